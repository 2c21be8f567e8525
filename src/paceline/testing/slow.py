"""Slows a real process down: stops and continues it so that it runs a share of the time.

Linux only. A small separate process does this, so that no thread with the interpreter lock can
distort the cycle. It ends after its time, or with its parent or its target. Before it ends, it
continues the target.
"""

from __future__ import annotations

import os
import select
import signal
import struct
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import IO, Protocol, Self

from paceline.report.callbacks import Callback, Progress

# The script answers each new share with one byte, once the share is in effect. The target is a
# pidfd, so a reused process id is never hit. `balance` is the time that the target has run beyond
# its share: a second of running adds 1 - share, and a second of standing subtracts share. It uses
# measured time, so later phases make up for a phase that oversleeps.
_PATIENCE = 30.0  # timeout in seconds for an answer
_SCRIPT = """
import os, select, signal, struct, sys, time

# The copy has a low number, whatever the parent's has: select takes none above 1023.
target, parent = os.dup(int(sys.argv[1])), int(sys.argv[2])
share, period, seconds = map(float, sys.argv[3:6])

# A signal only wakes the loop, so that no exception can fall between the last lines.
wake, waker = os.pipe()
os.set_blocking(waker, False)
signal.set_wakeup_fd(waker)
signal.signal(signal.SIGTERM, lambda *_: None)
# Ctrl-C reaches the whole group; whether it ends the run is for the parent to say.
signal.signal(signal.SIGINT, signal.SIG_IGN)

def throttle(share):
    balance, running, unanswered = 0.0, True, True
    mark = time.monotonic()
    end = mark + seconds
    while True:
        now = time.monotonic()
        balance += (now - mark) * (1 - share if running else -share)
        mark = now
        if now >= end or os.getppid() != parent:
            return
        if running and share < 1 and balance >= share * (1 - share) * period:
            signal.pidfd_send_signal(target, signal.SIGSTOP)
            running = False
        elif not running and share > 0 and balance <= 0:
            signal.pidfd_send_signal(target, signal.SIGCONT)
            running = True
        if unanswered:
            os.write(1, b".")
            unanswered = False
        left = min(end - now, 0.2)  # also the most that a parent's death goes unnoticed
        if running and share < 1:
            left = min(left, share * period - balance / (1 - share))
        elif not running and share > 0:
            left = min(left, balance / share)
        ready = select.select([0, target, wake], [], [], max(left, 0.0))[0]
        if target in ready or wake in ready:
            return
        if 0 in ready:
            order = os.read(0, 8)
            if not order:
                return
            share, balance, unanswered = struct.unpack("=d", order)[0], 0.0, True
            mark = time.monotonic()

try:
    throttle(share)
except (ProcessLookupError, BrokenPipeError):
    pass  # the target or the parent ended in this very moment
finally:
    try:
        signal.pidfd_send_signal(target, signal.SIGCONT)
    except ProcessLookupError:
        pass
"""


class Throttle:
    """Limits a process to `share` of the time while entered, for at most `seconds`.

    A share of 1.0 leaves the process alone, 0.0 pauses it; between them it runs once per `period`.
    """

    def __init__(self, pid: int, share: float, period: float = 0.1, seconds: float = 600.0) -> None:
        if pid < 1:
            raise ValueError(f"pid={pid} is no process; give the positive id of one process")
        for name, value in (("period", period), ("seconds", seconds)):
            if not 0 < value < float("inf"):
                raise ValueError(f"{name}={value} must be finite and > 0; try the default")
        self.pid = pid
        self.share = _checked(share)
        self.period = period
        self.seconds = seconds
        self._target: int | None = None
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        if self._child is not None:
            raise RuntimeError(
                f"this throttle of process {self.pid} is already entered; use change(share), or "
                f"leave it first"
            )
        self._target = _opened(self.pid)
        try:
            self._child = self._spawned(self._target)
            self._await_answer(self._child)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    def change(self, share: float) -> None:
        """Give the process another share from now on; the `seconds` keep counting."""
        share = _checked(share)
        if self._child is None:
            raise RuntimeError(
                f"this throttle of process {self.pid} is not entered; call change(share) inside "
                f"`with Throttle(...) as throttle:`"
            )
        # If the child has ended, the missing answer reports it.
        with suppress(BrokenPipeError):
            os.write(_number(self._child.stdin), struct.pack("=d", share))
        self._await_answer(self._child)
        self.share = share

    def _spawned(self, target: int) -> subprocess.Popen[bytes]:
        """Start the process that stops and continues the target."""
        numbers = (target, os.getpid(), self.share, self.period, self.seconds)
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SCRIPT, *map(str, numbers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(target,),
        )

    def _await_answer(self, child: subprocess.Popen[bytes]) -> None:
        """Wait until the last given share is in effect."""
        answered = select.poll()
        answered.register(_number(child.stdout), select.POLLIN)
        if not answered.poll(1000 * _PATIENCE):
            raise TimeoutError(
                f"the throttle of process {self.pid} did not answer in {_PATIENCE:g} s: its own "
                f"process {child.pid} gets no time; try again on a machine with less load"
            )
        if not os.read(_number(child.stdout), 1):
            raise RuntimeError(
                f"the throttle of process {self.pid} has ended: the process did, its "
                f"{self.seconds:g} seconds have passed, or it was killed; use a larger seconds=, "
                f"or leave it and enter another"
            )

    def _close(self) -> None:
        """End the cycle and leave the process running."""
        child, target = self._child, self._target
        self._child = self._target = None
        try:
            if child is not None:
                # The closing pipe is not enough: a fork of this process may hold it open.
                child.terminate()
                try:
                    child.wait(_PATIENCE)
                except subprocess.TimeoutExpired:
                    child.kill()
                child.__exit__(None, None, None)  # the child has ended or was killed
        finally:
            if target is not None:
                # Once more, in case the child was killed while the target was stopped.
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(target, signal.SIGCONT)
                os.close(target)


class HasProcesses(Protocol):
    """An engine whose workers are processes of this machine, such as `paceline.Ray`."""

    def pids(self) -> Mapping[str, int]: ...


class SlowWorkers(Callback):
    """Slows workers of a run down, from its first step to its end: `{"w7": 0.1}`.

    A restarted worker gets the same share again.
    """

    def __init__(
        self, engine: HasProcesses, shares: Mapping[str, float], period: float = 0.1
    ) -> None:
        self._engine, self._period = engine, period
        self._shares = {worker: _checked(share) for worker, share in shares.items()}
        self._slowed: dict[str, Throttle] = {}
        self._begun = False  # whether a step of the run was taken

    def change(self, shares: Mapping[str, float]) -> None:
        """Use other shares from now on; workers without a share run freely again."""
        self._shares = {worker: _checked(share) for worker, share in shares.items()}
        for worker in [worker for worker in self._slowed if worker not in shares]:
            self._slowed.pop(worker).__exit__(None, None, None)
        if self._begun:
            self._slow_down()

    def stepped(self, progress: Progress) -> None:
        self._begun = True
        self._slow_down()

    def ended(self, reason: str) -> None:
        self._begun = False
        while self._slowed:
            self._slowed.popitem()[1].__exit__(None, None, None)

    def _slow_down(self) -> None:
        """Apply its share to every running worker."""
        pids = self._engine.pids()
        for worker, share in self._shares.items():
            pid, throttle = pids.get(worker), self._slowed.get(worker)
            if pid is None:
                continue
            if throttle is not None and throttle.pid == pid:
                if throttle.share != share:
                    throttle.change(share)
                continue
            if throttle is not None:
                throttle.__exit__(None, None, None)
            self._slowed[worker] = Throttle(pid, share, self._period, seconds=3600).__enter__()


def _number(pipe: IO[bytes] | None) -> int:
    """Return the file descriptor of a pipe."""
    if pipe is None:
        raise AssertionError("the child is always started with pipes")
    return pipe.fileno()


def _checked(share: float) -> float:
    """Return a share; refuse a number outside 0 to 1."""
    if not 0 <= share <= 1:
        raise ValueError(
            f"share={share} is not within 0 and 1; use 1.0 for full speed, 0.5 for half, "
            f"0.0 for a pause"
        )
    return share


def _opened(pid: int) -> int:
    """Return a pidfd of a live process that this one may signal."""
    if sys.platform != "linux":
        raise RuntimeError(f"Throttle needs Linux, not {sys.platform}; run this test on Linux")
    try:
        target = os.pidfd_open(pid)
    except ProcessLookupError:
        raise ProcessLookupError(
            f"there is no process {pid}; give the id of a running one, on this machine"
        ) from None
    try:
        # A pidfd is readable once its process has ended, even before its parent waits for it.
        ended = select.poll()
        ended.register(target, select.POLLIN)
        if ended.poll(0):
            raise ProcessLookupError(f"process {pid} has ended; give the id of a running one")
        signal.pidfd_send_signal(target, 0)
    except BaseException:
        os.close(target)
        raise
    return target
