"""Two kinds of machine on a real Ray, told apart by resources and labels; one joins in mid-run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("kinds_run.py")


@pytest.mark.parametrize("away", [0, pytest.param(60, marks=pytest.mark.long)])
def test_a_node_that_joins_in_mid_run_is_used_at_once(away: int) -> None:
    """Within 10 s, or within twice what starting the first worker took if the machine is slow.

    away: seconds until it joins; 60 are three times the timeout of a start.
    """
    path = os.pathsep.join((str(ROOT), str(ROOT / "src")))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(away)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["nodes"] == {"big-0": "big", "small-0": "small"}  # each on a machine of its kind
    assert found["joined"] == ["big-0", "small-0"]  # the run began with one of them
    assert found["largest"]["small-0"] <= 3 < found["largest"]["big-0"]
    assert found["per_hour"] == {"big-0": 2.0, "small-0": 0.5}
    assert found["seconds"] < max(10.0, 2 * found["first"]), found
