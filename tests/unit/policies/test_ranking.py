"""The best of many: as a full sort would find them, however few figures are brought up to date."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline.policies.ranking as module
from paceline.core.state import decode, encode
from paceline.policies.arms import Floats
from paceline.policies.indices import KL, LCB, Greedy, Index, Thompson
from paceline.policies.ranking import Ranking, Rows


def plain(rows: Rows, seconds: Floats) -> Floats:
    return seconds


def made(index: Index, means: list[float], seed: int = 0) -> Ranking:
    """Return a ranking of workers that were each tried once and took their mean."""
    ranking = Ranking(index, seed, 1.0, None)
    ranking.arms.admit(f"w{i}" for i in range(len(means)))
    for i, mean in enumerate(means):
        ranking.observe(f"w{i}", mean, ended=True)
    return ranking


@settings(max_examples=100, deadline=None)
@given(
    means=st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 7.0]), min_size=1, max_size=60),
    busy=st.sets(st.integers(0, 59)),
    count=st.integers(1, 70),
)
def test_the_best_candidates_are_found(means: list[float], busy: set[int], count: int) -> None:
    ranking = made(Greedy(), means)
    candidates = {f"w{i}": None for i in range(len(means)) if i not in busy}
    best = ranking.best(3, candidates, count, plain)
    figures = sorted(means[int(worker[1:])] for worker in candidates)
    assert list(best.values()) == figures[:count]
    assert all(means[int(worker[1:])] == figure for worker, figure in best.items())


def test_equal_figures_are_chosen_at_random_and_the_seed_decides() -> None:
    names = [f"w{i}" for i in range(30)]
    chosen = {}
    for seed in (1, 1, 2):
        ranking = made(Greedy(), [1.0] * 30, seed)
        found = [tuple(ranking.best(round, names, 3, plain)) for round in range(40)]
        assert len({worker for best in found for worker in best}) > 25
        assert chosen.setdefault(seed, found) == found
    assert chosen[1] != chosen[2]


def test_many_equal_figures_are_chosen_among_without_sorting() -> None:
    """A radius makes thousands of figures 0: any of them will do, and each gets its chance."""
    ranking = made(LCB(), [0.5] * 6000)
    names = dict.fromkeys(f"w{i}" for i in range(6000))
    ranking.best(5, names, 1, plain)
    ranking.best(6, names, 1, plain)
    ranking.best(7, names, 1, plain)
    found = [tuple(ranking.best(round, names, 3, plain)) for round in range(8, 28)]
    assert all(len(best) == 3 for best in found)
    assert len({worker for best in found for worker in best}) > 50


def test_who_was_never_tried_comes_first() -> None:
    ranking = made(KL(), [1.0, 2.0])
    ranking.arms.admit(["new", "newer"])
    names = [*ranking.arms.names]
    assert set(ranking.best(0, names, 3, plain)) == {"new", "newer", "w0"}
    assert set(ranking.best(0, names, 3, plain)) == {"new", "newer", "w0"}  # it came to nothing
    ranking.observe("new", 9.0, ended=True)
    ranking.observe("newer", 1e-3, ended=True)
    assert list(ranking.best(0, names, 2, plain)) == ["newer", "w0"]


def test_figures_wait_for_their_turn_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 50, seven a round: news are seen at once, the passing of rounds within eight rounds."""
    monkeypatch.setattr(module, "REFRESH", 7)
    means = np.random.default_rng(0).uniform(0.1, 1.0, 50).tolist()
    lazy, names = made(KL(), means), [f"w{i}" for i in range(50)]
    for round in range(8):
        lazy.best(round, names, 5, plain)
    for _ in range(99):
        lazy.observe("w17", 1e-6, ended=True)
    assert next(iter(lazy.best(8, names, 5, plain))) == "w17"
    for round in range(100, 108):
        lazy.best(round, names, 5, plain)
    monkeypatch.setattr(module, "REFRESH", 1000)
    whole = made(KL(), means)
    for _ in range(99):
        whole.observe("w17", 1e-6, ended=True)
    ours, theirs = lazy.best(107, names, 50, plain), whole.best(107, names, 50, plain)
    assert list(ours) == list(theirs)
    assert list(ours.values()) == pytest.approx(list(theirs.values()), rel=0.02)


@pytest.mark.parametrize("index", [KL(), Thompson()], ids=str)
def test_saved_and_loaded_it_ranks_the_same(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFRESH", 7)
    names = [f"w{i}" for i in range(20)]
    straight = made(index, [0.1 * i for i in range(20)])
    copy: Ranking | None = None
    for round in range(10):
        best = straight.best(round, names, 4, plain)
        if copy is not None:
            assert copy.best(round, names, 4, plain) == best
        for ranking in (straight, *([copy] if copy else [])):
            for worker in best:
                ranking.observe(worker, 0.3, ended=True)
        if round == 4:
            copy = Ranking(index, 0, 1.0, None)
            copy.load_state_dict(decode(encode(straight.state_dict())))
