"""Every command of docs/cli.md does what the page shows."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from tests.console import Command, File, check, read

PAGE = Path(__file__).parents[3] / "docs" / "cli.md"
FITTED = ("profile", "plan", "simulate")  # whose figures differ from one scipy to another


def test_the_page(
    paceline: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, run = 0, 0
    for step in read(PAGE):
        match step:
            case File(name, text):
                Path(name).write_text(text)
            case Command(line, shown) if line.startswith("echo"):
                assert shown == (str(code),)
            case Command(line, shown):
                name, *args = shlex.split(line)
                assert name == "paceline"
                found = paceline(*args)
                assert found.exit_code in (0, 3), found.stderr
                code, run = found.exit_code, run + 1
                if args[0] not in FITTED:
                    check(shown, found.stdout.splitlines())
    assert run >= 10


def test_the_page_names_every_command() -> None:
    from paceline.cli.app import app

    text = PAGE.read_text()
    assert all(f"| `{name}" in text for name in app.commands)
