"""What the policies decided when these journals were made, they decide today."""

from __future__ import annotations

from pathlib import Path

import pytest

import paceline as pl
from paceline.core.journal import dump_entry
from paceline.core.protocol import Step
from tests.golden.make import CASES, FOLDER, policy, simulate


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", CASES)
def test_the_policy_decides_as_it_did(name: str) -> None:
    journal = pl.Journal.load(FOLDER / f"{name}.jsonl")
    again = pl.protocol.replay(policy(name), journal)
    assert [dump_entry(entry) for entry in again] == lines(FOLDER / f"{name}.jsonl")[1:]
    assert again == journal
    steps = [c for entry in journal for c in entry.commands if isinstance(c, Step)]
    assert len(steps) == CASES[name].steps


@pytest.mark.parametrize("name", CASES)
def test_the_simulator_plays_as_it_did(name: str, tmp_path: Path) -> None:
    journal = simulate(name)
    journal.save(tmp_path / "again.jsonl")
    assert lines(tmp_path / "again.jsonl") == lines(FOLDER / f"{name}.jsonl")


def test_every_journal_has_its_case_and_is_small() -> None:
    files = {path.stem: path.stat().st_size for path in FOLDER.glob("*.jsonl")}
    assert files.keys() == CASES.keys()
    assert max(files.values()) < 20_000
