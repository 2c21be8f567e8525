"""Storms of decentralized runs: no message counts twice, nothing bad gets in, bugs are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storms.gossip_planted import BUGS
from tests.storms.gossip_storm import play
from tests.storms.planted import found, planted


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")


def test_what_was_promised_holds_in_a_storm(tmp_path: Path) -> None:
    outcomes = [play(seed, tmp_path / str(seed)) for seed in range(30)]
    kinds = set().union(*(outcome.faults for outcome in outcomes))
    assert kinds >= {"lost", "twice", "late", "wrong", "stray", "cut", "bad", "crash", "pause"}
    assert sum(outcome.faults.total() for outcome in outcomes) > 500
    assert len({outcome.case.name for outcome in outcomes}) > 15


@pytest.mark.parametrize("seed", [2055, 5089])  # in which a sparse message has a number too few
def test_what_storms_once_found_is_mended(seed: int, tmp_path: Path) -> None:
    assert play(seed, tmp_path).faults["wrong"]


def test_the_same_seed_is_the_same_storm(tmp_path: Path) -> None:
    for seed in (3, 8):
        first, second = (play(seed, tmp_path / f"{seed}{name}") for name in "ab")
        assert first.faults == second.faults and first.events == second.events
        assert first.seconds == second.seconds
        journals = [sorted((tmp_path / f"{seed}{name}").glob("*.jsonl")) for name in "ab"]
        assert len(journals[0]) == len(journals[1]) == first.case.workers
        for one, other in zip(*journals, strict=True):
            assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numbers that are not finite
def test_a_bug_put_in_is_found(bug: str, tmp_path: Path) -> None:
    with planted(bug, BUGS):
        seed, told = found(play, bug, tmp_path)
    assert f"chaos.py --part gossip --seed {seed}" in told


def test_nodes_join_again_in_a_storm(tmp_path: Path) -> None:
    """Their journals go on: they replay, and have each sample once."""
    outcomes = [play(seed, tmp_path / str(seed), respawns=3) for seed in range(100, 120)]
    assert sum(outcome.returned for outcome in outcomes) > 10
