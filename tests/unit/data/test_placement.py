"""Shares by speed: exact, within limits, and as quick as can be; tiles that stay where they are."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.placement import dealt, limits, shares, step_seconds

SPEEDS = st.lists(st.floats(0, 100), min_size=1, max_size=12)


@settings(max_examples=300, deadline=None)
@given(SPEEDS, st.integers(0, 400), st.integers(0, 2), st.data())
def test_shares_add_up_within_their_limits(
    speeds: list[float], total: int, least: int, data: st.DataObject
) -> None:
    most = data.draw(st.none() | st.lists(st.integers(2, 80), min_size=len(speeds),
                                          max_size=len(speeds)))  # fmt: skip
    given = shares(total, speeds, least, most)
    assert min(given) >= least
    room = sum(most) if most else 10**9
    assert sum(given) == min(max(total, least * len(speeds)), room)
    assert most is None or all(a <= b for a, b in zip(given, most, strict=True))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=12), st.integers(12, 400))
def test_shares_are_within_one_of_the_exact_ones(speeds: list[float], total: int) -> None:
    for share, speed in zip(shares(total, speeds, least=0), speeds, strict=True):
        assert abs(share - total * speed / sum(speeds)) < 1


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=12), st.integers(1, 20))
def test_in_proportion_is_never_slower_than_equal(speeds: list[float], each: int) -> None:
    """But for rounding, and as quick only if all are alike: n / sum(v) against n / (N v_min)."""
    total = 1000 * each * len(speeds)
    quick = step_seconds(shares(total, speeds), speeds)
    equal = step_seconds([1000 * each] * len(speeds), speeds)
    assert quick <= equal * (1 + 1e-12) + 1 / min(speeds)
    assert quick == pytest.approx(total / sum(speeds), abs=1 / min(speeds))


def test_no_other_shares_are_much_quicker() -> None:
    speeds = [1.0, 2.5, 4.2]
    best = min(
        step_seconds([a, b, 20 - a - b], speeds)
        for a, b in product(range(1, 19), repeat=2)
        if a + b < 20
    )
    assert step_seconds(shares(20, speeds), speeds) <= best + 1 / min(speeds)


def test_those_at_a_limit_leave_the_rest_to_others() -> None:
    assert shares(100, [1, 1, 8], max_samples=[50, 50, 20]) == (40, 40, 20)
    assert shares(10, [0, 0]) == (5, 5)  # nothing is known
    assert shares(10, [0, 1]) == (1, 9)
    assert limits({"b": 3}, ["a", "b"]) == [float("inf"), 3.0]
    assert limits(4, ["a", "b"]) == [4.0, 4.0] and limits(None, ["a"]) is None


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_shares_are_within_limits_and_as_even_as_they_allow(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 8))
    rates = data.draw(st.lists(st.floats(0.01, 100), min_size=ranks, max_size=ranks))
    most = data.draw(st.lists(st.integers(1, 40), min_size=ranks, max_size=ranks))
    batch = data.draw(st.integers(ranks, sum(most)))
    given = shares(batch, rates, max_samples=most)
    assert sum(given) == batch
    assert all(1 <= share <= limit for share, limit in zip(given, most, strict=True))
    # Nobody has a sample that would be done sooner elsewhere, but for the rounding.
    giving = [(n - 1) / v for n, v in zip(given, rates, strict=True) if n > 1]
    taking = [(n + 1) / v for n, v, m in zip(given, rates, most, strict=True) if n < m]
    assert max(giving, default=0) <= min(taking, default=float("inf")) * (1 + 1e-9)


def test_shares_are_proportional() -> None:
    assert shares(16, [1, 1, 2, 4]) == (2, 2, 4, 8)
    assert shares(10, [1, 1, 1]) == (4, 3, 3)  # ties by order
    assert shares(10, [1, 1, 1000]) == (1, 1, 8)
    assert shares(10, [1, 1, 1000], max_samples=[9, 9, 4]) == (3, 3, 4)
    assert shares(3, [5, 1, 1]) == (1, 1, 1)
    assert shares(12, [1, 2, 9], max_samples=[3, 4, 5]) == (3, 4, 5)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=6), st.integers(6, 40), st.data())
def test_tiles_move_no_more_than_they_must(
    speeds: list[float], tiles: int, data: st.DataObject
) -> None:
    before = dealt({}, range(tiles), {f"w{i}": v for i, v in enumerate(speeds)})
    new = data.draw(st.dictionaries(st.sampled_from([f"w{i}" for i in range(6)]),
                                    st.floats(0.1, 10), min_size=1))  # fmt: skip
    after = dealt(before, range(tiles), new)
    assert sorted(after) == list(range(tiles)) and set(after.values()) == set(new)
    counts = dict(zip(new, shares(tiles, list(new.values())), strict=True))
    held = Counter(before.values())
    assert Counter(after.values()) == Counter(counts)
    stay = sum(min(held[worker], counts[worker]) for worker in new)
    assert sum(before[tile] == after[tile] for tile in range(tiles)) == stay


def test_chosen_tiles_leave_first() -> None:
    before = dict.fromkeys(range(4), "a")
    after = dealt(before, range(4), {"a": 1.0, "b": 1.0}, first=[3, 1])
    assert [tile for tile in range(4) if after[tile] == "b"] == [1, 3]
