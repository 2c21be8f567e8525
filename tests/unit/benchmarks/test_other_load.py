"""The load of others: what a benchmark has started does not count, also if it is a daemon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from _report import OtherLoad, _others


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
@pytest.mark.parametrize("marked", [True, False])
def test_a_daemon_counts_unless_the_benchmark_started_it(marked: bool, tmp_path: Path) -> None:
    load, file = OtherLoad(), tmp_path / "pid"
    env = {key: value for key, value in os.environ.items() if marked or "PACELINE" not in key}
    daemon = f'setsid sleep 60 & echo $! > "{file}"'
    subprocess.run(["sh", "-c", daemon], env=env, check=True, timeout=10)
    pid = int(file.read_text())
    try:
        found = _others()
        assert found is not None
        assert (pid in found[2]) is not marked
        assert os.getpid() not in found[2]
        cores = load.cores()
        assert cores is not None and cores >= 0
    finally:
        os.kill(pid, signal.SIGKILL)
