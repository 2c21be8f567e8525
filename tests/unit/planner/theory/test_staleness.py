from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from paceline.planner.theory.kernels import (
    Atoms,
    Kernel,
    Laplace,
    erlang,
    exponential,
    fixed,
    shifted_exponential,
    uniform,
)
from paceline.planner.theory.staleness import Accepted, bound, counts, of_batches, of_each

# M = 50, threshold S: p and mean accepted staleness of exponential and of Erlang-4 times; B2 (iii).
TABLE = [
    (5, 0.314, 0.215, 2.32, 3.48),
    (10, 0.412, 0.317, 4.52, 6.85),
    (15, 0.484, 0.402, 6.63, 10.09),
    (20, 0.541, 0.476, 8.66, 13.21),
    (25, 0.588, 0.540, 10.61, 16.21),
    (30, 0.629, 0.597, 12.48, 19.08),
    (40, 0.695, 0.694, 16.04, 24.46),
    (60, 0.789, 0.834, 22.39, 33.60),
    (100, 0.897, 0.966, 32.34, 44.84),
]


@pytest.mark.parametrize(("threshold", "p1", "p4", "stale1", "stale4"), TABLE)
def test_acceptance_of_fifty_workers(
    threshold: int, p1: float, p4: float, stale1: float, stale4: float
) -> None:
    memoryless = bound(exponential(2.0), 50, threshold)
    assert memoryless.acceptance == pytest.approx(p1, abs=5.1e-4)
    assert memoryless.staleness == pytest.approx(stale1, abs=5.1e-3)
    regular = bound(erlang(4, 2.0), 50, threshold)
    assert regular.acceptance == pytest.approx(p4, abs=5.1e-4)
    assert regular.staleness == pytest.approx(stale4, abs=5.1e-3)
    # The closed equations: p = 1 - (p(M-1)/(1+p(M-1)))^(S+1), and a negative binomial law.
    p = memoryless.acceptance
    assert p == pytest.approx(1 - (p * 49 / (1 + p * 49)) ** (threshold + 1), abs=1e-9)
    p = regular.acceptance
    assert p == pytest.approx(stats.nbinom.cdf(threshold, 4, 4 / (4 + p * 49)), abs=1e-9)


def test_acceptance_of_workers_by_turns() -> None:
    for threshold in (0, 5, 10, 48):
        found = bound(fixed(3.0), 50, threshold)
        assert found.acceptance == (threshold + 1) / 50
        assert found.staleness == threshold
    for threshold in (49, 60):
        assert bound(fixed(3.0), 50, threshold).acceptance == 1
        assert bound(fixed(3.0), 50, threshold).staleness == 49


def test_acceptance_of_any_delays() -> None:
    """p = E PoissonCDF(S; p (M - 1) X / E X)."""
    at, weights = np.asarray([0.5, 5.5]), np.asarray([0.9, 0.1])
    p = bound(Atoms(at.tolist(), weights.tolist()), 30, 12).acceptance
    assert p == pytest.approx(weights @ stats.poisson.cdf(12, p * 29 * at), abs=1e-9)
    p = bound(uniform(0.5, 1.5), 30, 12).acceptance
    x = np.linspace(0.5, 1.5, 20001)
    assert p == pytest.approx(stats.poisson.cdf(12, p * 29 * x).mean(), abs=1e-5)


def test_a_threshold_that_drops_nothing() -> None:
    found = bound(exponential(1.0), 1, 0)
    assert found.acceptance == pytest.approx(1.0)
    assert found.kernel.mean == pytest.approx(1.0)
    all_of_them = bound(erlang(4, 1.0), 10, 200)
    assert all_of_them.acceptance == pytest.approx(1.0)
    assert all_of_them.staleness == pytest.approx(9.0, abs=1e-6)


@pytest.mark.parametrize(
    ("kernel", "law"),
    [
        (exponential(2.0), stats.nbinom(1, 1 / (1 + 6.0))),
        (erlang(4, 2.0), stats.nbinom(4, 4 / (4 + 6.0))),
        (fixed(2.0), stats.poisson(6.0)),
    ],
    ids=["geometric", "negative binomial", "poisson"],
)
def test_counts_of_arrivals(kernel: Kernel, law: stats.rv_discrete) -> None:
    found = counts(kernel, 3.0, 80)
    assert found == pytest.approx(law.pmf(np.arange(81)), abs=1e-11)


def test_exponential_staleness_is_geometric() -> None:
    """B1: P(N = j) = (1/M) (1 - 1/M)^j, with M - 1 others at rate 1."""
    j = np.arange(40)
    assert counts(exponential(1.0), 9.0, 39) == pytest.approx(0.1 * 0.9**j, abs=1e-11)


@pytest.mark.parametrize(
    ("kernel", "spread"),
    [
        (uniform(0.5, 1.5), 1 / 12),
        (erlang(4, 1.0), 0.25),
        (exponential(1.0), 1.0),
    ],
)
def test_variance_of_staleness(kernel: Kernel, spread: float) -> None:
    """B4: (M - 1) + (M - 1)² cv², for M = 10: 15.75, 29.25 and 90."""
    law = counts(kernel, 9.0, 800)
    j = np.arange(801)
    assert law.sum() == pytest.approx(1.0)
    assert law @ j == pytest.approx(9.0)
    assert law @ j**2 - 81 == pytest.approx(9 + 81 * spread)


@pytest.mark.parametrize(
    "kernel", [exponential(1.0), erlang(4, 1.0), shifted_exponential(0.5, 0.5)], ids=str
)
def test_the_accepted_part_of_a_kernel(kernel: Kernel) -> None:
    """Its density is F'(x) PoissonCDF(S; rate x) / p, here summed on a grid."""
    x = np.linspace(0, 40, 400_001)
    density = {
        1: stats.expon.pdf(x),
        4: stats.gamma.pdf(x, 4, scale=0.25),
    }.get(int(getattr(kernel, "stages", 0)), stats.expon.pdf(x, 0.5, 0.5))
    accepted = density * stats.poisson.cdf(7, 12.0 * x)
    accepted /= accepted.sum()
    part = Accepted(kernel, 12.0, 7)
    assert part.mean == pytest.approx(accepted @ x, abs=1e-4)
    points = np.asarray([0.3 + 1j, -0.9 + 4j, -3.0 + 2j])
    for order in range(3):
        for s, value in zip(points, part.transform(points, order), strict=True):
            assert value == pytest.approx(complex(accepted @ (x**order * np.exp(-s * x))), abs=2e-3)


def test_a_kernel_known_by_its_transform() -> None:
    alone = Laplace(erlang(4, 1.0).transform, 1.0, -4.0)
    assert bound(alone, 50, 20).acceptance == pytest.approx(0.476, abs=5e-4)


def test_staleness_of_each_worker() -> None:
    """B1: means 1 to 10, the fastest 1.929 and the slowest 28.290; M - 1 over all gradients."""
    means = [1.0 + i for i in range(10)]
    found = of_each(means)
    assert found[0] == pytest.approx(1.929, abs=5e-4)
    assert found[-1] == pytest.approx(28.290, abs=5e-4)
    rates = [1 / mean for mean in means]
    assert np.average(found, weights=rates) == pytest.approx(9.0)
    assert of_each([1 + 9 * i / 4 for i in range(5)])[::4] == pytest.approx(
        [0.719, 16.185], abs=5e-4
    )
    assert of_each([1 + 9 * i / 19 for i in range(20)])[::19] == pytest.approx(
        [4.449, 53.493], abs=5e-4
    )


def test_staleness_of_batches() -> None:
    """B1: (M - 1) / K."""
    expected = {1: 39.0, 2: 19.5, 4: 9.75, 8: 4.875, 20: 1.95, 40: 0.975}
    assert {size: of_batches(40, size) for size in expected} == expected


def test_refusals() -> None:
    with pytest.raises(ValueError, match="threshold=-1, workers=5: use a threshold >= 0"):
        bound(exponential(1.0), 5, -1)
    with pytest.raises(ValueError, match=r"means=\[0.0\]: give each worker's mean"):
        of_each([0.0])
    with pytest.raises(ValueError, match="workers=4, size=0"):
        of_batches(4, 0)
