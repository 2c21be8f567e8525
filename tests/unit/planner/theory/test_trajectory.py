from __future__ import annotations

from math import exp, factorial, floor, pi

import numpy as np
import pytest

from paceline.planner.theory.kernels import (
    Atoms,
    Blend,
    Kernel,
    Laplace,
    erlang,
    exponential,
    fixed,
    shifted_exponential,
    uniform,
)
from paceline.planner.theory.roots import root
from paceline.planner.theory.sdde import boundary, rate
from tests.oracles.trajectory import atoms, mean_path


def test_a_fixed_delay_against_the_method_of_steps() -> None:
    """Between multiples of the delay x is a polynomial: Σ (-a)^k (t - (k-1)τ)^k / k!."""
    a, tau = 0.7, 1.5
    times, found = mean_path(a, fixed(tau), 9.0, 0.005)
    for t, value in list(zip(times.tolist(), found.tolist(), strict=True))[::200]:
        exact = sum(
            (-a) ** k * (t - (k - 1) * tau) ** k / factorial(k) for k in range(floor(t / tau) + 2)
        )
        assert value == pytest.approx(exact, abs=2e-6)


def test_an_exponential_delay_against_its_equation() -> None:
    """With x' = -u and u' = (a x - u) / T both are exponentials, x(0) = 1 and u(0) = a."""
    a, mean = 0.2 / 3, 3.0
    times, found = mean_path(a, exponential(mean), 20.0, 0.02)
    roots = np.roots([mean, 1.0, a])
    first = (roots[1] + a) / (roots[1] - roots[0])
    exact = first * np.exp(roots[0] * times) + (1 - first) * np.exp(roots[1] * times)
    assert np.abs(found - exact).max() < 2e-4


# x(8) for gain 0.8 and mean 1: the digest's integration, traj.txt.
AT_8 = [
    (fixed(1.0), -0.0214),
    (uniform(0.5, 1.5), -0.0211),
    (erlang(4, 1.0), -0.0101),
    (exponential(1.0), 0.0197),
]


@pytest.mark.parametrize(("kernel", "expected"), AT_8)
def test_after_eight_delays(kernel: Kernel, expected: float) -> None:
    _, found = mean_path(0.8, kernel, 8.0, 0.01)
    assert found[-1] == pytest.approx(expected, abs=1e-4)


# At gain 1.2 the straggler's two rightmost roots are at -0.358 and -0.367: neither is ever alone.
ALONE = [
    (fixed(1.0), (0.15, 1.2)),
    (Atoms((0.5, 5.5), (0.9, 0.1)), (0.15,)),
    (uniform(0.0, 2.0), (0.15, 1.2)),
    (shifted_exponential(0.5, 0.5), (0.15, 1.2)),
    (erlang(4, 1.0), (0.15, 1.2)),
    (Blend([fixed(1.0), erlang(2, 1.0)], [0.5, 0.5]), (0.15, 1.2)),
]


@pytest.mark.parametrize(
    ("kernel", "gain"), [(kernel, gain) for kernel, gains in ALONE for gain in gains]
)
def test_the_rate_is_that_of_the_rightmost_root(kernel: Kernel, gain: float) -> None:
    """x(t + P) = ± exp(-r P) x(t) for P of full half periods, once other roots have faded."""
    times, found = mean_path(gain, kernel, 44.0, 0.02)
    dominant = root(gain, kernel)
    half = pi / dominant.imag if dominant.imag else 1.0
    later = half * floor(16 / half)
    window = (times >= 20) & (times < 26)
    start = float(times[window][np.argmax(np.abs(found[window]))])
    before, after = np.interp([start, start + later], times, found)
    sign = (-1) ** round(later / half) if dominant.imag else 1
    assert before * after * sign > 0
    assert np.log(abs(before / after)) / later == pytest.approx(rate(gain, kernel), rel=0.01)


def test_it_grows_beyond_the_boundary() -> None:
    kernel = uniform(0.0, 2.0)
    for share, grows in ((0.9, False), (1.1, True)):
        _, found = mean_path(share * boundary(kernel), kernel, 60.0, 0.02)
        half = found.size // 2
        assert (np.abs(found[half:]).max() > np.abs(found[:half]).max()) == grows


def test_atoms_share_moments() -> None:
    for kernel in (erlang(3, 2.0), uniform(1.0, 4.0), shifted_exponential(0.5, 0.25)):
        rule = atoms(kernel, 12)
        assert len(rule.seconds) == 12
        at = np.zeros(1, np.complex128)
        for order in range(3):
            assert rule.transform(at, order)[0] == pytest.approx(kernel.transform(at, order)[0])
    point = np.asarray([0.4 + 0.9j])
    blend = Blend([fixed(1.0), erlang(2, 1.0)], [0.25, 0.75])
    assert atoms(blend).transform(point)[0] == pytest.approx(blend.transform(point)[0], rel=1e-9)


def test_refusals() -> None:
    with pytest.raises(TypeError, match=r"Laplace is known by .* use measured\(seconds\)"):
        atoms(Laplace(lambda s: np.exp(-s), 1.0))
    with pytest.raises(ValueError, match=r"step=2.0: use damping > 0, .* 0 < step <= seconds"):
        mean_path(1.0, fixed(1.0), 1.0, 2.0)
    assert mean_path(0.5, fixed(0.0), 2.0, 0.01)[1][-1] == pytest.approx(exp(-1.0), abs=1e-4)
