"""A session under Slurm, on a machine where it runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def missing() -> str | None:
    """Return why Slurm cannot be used here."""
    if shutil.which("sbatch") is None:
        return "there is no sbatch; Debian's package slurm-wlm has it"
    try:
        asked = subprocess.run(["sinfo", "-h"], capture_output=True, text=True, timeout=10)
    except subprocess.TimeoutExpired:
        return "Slurm does not answer"
    return None if asked.returncode == 0 and asked.stdout else "no Slurm controller answers"


pytestmark = [
    pytest.mark.cluster,
    pytest.mark.long,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]


def test_the_recipe_trains_with_two_tasks(tmp_path: Path) -> None:
    command = ["sbatch", "--wait", "-o", "out.txt", str(ROOT / "examples" / "session.sbatch")]
    script = str(ROOT / "examples" / "session_loop.py")
    done = subprocess.run(
        [*command, script],
        cwd=tmp_path,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
        timeout=280,
    )
    output = (tmp_path / "out.txt").read_text()
    assert done.returncode == 0, output
    losses = [line for line in output.splitlines() if line.startswith("final loss")]
    assert len(losses) == 2 and losses[0] == losses[1]
