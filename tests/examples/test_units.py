"""The systemd units among the examples, as systemd itself reads them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

UNITS = sorted((Path(__file__).parents[2] / "examples").glob("*.service"))
pytestmark = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


def verified(unit: Path) -> str:
    """Return what systemd has to say about a unit."""
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return found.stdout + found.stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_accepts_the_unit(unit: Path, tmp_path: Path) -> None:
    assert unit.name not in verified(unit)
    wrong = tmp_path / unit.name
    wrong.write_text(unit.read_text().replace("RestartSec=", "RestartSeconds="))
    assert "RestartSeconds" in verified(wrong)
