"""Indices against their oracles: closed forms, coverage, scale, and how they grow."""

from __future__ import annotations

from collections.abc import Callable
from math import e, exp, log

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from paceline.policies.selection.arms import Times
from paceline.policies.selection.indices import (
    KL,
    LCB,
    LEVELS,
    Bounded,
    FiniteVariance,
    Greedy,
    Index,
    SubExponential,
    Thompson,
    inflation,
)

RNG = np.random.default_rng(0)


def times(mean: float, count: float, square: float | None = None, cut: float = 0.0) -> Times:
    """Return the sums of so many observations of a mean."""
    squares = count * (2 * mean**2 if square is None else square)
    truncated = count * np.minimum(mean, LEVELS)[:, None]
    return Times(*(np.array([v]) for v in (mean * count, squares, count, cut)), truncated=truncated)


def sums_of(drawn: NDArray[np.float64]) -> Times:
    """Return the sums of drawn times, one row for each worker."""
    workers, count = drawn.shape
    truncated = np.array([np.minimum(drawn, level).sum(1) for level in LEVELS])
    plain = drawn.sum(1), (drawn**2).sum(1), np.full(workers, float(count)), np.zeros(workers)
    return Times(*plain, truncated=truncated)


def value(index: Index, of: Times, rounds: float) -> float:
    return float(index.values(of, rounds, 0.0, np.random.default_rng(1))[0])


@pytest.mark.parametrize(
    ("c", "r"), [(0.01, 1.1481651), (0.1, 1.5162212), (1, 3.1461932), (5, 8.0907174)]
)
def test_the_inflation_of_the_digest(c: float, r: float) -> None:
    assert float(inflation(np.array([float(c)]))[0]) == pytest.approx(r, abs=5e-8)


def test_the_inflation_solves_its_equation_at_every_scale() -> None:
    c = np.concatenate([[0.0], np.logspace(-10, 8, 200)])
    r = inflation(c)
    assert np.all(r >= 1)
    assert r[0] == 1
    assert r - 1 - np.log(r) == pytest.approx(c, rel=1e-6, abs=1e-15)


def test_kl_is_the_least_mean_that_the_divergence_allows() -> None:
    q = value(KL(), times(0.7, 12), rounds=500)
    assert 12 * (0.7 / q - 1 - log(0.7 / q)) == pytest.approx(log(500))
    cautious = value(KL(caution=3), times(0.7, 12), rounds=500)
    assert 12 * (0.7 / cautious - 1 - log(0.7 / cautious)) == pytest.approx(
        log(500) + 3 * log(log(500))
    )


def test_kl_of_weibull_times_is_that_of_their_power() -> None:
    """With shape 3 an observation says more: the figure is nearer to the mean."""
    sums = times(0.7**3, 5)
    q = value(KL(shape=3), sums, rounds=100)
    plain = value(KL(), sums, rounds=100)
    mean = float(KL(shape=3).means(sums)[0])
    assert q / mean == pytest.approx((plain / 0.7**3) ** (1 / 3))
    assert q / mean > plain / 0.7**3


def test_the_coverage_of_the_digest() -> None:
    """Exponential times of mean 1, ten of them, e^-3 allowed for: how often the bound is above 1.

    The bound is above the truth when the sum of ten times exceeds a threshold, exactly.
    """

    def failures(index: Index, rounds: float) -> float:
        low, high = 0.1, 100.0
        for _ in range(80):
            middle = (low + high) / 2
            above = value(index, times(middle, 10), rounds) > 1
            low, high = (low, middle) if above else (middle, high)
        return float(stats.gamma.sf(10 * high, 10))

    assert failures(KL(), e**3) == pytest.approx(5.4e-3, rel=0.02)
    assert failures(LCB(), exp(1.5)) == pytest.approx(6e-5, rel=0.1)
    assert failures(SubExponential(2, 2), exp(0.75)) < exp(-3)


def test_bounded_covers_whatever_the_law() -> None:
    """Uniform and two-point times within [0, 1]: the bound is above the mean in under e^-3.

    And it says something: for most it is above a tenth of the mean.
    """
    rng = np.random.default_rng(5)
    laws: list[Callable[[tuple[int, int]], NDArray[np.float64]]] = [
        lambda shape: rng.random(shape),
        lambda shape: (rng.random(shape) < 0.2).astype(float),
    ]
    for draw in laws:
        drawn = draw((5000, 200))
        sums = Times(drawn.sum(1), (drawn**2).sum(1), np.full(5000, 200.0), np.zeros(5000))
        bound = Bounded(1.0).values(sums, exp(0.75), 0.0, rng)
        truth = 0.5 if drawn.mean() > 0.4 else 0.2
        assert np.mean(bound > truth) < exp(-3)
        assert np.mean(bound > 0.1 * truth) > 0.9


PARETO = 1 / np.sqrt(2.5 * 0.5)  # deviation over mean of Pareto times of shape 2.5


@pytest.mark.parametrize(("workers", "count", "least"), [(60_000, 30, 0.38), (12_000, 200, 0.65)])
def test_finite_variance_covers_heavy_tails_where_sub_exponential_fails(
    workers: int, count: int, least: float
) -> None:
    """Pareto times of mean 1 and shape 2.5; both laws know the deviation; e^-10 may fail.

    The sub-exponential bound fails ten times as often as allowed, as no exponent bounds the tail.
    """
    rng = np.random.default_rng(7)
    heavy, robust, medians = 0, 0, list[float]()
    for _ in range(6):  # a part at a time, for memory
        of = sums_of(0.6 * (1 + rng.pareto(2.5, (workers // 6, count))))
        bound = FiniteVariance(PARETO).values(of, exp(2.5), 0.0, rng)
        robust += int(np.sum(bound > 1))
        medians.append(float(np.median(bound)))
        other = SubExponential(PARETO, PARETO).values(of, exp(2.5), 0.0, rng)
        heavy += int(np.sum(other > 1))
    assert heavy > 10 * workers * exp(-10)
    assert robust <= workers * exp(-10) + 1
    assert min(medians) > least


@pytest.mark.parametrize("count", [30, 200])
def test_finite_variance_covers_exponential_times_and_says_more(count: int) -> None:
    """The bound of exponential times is nearer to the mean than the sub-exponential one."""
    rng = np.random.default_rng(8)
    of = sums_of(rng.exponential(1.0, (20_000, count)))
    ours = FiniteVariance(1.0).values(of, exp(0.75), 0.0, rng)
    theirs = SubExponential(2.0, 2.0).values(of, exp(0.75), 0.0, rng)
    assert np.mean(ours > 1) < exp(-3)
    assert np.median(ours) > np.median(theirs)


@pytest.mark.parametrize("rounds", [2.0, 40.0, 1e4])
def test_finite_variance_is_the_least_mean_that_is_not_refuted(rounds: float) -> None:
    """A search over all means, each with the truncation of its own from the times themselves."""
    rng, g, variation = np.random.default_rng(3), 4 * log(rounds), 1.3

    def refuted(mean: float, drawn: NDArray[np.float64]) -> bool:
        count = len(drawn)
        level = 2 ** np.ceil(np.log2((3 + variation * np.sqrt(count / g)) * mean))
        radius = variation * mean * np.sqrt(2 * g / count) + level * g / 3 / count
        return bool(np.minimum(drawn, level).mean() > mean + radius)

    for count in (3, 40, 400):
        drawn = 0.03 * rng.pareto(2.5, count) + 0.01
        means = np.geomspace(1e-8, 1, 40_000)
        least = next(mean for mean in means if not refuted(mean, drawn))
        found = value(FiniteVariance(variation), sums_of(drawn[None]), rounds)
        assert found == pytest.approx(least, rel=1e-3, abs=1.1e-8)


def test_an_exponent_is_a_power_of_the_rounds() -> None:
    of = times(0.3, 70)
    found = value(FiniteVariance(0.9, exponent=2.0), of, 50**2)
    assert found == pytest.approx(value(FiniteVariance(0.9), of, 50))
    assert found < value(FiniteVariance(0.9, exponent=1.0), of, 50**2)


def test_finite_variance_has_no_scale() -> None:
    before = value(FiniteVariance(0.9), times(0.3, 70), 50)
    assert 0.05 < before < 0.3
    assert value(FiniteVariance(0.9), times(0.3 * 2**-9, 70), 50) == pytest.approx(before * 2**-9)


def test_bernstein_is_tighter_where_times_vary_little() -> None:
    many = value(Bounded(1.0), times(0.5, 10_000, square=0.2501), rounds=50)
    assert many > 0.5 - np.sqrt(4 * log(50) / 20_000)


def test_the_radius_of_the_paper() -> None:
    f = 2 * log(100)
    expected = 2.0 - np.sqrt(4 * f / 400) - 2 * f / 400
    assert value(LCB(), times(2.0, 400), 100) == pytest.approx(expected)
    assert value(LCB(scale=3), times(2.0, 400), 100) == pytest.approx(2 - 3 * (2 - expected))
    assert value(LCB(), times(0.1, 3), 100) == 0.0


def test_the_radius_of_the_regret_bound() -> None:
    """With 48 ln u / min(d^2, d) trials the radius is below half the gap d, at 0.4916 d."""
    for d in (0.1, 0.5, 1.0):
        count = 48 * log(1000) / min(d * d, d)
        radius = 5.0 - value(LCB(), times(5.0, count), 1000)
        assert radius <= 0.4917 * d


def test_thompson_draws_from_the_posterior() -> None:
    """1 / draw is Gamma(T) / sum: mean and deviation of the rate."""
    of = Times(np.full(50_000, 6.0), np.zeros(50_000), np.full(50_000, 12.0), np.zeros(50_000))
    drawn = 1 / Thompson().values(of, 9, 0.0, np.random.default_rng(2))
    assert drawn.mean() == pytest.approx(2.0, rel=0.01)
    assert drawn.std() == pytest.approx(np.sqrt(12) / 6, rel=0.02)


def test_thompson_returns_to_the_prior_of_what_is_forgotten() -> None:
    """A worker once ten times slower is tried again about every third time."""
    size = 20_000
    of = Times(np.full(size, 1e-4), np.zeros(size), np.full(size, 1e-5), np.zeros(size))
    drawn = Thompson().values(of, 9, 1.0, np.random.default_rng(2))
    assert np.mean(drawn < 1.0) == pytest.approx(exp(-1), abs=0.02)


@pytest.mark.parametrize("index", [KL(), KL(shape=2.5), Thompson(), Thompson(shape=0.7), Greedy()])
@pytest.mark.parametrize("factor", [1e-3, 100.0])
def test_free_of_scale(index: Index, factor: float) -> None:
    """Ten times slower machines are ranked alike; a radius would never stop, or never begin."""
    before = value(index, times(0.3**index.shape, 7), 50)
    after = value(index, times((0.3 * factor) ** index.shape, 7), 50)
    assert after == pytest.approx(factor * before)


@pytest.mark.parametrize(
    "index",
    [KL(), KL(3.0, 3.0), LCB(9.0), SubExponential(1, 1), Bounded(9.0), FiniteVariance(0.5)],
)
def test_optimism_grows_with_rounds_and_shrinks_with_trials(index: Index) -> None:
    values = [value(index, times(2.0, 200), rounds) for rounds in (2, 20, 200)]
    assert values[0] > values[1] >= values[2]
    values = [value(index, times(2.0, count), 200) for count in (20, 2000, 200_000)]
    assert values[0] <= values[1] < values[2] <= float(index.means(times(2.0, 1))[0])


def test_the_bound_of_who_never_finished_is_that_of_the_likelihood() -> None:
    """exp(-S / q) = exp(-g): with S = 9 seconds and no end, a mean below 9 / ln 50 is refuted."""
    never = Times(*(np.array([v]) for v in (9.0, 0.0, 0.0, 5.0)))
    assert value(KL(), never, 50) == pytest.approx(9 / log(50), rel=1e-4)


def test_who_never_finished_looks_slower_the_longer_it_was_given() -> None:
    for index in (KL(), Greedy(), Thompson()):
        seen = [
            value(index, Times(*(np.array([v]) for v in (s, 0.0, 0.0, 5.0))), 50)
            for s in (1.0, 9.0)
        ]
        assert seen[1] == pytest.approx(9 * seen[0])


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: KL(shape=0), "KL got shape=0; use a number above 0"),
        (lambda: KL(caution=-1), "KL got caution=-1; use 0, or 3 for what proofs need"),
        (lambda: LCB(scale=-2.0), r"LCB got scale=-2.0; use a number above 0"),
        (lambda: Bounded(float("inf")), "Bounded got most=inf; use a number above 0"),
        (lambda: SubExponential(1.0, 0.0), "SubExponential got alpha=0.0"),
        (lambda: FiniteVariance(-1.0), "FiniteVariance got variation=-1.0; use a number above 0"),
        (lambda: Thompson(shape=float("nan")), "Thompson got shape=nan"),
        (lambda: Greedy(shape=0.0), "Greedy got shape=0.0"),
    ],
)
def test_what_cannot_be_is_refused(make: object, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()  # type: ignore[operator]
