"""Supervises a driver process: starts it again when it dies, and ends what it leaves behind."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING

from paceline.cli.show import say
from paceline.report.callbacks import Callback, Live, Progress
from paceline.training.observers import Observer, Setup

if TYPE_CHECKING:
    from types import FrameType

_LOOK = 0.1  # seconds between two looks at the driver
_SAVE = 60.0  # seconds that a driver may take to save and end after a signal
_GRACE = 2.0  # seconds that leftover processes have between SIGTERM and SIGKILL
_LONGEST = 60.0  # seconds to wait before a restart
_PARENT_DEATH, _SUBREAPER = 1, 36  # of prctl(2), on Linux

Reached = tuple[int, int]
"""The number of the last `fit` in a script, and the step at which it began."""


# --- the driver's side ---------------------------------------------------------------------------


class Supervised(Observer):
    """Makes each trainer of a script resume, and notes its steps for the supervisor."""

    resumes = True

    def __init__(self, notes: Path) -> None:
        self._fits = 0
        self.callbacks = (Notes(notes, self),)

    @property
    def fits(self) -> int:
        return self._fits

    def fitting(self, setup: Setup) -> None:
        self._fits += 1


class Notes(Callback):
    """Appends the begin and the first step of each run to a file."""

    def __init__(self, file: Path, observer: Supervised) -> None:
        self._file, self._observer, self._stepped = file, observer, False

    def started(self, live: Live) -> None:
        self._stepped = False
        self._note("started", live.total.version)

    def stepped(self, progress: Progress) -> None:
        if not self._stepped:
            self._stepped = True
            self._note("stepped", progress.step)

    def _note(self, what: str, step: int) -> None:
        with open(self._file, "a", encoding="utf-8") as file:
            file.write(json.dumps([what, self._observer.fits, step, time.time()]) + "\n")


def end_with_parent() -> None:
    """Have this process get SIGTERM if its supervisor dies, so that it saves and ends."""
    _prctl(_PARENT_DEATH, int(signal.SIGTERM))


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


# --- the supervisor's side -----------------------------------------------------------------------


class Supervisor:
    """Runs a driver until it succeeds, a signal ends it, or restarts make no progress.

    command: returns the command of a driver, given the file for its notes.
    limit: restarts in a row after which no later step was reached.
    output: where the driver's standard output goes.
    """

    def __init__(
        self, command: Callable[[Path], list[str]], limit: int, output: IO[str] | None = None
    ) -> None:
        self._command, self._limit, self._output = command, limit, output
        self._signals: list[int] = []
        self._others = set(children())  # these are not ours to end
        self.restarted = 0

    def run(self) -> int:
        """Return the exit code of the last driver; that of a shell if a signal killed it."""
        _prctl(_SUBREAPER, 1)  # processes that a dead driver leaves become children of this one
        best, failed = (-1, -1), 0
        ended: float | None = None
        with tempfile.TemporaryDirectory(prefix="paceline-submit-") as folder, self._listening():
            for life in count():
                notes = Path(folder) / f"{life}.jsonl"
                code, ended = self._live(notes, ended)
                reached = _reached(notes)
                if code == 0 or self._signals:
                    return code
                if life == 0 and reached == (0, 0) and code < 128:
                    say(f"the script ended with exit code {code} before it trained")
                    return code
                failed = 0 if reached > best else failed + 1
                best = max(best, reached)
                if failed >= self._limit:
                    say(f"{failed} restarts without progress; the driver is not started again")
                    return code
                delay = min(2.0**failed, _LONGEST)
                say(f"the driver ended with exit code {code}; it is started again in {delay:g} s")
                if not self._wait(delay):
                    return 128 + self._signals[0]
                self.restarted += 1
        raise AssertionError("count() does not end")

    def _live(self, notes: Path, ended: float | None) -> tuple[int, float]:
        """Run one driver to its end, and end what it leaves behind.

        ended: the time at which the driver before it ended.
        Return its exit code, and the time at which it ended.
        """
        driver = subprocess.Popen(
            self._command(notes), start_new_session=True, stdout=self._output
        )  # its own session, so that Ctrl-C reaches the supervisor alone
        forwarded, deadline = 0, float("inf")
        try:
            while driver.poll() is None:
                time.sleep(_LOOK)
                self._reap(driver.pid)
                if ended is not None and (first := _first_step(notes)) is not None:
                    step, at = first
                    say(f"training continues: step {step}, {at - ended:.1f} s after the end")
                    ended = None
                if len(self._signals) > forwarded:
                    if forwarded:  # the second one
                        break
                    forwarded, deadline = len(self._signals), time.monotonic() + _SAVE
                    driver.send_signal(self._signals[0])
                if time.monotonic() > deadline:
                    break
        finally:
            if driver.poll() is None:
                driver.kill()
            code, now = driver.wait(timeout=_SAVE), time.time()
            self._end_leftovers(driver.pid)
        return code if code >= 0 else 128 - code, now

    def _end_leftovers(self, group: int) -> None:
        """End the processes that the driver started, such as those of its Ray."""
        deadline = time.monotonic() + _GRACE
        number = signal.SIGTERM
        while True:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)
            left = [pid for pid in descendants(os.getpid()) if pid not in self._others]
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            self._reap(None)
            if not left or time.monotonic() > deadline + _SAVE:
                return
            time.sleep(_LOOK)
            if time.monotonic() > deadline:
                number = signal.SIGKILL

    def _reap(self, driver: int | None) -> None:
        """Collect dead processes that were left to this one; `Popen` collects the driver."""
        for pid in children():
            if pid != driver and pid not in self._others:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def _wait(self, seconds: float) -> bool:
        """Wait; return False if a signal came."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._signals:
            time.sleep(_LOOK)
        return not self._signals

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        heard = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, note) for number in heard]
        try:
            yield
        finally:
            for number, handler in zip(heard, before, strict=True):
                signal.signal(number, handler)


def _read(notes: Path) -> list[tuple[str, int, int, float]]:
    """Return the whole lines of a driver's notes; its last one may be cut short."""
    if not notes.exists():
        return []
    lines = notes.read_text(encoding="utf-8").split("\n")[:-1]
    return [tuple(json.loads(line)) for line in lines]


def _reached(notes: Path) -> Reached:
    return max(((fit, step) for what, fit, step, _ in _read(notes) if what == "started"),
               default=(0, 0))  # fmt: skip


def _first_step(notes: Path) -> tuple[int, float] | None:
    return next(((step, at) for what, _, step, at in _read(notes) if what == "stepped"), None)


def children() -> list[int]:
    """Return the child processes of this one; on Linux only."""
    return _parents().get(os.getpid(), [])


def descendants(pid: int) -> list[int]:
    """Return the processes below one that are not yet dead; on Linux only."""
    parents, found, last = _parents(living=True), list[int](), [pid]
    while last:
        last = [child for each in last for child in parents.get(each, [])]
        found += last
    return found


def _parents(living: bool = False) -> dict[int, list[int]]:
    """Return the children of each process."""
    found: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, parent = path.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if not living or state != "Z":
                found.setdefault(int(parent), []).append(int(path.parent.name))
    return found
