"""Real processes in real control groups: frozen, limited, and let go."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.testing.groups import Group, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    """A process that computes all the time."""
    with subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) as process:
        yield process
        process.kill()


def computed(pid: int, seconds: float) -> float:
    """Return the share of a core that a process has in the next seconds."""

    def ticks() -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    before, begin = ticks(), time.monotonic()
    time.sleep(seconds)
    return (ticks() - before) / 100 / (time.monotonic() - begin)


def test_a_frozen_process_does_nothing_until_it_is_thawed(busy: subprocess.Popen[bytes]) -> None:
    with Group([busy.pid]) as group:
        group.freeze()
        time.sleep(0.1)
        assert computed(busy.pid, 0.5) == 0.0
        group.thaw()
        assert computed(busy.pid, 0.5) > 0.0


def test_a_limit_is_kept_and_can_be_changed(busy: subprocess.Popen[bytes]) -> None:
    with Group([busy.pid], cores=0.2) as group:
        assert 0.0 < computed(busy.pid, 1.0) < 0.3
        group.limit(0.05)
        assert 0.0 < computed(busy.pid, 1.0) < 0.15
        with pytest.raises(ValueError, match="cores=0 is not within"):
            group.limit(0)


def test_a_frozen_process_can_be_killed_and_its_group_is_removed() -> None:
    with Group() as group:
        with subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) as process:
            group.add(process.pid)
            folders = set(group._folders)
            group.freeze()
            process.kill()
            assert process.wait(5) == -9
        group.add(process.pid)  # which is gone: nothing happens
    assert folders and not any(folder.exists() for folder in folders)


def test_what_was_frozen_runs_on_after_the_end(busy: subprocess.Popen[bytes]) -> None:
    with Group([busy.pid], cores=0.05) as group:
        group.freeze()
    assert computed(busy.pid, 0.5) > 0.0


def test_who_was_frozen_is_limited_as_before(busy: subprocess.Popen[bytes]) -> None:
    """A host that hangs for a while does not make its workers quicker."""
    with Group([busy.pid], cores=0.2):
        with Group() as host:
            host.add(busy.pid)
            host.add(busy.pid)
            host.freeze()
        assert 0.0 < computed(busy.pid, 1.0) < 0.3


def test_who_was_in_a_group_that_is_left_meanwhile_is_free(busy: subprocess.Popen[bytes]) -> None:
    host = Group([busy.pid])
    with Group([busy.pid], cores=0.05):
        host.__enter__()
    host.__exit__()
    assert computed(busy.pid, 1.0) > 0.1
