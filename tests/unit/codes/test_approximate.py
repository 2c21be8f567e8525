"""Approximate codes: their error against closed forms, and estimates without bias."""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations, permutations
from math import comb, factorial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.codes import generators as make
from paceline.codes.approximate import (
    Approximate,
    LeastSquares,
    Replicated,
    Stochastic,
    graph,
    least_squares,
)
from paceline.codes.base import Code
from paceline.codes.dual import cyclic
from paceline.codes.groups import Grouped
from paceline.codes.placements import scattered
from tests.unit.codes.exchange import gradients, messages


def coefficients(code: Code) -> np.ndarray:
    b = np.zeros((code.n, code.parts))
    for row in range(code.n):
        for part, (value,) in code.row(row).items():
            b[row, part] = value
    return b


def squared(code: Approximate, rows: Collection[int]) -> float:
    """Return the error per part by its definition."""
    a = np.zeros(code.n)
    for row, (weight,) in code.decode(rows).items():
        assert row in rows
        a[row] = weight
    return float(((a @ coefficients(code) - 1) ** 2).mean())


def bernoulli(n: int, parts: int, load: int, seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).random((n, parts)) < load / parts).astype(float)


def alphas(code: LeastSquares, rows: Collection[int]) -> np.ndarray:
    """Return the best attainable sums by the closed form of Glasgow and Wootters.

    1 in components with an odd cycle; in bipartite ones, 1 -+ (|L| - |R|) / (|L| + |R|).
    """
    neighbors: list[list[int]] = [[] for _ in range(code.parts)]
    for row in rows:
        u, v = code.row(row)
        neighbors[u].append(v)
        neighbors[v].append(u)
    alpha, color = np.zeros(code.parts), [-1] * code.parts
    for root in range(code.parts):
        if color[root] >= 0:
            continue
        color[root], found, odd = 0, [root], False
        for u in found:
            for v in neighbors[u]:
                if color[v] < 0:
                    color[v] = 1 - color[u]
                    found.append(v)
                odd |= color[v] == color[u]
        sides = [[u for u in found if color[u] == side] for side in (0, 1)]
        for side, other in (sides, sides[::-1]):
            alpha[side] = 1.0 if odd else 2 * len(other) / len(found)
    return alpha


@pytest.mark.parametrize(("n", "copies"), [(30, 3), (30, 4), (12, 2)])
def test_a_graph_decodes_to_the_closed_form(n: int, copies: int) -> None:
    for seed in range(30):
        code = graph(n, copies, 0, seed)
        rng = np.random.default_rng(seed)
        rows = np.flatnonzero(rng.random(n) > 0.3).tolist()
        a = np.array([code.decode(rows).get(row, (0.0,))[0] for row in range(n)])
        np.testing.assert_allclose(a @ coefficients(code), alphas(code, rows), atol=1e-8)
        smallest = np.linalg.lstsq(coefficients(code)[rows].T, np.ones(code.parts), rcond=None)[0]
        np.testing.assert_allclose(a[rows], smallest, atol=1e-8)


def test_ten_thousand_edges() -> None:
    """With 20 percent missing the error is 1.4e-3 per block, p⁴ or so, and weights stay small."""
    errors = []
    for seed in range(5):
        code = graph(10_000, 4, 0, seed)
        rows = np.flatnonzero(np.random.default_rng(100 + seed).random(10_000) > 0.2).tolist()
        estimate = code.estimate(rows)
        errors.append(estimate.error)
        assert estimate.error == pytest.approx(((alphas(code, rows) - 1) ** 2).mean(), abs=1e-8)
        assert max(abs(weight) for (weight,) in estimate.weights.values()) < 1.6
    assert 0.9e-3 < np.mean(errors) < 2.3e-3


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 99), st.data())
@settings(max_examples=60, deadline=None)
def test_least_squares_is_the_least_and_tells_its_error(
    n: int, parts: int, seed: int, data: st.DataObject
) -> None:
    holders = scattered(n, parts, data.draw(st.integers(1, n)), seed)
    code = LeastSquares(n, holders, 0)
    rows = data.draw(st.sets(st.integers(0, n - 1)))
    found = code.estimate(rows)
    assert found.weights == code.decode(rows)
    b = coefficients(code)[sorted(rows)]
    best = np.linalg.lstsq(b.T, np.ones(parts), rcond=None)[0]
    assert found.error == pytest.approx(((best @ b - 1) ** 2).mean(), abs=1e-8)
    assert found.error == pytest.approx(squared(code, rows), abs=1e-12)


def test_least_squares_of_an_exact_code() -> None:
    """Exact with as many stragglers as the code bears, and an estimate beyond."""
    code = least_squares(cyclic(9, 3), 4)
    assert not code.exact
    for missing in combinations(range(9), 2):
        assert code.estimate(set(range(9)) - set(missing)).error < 1e-12
    assert 0 < code.estimate(range(4)).error < 1
    assert code.estimate([]).error == 1.0 and code.decode([]) == {}
    with pytest.raises(ValueError, match="messages=2; approximate decoding needs m = 1"):
        least_squares(Grouped(4, make.best(4, 2)), 1)


def test_bernoulli_codes() -> None:
    """Oracle: one-step weights k / (r d) err by k²(1 - d/k) / (r d) = 23.75, the best by 5.79."""
    n, parts, load, r = 100, 100, 5, 80
    one_step, best = [], []
    for seed in range(2000):
        b = bernoulli(r, parts, load, seed)
        one_step.append(((b.sum(axis=0) * parts / (r * load) - 1) ** 2).sum())
        if seed < 40:
            b = bernoulli(n, parts, load, seed)
            b[0, ~b.any(axis=0)] = 1.0
            holders = tuple(tuple(np.flatnonzero(column).tolist()) for column in b.T)
            code = LeastSquares(n, holders, 20)
            best.append(code.estimate(range(20, 100)).error * parts)
    assert np.mean(one_step) == pytest.approx(23.75, abs=0.3)
    assert np.mean(best) == pytest.approx(5.79, abs=1.0)


def test_repetition_loses_whole_groups() -> None:
    """Oracle: k C(n-d, s-d) / C(n, s) = 0.0206 is the expected error with n = k = 100, s = 20."""
    code = Replicated(100, 5, 20, rescale=False)
    expected = 100 * comb(95, 15) / comb(100, 20)
    assert expected == pytest.approx(0.0206, abs=5e-5)
    errors = []
    for seed in range(4000):
        alive = np.random.default_rng(seed).permutation(100)[20:].tolist()
        errors.append(code.estimate(alive).error * 100)
    spread = np.std(errors) / np.sqrt(len(errors))
    assert np.mean(errors) == pytest.approx(expected, abs=4 * spread)


def test_repetition_equals_the_exact_code_if_no_group_is_lost() -> None:
    approximate, exact = Replicated(6, 3, 4), Grouped(6, make.repetition(3))
    assert [approximate.row(i) for i in range(6)] == [exact.row(i) for i in range(6)]
    assert approximate.decode({1, 2, 5}) == exact.decode({1, 2, 5})
    assert approximate.estimate({1, 2, 5}).error == 0.0


def test_lost_groups_are_made_up_for() -> None:
    """Averaged over which group is lost, the estimate is the sum itself."""
    code = Replicated(6, 2, 2)
    g = gradients(code, 20)
    sent = messages(code, g)
    total = np.zeros(20)
    for lost in range(3):
        rows = [row for row in range(6) if row // 2 != lost]
        total += sum(w * sent[row] for row, (w,) in code.decode(rows).items()) / 3
    np.testing.assert_allclose(total, g.sum(axis=0), atol=1e-12)
    assert code.decode([0, 2]) == {0: (1.5,), 2: (1.5,)}
    assert code.estimate([0, 2]).error == pytest.approx((2 * 0.25 + 1.0) / 3)
    assert Replicated(6, 2, 2, rescale=False).decode([0, 2]) == {0: (1.0,), 2: (1.0,)}
    assert code.estimate([]).error == 1.0


@pytest.mark.parametrize("p", [0.0, 0.25, 0.5])
def test_stochastic_coding_is_unbiased_from_any_number_of_answers(p: float) -> None:
    """Over all sets of r rows the mean is exact; the variance is that of a hypergeometric count."""
    n, copies = 6, 2
    code = Stochastic(n, scattered(n, 6, copies, seed=3), p)
    b = coefficients(code)
    for r in range(1, n + 1):
        mean, variance = np.zeros(6), 0.0
        for rows in combinations(range(n), r):
            weights = [code.decode(rows)[row][0] for row in rows]
            mean += weights @ b[list(rows)] / comb(n, r)
            variance += code.estimate(rows).error / comb(n, r)
            assert code.estimate(rows).error == pytest.approx(squared(code, rows))
        np.testing.assert_allclose(mean, np.ones(6), atol=1e-12)
        assert variance == pytest.approx((n - r) * (n - copies) / (r * copies * (n - 1)), abs=1e-12)
    assert code.estimate([]).error == 1.0


def test_the_sum_of_as_many_answers_as_expected_is_not_scaled() -> None:
    code = Stochastic(8, scattered(8, 6, 3, seed=1), 0.25)
    assert code.decode([0, 1, 3, 4, 5, 7]) == dict.fromkeys([0, 1, 3, 4, 5, 7], (1.0,))
    assert [value for (value,) in code.row(0).values()] == pytest.approx(
        [1 / (3 * 0.75)] * len(code.row(0))
    )


@pytest.mark.parametrize(
    ("code", "counts"),
    [
        (Replicated(6, 2, 2), {3, 4}),
        (Replicated(6, 3, 4), {2}),
        (Stochastic(6, scattered(6, 6, 2, 3), 0.25), {4}),
    ],
)
def test_over_all_orders_of_arrival_the_estimate_is_the_sum(
    code: Approximate, counts: set[int]
) -> None:
    """The collector decides when to decode, so that the number of answers is random."""
    b = coefficients(code)
    total, used = np.zeros(code.parts), set()
    for order in permutations(range(code.n)):
        collector = code.collector()
        rows: list[int] = []
        while not collector.ready:
            rows.append(order[len(rows)])
            collector.add(rows[-1])
        decoded = code.decode(rows)
        total += sum(w * b[row] for row, (w,) in decoded.items())
        used.add(len(rows))
    np.testing.assert_allclose(total / factorial(code.n), np.ones(code.parts), atol=1e-12)
    assert used == counts


def test_when_enough_answered() -> None:
    counted = graph(6, 3, 2).collector()
    assert [counted.add(row) for row in range(4)] == [False, False, False, True]
    covered = Replicated(6, 3, 1).collector()
    assert [covered.add(row) for row in (0, 1, 5)] == [False, False, True]
    few = Replicated(6, 3, 4).collector()
    assert [few.add(row) for row in (0, 1)] == [False, True] and few.ready
    some = Stochastic(4, ((0, 1), (2, 3)), 0.25).collector()
    assert [some.add(row) for row in (0, 1, 2)] == [False, False, True]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"stragglers=4 of 4 rows: use 0 to 3"):
        LeastSquares(4, ((0, 1),), 4)
    with pytest.raises(ValueError, match="a part without holders"):
        Stochastic(4, ((0, 1), ()), 0.1)
    with pytest.raises(ValueError, match="probability=1"):
        Stochastic(4, ((0, 1),), 1.0)
    with pytest.raises(ValueError, match="n=7 is no multiple of copies=2"):
        Replicated(7, 2, 1)
    with pytest.raises(ValueError, match="divide 2 n = 10"):
        graph(5, 3, 1)
    with pytest.raises(ValueError, match="row 9 is not of this code"):
        LeastSquares(4, ((0, 9),), 1)
    with pytest.raises(ValueError, match="row 9 is not of this code"):
        graph(6, 3, 1).decode([9])
