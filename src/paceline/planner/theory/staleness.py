"""The staleness of gradients, in updates, and the effect of a threshold that drops stale ones.

While a worker computes for X seconds, the gradients of the others are applied as a Poisson process.
The staleness is thus Poisson given X. A worker whose gradient is dropped reads the newest model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isfinite, log, pi

import numpy as np
from scipy.optimize import brentq

from paceline.planner.theory.kernels import Atoms, Complex, Kernel, Real, fixed

_DIGITS = 12  # decimal digits by which counts too high for the circle are damped


@dataclass(frozen=True, slots=True)
class Accepted:
    """The law of delays in which at most `threshold` gradients are applied, `rate` a second.

    Its transform is the sum of the first coefficients of K(s + rate (1 - u)) in powers of u,
    divided by that sum at s = 0.
    """

    kernel: Kernel
    rate: float
    threshold: int

    @property
    def mean(self) -> float:
        return float(self.transform(np.zeros(1, np.complex128), 1)[0].real)

    @property
    def abscissa(self) -> float:
        return self.kernel.abscissa - self.rate

    def transform(self, s: Complex, order: int = 0) -> Complex:
        share = _first_counts(self.kernel, np.zeros(1, np.complex128), self.rate, self.threshold, 0)
        some = _first_counts(self.kernel, np.asarray(s).ravel(), self.rate, self.threshold, order)
        return np.asarray(some.sum(axis=-1).reshape(np.shape(s)) / share.sum().real)


@dataclass(frozen=True, slots=True)
class Bound:
    """The effect of a threshold on staleness."""

    acceptance: float  # the probability that an arriving gradient is applied
    staleness: float  # mean of the applied gradients
    kernel: Kernel  # of the delays of the applied gradients


def of_each(means: Sequence[float]) -> list[float]:
    """Return the mean staleness of each worker's gradients, (Λ - 1/m_i) m_i with Λ = Σ 1/m_i.

    The mean over all gradients is M - 1, for any response times.
    """
    if not means or not all(isfinite(mean) and mean > 0 for mean in means):
        raise ValueError(f"means={list(means)!r}: give each worker's mean seconds, finite and > 0")
    arrivals = sum(1 / mean for mean in means)
    return [arrivals * mean - 1 for mean in means]


def of_batches(workers: int, size: int) -> float:
    """Return the mean staleness if each update is the mean of `size` arrivals, (M - 1) / size."""
    if workers < 1 or size < 1:
        raise ValueError(f"workers={workers}, size={size}: both must be at least 1")
    return (workers - 1) / size


def counts(kernel: Kernel, rate: float, most: int) -> Real:
    """Return the probabilities that 0, 1, …, `most` arrivals of a Poisson process fall in a delay.

    Exponential delays make this geometric, and Erlang ones negative binomial.
    """
    found = _first_counts(kernel, np.zeros(1, np.complex128), rate, most, 0)[0]
    return np.asarray(found.real, dtype=np.float64)


def bound(kernel: Kernel, workers: float, threshold: int) -> Bound:
    """Return the effect of dropping gradients of staleness above the threshold, of equal workers.

    The acceptance p solves p = P(N <= threshold), where N is Poisson of mean p (M - 1) X / E X. If
    the delay is constant, workers arrive in turn, and p = min(1, (threshold + 1) / M).
    """
    if threshold < 0 or not workers >= 1:
        raise ValueError(
            f"threshold={threshold}, workers={workers}: use a threshold >= 0, in updates, and at "
            "least 1 worker"
        )
    if isinstance(kernel, Atoms) and len(kernel.seconds) == 1:
        # After a drop the worker restarts immediately, and later delivers a fresh gradient.
        applied = min(1.0, (threshold + 1) / workers)
        return Bound(applied, min(float(threshold), workers - 1), fixed(kernel.mean))
    others = (workers - 1) / kernel.mean

    def excess(p: float) -> float:  # falls with p, as the others deliver more
        return float(counts(kernel, p * others, threshold).sum()) - p

    accepted = 1.0 if excess(1.0) >= 0 else float(brentq(excess, 0.0, 1.0, xtol=1e-15))
    found = counts(kernel, accepted * others, threshold)
    stale = float(found @ np.arange(threshold + 1) / found.sum())
    return Bound(accepted, stale, Accepted(kernel, accepted * others, threshold))


def _first_counts(kernel: Kernel, s: Complex, rate: float, most: int, order: int) -> Complex:
    """Return coefficients 0 to `most` of K(s + rate (1 - u)) in u, by Cauchy's integral."""
    points = 1 << max(ceil(log(4 * (most + 1), 2)), 6)
    # The circle must not reach the singularity, and higher coefficients must vanish on it.
    room = (s.real - kernel.abscissa) / rate if rate > 0 else np.full(s.shape, np.inf)
    radius = np.minimum(1.0, 1 + room) * 10 ** (-_DIGITS / points)
    radius = np.where(radius > 0, radius, np.nan)[:, None]  # undefined left of the abscissa
    circle = radius * np.exp(2j * pi * np.arange(points) / points)
    values = kernel.transform(s[:, None] + rate * (1 - circle), order)
    found = np.fft.fft(values, axis=-1)[:, : most + 1] / points
    return np.asarray(found * radius ** -np.arange(most + 1.0))
