"""Delayed SGD step by step: x_{k+1} = x_k - α x_{k-d} + ξ, where all gradients are d updates old.

It is exact for workers that deliver by turns, d = M - 1 and α = η λ. The formulas in continuous
time come close to it if the delay is taken as d + 1/2 updates.
"""

from __future__ import annotations

import cmath
from math import asin, cos, inf, log, pi, sin

import numpy as np
from scipy.optimize import brentq


def boundary(delay: int) -> float:
    """Return the smallest α that does not converge, 2 sin(π / (2 (2d + 1))).

    >>> round(boundary(1), 8), round(boundary(9), 8)
    (1.0, 0.16515869)
    """
    _check(1.0, delay)
    return 2 * sin(pi / (2 * (2 * delay + 1)))


def best_gain(delay: int) -> float:
    """Return the α of critical damping, d^d / (d + 1)^(d + 1), where x shrinks by d / (d + 1)."""
    _check(1.0, delay)
    return (delay / (delay + 1)) ** delay / (delay + 1)


def rate(alpha: float, delay: int) -> float:
    """Return r, where x shrinks by exp(-r) per update, from the roots of z^(d+1) - z^d + α."""
    _check(alpha, delay)
    polynomial = np.zeros(delay + 2)
    polynomial[0] = 1.0
    polynomial[1] -= 1.0
    polynomial[-1] += alpha
    largest = float(np.max(np.abs(np.roots(polynomial)), initial=0.0))
    return -log(largest) if largest else inf


def variance(alpha: float, delay: int, noise: float = 1.0) -> float:
    """Return the stationary variance of x for noise ξ of variance σ², `inf` if there is none.

    With α = 2 sin(θ/2) and y = θ (d + 1/2) it is σ² (1 + sin y) / (2 α cos y cos(θ/2)).
    """
    _check(alpha, delay)
    if alpha >= boundary(delay):
        return inf
    theta = 2 * asin(alpha / 2)
    y = theta * (delay + 0.5)
    return noise * (1 + sin(y)) / (2 * alpha * cos(y) * cos(theta / 2))


def autocovariance(alpha: float, delay: int, lags: int, noise: float = 1.0) -> list[float]:
    """Return the covariance of x with itself 0, 1, …, `lags` updates later.

    Up to lag d + 1 it is C cos(θ m - ψ) with ψ = y/2 - π/4; then γ(m+1) = γ(m) - α γ(m-d).
    """
    at_zero = variance(alpha, delay, noise)
    if at_zero == inf:
        raise ValueError(
            f"alpha={alpha!r} with delay={delay} has no stationary variance; "
            f"use alpha < {boundary(delay):.6g}"
        )
    theta = 2 * asin(alpha / 2)
    psi = theta * (delay + 0.5) / 2 - pi / 4
    found = [at_zero * cos(theta * lag - psi) / cos(psi) for lag in range(min(lags, delay + 1) + 1)]
    while len(found) <= lags:
        found.append(found[-1] - alpha * found[-1 - delay])
    return found


def best_workers(alpha: float, smallest: float | None = None) -> int:
    """Return the M of workers taking turns at which x shrinks fastest per second.

    smallest: α of the flattest direction, if it is not the same as in the steepest.
    """
    _check(alpha, 0)
    ends = {alpha, alpha if smallest is None else smallest}
    best, highest, workers = 1, -inf, 1
    while workers == 1 or alpha < boundary(workers - 1):
        score = workers * min(rate(each, workers - 1) for each in ends)
        if score > highest:
            best, highest = workers, score
        workers += 1
    return best


def _check(alpha: float, delay: int) -> None:
    if not (alpha > 0 and delay >= 0):
        raise ValueError(
            f"alpha={alpha!r}, delay={delay!r}: use alpha > 0, the learning rate times the "
            "curvature, and a delay >= 0, in updates"
        )


def heavy_ball(alpha: float, delay: int, momentum: float) -> float:
    """Return the largest |z| of x_(k+1) = x_k + β (x_k - x_(k-1)) - α x_(k-d), with d >= 1."""
    polynomial = np.zeros(delay + 2)
    polynomial[:2] = 1.0, -1 - momentum
    polynomial[2] += momentum
    polynomial[-1] += alpha
    return float(abs(np.roots(polynomial)).max())


def heavy_ball_boundary(delay: int, momentum: float) -> float:
    """Return the smallest α at which heavy ball does not converge.

    On |z| = 1, z = exp(iθ), α = -z^(d-1) (z - 1) (z - β) must be real. Its modulus grows with θ, so
    that the first θ > 0 counts.
    """

    def turn(theta: float) -> float:
        z = cmath.exp(1j * theta)
        return (delay - 1) * theta + cmath.phase(z - 1) + cmath.phase(z - momentum) - pi

    z = cmath.exp(1j * float(brentq(turn, 1e-9, pi)))
    return abs(z - 1) * abs(z - momentum)
