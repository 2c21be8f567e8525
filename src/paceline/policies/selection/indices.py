"""Bandit indices: a lower confidence bound of each worker's mean time, by which it is ranked.

A worker with few trials gets a low index and is tried again (optimism). A worker with many trials
gets an index near its mean. exp(-g) is the allowed failure probability, T the number of ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gamma, inf, isfinite, log
from typing import Protocol

import numpy as np

from paceline.policies.selection.arms import Floats, Times

LEVELS = tuple(2.0**power for power in range(-30, 18))
"""The seconds per sample at which `FiniteVariance` truncates times: 1 ns to 36 hours."""


class Index(Protocol):
    """Ranks workers by an optimistic estimate of their mean time."""

    @property
    def shape(self) -> float:
        """The power to which response times are summed."""

    @property
    def levels(self) -> tuple[float, ...]:
        """The seconds at which response times are truncated, for one more sum each; may be ()."""

    def means(self, times: Times) -> Floats:
        """Return the maximum-likelihood mean of each worker, in seconds."""

    def values(self, times: Times, rounds: float, prior: float, rng: np.random.Generator) -> Floats:
        """Return the index of each worker in seconds, from observations of `rounds` rounds.

        prior: the mean of the fastest worker if observations are forgotten, else 0.
        """


class Means:
    """Computes maximum-likelihood means for Weibull times of the index's shape."""

    shape: float = 1.0
    levels: tuple[float, ...] = ()

    def means(self, times: Times) -> Floats:
        return _mean(times.seconds / times.count, self.shape)


@dataclass(frozen=True)
class KL(Means):
    """Returns the least mean q for which T * KL(estimate, q) <= g: exact tails, without a scale.

    For exponential times q = mean / r with r - 1 - ln r = g / T. This is the closed form of kl-UCB
    (Garivier and Cappé, 2011, arXiv 1102.2490), for means to be minimized.

    shape: the shape of Weibull times, whose power `shape` is exponential. A shape above 1 is for
        times that vary less than exponential ones, and needs fewer trials. It is 3.7 if the
        deviation is 0.3 of the mean.
    caution: g = ln(rounds) + caution * ln ln(rounds); proofs need 3, 0 does better.
    """

    shape: float = 1.0
    caution: float = 0.0

    def __post_init__(self) -> None:
        _check_positive(self, "shape")
        if not 0 <= self.caution < inf:
            raise ValueError(f"KL got caution={self.caution!r}; use 0, or 3 for what proofs need")

    def values(self, times: Times, rounds: float, prior: float, rng: np.random.Generator) -> Floats:
        g = log(rounds)
        if self.caution and g > 1:
            g += self.caution * log(g)
        # A worker without an end in S seconds has a mean above S / g, the limit for no ends.
        count = np.maximum(times.ended, 1e-6)
        return _mean(times.seconds / count / inflation(g / count), self.shape)


@dataclass(frozen=True)
class Thompson(Means):
    """Draws a mean from its posterior distribution: sum of seconds / Gamma(T).

    Thompson sampling (Thompson, 1933; for exponential families Korda, Kaufmann, Munos, 2013,
    arXiv 1307.3400) with Jeffreys' prior. If observations are forgotten, each worker gets one
    extra observation of the fastest worker's mean, so a worker not tried for long is tried again.

    shape: as in `KL`.
    """

    shape: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(self, "shape")

    def values(self, times: Times, rounds: float, prior: float, rng: np.random.Generator) -> Floats:
        seconds, count = times.seconds, times.count
        if prior:
            seconds, count = seconds + _power(prior, self.shape), count + 1
        drawn = np.maximum(rng.standard_gamma(count), np.finfo(float).tiny)
        return _mean(seconds / drawn, self.shape)


@dataclass(frozen=True)
class LCB(Means):
    """Subtracts the radius sqrt(4 f / T) + 2 f / T with f = 2 ln(rounds) from the mean.

    For exponential times of mean at most `scale` seconds a sample, after Egger, Bitar,
    Wachter-Zeh and Gündüz (arXiv 2202.08302). With a wrong scale the radius is too wide or too
    narrow: `KL` needs no scale and far fewer trials.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(self, "scale")

    def values(self, times: Times, rounds: float, prior: float, rng: np.random.Generator) -> Floats:
        f = 2 * log(rounds)
        radius = np.sqrt(4 * f / times.count) + 2 * f / times.count
        return np.maximum(times.seconds / times.count - self.scale * radius, 0.0)


@dataclass(frozen=True)
class SubExponential(Means):
    """Subtracts max(sqrt(2 nu^2 g / T), 2 alpha g / T), g = 4 ln(rounds), from the mean.

    For times with E exp(s (X - mean)) <= exp(s^2 nu^2 / 2) for |s| <= 1 / alpha, in seconds a
    sample. Exponential times of mean m have nu = alpha = 2 m.
    """

    nu: float
    alpha: float

    def __post_init__(self) -> None:
        _check_positive(self, "nu", "alpha")

    def values(self, times: Times, rounds: float, prior: float, rng: np.random.Generator) -> Floats:
        g = 4 * log(rounds)
        radius = np.maximum(
            np.sqrt(2 * self.nu**2 * g / times.count), 2 * self.alpha * g / times.count
        )
        return np.maximum(times.seconds / times.count - radius, 0.0)


@dataclass(frozen=True)
class Bounded(Means):
    """Subtracts the smaller of Hoeffding's and the empirical Bernstein radius from the mean.

    For times of any distribution, of at most `most` seconds a sample. With
    g = 4 ln(rounds), Hoeffding's radius is most * sqrt(g / 2T). The other is
    sqrt(2 V g / T) + 3 most g / T with the measured variance V (Audibert, Munos, Szepesvári, 2009).
    """

    most: float

    def __post_init__(self) -> None:
        _check_positive(self, "most")

    def values(self, times: Times, rounds: float, prior: float, rng: np.random.Generator) -> Floats:
        g, count = 4 * log(rounds), times.count
        mean = np.minimum(times.seconds / count, self.most)
        ended = np.maximum(times.ended, 1.0)
        spread = np.maximum(times.squares / ended - mean**2, 0.0)
        bernstein = np.sqrt(2 * spread * g / count) + 3 * self.most * g / count
        radius = np.minimum(bernstein, self.most * np.sqrt(g / (2 * count)))
        return np.asarray(np.maximum(mean - radius, 0.0))


@dataclass(frozen=True)
class FiniteVariance(Means):
    """Returns the least mean m that the truncated mean of the times does not refute.

    For times of any distribution with a deviation of at most `variation` times the mean. Heavy
    tails are allowed: Pareto times of shape a > 2 have variation 1 / sqrt(a (a - 2)), exponential
    times 1. With g = exponent ln(rounds), times are truncated at
    B = (3 + variation sqrt(T / g)) m, rounded up to a power of two. The mean m is refuted if the
    mean of min(X, B) exceeds m + variation m sqrt(2 g / T) + B g / 3T. This is Bernstein's
    inequality: truncation increases neither the mean nor the variance. So exp(-g) bounds the
    probability to refute the true mean.

    The truncated mean is that of Bubeck, Cesa-Bianchi and Lugosi (2013, arXiv 1209.1711). They
    drop long times, bound E X^2 in seconds, and have the radius 4 sqrt(E X^2 g / T). Their limits
    change with g, so they need all times. The one-sided bound above is derived here. It has no
    scale, and needs one sum for each power of two.

    exponent: a bound fails with probability rounds**-exponent at most; 4 is that of `Bounded` and
        `SubExponential`, less does better.
    """

    variation: float
    exponent: float = 4.0
    levels = LEVELS

    def __post_init__(self) -> None:
        _check_positive(self, "variation", "exponent")

    def values(self, times: Times, rounds: float, prior: float, rng: np.random.Generator) -> Floats:
        g, count = max(self.exponent * log(rounds), 1e-9), times.count
        levels = np.array(self.levels)[:, None]
        # A level decides on the means from the largest of the level below up to its own largest.
        largest = levels / (3 + self.variation * np.sqrt(count / g))
        least = times.truncated / count - levels * g / (3 * count)
        least /= 1 + self.variation * np.sqrt(2 * g / count)
        allowed = least <= largest
        allowed[-1] = True  # no level is above the last
        first, worker = np.argmax(allowed, axis=0), np.arange(len(count))
        below = np.where(first > 0, largest[first - 1, worker], 0.0)
        return np.asarray(np.maximum(least[first, worker], below))


@dataclass(frozen=True)
class Greedy(Means):
    """Uses the measured mean, and so never retries a worker that was slow at first (a control)."""

    shape: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(self, "shape")

    def values(self, times: Times, rounds: float, prior: float, rng: np.random.Generator) -> Floats:
        return _mean(times.seconds / times.count, self.shape)


def inflation(c: Floats) -> Floats:
    """Return r >= 1 with r - 1 - ln r = c, by Newton's method.

    >>> round(float(inflation(np.array([1.0]))[0]), 6)
    3.146193
    """
    r = 1 + np.sqrt(2 * c) + c
    for _ in range(5):
        r = np.where(c > 1e-12, r * (c + np.log(r)) / np.maximum(r - 1, 1e-300), 1.0)
    return np.asarray(r)


def _mean(powers: Floats, shape: float) -> Floats:
    """Return the mean of Weibull times from the mean of their powers."""
    return powers if shape == 1 else powers ** (1 / shape) * gamma(1 + 1 / shape)


def _power(mean: float, shape: float) -> float:
    """Invert `_mean`."""
    return float((mean / gamma(1 + 1 / shape)) ** shape)


def _check_positive(index: object, *names: str) -> None:
    for name in names:
        value = getattr(index, name)
        if not (isfinite(value) and value > 0):
            raise ValueError(f"{type(index).__name__} got {name}={value!r}; use a number above 0")
        object.__setattr__(index, name, float(value))  # a plain float, which can be saved
