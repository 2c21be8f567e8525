"""How soon it is noticed that a process is dead, a worker hangs, or a machine is gone."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

import paceline as pl
from paceline.core.protocol import Left
from paceline.testing import groups
from paceline.testing.hosts import Hosts, missing
from tests.conftest import make_learner

pytestmark = [pytest.mark.cluster, pytest.mark.timing]
ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("far_run.py")


class Strike(pl.Callback):
    """Sends a signal to a worker at some steps, and notes when."""

    def __init__(self, engine: pl.Ray, number: signal.Signals, steps: list[int]) -> None:
        self._engine, self._number, self._steps = engine, number, steps
        self.struck: dict[str, float] = {}
        self.stopped: list[int] = []

    def stepped(self, progress: pl.Progress) -> None:
        if progress.step not in self._steps:
            return
        worker = f"w{self._steps.index(progress.step)}"
        pid = self._engine.pids()[worker]
        os.kill(pid, self._number)
        self.struck[worker] = self._engine.now()
        self.stopped.append(pid)

    def ended(self, reason: str) -> None:
        for pid in self.stopped:
            with contextlib.suppress(ProcessLookupError):  # it is gone, as it should be
                os.kill(pid, signal.SIGCONT)


def left(run: pl.Run) -> dict[str, float]:
    """Return when each worker was found lost, the first time."""
    found: dict[str, float] = {}
    for entry in run.journal:
        if isinstance(entry.event, Left):
            found.setdefault(entry.event.worker, entry.now)
    return found


def test_a_dead_process_is_noticed_within_a_tenth_of_a_second() -> None:
    with pl.Ray(6, timeout=60, respawns=0) as engine:  # starting others takes a processor's time
        strike = Strike(engine, signal.SIGKILL, [3, 13, 23, 33, 43])
        run = pl.Trainer(
            make_learner(), pl.rennala(6), engine, callbacks=[strike], progress=False
        ).fit(steps=400)
    found = left(run)
    assert set(found) >= set(strike.struck), "some were not noticed"
    took = [found[worker] - at for worker, at in strike.struck.items()]
    # A busy machine has slow steps.
    step = statistics.median(b - a for a, b in pairwise(run.metrics["seconds"]))
    assert statistics.median(took) < max(0.1, 10 * step), (
        took,
        step,
    )


def test_a_stopped_worker_is_noticed_at_the_deadline_of_its_task() -> None:
    deadline = 2.0
    with pl.Ray(3, timeout=deadline) as engine:
        strike = Strike(engine, signal.SIGSTOP, [3])
        run = pl.Trainer(
            make_learner(), pl.rennala(3), engine, callbacks=[strike], progress=False
        ).fit(seconds=6.0)
    found = left(run)["w0"]
    assert deadline - 0.5 < found - strike.struck["w0"] < deadline + 0.5
    assert run.steps > 100  # and the others went on


def test_a_silent_machine_is_noticed_within_six_seconds() -> None:
    """By Ray, with the settings of `paceline env`; the deadline of a task is 60 s here."""
    if reason := missing() or groups.missing():
        pytest.skip(reason)
    with Hosts(3, delay=0.001) as hosts:
        troubles = [partial(hosts.freeze, 1), partial(hosts.link, 2, up=False)]
        address = hosts.start_ray(cpus=1, object_store=100_000_000)
        command = [sys.executable, str(SCRIPT), address, "3", "1", "100000", "small"]
        with hosts.popen(
            0, command, env={"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src")))},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) as process:  # fmt: skip
            deadline = threading.Timer(120, process.kill)
            deadline.start()
            took: list[float] = []
            begin, lines = None, []
            for line in process.stdout:  # type: ignore[union-attr]  # ends with the process
                lines.append(line)
                if begin is None and line.startswith("step ") and int(line.split()[1]) > 20:
                    troubles[len(took)]()
                    begin = time.monotonic()
                elif begin is not None and "is lost" in line:
                    took.append(time.monotonic() - begin)
                    begin = None
                if len(took) == len(troubles):
                    break
            deadline.cancel()
            process.kill()
    told = "".join(lines[-20:])
    assert len(took) == 2, told
    assert max(took) < 6.0, (took, told)
