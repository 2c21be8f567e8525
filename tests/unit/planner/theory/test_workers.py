from __future__ import annotations

from math import inf, pi

import numpy as np
import pytest

from paceline.planner.theory.asynchrony import Asynchrony
from paceline.planner.theory.kernels import Kernel, erlang, exponential, fixed
from paceline.planner.theory.workers import (
    best_fastest,
    best_threshold,
    best_workers,
    fastest_workers,
)
from tests.oracles.orders import kth
from tests.oracles.workers import best_of_all, saturating_workers, soonest_workers

# κ, M* and its rate at η = 0.1, 0.02 and 0.005, and the continuous x_L*; B5 and its script b5.
TABLE = [
    (1, (4, 0.9441), (19, 0.9784), (74, 0.9962), 0.3679),
    (2, (7, 0.5649), (33, 0.6033), (132, 0.6033), 0.6606),
    (5, (10, 0.2592), (53, 0.2774), (211, 0.2789), 1.0568),
    (10, (12, 0.1377), (63, 0.1458), (255, 0.1478), 1.2750),
    (100, (15, 0.0152), (76, 0.0154), (307, 0.0156), 1.5367),
]


@pytest.mark.parametrize(("kappa", "tenth", "fiftieth", "small", "gain"), TABLE)
def test_best_number_of_equal_workers(
    kappa: int,
    tenth: tuple[int, float],
    fiftieth: tuple[int, float],
    small: tuple[int, float],
    gain: float,
) -> None:
    for learning_rate, (workers, rate) in {0.1: tenth, 0.02: fiftieth, 0.005: small}.items():
        found = best_workers(fixed(1.0), learning_rate, 1.0, 1 / kappa)
        assert found.workers == workers
        assert found.rate == pytest.approx(rate, abs=6e-5)
        assert found.gain == pytest.approx(workers * learning_rate)
    fine = best_workers(fixed(1.0), 1e-5, 1.0, 1 / kappa)
    assert fine.gain == pytest.approx(gain, abs=6e-5)
    if kappa >= 5:
        near = 0.453 * (pi / 2) / (0.453 + 1 / kappa)
        assert fine.gain == pytest.approx(near, rel=0.035)


def test_scales_do_not_matter() -> None:
    assert best_workers(fixed(9.0), 0.002, 10.0, 1.0).workers == 63


def test_random_times_bear_more_workers() -> None:
    """B5b, η = 0.02 and κ = 10: 63 if fixed, about 80 for Erlang-4, and 90 or more memoryless."""
    assert best_workers(erlang(4, 1.0), 0.02, 1.0, 0.1).workers == 78
    assert best_workers(exponential(1.0), 0.02, 1.0, 0.1, most=90).workers == 90


def test_every_number_up_to_the_best_is_slower() -> None:
    for kernel in (fixed(1.0), erlang(2, 1.0)):
        best = best_of_all(kernel, 0.05, 1.0, 0.2, most=39)
        assert best_workers(kernel, 0.05, 1.0, 0.2, most=39).workers == best


def test_simulated_rates_by_number() -> None:
    """B5, η = 0.02 and λ of 1 and 0.1, fixed: simulated, with a peak at 65 and none at 80."""
    simulated = {40: 0.0872, 55: 0.1244, 65: 0.1405, 70: 0.0874, 75: 0.0378, 80: -0.0087}
    for workers, expected in simulated.items():
        found = min(Asynchrony(workers, fixed(1.0), 0.02, each).rate for each in (1.0, 0.1))
        assert found == pytest.approx(expected, abs=0.007)


def test_no_more_than_there_are_and_the_fewest_of_equally_good() -> None:
    assert best_workers(fixed(1.0), 0.02, most=7).workers == 7
    # Memoryless: the rate is 1/2 from x = 1/4 on.
    assert best_workers(exponential(1.0), 0.02, most=100).workers == 13
    assert best_workers(fixed(1.0), 5.0).workers == 1


def test_the_fastest_of_unequal_workers() -> None:
    """Ten quick ones and one that is slow: it delivers little, and makes all that come stale."""
    kernels = [fixed(50.0), *[fixed(1.0)] * 10]
    chosen = fastest_workers(kernels, learning_rate=0.03)
    assert chosen.workers == 10
    assert chosen.rate == pytest.approx(Asynchrony(10, fixed(1.0), 0.03).rate)
    assert chosen.gain == pytest.approx(0.3)
    assert fastest_workers(kernels[1:], 0.1).workers == 4
    # With a small learning rate all of similar ones help.
    similar: list[Kernel] = [exponential(1.0), exponential(1.5), fixed(1.2), fixed(1.8)]
    assert fastest_workers(similar, 0.01).workers == 4


def test_of_many_unequal_workers_some_numbers_are_tried() -> None:
    kernels = [fixed(1.0 + i / 1000) for i in range(130)]
    chosen = fastest_workers(kernels, learning_rate=0.01).workers
    assert abs(chosen - best_of_all(fixed(1.0), 0.01, 1.0, 1.0, most=130)) <= 3


def test_soonest_at_a_level_above_the_noise() -> None:
    plan = Asynchrony(1, fixed(1.0), 0.02, noise=1.0)
    workers, seconds = soonest_workers(plan, 100.0, 0.05, most=78)
    assert workers in (18, 19)
    each = [
        Asynchrony(m, fixed(1.0), 0.02, noise=1.0).hitting_time(100.0, 0.05) for m in range(1, 79)
    ]
    assert seconds == min(each) == each[workers - 1]
    # Close to the noise fewer are better, as V = (η s² / 2λ) tan(π/4 + x/2) grows with M.
    assert soonest_workers(plan, 100.0, 0.0125, most=78)[0] < 18
    assert soonest_workers(plan, 100.0, 0.009, most=78) == (1, inf)


def test_a_link_is_busy_with_so_many() -> None:
    assert saturating_workers(1.0, 0.1) == pytest.approx(11.0)


def test_a_rule_for_the_threshold() -> None:
    """η λ (accepted staleness + 1/2) ~ 1/e: four fifths of the best rate, or more.

    Memoryless times have the least, 0.80, and fixed ones up to 1.00. The best of all 50 thresholds
    are among those tried.
    """
    for kernel in (exponential(1.0), erlang(4, 1.0), fixed(1.0)):
        for gain in (1.0, 2.0, 4.0):
            plan = Asynchrony(50, kernel, gain / 50)
            threshold = best_threshold(kernel, 50, gain / 50)
            best = max(plan.bounded(each).rate for each in (4, 7, 9, 10, 16, 18, 24, 36))
            assert 0.8 * best < plan.bounded(threshold).rate < 1.001 * best
    assert best_threshold(fixed(1.0), 50, 2.0 / 50) == 9
    assert best_threshold(exponential(1.0), 10, 0.001) == 9


@pytest.mark.parametrize("kernel", [exponential(1.0), erlang(4, 1.0)])
def test_flat_directions_bear_a_higher_threshold(kernel: Kernel) -> None:
    plans = [Asynchrony(20, kernel, 0.1, each) for each in (1.0, 0.1)]
    one, both = (best_threshold(kernel, 20, 0.1, 1.0, each) for each in (None, 0.1))
    slowest = [min(plan.bounded(each).rate for plan in plans) for each in range(0, 40, 3)]
    rate_of_one, rate = (min(p.bounded(each).rate for p in plans) for each in (one, both))
    assert one < both
    assert max(rate_of_one, 0.75 * max(slowest)) < rate


def test_how_many_of_the_fastest_to_wait_for() -> None:
    """Of exponential times the expectation is known, (batch / k) E X_(k:n)."""
    means = [1.0, 1.0, 1.5, 1.5, 2.0, 6.0]
    rng = np.random.Generator(np.random.PCG64(0))
    times = rng.exponential(means, size=(20_000, 6))
    exact = [12 / k * kth(means, k) for k in range(1, 7)]
    assert best_fastest(times, np.zeros(6), batch=12) == 1 + exact.index(min(exact))
    # Workers with long messages are not waited for.
    assert best_fastest(np.full((1, 4), 1.0), np.zeros(4), batch=12) == 4
    assert best_fastest(np.full((1, 4), 1.0), np.array([0.0, 0.0, 9.0, 9.0]), batch=12) == 2
    assert best_fastest(np.full((1, 4), 1.0), np.zeros(4), batch=3) == 3


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"converges however many .* as most="):
        best_workers(exponential(1.0), 0.02)
    with pytest.raises(ValueError, match="most=0: there must be at least 1"):
        best_workers(fixed(1.0), 0.02, most=0)
    with pytest.raises(ValueError, match=r"smallest=2.0: use .* smallest <= largest"):
        best_workers(fixed(1.0), 0.02, 1.0, 2.0)
    with pytest.raises(ValueError, match="no workers were given"):
        fastest_workers([], 0.1)
    with pytest.raises(ValueError, match=r"seconds=0.0: give the mean response time"):
        saturating_workers(1.0, 0.0)
