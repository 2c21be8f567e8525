"""`paceline new`: its script runs as it is, and no file is overwritten."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from paceline.cli.new import SCRIPT

Paceline = Callable[..., Result]
ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_script_runs_as_it_is(paceline: Paceline, folder: Path) -> None:
    done = paceline("new")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("wrote train.py") and done.stdout.count("\n") == 2
    command = [sys.executable, "train.py"]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("160 steps in 21.5 s")
    before, after = map(float, ran.stdout.split("loss ")[1].split(" (")[0].split(" -> "))
    assert after < before / 2
    assert (folder / "run.jsonl").exists() and (folder / "model.pt").exists()


def test_it_is_short_and_linted(folder: Path) -> None:
    (folder / "train.py").write_text(SCRIPT)
    assert len(SCRIPT.splitlines()) <= 40
    ruff = [sys.executable, "-m", "ruff"]
    rules = ["--no-cache", "--config", str(ROOT / "pyproject.toml"), "train.py"]
    for command in (["check"], ["format", "--check"]):
        linted = subprocess.run([*ruff, *command, *rules], capture_output=True, text=True)
        assert linted.returncode == 0, linted.stdout + linted.stderr


def test_one_line_leads_to_ray() -> None:
    (line,) = [line for line in SCRIPT.splitlines() if line.startswith("engine = ")]
    assert line.startswith("engine = pl.Simulator(workers=4") and "engine = pl.Ray(" in SCRIPT


def test_no_file_is_overwritten(paceline: Paceline, folder: Path) -> None:
    (folder / "mine.py").write_text("mine")
    done = paceline("new", "mine.py")
    assert done.exit_code == 1 and not done.stdout
    assert done.stderr == "Error: mine.py exists and is not overwritten; give another name\n"
    assert (folder / "mine.py").read_text() == "mine"
    assert "there is no folder far for a.py" in paceline("new", "far/a.py").stderr
    assert paceline("new", ".").exit_code == 2


def test_json(paceline: Paceline, folder: Path) -> None:
    assert json.loads(paceline("new", "a.py", "--json").stdout) == {"output": "a.py"}
