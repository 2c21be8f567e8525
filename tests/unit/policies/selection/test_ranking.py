"""The best of many: as a full sort would find them, however few figures are brought up to date."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline.policies.selection.ranking as module
from paceline.core.schema import load_state, save_state
from paceline.policies.selection.arms import Floats
from paceline.policies.selection.indices import KL, LCB, FiniteVariance, Greedy, Index, Thompson
from paceline.policies.selection.ranking import Ranking, Rows


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
    everyone = [f"w{i}" for i in range(len(means))]
    candidates = {f"w{i}": None for i in range(len(means)) if i not in busy}
    best = ranking.best(3, everyone, candidates, count, plain)
    figures = sorted(means[int(worker[1:])] for worker in candidates)
    assert list(best.values()) == figures[:count]
    assert all(means[int(worker[1:])] == figure for worker, figure in best.items())


def test_equal_figures_are_chosen_at_random_and_the_seed_decides() -> None:
    names = [f"w{i}" for i in range(30)]
    chosen: dict[int, list[tuple[str, ...]]] = {}
    for seed in (1, 1, 2):
        ranking = made(Greedy(), [1.0] * 30, seed)
        found = [tuple(ranking.best(round, names, names, 3, plain)) for round in range(40)]
        assert len({worker for best in found for worker in best}) > 25
        assert chosen.setdefault(seed, found) == found
    assert chosen[1] != chosen[2]


def test_many_equal_figures_are_chosen_among_without_sorting() -> None:
    """A radius makes thousands of figures 0: any of them will do, and each gets its chance."""
    ranking = made(LCB(), [0.5] * 6000)
    names = dict.fromkeys(f"w{i}" for i in range(6000))
    ranking.best(5, names, names, 1, plain)
    ranking.best(6, names, names, 1, plain)
    ranking.best(7, names, names, 1, plain)
    found = [tuple(ranking.best(round, names, names, 3, plain)) for round in range(8, 28)]
    assert all(len(best) == 3 for best in found)
    assert len({worker for best in found for worker in best}) > 50


def test_who_was_never_tried_comes_first() -> None:
    ranking = made(KL(), [1.0, 2.0])
    ranking.arms.admit(["new", "newer"])
    names = [*ranking.arms.names]
    assert set(ranking.best(0, names, names, 3, plain)) == {"new", "newer", "w0"}
    assert set(ranking.best(0, names, names, 3, plain)) == {
        "new",
        "newer",
        "w0",
    }  # it came to nothing
    ranking.observe("new", 9.0, ended=True)
    ranking.observe("newer", 1e-3, ended=True)
    assert list(ranking.best(0, names, names, 2, plain)) == ["newer", "w0"]


def test_figures_wait_for_their_turn_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 50, seven a round: news are seen at once, the passing of rounds within eight rounds."""
    monkeypatch.setattr(module, "REFRESH", 7)
    means = np.random.default_rng(0).uniform(0.1, 1.0, 50).tolist()
    lazy, names = made(KL(), means), [f"w{i}" for i in range(50)]
    for round in range(8):
        lazy.best(round, names, names, 5, plain)
    for _ in range(99):
        lazy.observe("w17", 1e-6, ended=True)
    assert next(iter(lazy.best(8, names, names, 5, plain))) == "w17"
    for round in range(100, 108):
        lazy.best(round, names, names, 5, plain)
    monkeypatch.setattr(module, "REFRESH", 1000)
    whole = made(KL(), means)
    for _ in range(99):
        whole.observe("w17", 1e-6, ended=True)
    ours, theirs = lazy.best(107, names, names, 50, plain), whole.best(107, names, names, 50, plain)
    assert list(ours) == list(theirs)
    assert list(ours.values()) == pytest.approx(list(theirs.values()), rel=0.02)


@pytest.mark.parametrize("index", [KL(), Thompson(), FiniteVariance(0.9)], ids=str)
def test_saved_and_loaded_it_ranks_the_same(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFRESH", 7)
    names = [f"w{i}" for i in range(20)]
    straight = made(index, [0.1 * i for i in range(20)])
    copy: Ranking | None = None
    for round in range(10):
        best = straight.best(round, names, names, 4, plain)
        if copy is not None:
            assert copy.best(round, names, names, 4, plain) == best
        for ranking in (straight, *([copy] if copy else [])):
            for worker in best:
                ranking.observe(worker, 0.3, ended=True)
        if round == 4:
            copy = Ranking(index, 0, 1.0, None)
            load_state(copy, save_state(straight))


def test_who_is_gone_is_no_candidate_and_costs_nothing() -> None:
    """Of 3,000 the best 2,000 leave; those who stay are found as if there were no others."""
    ranking = made(Greedy(), [0.001 * i for i in range(3000)])
    stay = {f"w{i}": None for i in range(2000, 3000)}
    for i in range(2000):
        ranking.leave(f"w{i}")
    for round in range(2):  # a round brings 2,048 figures up to date
        best = ranking.best(round, stay, stay, 3, plain)
    assert list(best) == ["w2000", "w2001", "w2002"]
    assert len(ranking._front(3, np.random.default_rng(0))) == 3
    assert np.isinf(ranking._figures[:2000]).all()
    ranking.arrive("w7")
    stay["w7"] = None
    assert next(iter(ranking.best(2, stay, stay, 3, plain))) == "w7"


def test_who_joined_or_left_unseen_is_noticed_after_a_resume() -> None:
    ranking = made(Greedy(), [1.0, 2.0, 3.0])
    names = ["w0", "w1", "w2"]
    ranking.best(0, names, names, 1, plain)
    resumed = Ranking(Greedy(), 0, 1.0, None)
    load_state(resumed, save_state(ranking))
    there = ["w1", "w2", "new"]
    assert set(resumed.best(1, there, there, 2, plain)) == {"new", "w1"}


@pytest.mark.parametrize("index", [KL(), KL(shape=4.0), Thompson(), FiniteVariance(0.9)], ids=str)
def test_who_was_long_away_is_tried_anew(index: Index) -> None:
    """After 5,000 rounds at a discount of 0.9 nothing is left, not even a number."""
    ranking = Ranking(index, 0, 0.9, None)
    names = ["w0", "w1"]
    for worker in names:
        ranking.arrive(worker)
        ranking.observe(worker, 1.0, ended=True)
    ranking.leave("w1")
    for round in range(1, 5001, 50):
        assert list(ranking.best(round, ["w0"], ["w0"], 1, plain)) == ["w0"]
        ranking.observe("w0", 1.0, ended=True)
    ranking.arrive("w1")
    assert next(iter(ranking.best(5001, names, names, 1, plain))) == "w1"
