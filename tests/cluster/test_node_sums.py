"""Sums on nodes, on a real Ray of two nodes: the same model up to the rounding of sums."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("node_sums_run.py")


@pytest.mark.long
def test_two_workers_on_each_of_two_nodes() -> None:
    path = os.pathsep.join((str(ROOT), str(ROOT / "src")))
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["sums"] == [0, 20]  # one of each node in each of ten steps
    assert not found["same"] and found["apart"] < 1e-12, found
