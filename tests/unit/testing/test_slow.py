"""Real processes, really slowed: their CPU time, and that every way out lets them run again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import nan
from pathlib import Path

import pytest

from paceline.core.journal import Header
from paceline.report.callbacks import Live, Progress
from paceline.report.metrics import Meter
from paceline.testing.slow import SlowWorkers, Throttle

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="stops processes through Linux pidfds and reads /proc"
)

BURN = "while True: pass"


@contextmanager
def process(script: str = BURN, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a script in a process that is killed at the end."""
    command = [sys.executable, "-c", script, *arguments]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def fields(pid: int) -> list[str]:
    """Return /proc/<pid>/stat after the name: state, parent, … (proc(5) counts them from 3)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()


def cpu_seconds(pid: int) -> float:
    user, system = fields(pid)[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def stopped(pid: int) -> bool:
    return fields(pid)[0] == "T"


def children(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(fields(int(folder.name))[1]) == pid:
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def helper_of(parent: int) -> int:
    """Return the parent's only child that throttles."""
    commands = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in children(parent)}
    (helper,) = (child for child, command in commands.items() if b"SIGSTOP" in command)
    return helper


def alive(pid: int) -> bool:
    try:
        return fields(pid)[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def assert_share(share: float, target: int, twin: int, seconds: float) -> None:
    """Compare CPU time with what the share allows, and with what an unthrottled twin got."""
    start, before, twin_before = time.monotonic(), cpu_seconds(target), cpu_seconds(twin)
    time.sleep(seconds)
    lasted = time.monotonic() - start
    used, twin_used = cpu_seconds(target) - before, cpu_seconds(twin) - twin_before
    # A busy machine takes time from both, so the lower bound is relative. The upper bound is
    # not: a twin that is crowded out must not make an honest target look greedy.
    assert used <= 1.5 * share * lasted + 0.02
    assert used >= 0.3 * share * twin_used - 0.02


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_process_gets_its_share_of_the_time(share: float) -> None:
    with process() as target, process() as twin:
        with Throttle(target.pid, share, period=0.05):
            assert_share(share, target.pid, twin.pid, 1.2)
            # What the slowing itself costs: mostly the start of its interpreter.
            assert cpu_seconds(helper_of(os.getpid())) < 0.3
        assert not stopped(target.pid)


def test_the_share_can_change_on_the_way() -> None:
    with process() as target, process() as twin:
        with Throttle(target.pid, 1.0, period=0.05) as throttle:
            assert throttle.share == 1.0
            assert_share(1.0, target.pid, twin.pid, 0.4)
            throttle.change(0.2)
            assert throttle.share == 0.2
            assert_share(0.2, target.pid, twin.pid, 0.8)
            throttle.change(0.0)
            assert within(2, lambda: stopped(target.pid))
            assert_share(0.0, target.pid, twin.pid, 0.2)
            throttle.change(1.0)
            assert within(2, lambda: not stopped(target.pid))
        assert not stopped(target.pid)


def test_a_pause_lasts_until_it_is_left() -> None:
    with process() as target:
        with Throttle(target.pid, 0.0):
            assert within(2, lambda: stopped(target.pid))
            time.sleep(0.5)
            assert stopped(target.pid)
        assert within(2, lambda: not stopped(target.pid))
        with Throttle(target.pid, 0.0):
            assert within(2, lambda: stopped(target.pid))
        assert within(2, lambda: not stopped(target.pid))


def test_leaving_by_an_exception_lets_the_process_run() -> None:
    with process() as target:
        with pytest.raises(KeyError, match="mine"), Throttle(target.pid, 0.0):
            raise KeyError("mine")
        assert within(2, lambda: not stopped(target.pid))


def test_it_ends_by_itself_after_its_seconds() -> None:
    with process() as target, Throttle(target.pid, 0.0, seconds=0.3) as throttle:
        assert within(2, lambda: stopped(target.pid))
        assert within(2, lambda: not stopped(target.pid))
        with pytest.raises(RuntimeError, match=r"has ended: .* 0.3 seconds have passed"):
            throttle.change(0.0)


def test_the_death_of_the_target_is_no_error() -> None:
    with process() as target:
        with Throttle(target.pid, 0.0) as throttle:
            helper = helper_of(os.getpid())
            target.kill()
            # Not yet waited for, the target is a zombie, which could still be signaled.
            assert within(2, lambda: not alive(helper))
            with pytest.raises(RuntimeError, match="has ended: the process did"):
                throttle.change(0.5)
        target.wait()
        assert not Path(f"/proc/{helper}").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killing_the_helper_does_not_leave_the_process_stopped(number: signal.Signals) -> None:
    with process() as target:
        with Throttle(target.pid, 0.0):
            helper = helper_of(os.getpid())
            os.kill(helper, number)
            assert within(2, lambda: not alive(helper))
            if number == signal.SIGTERM:
                assert within(2, lambda: not stopped(target.pid))
        assert within(2, lambda: not stopped(target.pid))


PARENT = """
import os, signal, sys
from paceline.testing.slow import Throttle
with Throttle(int(sys.argv[1]), 0.0, seconds=20.0):
    fork = os.fork()
    if fork:
        print(fork, flush=True)
    if not fork or sys.argv[2] == "stay":
        signal.pause()
"""


def test_a_fork_of_the_parent_does_not_block_its_leaving() -> None:
    with process() as target, process(PARENT, str(target.pid), "leave") as parent:
        assert parent.stdout is not None
        fork = int(parent.stdout.readline())
        try:
            assert parent.wait(timeout=5) == 0
            assert within(2, lambda: not stopped(target.pid))
            assert alive(fork)
        finally:
            os.kill(fork, signal.SIGKILL)


def test_the_death_of_the_parent_lets_the_process_run() -> None:
    with process() as target, process(PARENT, str(target.pid), "stay") as parent:
        assert parent.stdout is not None
        # The fork lives on and holds every pipe open, which must not keep the throttle alive.
        fork = int(parent.stdout.readline())
        try:
            helper = helper_of(parent.pid)
            assert within(2, lambda: stopped(target.pid))
            parent.kill()
            assert within(2, lambda: not stopped(target.pid))
            assert within(2, lambda: not alive(helper))
            assert alive(fork)
        finally:
            os.kill(fork, signal.SIGKILL)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_is_between_zero_and_one(share: float) -> None:
    message = rf"share={share} is not within 0 and 1; use 1.0 for full speed"
    with pytest.raises(ValueError, match=message):
        Throttle(1, share)
    throttle = Throttle(os.getpid(), 1.0)
    with throttle, pytest.raises(ValueError, match=message):
        throttle.change(share)


def test_other_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"pid=0 is no process"):
        Throttle(0, 0.5)
    with pytest.raises(ValueError, match=r"period=0 must be finite and > 0"):
        Throttle(1, 0.5, period=0)
    with pytest.raises(ValueError, match=r"seconds=inf must be finite"):
        Throttle(1, 0.5, seconds=float("inf"))


def test_a_missing_process_is_named() -> None:
    with process() as target:
        target.kill()
        assert within(2, lambda: not alive(target.pid))
        with pytest.raises(ProcessLookupError, match=rf"process {target.pid} has ended; give"):
            Throttle(target.pid, 0.5).__enter__()
        target.wait()
        with pytest.raises(ProcessLookupError, match=rf"there is no process {target.pid}; give"):
            Throttle(target.pid, 0.5).__enter__()


def test_it_is_entered_once_and_changed_only_inside() -> None:
    with process() as target:
        throttle = Throttle(target.pid, 1.0)
        with pytest.raises(RuntimeError, match="is not entered"):
            throttle.change(0.5)
        with throttle, pytest.raises(RuntimeError, match="is already entered"):
            throttle.__enter__()
        with throttle:
            throttle.change(0.9)


class Processes:
    """Real processes under the names of workers."""

    def __init__(self, **processes: subprocess.Popen[bytes]) -> None:
        self.processes = processes

    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self.processes.items()}


def after(step: int) -> Progress:
    return Progress(
        *(step, 0.0, nan, 0, nan, 0.0, 0.0, 2, 2, 0.0, 2, 0, 0, 0, 0.0),
        _model=lambda: None,
        _stop=lambda reason: None,
    )


LIVE = Live(Header(), {"main": Meter()}, Meter(), lambda: 0.0)


def throttles() -> int:
    """Count this process's children that throttle."""
    commands = [Path(f"/proc/{child}/cmdline").read_bytes() for child in children(os.getpid())]
    return sum(b"SIGSTOP" in command for command in commands)


def test_workers_are_slow_from_the_first_step_to_the_end() -> None:
    with process() as one, process() as two:
        slow = SlowWorkers(Processes(w0=one, w1=two), {"w0": 0.0, "w9": 0.0})
        slow.started(LIVE)
        assert not stopped(one.pid)
        slow.stepped(after(1))
        assert within(2, lambda: stopped(one.pid))
        slow.stepped(after(2))
        assert stopped(one.pid) and not stopped(two.pid) and throttles() == 1
        slow.ended("done")
        assert within(2, lambda: not stopped(one.pid))
        assert throttles() == 0


def test_a_worker_that_is_started_again_is_as_slow() -> None:
    with process() as one, process() as successor:
        processes = Processes(w0=one)
        slow = SlowWorkers(processes, {"w0": 0.0})
        slow.stepped(after(1))
        one.kill()
        processes.processes = {}  # not up yet
        slow.stepped(after(2))
        processes.processes = {"w0": successor}
        slow.stepped(after(3))
        assert within(2, lambda: stopped(successor.pid))
        slow.ended("done")
        assert within(2, lambda: not stopped(successor.pid))


def test_other_workers_can_become_slow_in_mid_run() -> None:
    with process() as one, process() as two, process() as three:
        slow = SlowWorkers(Processes(w0=one, w1=two, w2=three), {"w0": 0.0, "w1": 0.0}, period=0.05)
        slow.stepped(after(1))
        assert within(2, lambda: stopped(one.pid) and stopped(two.pid))
        slow.change({"w1": 0.1, "w2": 0.0})  # one is freed, one has another share, one is new
        assert within(2, lambda: stopped(three.pid) and not stopped(one.pid))
        assert_share(0.1, two.pid, one.pid, 0.6)
        slow.stepped(after(2))
        assert stopped(three.pid) and throttles() == 2
        slow.change({})
        assert within(2, lambda: not stopped(two.pid) and not stopped(three.pid))
        assert throttles() == 0
        slow.stepped(after(3))
        assert throttles() == 0
        slow.ended("done")


def test_shares_changed_between_runs_hold_from_the_next_first_step_on() -> None:
    with process() as one, process() as two:
        slow = SlowWorkers(Processes(w0=one, w1=two), {"w0": 0.0})
        slow.change({"w1": 0.0})
        assert throttles() == 0
        slow.stepped(after(1))
        assert within(2, lambda: stopped(two.pid)) and not stopped(one.pid)
        slow.ended("done")
        slow.change({"w0": 0.0})
        assert throttles() == 0 and not stopped(one.pid)
        slow.stepped(after(1))
        assert within(2, lambda: stopped(one.pid))
        slow.ended("done")
        assert within(2, lambda: not stopped(one.pid) and not stopped(two.pid))


def test_a_bad_share_changes_nothing() -> None:
    with process() as one:
        slow = SlowWorkers(Processes(w0=one), {"w0": 0.0})
        slow.stepped(after(1))
        with pytest.raises(ValueError, match=r"share=2 is not within 0 and 1"):
            slow.change({"w0": 2})
        assert within(2, lambda: stopped(one.pid))
        slow.ended("done")
