"""Codes for any placement: exact for every straggler set, with the smallest weights."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.codes.base import NotDecodable
from paceline.codes.dual import Placed, by_speed, cyclic
from tests.unit.codes.exchange import error, everyone, gradients, messages, worst

SPEEDS = [1, 1, 1, 2, 2, 4, 4, 8]


def norm(code: Placed, missing: tuple[int, ...]) -> float:
    rows = [row for row in range(code.n) if row not in missing]
    return float(np.linalg.norm(list(code.decode(rows).values())))


def test_the_smallest_weights() -> None:
    """Oracle: ||Z|| of the draw 15470 for none, one and two stragglers; the error is round-off."""
    code = cyclic(10, 4, 2, seed=15470, frame="gaussian")
    g = gradients(code, 60)
    sent = messages(code, g)
    sizes = {}
    for s in (0, 1, 2):
        sizes[s] = {missing: norm(code, missing) for missing in everyone(10, s)}
        assert max(error(code, g, sent, missing) for missing in sizes[s]) < 1e-12
    assert sizes[0][()] == pytest.approx(3.492, abs=5e-4)
    assert np.mean(list(sizes[1].values())) == pytest.approx(5.517, abs=5e-4)
    assert max(sizes[1].values()) == pytest.approx(11.987, abs=5e-4)
    assert np.mean(list(sizes[2].values())) == pytest.approx(12.066, abs=5e-4)
    assert max(sizes[2].values()) == pytest.approx(35.234, abs=5e-4)
    for (first, second), size in sizes[2].items():  # none grows when a straggler is removed
        assert sizes[1][first,] <= size and sizes[1][second,] <= size
    assert min(sizes[1].values()) >= sizes[0][()]


@pytest.mark.parametrize(("n", "d", "m"), [(5, 2, 1), (6, 4, 2), (7, 3, 3), (9, 5, 3), (8, 4, 1)])
def test_cyclic_is_exact_from_every_set(n: int, d: int, m: int) -> None:
    code = cyclic(n, d, m)
    assert (code.stragglers, code.load, code.parts, code.messages) == (d - m, d, n, m)
    assert sorted(code.row(n - 1)) == sorted({(n - 1 + t) % n for t in range(d)})
    assert worst(code) < 1e-12


def test_a_harmonic_frame_beats_gaussian_draws() -> None:
    for n, d, m in ((6, 4, 2), (8, 6, 3), (11, 8, 4)):
        gains = {f: cyclic(n, d, m, frame=f).gain for f in ("harmonic", "gaussian")}
        assert gains["harmonic"] < 0.5 * gains["gaussian"]
        assert cyclic(n, d, m).frame == "harmonic"


def test_more_draws_are_no_worse() -> None:
    best = cyclic(6, 4, 2)
    assert best.gain <= min(cyclic(6, 4, 2, seed).gain for seed in range(10))
    assert best == cyclic(6, 4, 2, best.seed, best.frame)


def test_the_gain_bounds_what_rounding_does() -> None:
    """The worst float32 error over all sets follows the gain of the draw."""
    good, bad = cyclic(6, 4, 2), cyclic(6, 4, 2, seed=0, frame="gaussian")
    assert bad.gain > 5 * good.gain
    for code in (good, bad):
        assert worst(code, np.float32) < 2 * code.gain * 2.0**-24


@pytest.mark.parametrize(("s", "m"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_more_parts_on_quick_workers(s: int, m: int) -> None:
    code = by_speed(SPEEDS, 24, s, m)
    assert sum(len(code.row(i)) for i in range(8)) == 24 * (s + m)
    assert worst(code, length=120) < 1e-12


def test_who_holds_nothing_is_never_missed() -> None:
    code = by_speed([1, 1, 0, 1], 6, 1)
    assert code.row(2) == {}
    g = gradients(code, 20)
    assert error(code, g, messages(code, g), {2, 3}) < 1e-13
    collector = code.collector()
    assert [collector.add(row) for row in (2, 0, 0, 1)] == [False, False, False, True]
    with pytest.raises(
        NotDecodable,
        match="2 of 3 rows are missing, the first is row 0; this code decodes if at most 1",
    ):
        code.decode([2, 3])


@given(st.integers(2, 7), st.integers(0, 2), st.integers(1, 3), st.integers(0, 99), st.data())
@settings(max_examples=40, deadline=None)
def test_any_placement_is_exact_or_refused(
    n: int, s: int, m: int, seed: int, data: st.DataObject
) -> None:
    if s + m > n:
        return
    subsets = st.sets(st.integers(0, n - 1), min_size=s + m)
    holders = tuple(map(tuple, data.draw(st.lists(subsets, min_size=1, max_size=6))))
    code = Placed(n, holders, s, m, seed, "gaussian")
    missing = data.draw(st.sets(st.integers(0, n - 1)))
    g = gradients(code, 13)
    holding = {row for rows in holders for row in rows}
    collector = code.collector()
    for row in set(range(n)) - missing:
        collector.add(row)
    assert collector.ready == (len(missing & holding) <= s)
    if collector.ready:
        assert error(code, g, messages(code, g), missing) < 1e-14 * max(code.gain, 10) * 10
    else:
        with pytest.raises(NotDecodable):
            code.decode(set(range(n)) - missing)


def test_one_missing_too_many_is_refused() -> None:
    code = cyclic(7, 4, 2)
    for missing in combinations(range(7), 3):
        with pytest.raises(NotDecodable, match="3 of 7 rows are missing"):
            code.decode(set(range(7)) - set(missing))


def test_support() -> None:
    code = cyclic(7, 4, 2)
    g = gradients(code, 30)
    before = messages(code, g)
    for part in range(7):
        changed = g.copy()
        changed[part] *= 3.0
        after = messages(code, changed)
        for row in range(7):
            assert bool((before[row] == after[row]).all()) == (row not in code.holders[part])


def test_a_thousand_rows() -> None:
    code = cyclic(1000, 24, 4)
    missing = set(np.random.default_rng(1).choice(1000, 20, replace=False).tolist())
    g = gradients(code, 8)
    assert error(code, g, messages(code, g), missing) < 1e-9


def test_bad_placements_are_refused() -> None:
    with pytest.raises(ValueError, match=r"part 1 is held by rows \(0, 2\).*need 3 different"):
        Placed(3, ((0, 1, 2), (0, 2)), 1, 2)
    with pytest.raises(ValueError, match="need 2 different"):
        Placed(3, ((1, 1),), 1, 1)
    with pytest.raises(ValueError, match="row 3 is not of this code"):
        Placed(3, ((2, 3),), 1, 1)
    with pytest.raises(ValueError, match="use s >= 0, m >= 1"):
        Placed(3, ((1, 2),), -1, 1)
    with pytest.raises(ValueError, match="n=3, d=4, m=1"):
        cyclic(3, 4)
