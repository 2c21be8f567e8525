"""What is owed is paid: the weights of each tile add up to its part of all steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.protocol import Result, Task, Work
from paceline.policies.guard import Guard


def result(id: int, **tiles: int) -> Result:
    portions = {int(name[1:]): samples for name, samples in tiles.items()}
    samples = sum(portions.values())
    task = Task(id, "w0", Work(tiles=portions), 0, 0.0, samples, 0, draws=(0,) * len(portions))
    return Result(task, 1.0, samples, 1.0, {})


def test_who_comes_every_time_weighs_its_data() -> None:
    guard = Guard(np.array([10, 30, 60]), 3.0)
    for _ in range(5):
        weights = guard.weigh([result(0, t0=4), result(1, t1=1, t2=2)])
        assert weights == pytest.approx({0: 0.1, 1: 0.9})
    assert guard.owed == pytest.approx([0, 0, 0])


def test_who_was_missing_is_paid_when_it_comes() -> None:
    guard = Guard(np.array([50, 50]), 3.0)
    assert guard.weigh([result(0, t0=8)]) == pytest.approx({0: 0.5})
    assert guard.weigh([result(1, t0=8)]) == pytest.approx({1: 0.5})
    assert guard.weigh([result(2, t0=8), result(3, t1=2)]) == pytest.approx({2: 0.5, 3: 1.5})


def test_two_results_of_one_tile_share_what_it_is_owed() -> None:
    guard = Guard(np.array([50, 50]), 3.0)
    weights = guard.weigh([result(0, t0=6), result(1, t0=2), result(2, t1=8)])
    assert weights == pytest.approx({0: 0.375, 1: 0.125, 2: 0.5})


RESULTS = st.lists(
    st.dictionaries(st.integers(0, 4), st.integers(1, 9), min_size=1), min_size=1, max_size=4
)


@settings(max_examples=200, deadline=None)
@given(st.lists(RESULTS, min_size=1, max_size=12), st.floats(0, 4), st.integers(1, 4))
def test_the_books_balance(history: list[list[dict[int, int]]], bound: float, k: int) -> None:
    """Had + owed + written off = due, for each tile; and nobody is owed more than the bound."""
    sizes = np.array([1, 2, 3, 4, 10])
    guard, had = Guard(sizes, bound), np.zeros(5)
    owner = np.array([0, 0, 1, 2, 2])
    for steps, results in enumerate(history, 1):
        step = [result(i, **{f"t{t}": n for t, n in r.items()}) for i, r in enumerate(results)]
        for id, weight in guard.weigh(step).items():
            assert weight >= 0
            for tile, samples in results[id].items():
                had[tile] += weight * samples / sum(results[id].values())
        late = guard.late(owner, 3, k)
        assert had + guard.owed + guard.missed == pytest.approx(steps * sizes / 20)
        owed, due = np.bincount(owner, guard.owed), np.bincount(owner, sizes / 20)
        assert np.all(owed <= bound / k + due + 1e-9)
        assert late.tolist() == [i for i in range(3) if owed[i] >= bound / k - 1e-9]


def test_it_is_saved_and_loaded() -> None:
    guard, other = Guard(np.array([1, 3]), 1.0), Guard(np.array([1, 3]), 1.0)
    guard.weigh([result(0, t1=1)])
    other.load_state_dict(guard.state_dict())
    assert other.owed.tolist() == guard.owed.tolist() == [0.25, 0.0]


def test_a_result_of_no_tile_is_refused() -> None:
    nothing = Result(Task(7, "w0", Work(), 0, 0.0, 1, 0), 1.0, 1, 1.0, {})
    with pytest.raises(ValueError, match="task 7 is of no tile"):
        Guard(np.array([1]), 1.0).weigh([nothing])
