"""Every command of docs/cli.md does what the page shows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import Result

PAGE = Path(__file__).parents[3] / "docs" / "cli.md"
FITTED = ("profile", "plan", "simulate")  # whose figures differ from one scipy to another


def test_the_page(
    paceline: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text()
    (script,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    Path("train.py").write_text(script)
    code, run = 0, 0
    for block in re.findall(r"^```console\n(.*?)^```", text, re.M | re.S):
        lines = block.splitlines()
        starts = [*(i for i, line in enumerate(lines) if line.startswith("$ ")), len(lines)]
        for start, end in pairwise(starts):
            name, *args = shlex.split(lines[start][2:])
            shown = lines[start + 1 : end]
            if name == "echo":
                assert shown == [str(code)]
                continue
            assert name == "paceline"
            found = paceline(*args)
            assert found.exit_code in (0, 3), found.stderr
            code, run = found.exit_code, run + 1
            if args[0] not in FITTED:
                printed = found.stdout.splitlines()
                for line, real in zip(shown, printed, strict=False):
                    assert real.startswith(line.partition("…")[0])
    assert run >= 10


def test_the_page_names_every_command() -> None:
    from paceline.cli.app import app

    text = PAGE.read_text()
    assert all(f"| `{name}" in text for name in app.commands)
