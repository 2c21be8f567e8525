"""Fault simulation of runs that processes join: promises hold, and bugs put in are found."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.storms.planted import found, planted
from tests.storms.session_planted import BUGS
from tests.storms.session_storm import play
from tests.storms.storm import Violation

STORMS = int(os.environ.get("PACELINE_SESSION_STORMS", "100"))
"""How many to play; `PACELINE_SESSION_STORMS=1000` plays more."""
_EACH = 50  # in one test
FINDINGS = {
    "take answers by their number alone": ("S2",),
    "take answers of lost clients": ("S2", "S3"),
    "let no call of an ended seat fail": ("S3",),
    "count no client as silent": ("S5",),
    "count those who ask as silent": ("S5",),
    "keep the seat of one who left": ("S5",),
    "give a seat to two clients": ("S1", "S2"),
    "keep calls that were fetched": ("S4",),
    "tell the engine of no loss": ("S3",),
    "keep clients that are dismissed": ("S3",),
    "leave new seats vacant": ("S6",),
    "keep vacant seats after the end": ("I11",),
    "say nothing of a death": ("ValueError",),
}
"""The promises that each bug breaks."""


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")


@pytest.mark.parametrize(
    "first",
    [pytest.param(n, marks=[pytest.mark.long] * (n > 0)) for n in range(0, STORMS, _EACH)],
)
def test_what_was_promised_holds_in_a_storm(first: int, tmp_path: Path) -> None:
    outcomes = [play(seed, tmp_path / str(seed)) for seed in range(first, first + _EACH)]
    kinds = set().union(*(outcome.faults for outcome in outcomes))
    assert kinds >= {"stop", "quit", "dies", "silent", "unheard", "delayed", "twice", "old id"}
    assert sum(outcome.faults.total() for outcome in outcomes) > 1000
    assert sum(outcome.kills for outcome in outcomes) > 0
    assert any(outcome.same_bits for outcome in outcomes)


def test_the_same_seed_is_the_same_storm(tmp_path: Path) -> None:
    first, second = (play(4, tmp_path / name) for name in "ab")
    assert first.faults == second.faults and first.seconds == second.seconds
    journals = [sorted((tmp_path / name).glob("*.jsonl")) for name in "ab"]
    assert journals[0] and len(journals[0]) == len(journals[1])
    for one, other in zip(*journals, strict=True):
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_put_in_is_found(bug: str, tmp_path: Path) -> None:
    def look(seed: int, folder: Path) -> None:
        try:
            play(seed, folder)
        except Violation as violation:
            if str(violation).startswith(FINDINGS[bug]):
                raise

    with planted(bug, BUGS), np.errstate(all="ignore"):
        seed, told = found(look, bug, tmp_path)
    assert f"session_storm --seed {seed}" in told
