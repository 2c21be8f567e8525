"""Asynchronous SGD as a stochastic delay differential equation: stability, speed and noise.

Each arriving gradient is applied immediately, although it was computed on an older model. Near a
minimum, along a direction of curvature λ and with learning rate η,

    dx = -a ∫ x(t - u) dK(u) dt + σ dW,   a = η λ Λ,   σ² = η² Λ s²,

where Λ gradients of noise s² arrive in a second, and their delays have the law K. Since M = Λ E X
(Little's law), the gain a E X = η λ M does not depend on the delays. The approach is that of Yu,
Chen and Poor (2024), arXiv 2406.11159; the formulas here were derived independently of theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, inf, log, pi, sin, sqrt, tan

import numpy as np
from scipy.optimize import brentq, minimize_scalar
from scipy.optimize.elementwise import find_root

from paceline.planner.theory.kernels import Atoms, Gamma, Kernel, Real
from paceline.planner.theory.roots import root

SAFE = pi / 2  # the gain below which the mean converges for every law of the delays

_LARGEST = 100.0  # the largest gain in the search for a boundary
_NARROW = 1e-6  # width of the smallest interval to split, in frequency times the mean delay
_SCAN = 16  # gains beyond critical damping to try
_SAME = 1e-6  # relative difference of rates and gains that count as equal


@dataclass(frozen=True, slots=True)
class Best:
    """The smallest gain a E X at which the mean decays fastest, and its rate per second."""

    gain: float
    rate: float


def rate(damping: float, kernel: Kernel) -> float:
    """Return the decay rate of the mean per second: minus the real part of the rightmost root."""
    return -root(damping, kernel).real


def boundary(kernel: Kernel) -> float:
    """Return the smallest gain a E X that does not converge, `inf` if there is none below 100.

    On the boundary s = iω, so that E cos(ωX) = 0 and a = ω / E sin(ωX). This a is at least ω and
    at least π / (2 E X).

    >>> from paceline.planner.theory.kernels import erlang, fixed
    >>> round(boundary(fixed(3.0)), 6), round(boundary(erlang(2, 3.0)), 6)
    (1.570796, 4.0)
    """
    match kernel:
        case Atoms(seconds=(_,)):
            return SAFE
        case Gamma(stages=k):
            return k * tan(SAFE / k) / cos(SAFE / k) ** k if k > 1 else inf
    mean = kernel.mean

    def at(omega: Real) -> tuple[Real, Real]:
        value = kernel.transform(np.asarray(1j * omega / mean, dtype=np.complex128))
        return value.real, -value.imag

    found, start, width = inf, 0.0, 4.0
    while start < min(found, _LARGEST):
        for omega in _zeros(lambda w: at(w)[0], start, start + width):
            sine = float(at(np.asarray([omega]))[1][0])
            if sine > 0:
                found = min(found, omega / sine)
        start += width
    return found if found <= _LARGEST else inf


def mean_square_boundary(kernel: Kernel, workers: float) -> float:
    """Return the smallest gain a E X at which E x² does not converge; at most `boundary`.

    Which gradient arrives next is random, so single runs scatter around the mean. With fewer
    workers they scatter more. Let arrivals be Poisson, and let V be the `variance` for a noise of
    1. Each arrival adds (η λ x(t - u))², and so E x² converges while a²/Λ · V < 1.

    Let y be the gain with a²/Λ · V = 1. The gain returned is 1 + y, which is exact for memoryless
    times: x (x - 1) = 2 M. For the other laws that were simulated it is a lower bound. It is never
    below π/2.

    >>> from paceline.planner.theory.kernels import exponential, fixed
    >>> mean_square_boundary(exponential(1.0), 6), round(mean_square_boundary(fixed(1.0), 6), 6)
    (4.0, 1.570796)
    """
    most = boundary(kernel)
    if isinstance(kernel, Gamma) and kernel.stages == 1:
        return (1 + sqrt(1 + 8 * workers)) / 2
    if most <= SAFE:
        return most
    mean = kernel.mean

    def excess(gain: float) -> float:
        return gain**2 / (workers * mean) * variance(gain / mean, kernel) - 1

    # V is at least 1 / (2 a), so that the gain is at most 2 M.
    end = min(most - 1, 2.0 * workers)
    if excess(end) <= 0:
        return most
    found = 1 + float(brentq(excess, 1e-9, end, xtol=1e-9))
    return max(found, SAFE)


def best_gain(kernel: Kernel) -> Best:
    """Return the gain at which the mean decays fastest.

    Up to a = max r / E exp(rX) exactly one root is right of -r, and it is real. This is critical
    damping, where E exp(rX) (1 - rX) = 0. At larger gains the rate falls, except for very unequal
    delays.

    >>> from paceline.planner.theory.kernels import fixed
    >>> best_gain(fixed(2.0))
    Best(gain=0.36787944117144233, rate=0.5)
    """
    mean = kernel.mean
    match kernel:
        case Atoms(seconds=(_,)):
            return Best(float(np.exp(-1)), 1 / mean)
        case Gamma(stages=k):
            return Best((k / (k + 1)) ** (k + 1), k / (k + 1) / mean)

    def moments(r: float) -> tuple[float, float]:
        at = np.asarray([-r], dtype=np.complex128)
        with np.errstate(over="ignore", invalid="ignore"):
            return float(kernel.transform(at)[0].real), float(kernel.transform(at, 1)[0].real)

    def falls(r: float) -> float:
        value, first = moments(r)
        slope = r * first / value - 1
        return slope if slope < inf else 1.0  # where both overflow

    # By Chebyshev's inequality the maximum is not beyond 1 / E X.
    most = min(1 / mean, -kernel.abscissa * (1 - 1e-9))
    fastest = most if falls(most) <= 0 else float(brentq(falls, 0.0, most, xtol=1e-15 * most))
    critical = Best(fastest / moments(fastest)[0] * mean, fastest)

    end = min(boundary(kernel), 4.0)
    gains = np.geomspace(critical.gain, end, _SCAN + 1)[1:]
    rates = [rate(gain / mean, kernel) for gain in gains.tolist()]
    highest = int(np.argmax(rates))
    if rates[highest] <= critical.rate * (1 + _SAME):
        return critical
    edges = [critical.gain, *gains.tolist(), end]
    found = minimize_scalar(
        lambda g: -rate(g / mean, kernel),
        bounds=(edges[highest], edges[highest + 2]),
        method="bounded",
        options={"xatol": _SAME * edges[highest]},
    )
    gain = float(found.x)
    return Best(gain, rate(gain / mean, kernel))


def variance(damping: float, kernel: Kernel, noise: float = 1.0) -> float:
    """Return the stationary variance for noise σ² per second; `inf` if the mean diverges.

    V = (σ²/π) ∫ dω / |iω + a K(iω)|² over ω > 0. Let x = a E X. A fixed delay gives
    (σ²/2a) (1 + sin x) / cos x (Küchler and Mensch, 1992), and an exponential one (σ²/2a) (1 + x).
    """
    mean = kernel.mean
    x = damping * mean
    found = root(damping, kernel)
    if not found.real < 0:
        return inf
    match kernel:
        case Atoms(seconds=(_,)):
            return noise / (2 * damping) * (1 + sin(x)) / cos(x)
        case Gamma(stages=1):
            return noise / (2 * damping) * (1 + x)

    def density(omega: Real) -> Real:
        at = np.asarray(1j * omega, dtype=np.complex128)
        return np.asarray(np.abs(at + x * kernel.transform(at / mean)) ** -2)

    # Peaks are below x, since |K| <= 1, and the highest is at the rightmost root. For large ω the
    # density is 1/ω², up to terms whose integral falls with the third power.
    far = 1000 * (1 + x)
    near = np.linspace(0, 2 * x, 33)
    edges = np.concatenate([near, [found.imag * mean], np.geomspace(2 * x, far, 33)[1:]])
    return noise * mean / pi * (_integral(density, np.unique(edges)) + 1 / far)


def hitting_time(start: float, level: float, *, rate: float, floor: float = 0.0) -> float:
    """Return the seconds until a quantity that decays at twice the rate to a floor is at a level.

    From y' = -2 rate (y - floor), T = ln((start - floor) / (level - floor)) / (2 rate). It is for
    squared distances as well as for losses; `inf` if the level is not above the floor.
    """
    if not (start > 0 and level > 0):
        raise ValueError(f"start={start!r}, level={level!r}: both must be > 0")
    if start <= level:
        return 0.0
    if level <= floor or rate <= 0:
        return inf
    return log((start - floor) / (level - floor)) / (2 * rate)


def _zeros(function: Callable[[Real], Real], start: float, end: float) -> list[float]:
    """Return the sign changes of a function whose slope is at most 1.

    An interval is skipped only if the values at its ends are too far from 0 for a zero inside.
    """
    at = np.linspace(start, end, 65)
    value = function(at)
    while True:
        width = np.diff(at)
        open_ = np.abs(value[:-1]) + np.abs(value[1:]) <= width
        crossing = np.signbit(value[:-1]) != np.signbit(value[1:])
        split = np.flatnonzero(open_ & (width > np.where(crossing, 1e-3, _NARROW)))
        if not split.size:
            break
        middle = (at[split] + at[split + 1]) / 2
        value = np.insert(value, split + 1, function(middle))
        at = np.insert(at, split + 1, middle)
    if not crossing.any():
        return []
    found = find_root(function, (at[:-1][crossing], at[1:][crossing]))
    return [float(zero) for zero in found.x]


def _integral(function: Callable[[Real], Real], edges: Real) -> float:
    """Integrate by Gauss's rule, halving intervals until halves and whole agree.

    All intervals are evaluated together. scipy.integrate.quad evaluates point by point. It is some
    50 times slower for a few atoms, and off by 6e-7 if a straggler makes the density oscillate.
    """
    nodes, weights = np.polynomial.legendre.leggauss(10)

    def each(left: Real, right: Real) -> Real:
        half = (right - left) / 2
        at = (left + half)[:, None] + half[:, None] * nodes
        return np.asarray(half * (function(at.ravel()).reshape(at.shape) @ weights))

    left, right = edges[:-1], edges[1:]
    whole = each(left, right)
    allowed = 1e-11 * float(whole.sum())
    total = 0.0
    for _ in range(40):
        middle = (left + right) / 2
        first, second = each(left, middle), each(middle, right)
        rough = np.abs(first + second - whole) > allowed
        total += float((first + second)[~rough].sum())
        if not np.any(rough):
            break
        left, right = (
            np.concatenate([left[rough], middle[rough]]),
            np.concatenate([middle[rough], right[rough]]),
        )
        whole = np.concatenate([first[rough], second[rough]])
    else:
        total += float(whole.sum())
    return total
