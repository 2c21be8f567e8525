from __future__ import annotations

from math import inf, log, pi

import numpy as np
import pytest
from scipy.linalg import solve_discrete_lyapunov

from paceline.planner.theory import sdde
from paceline.planner.theory.kernels import fixed
from tests.oracles import discrete

# d, boundary, π/(2d), π/(2d+1), α*, 1/(e (d + 1/2)): the digest's table, B3.
TABLE = [
    (0, 2.0, inf, 3.1416, 1.0, 0.73576),
    (1, 1.0, 1.5708, 1.0472, 0.25, 0.24525),
    (2, 0.61803399, 0.78540, 0.62832, 0.14814815, 0.14715),
    (3, 0.44504187, 0.52360, 0.44880, 0.10546875, 0.10511),
    (4, 0.34729636, 0.39270, 0.34907, 0.08192000, 0.08175),
    (5, 0.28462968, 0.31416, 0.28560, 0.06697960, 0.06689),
    (9, 0.16515869, 0.17453, 0.16535, 0.03874205, 0.03872),
    (19, 0.08053188, 0.08267, 0.08055, 0.01886768, 0.01887),
    (49, 0.03173193, 0.03206, 0.03173, 0.00743203, 0.00743),
    (99, 0.01578673, 0.01587, 0.01579, 0.00369730, 0.00370),
]


def covariance(alpha: float, delay: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return that of the last d + 1 steps, from Lyapunov's equation."""
    step = np.eye(delay + 1, k=-1)
    step[0, 0] += 1
    step[0, -1] -= alpha
    noise = np.zeros((delay + 1, delay + 1))
    noise[0, 0] = 1.0
    return np.asarray(solve_discrete_lyapunov(step, noise))


@pytest.mark.parametrize(("delay", "edge", "rough", "close", "critical", "close_critical"), TABLE)
def test_the_table(
    delay: int, edge: float, rough: float, close: float, critical: float, close_critical: float
) -> None:
    assert discrete.boundary(delay) == pytest.approx(edge, abs=5e-9)
    assert discrete.best_gain(delay) == pytest.approx(critical, abs=5e-9)
    # In continuous time, with a delay of d and of d + 1/2 updates.
    longer = fixed(delay + 0.5)
    assert sdde.boundary(longer) / longer.mean == pytest.approx(close, abs=5e-5)
    assert sdde.best_gain(longer).gain / longer.mean == pytest.approx(close_critical, abs=6e-6)
    if delay:
        assert sdde.boundary(fixed(delay)) / delay == pytest.approx(rough, abs=6e-6)
        assert abs(close / edge - 1) < abs(rough / edge - 1) / 5


@pytest.mark.parametrize("delay", [0, 1, 2, 5, 9, 19, 49])
def test_boundary_and_critical_damping_by_the_roots(delay: int) -> None:
    edge, critical = discrete.boundary(delay), discrete.best_gain(delay)
    assert discrete.rate(edge, delay) == pytest.approx(0.0, abs=1e-9)
    assert discrete.rate(0.999 * edge, delay) > 0 > discrete.rate(1.001 * edge, delay)
    if delay:
        # The double root is known to half the digits.
        expected = -log(delay / (delay + 1))
        assert discrete.rate(critical, delay) == pytest.approx(expected, abs=1e-5)
        for other in (0.98 * critical, 1.02 * critical):
            assert discrete.rate(other, delay) < expected
    else:
        assert discrete.rate(critical, delay) == inf


@pytest.mark.parametrize("delay", [0, 1, 2, 3, 5, 8, 13, 20])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.7, 0.97])
def test_variance_is_that_of_lyapunovs_equation(delay: int, share: float) -> None:
    alpha = share * discrete.boundary(delay)
    exact = covariance(alpha, delay)
    assert discrete.variance(alpha, delay, 3.0) == pytest.approx(3 * exact[0, 0], rel=1e-11)
    found = discrete.autocovariance(alpha, delay, delay)
    assert found == pytest.approx(exact[0].tolist(), rel=1e-9, abs=1e-9 * exact[0, 0])


def test_autocovariance_beyond_the_delay() -> None:
    """Of one step more: the covariances of a longer state."""
    exact = covariance(0.2, 3)
    step = np.eye(4, k=-1)
    step[0, 0] += 1
    step[0, -1] -= 0.2
    found = discrete.autocovariance(0.2, 3, 12)
    for lag in (4, 5, 12):
        later = np.linalg.matrix_power(step, lag) @ exact
        assert found[lag] == pytest.approx(later[0, 0], rel=1e-9)
    assert len(discrete.autocovariance(0.2, 3, 2)) == 3


@pytest.mark.parametrize(
    ("delay", "alpha", "exact"),
    [(0, 0.2, 2.77778), (1, 0.5, 2.4), (2, 0.494427191, 6.43079), (20, 0.038302735, 31.51426)],
)
def test_variance_in_numbers(delay: int, alpha: float, exact: float) -> None:
    assert discrete.variance(alpha, delay) == pytest.approx(exact, rel=2e-6)
    # Continuous time comes close with d + 1/2.
    continuous = sdde.variance(alpha, fixed(delay + 0.5))
    off = {0: 0.0052, 1: 0.0424, 2: 0.0692, 20: 0.0003}[delay]
    assert abs(continuous / exact - 1) == pytest.approx(off, abs=1e-4)


def test_variance_of_workers_by_turns() -> None:
    """B4: M = 20, as a factor of η s² / 2λ."""
    for x, factor in {0.1: 1.103, 0.3679: 1.443, 0.8: 2.397, 1.2: 4.928}.items():
        alpha = x / 20
        assert discrete.variance(alpha, 19) * 2 * alpha == pytest.approx(factor, abs=6e-4)


def test_best_number_of_workers() -> None:
    """B5: M* ~ 1/(e η λ) + 1/2, and for κ = 1, 2, 5, 10, 100 at η λ = 0.1."""
    assert discrete.best_workers(0.02) == 19
    found = [discrete.best_workers(0.1, 0.1 / kappa) for kappa in (1, 2, 5, 10, 100)]
    assert found == [5, 7, 11, 13, 15]
    assert [discrete.best_workers(0.02, 0.02 / kappa) for kappa in (2, 5)] == [34, 53]


def test_what_does_not_converge() -> None:
    assert discrete.variance(1.0, 1) == inf
    with pytest.raises(ValueError, match=r"alpha=1.5 with delay=1 has no .* use alpha < 1"):
        discrete.autocovariance(1.5, 1, 3)
    with pytest.raises(ValueError, match=r"alpha=-0.1, delay=1: use alpha > 0"):
        discrete.variance(-0.1, 1)
    with pytest.raises(ValueError, match="delay=-1"):
        discrete.boundary(-1)
    assert discrete.boundary(0) == pytest.approx(2.0)
    assert discrete.boundary(10**6) * (10**6 + 0.5) == pytest.approx(pi / 2)
