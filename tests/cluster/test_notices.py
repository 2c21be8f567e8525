"""Machines that are taken away after a notice, on a real Ray: nothing is computed twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("notices_run.py")


@pytest.mark.long
def test_workers_and_slices_leave_before_their_machine() -> None:
    """After SIGTERM, a notice of a cloud, and `ray drain-node`, one after the other."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "src")))
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["reason"] == "all have left", found
    assert found["drained"][:2] == ["home-0", "spot-0"] and "home-1" in found["drained"]
    assert found["servers"] == {"sigterm": 4, "cloud": 4, "drain-node": 3, "end": 2}
    assert found["by_ray"] == [True, True]  # the cloud's notice was passed on
    assert found["redone"] == 0 and {*found["fates"]} <= {"used", "unfinished"}, found
