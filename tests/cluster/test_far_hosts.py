"""Hosts that are far apart, on one machine: spread servers, a lost host, a slow link."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.testing.hosts import Hosts, missing

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("far_run.py")


def train(
    k: int, steps: int, learner: str, at: int, trouble: Callable[[Hosts], None]
) -> tuple[dict[str, Any], str]:
    """Train on three hosts, make trouble after a step; return what came of it and was told."""
    if reason := missing():
        pytest.skip(reason)
    with Hosts(3, delay=0.005, rate=100e6, queue=512 << 10) as hosts:
        address = hosts.start_ray()
        with hosts.popen(
            0,
            [sys.executable, str(SCRIPT), address, "3", str(k), str(steps), learner],
            env={"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src")))},  # as the workers
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            deadline = threading.Timer(120, process.kill)
            deadline.start()
            lines = []
            for line in process.stdout:  # type: ignore[union-attr]  # ends with the process
                lines.append(line)
                if line.startswith(f"step {at} "):
                    trouble(hosts)
            deadline.cancel()
        told = "".join(lines)
        assert process.returncode == 0, told
    return next(json.loads(line) for line in reversed(lines) if line.startswith("{")), told


def test_a_host_lost_in_mid_step_changes_nothing() -> None:
    """A worker and a server at once, with what lay in their store: the last results, a slice.

    Norms over all slices are rounded as they are cut; test_servers.py and storms lose servers so.
    """
    found, told = train(3, 10, "momentum", 4, lambda hosts: hosts.kill(2))
    assert "is lost" in told, told
    assert found["steps"] == 10 and found["bits"] and found["replays"], told


@pytest.mark.long
@pytest.mark.timing
def test_a_server_behind_a_slow_link_is_left_out() -> None:
    found, told = train(2, 16, "plain", 4, lambda hosts: hosts.link(2, rate=8e6))
    assert found["servers"] == 2 and "its slice moves to the other servers" in told, told
    before, after = found["seconds"][1:4], found["seconds"][-4:]
    assert min(after) < 3 * max(before), told  # and not ten times, as the link is
    assert found["steps"] == 16 and found["replays"]
