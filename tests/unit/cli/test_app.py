"""The command as a whole: it is quick, and it fails in one sentence."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import paceline as pl
from paceline.cli import app as module
from paceline.cli.app import app


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['paceline', '--help']\n"
        "from paceline.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'ray', 'scipy', 'numpy'} & set(sys.modules)))"
    )
    ours, plain = [], []
    for _ in range(3):
        took, said = _timed(code)
        ours.append(took)
        plain.append(_timed("import click, json, logging, inspect")[0])
        assert said.splitlines()[-1] == "[]"
    assert min(ours) < 3 * min(plain)  # 1.2 times as a rule; torch alone would make it 20


def _timed(code: str) -> tuple[float, str]:
    """Return the seconds that a new Python needs for this, and what it prints."""
    began = time.perf_counter()
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return time.perf_counter() - began, done.stdout


def test_it_is_a_module_too() -> None:
    command = [sys.executable, "-m", "paceline", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"paceline, version {pl.__version__}\n"


def test_every_command_has_help() -> None:
    told = CliRunner().invoke(app, ["--help"]).output
    assert list(app.commands) == [
        *("new", "train", "submit", "launch", "serve", "profile", "plan", "simulate", "replay"),
        *("report", "compare"),
        *("export", "doctor", "env"),
    ]
    for name in app.commands:
        assert name in told
        assert "--json" in CliRunner().invoke(app, [name, "--help"]).output


def test_wrong_usage_is_code_2(paceline: Callable[..., Result], tmp_path: Path) -> None:
    for args in (["fly"], ["report"], ["report", tmp_path / "missing"], ["plan", "--target", "x"]):
        assert paceline(*args).exit_code == 2


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("k=12 exceeds\nthe 8 workers; use k <= 8"), "k=12 exceeds the 8 workers; use"),
        (KeyError("w9"), "this is a bug in Paceline"),
    ],
)
def test_an_error_is_one_sentence_unless_asked_for_more(error: Exception, told: str) -> None:
    @click.command()
    def fail() -> None:
        raise error

    group = module.Commands("paceline", params=list(app.params))
    group.add_command(fail)
    found = CliRunner().invoke(group, ["fail"])
    assert found.exit_code == 1
    assert found.stderr.startswith("Error: ") and told in found.stderr
    assert found.stderr.count("\n") == 1 and not found.stdout
    assert CliRunner().invoke(group, ["--debug", "fail"]).exception is error


def test_shells_can_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_PACELINE_COMPLETE", "zsh_complete")
    monkeypatch.setenv("COMP_WORDS", "paceline re")
    monkeypatch.setenv("COMP_CWORD", "1")
    command = [sys.executable, "-m", "paceline"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1::3] == ["replay", "report"]
