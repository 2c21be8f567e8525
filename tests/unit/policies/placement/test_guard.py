"""What is owed is paid: the weights of each tile add up to its part of all steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.protocol import Result, Task, Work
from paceline.policies.placement.guard import Guard


def result(id: int, **tiles: int) -> Result:
    portions = {int(name[1:]): samples for name, samples in tiles.items()}
    samples = sum(portions.values())
    task = Task(id, "w0", Work(tiles=portions), 0, 0.0, samples, 0, 1, (0,) * len(portions))
    return Result(task, 1.0, samples, 1.0, {})


EACH = np.array([0, 1, 1])  # the owner of each of three tiles


def test_who_comes_every_time_weighs_its_data() -> None:
    guard = Guard(np.array([10, 30, 60]), 3.0)
    for _ in range(5):
        weights = guard.weigh([result(0, t0=4), result(1, t1=1, t2=2)], EACH)
        assert weights == pytest.approx({0: 0.1, 1: 0.9})
    assert guard.owed == pytest.approx([0, 0, 0])


def test_few_samples_stand_for_all_tiles_of_their_owner() -> None:
    guard = Guard(np.array([10, 30, 60]), 3.0)
    assert guard.weigh([result(0, t0=1), result(1, t2=1)], EACH) == pytest.approx({0: 0.1, 1: 0.9})


def test_who_was_missing_is_paid_when_it_comes() -> None:
    guard, owner = Guard(np.array([50, 50]), 3.0), np.array([0, 1])
    assert guard.weigh([result(0, t0=8)], owner) == pytest.approx({0: 0.5})
    assert guard.weigh([result(1, t0=8)], owner) == pytest.approx({1: 0.5})
    weights = guard.weigh([result(2, t0=8), result(3, t1=2)], owner)
    assert weights == pytest.approx({2: 0.5, 3: 1.5})


def test_results_on_one_owners_tiles_share_what_it_is_owed() -> None:
    guard = Guard(np.array([50, 20, 30]), 3.0)
    weights = guard.weigh([result(0, t1=6), result(1, t2=2), result(2, t0=8)], EACH)
    assert weights == pytest.approx({0: 0.375, 1: 0.125, 2: 0.5})
    # Done for another: a result may be on tiles of several.
    weights = guard.weigh([result(3, t0=4, t1=4), result(4, t0=4)], EACH)
    assert weights == pytest.approx({3: 0.75, 4: 0.25})


RESULTS = st.lists(
    st.dictionaries(st.integers(0, 4), st.integers(1, 9), min_size=1), min_size=1, max_size=4
)


@settings(max_examples=200, deadline=None)
@given(st.lists(RESULTS, min_size=1, max_size=12), st.floats(0, 4), st.integers(1, 4))
def test_the_books_balance(history: list[list[dict[int, int]]], bound: float, k: int) -> None:
    """Had + owed + written off = due, for each owner; and nobody is owed more than the bound."""
    sizes = np.array([1, 2, 3, 4, 10])
    guard, had = Guard(sizes, bound), np.zeros(3)
    owner = np.array([0, 0, 1, 2, 2])
    for steps, results in enumerate(history, 1):
        step = [result(i, **{f"t{t}": n for t, n in r.items()}) for i, r in enumerate(results)]
        due = np.bincount(owner, guard.owed + sizes / 20)
        weights = guard.weigh(step, owner)
        assert all(weight > 0 for weight in weights.values())
        came = {int(owner[tile]) for each in results for tile in each}
        assert sum(weights.values()) == pytest.approx(sum(due[list(came)]))
        had[list(came)] += due[list(came)]
        assert all(guard.owed >= 0) and not guard.owed[np.isin(owner, list(came))].any()
        late = guard.late(owner, 3, k)
        books = had + np.bincount(owner, guard.owed + guard.missed)
        assert books == pytest.approx(steps * np.bincount(owner, sizes) / 20)
        owed, due = np.bincount(owner, guard.owed), np.bincount(owner, sizes / 20)
        most = bound * due * 3 / k
        assert np.all(owed <= most + due + 1e-9)
        assert late.tolist() == [i for i in range(3) if owed[i] >= most[i] - 1e-9]


def test_it_is_saved_and_loaded() -> None:
    guard, other = Guard(np.array([1, 3]), 1.0), Guard(np.array([1, 3]), 1.0)
    guard.weigh([result(0, t1=1)], np.array([0, 1]))
    other.load_state_dict(guard.state_dict())
    assert other.owed.tolist() == guard.owed.tolist() == [0.25, 0.0]


def test_a_result_of_no_tile_is_refused() -> None:
    nothing = Result(Task(7, "w0", Work(), 0, 0.0, 1, 0), 1.0, 1, 1.0, {})
    with pytest.raises(ValueError, match="task 7 names no data shard"):
        Guard(np.array([1]), 1.0).weigh([nothing], np.array([0]))
