from __future__ import annotations

from math import cos, e, exp, inf, log, pi, sin, tan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import solve_ivp
from scipy.optimize import brentq

import paceline as pl
from paceline.planner.theory.kernels import (
    Atoms,
    Blend,
    Gamma,
    Kernel,
    Laplace,
    erlang,
    exponential,
    fixed,
    shifted_exponential,
    uniform,
)
from paceline.planner.theory.responses import kernel_of
from paceline.planner.theory.sdde import SAFE, best_gain, boundary, hitting_time, rate, variance

# x, r / a, and the variance factor (1 + sin x) / cos x: the digest's table of fixed delays, B2.
FIXED = [
    (0.05, 1.05412, 1.05129),
    (0.1, 1.11833, 1.10536),
    (0.2, 1.29586, 1.22305),
    (0.3, 1.63134, 1.35609),
    (exp(-1), 2.71828, 1.45713),
    (0.4, 2.36022, 1.50850),
    (0.5, 1.58805, 1.68580),
    (0.75, 0.68994, 2.29830),
    (0.8, 0.59121, 2.46496),
    (1.0, 0.31813, 3.40822),
    (1.2, 0.15872, 5.33186),
    (1.5, 0.02186, 28.2383),
]

# Kernels of mean 1: boundary, best gain, and its rate; B2 (ii).
KERNELS: dict[str, tuple[Kernel, float, float, float]] = {
    "fixed": (fixed(1.0), 1.57080, 0.36788, 1.0),
    "erlang2": (erlang(2, 1.0), 4.0, 0.29630, 0.66667),
    "erlang3": (erlang(3, 1.0), 2.66667, 0.31641, 0.75),
    "erlang4": (erlang(4, 1.0), 2.27417, 0.32768, 0.8),
    "erlang8": (erlang(8, 1.0), 1.85849, 0.34644, 0.88889),
    "exponential": (exponential(1.0), inf, 0.25, 0.5),
    "uniform": (uniform(0.0, 2.0), 2.46740, 0.32381, 0.79681),
    "half shifted": (shifted_exponential(0.5, 0.5), 2.26983, 0.32224, 0.76393),
    "much shifted": (shifted_exponential(0.8, 0.2), 1.65786, 0.35987, 0.95491),
    "straggler": (Atoms((0.5, 5.5), (0.9, 0.1)), 3.47138, 0.20034, 0.38003),
    "two": (Atoms((0.1, 1.9)), 10.04124, 0.28874, 0.67260),
}


def hidden(kernel: Kernel) -> Laplace:
    """Return the same law without its closed forms."""
    return Laplace(kernel.transform, kernel.mean, kernel.abscissa)


@pytest.mark.parametrize(("x", "speed", "factor"), FIXED)
def test_fixed_delays(x: float, speed: float, factor: float) -> None:
    for tau in (1.0, 40.0):
        damping = x / tau
        assert rate(damping, fixed(tau)) / damping == pytest.approx(speed, abs=6e-6)
        found = variance(damping, fixed(tau))
        assert found * 2 * damping == pytest.approx(factor, rel=5e-6)
        assert found * 2 * damping == pytest.approx(tan(pi / 4 + x / 2), rel=1e-12)


def test_fixed_delays_at_the_boundary() -> None:
    assert boundary(fixed(0.3)) == pi / 2
    assert variance(pi / 2 + 1e-9, fixed(1.0)) == inf
    assert rate(pi / 2, fixed(1.0)) == pytest.approx(0.0, abs=1e-12)
    slope = (rate(pi / 2 - 1e-5, fixed(1.0)) - rate(pi / 2, fixed(1.0))) / 1e-5
    assert slope == pytest.approx(0.45302, abs=2e-5)


def test_a_small_delay_speeds_up() -> None:
    """r = a (1 + x + 1.5 x² + …), and r >= a up to x = 0.63336."""
    assert rate(0.01, fixed(1.0)) == pytest.approx(0.01 * (1 + 0.01 + 1.5e-4), rel=1e-5)
    assert brentq(lambda x: rate(x, fixed(1.0)) - x, 0.4, 1.2) == pytest.approx(0.63336, abs=1e-5)


@pytest.mark.parametrize("name", KERNELS)
def test_boundary_and_best_gain(name: str) -> None:
    kernel, edge, gain, speed = KERNELS[name]
    assert boundary(kernel) == pytest.approx(edge, abs=6e-6)
    best = best_gain(kernel)
    assert best.gain == pytest.approx(gain, abs=6e-6)
    assert best.rate == pytest.approx(speed, abs=6e-6)
    # Near a double root the rate is as the square root.
    assert rate(best.gain, kernel) == pytest.approx(best.rate, abs=1e-5)
    assert rate(0.97 * best.gain, kernel) < best.rate
    if edge < inf:
        assert rate(1.03 * best.gain, kernel) < best.rate
        assert rate(edge * 0.999, kernel) > 0 > rate(edge * 1.001, kernel)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 8])
def test_closed_forms_of_erlang(k: int) -> None:
    edge = k * tan(pi / 2 / k) / cos(pi / 2 / k) ** k if k > 1 else inf
    for kernel in (erlang(k, 3.0), hidden(erlang(k, 3.0))):
        assert boundary(kernel) == pytest.approx(edge, rel=1e-9)
        best = best_gain(kernel)
        assert best.gain == pytest.approx((k / (k + 1)) ** (k + 1), rel=1e-6)
        assert best.rate * 3.0 == pytest.approx(k / (k + 1), rel=1e-6)


def test_an_exponential_delay_never_diverges_in_the_mean() -> None:
    """T s² + s + a = 0: the rate stays at 1 / (2 T) from x = 1/4 on."""
    for x in (0.25, 1.0, 5.0, 80.0):
        assert rate(x / 2, exponential(2.0)) == pytest.approx(0.25, abs=1e-7)
    assert boundary(exponential(2.0)) == inf
    assert boundary(Gamma(0.5, 1.0)) == inf


def test_very_unequal_delays_are_best_beyond_critical_damping() -> None:
    kernel = kernel_of(pl.delays.LogNormal(exp(-0.5), 1.0))
    best = best_gain(kernel)
    assert best.gain == pytest.approx(0.533, abs=0.01)
    for gain in np.linspace(0.05, 2.0, 14):
        assert rate(float(gain), kernel) <= best.rate * (1 + 1e-6)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.floats(0.0, 1.0).map(lambda u: u**3 * 8), st.floats(0.01, 1.0)),
        min_size=1,
        max_size=6,
    ).filter(lambda parts: max(at for at, _ in parts) > 0.1)
)
def test_a_gain_below_half_pi_converges_whatever_the_delays(
    parts: list[tuple[float, float]],
) -> None:
    kernel = Atoms([at for at, _ in parts], [weight for _, weight in parts])
    assert boundary(kernel) >= SAFE - 1e-9
    assert rate(0.999 * SAFE / kernel.mean, kernel) > 0


def test_the_universal_bound_is_sharp() -> None:
    """No law is worse than the fixed one, and others come close."""
    assert boundary(Atoms((0.99, 1.01))) == pytest.approx(SAFE, abs=1e-3)
    assert boundary(shifted_exponential(0.99, 0.01)) == pytest.approx(SAFE, abs=1e-3)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.floats(0.05, 3.0), st.floats(0.05, 1.0)), min_size=2, max_size=4, unique=True
    )
)
def test_boundaries_are_where_the_root_crosses(parts: list[tuple[float, float]]) -> None:
    kernel = Atoms([at for at, _ in parts], [weight for _, weight in parts])
    edge = boundary(kernel)
    if edge < 50:
        assert rate(edge / kernel.mean, kernel) * kernel.mean == pytest.approx(0.0, abs=1e-6)
        for share in (0.2, 0.5, 0.8, 0.95, 0.999):
            assert rate(share * edge / kernel.mean, kernel) > 0


@pytest.mark.parametrize("x", [0.05, 0.36, 0.8, 1.2, 1.5, 1.5707])
def test_variance_integrals_agree_with_closed_forms(x: float) -> None:
    found = variance(x / 5, hidden(fixed(5.0)), 3.0)
    assert found == pytest.approx(3.0 * (1 + sin(x)) / (2 * x / 5 * cos(x)), rel=1e-7)
    found = variance(x / 5, hidden(exponential(5.0)), 3.0)
    assert found == pytest.approx(3.0 * (1 + x) / (2 * x / 5), rel=1e-8)
    assert variance(x / 5, exponential(5.0), 3.0) == pytest.approx(found, rel=1e-8)


def test_variance_of_erlang_delays() -> None:
    """B4: the kernel's integral for Erlang-4, as a factor of that without delay."""
    factors = {0.1: 1.103, 0.3679: 1.428, 0.8: 2.170, 1.2: 3.344}
    for x, factor in factors.items():
        assert variance(x, erlang(4, 1.0)) * 2 * x == pytest.approx(factor, abs=1e-3)
    assert variance(2.3, erlang(4, 1.0)) == inf


def test_variance_of_mixed_delays_by_lyapunov() -> None:
    """A blend of exponentials is a linear system of three states, whose variance is known."""
    a, fast, slow, share = 0.9, 0.4, 3.0, 0.75
    # x' = -a (share u + (1 - share) v) + noise, u' = (x - u)/fast, v' = (x - v)/slow.
    system = np.asarray(
        [[0, -a * share, -a * (1 - share)], [1 / fast, -1 / fast, 0], [1 / slow, 0, -1 / slow]]
    )
    both = np.kron(system, np.eye(3)) + np.kron(np.eye(3), system)
    noise = np.zeros(9)
    noise[0] = 1.0
    exact = np.linalg.solve(both, -noise)[0]
    kernel = Blend([exponential(fast), exponential(slow)], [share, 1 - share])
    assert variance(a, kernel) == pytest.approx(exact, rel=1e-8)
    assert rate(a, kernel) == pytest.approx(-np.linalg.eigvals(system).real.max(), rel=1e-9)


def test_hitting_time() -> None:
    """T = ln((start - floor) / (level - floor)) / (2 r)."""
    assert hitting_time(1.0, 0.1, rate=0.5) == pytest.approx(log(10))
    assert hitting_time(1.0, 0.1, rate=0.5, floor=0.05) == pytest.approx(log(19))
    assert hitting_time(1.0, 0.1, rate=0.5, floor=0.1) == inf
    assert hitting_time(1.0, 0.1, rate=-0.1) == inf
    assert hitting_time(0.1, 0.2, rate=-0.1) == 0.0
    # Critical damping is e times as fast as no delay at the same damping.
    both = [hitting_time(1.0, 1e-4, rate=r) for r in (rate(1 / e, fixed(1.0)), 1 / e)]
    assert both[1] / both[0] == pytest.approx(e, rel=1e-6)
    with pytest.raises(ValueError, match=r"start=0.0, level=0.1: both must be > 0"):
        hitting_time(0.0, 0.1, rate=1.0)


@pytest.mark.parametrize("floor", [0.05, 0.3, 0.79])
def test_hitting_time_of_the_integrated_second_moment(floor: float) -> None:
    """Without delay, d E x² / dt = -2 a E x² + σ², whose floor is σ² / (2 a)."""
    a, start, level = 0.7, 1.0, 0.8
    seconds = hitting_time(start, level, rate=a, floor=floor)
    moment = solve_ivp(
        lambda _, y: -2 * a * y + 2 * a * floor, (0, seconds), [start], rtol=1e-10, atol=1e-12
    )
    assert moment.y[0, -1] == pytest.approx(level, rel=1e-8)
