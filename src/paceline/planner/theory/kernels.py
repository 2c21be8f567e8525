"""Delay kernels: the law of the seconds between reading the model and applying the gradient.

A kernel is given by its Laplace transform, K(s) = E exp(-s X), and by E X exp(-s X) and
E X² exp(-s X). The delay of an arriving gradient is the worker's whole response time X, and not
its remaining part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import comb, inf, isfinite, pi
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from scipy.special import spherical_in

from paceline.delays.models import settle

Complex: TypeAlias = NDArray[np.complex128]
Real: TypeAlias = NDArray[np.float64]

_BLOCK = 2**18  # limit of numbers in memory during one evaluation
_CIRCLE = 16  # points of the circle for derivatives, whose error is below 4**-16


@runtime_checkable
class Kernel(Protocol):
    """The law of a delay."""

    @property
    def mean(self) -> float:
        """The expected seconds."""

    @property
    def abscissa(self) -> float:
        """The transform converges to the right of this number; 0 for a heavy tail, else below 0."""

    def transform(self, s: Complex, order: int = 0) -> Complex:
        """Return E X^order exp(-s X) for orders 0, 1 and 2, right of the abscissa."""


@dataclass(frozen=True, slots=True)
class Atoms:
    """One of finitely many delays, with weights that add up to 1."""

    seconds: Sequence[float]
    weights: Sequence[float] = ()
    _at: Real = field(init=False, repr=False, compare=False)
    _share: Real = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        at = np.asarray(self.seconds, dtype=np.float64)
        share = np.asarray(self.weights if len(self.weights) else np.ones(at.size), np.float64)
        _check_numbers(self, "seconds", at)
        _check_weights(self, share, at.size)
        share = share / share.sum()
        at, share = at[share > 0], share[share > 0]
        object.__setattr__(self, "seconds", tuple(at.tolist()))
        object.__setattr__(self, "weights", tuple(share.tolist()))
        object.__setattr__(self, "_at", at)
        object.__setattr__(self, "_share", share)

    @property
    def mean(self) -> float:
        return float(self._at @ self._share)

    @property
    def abscissa(self) -> float:
        return -inf

    def transform(self, s: Complex, order: int = 0) -> Complex:
        flat = np.asarray(s, dtype=np.complex128).ravel()
        weights = self._share * self._at**order
        found = np.empty_like(flat)
        rows = max(_BLOCK // self._at.size, 1)
        for first in range(0, flat.size, rows):
            block = flat[first : first + rows]
            found[first : first + rows] = np.exp(-np.multiply.outer(block, self._at)) @ weights
        return found.reshape(np.shape(s))


@dataclass(frozen=True, slots=True)
class Gamma:
    """A gamma law: exponential for one stage, Erlang for several, with less spread for more."""

    stages: float
    mean: float

    def __post_init__(self) -> None:
        settle(self, "stages", "> 0", "use 1 for the exponential")
        settle(self, "mean", "> 0", "use fixed(0.0) for no delay")

    @property
    def abscissa(self) -> float:
        return -self.stages / self.mean

    def transform(self, s: Complex, order: int = 0) -> Complex:
        scale = self.mean / self.stages
        factor = float(np.prod([scale * (self.stages + i) for i in range(order)]))
        return np.asarray(factor * (1 + scale * np.asarray(s)) ** -(self.stages + order))


@dataclass(frozen=True, slots=True)
class Uniform:
    """Uniform between two numbers of seconds."""

    least: float
    most: float

    def __post_init__(self) -> None:
        settle(self, "least", ">= 0", "give the shortest delay")
        settle(self, "most", f"> {self.least!r}", "use fixed(seconds) for a single delay")

    @property
    def mean(self) -> float:
        return (self.least + self.most) / 2

    @property
    def abscissa(self) -> float:
        return -inf

    def transform(self, s: Complex, order: int = 0) -> Complex:
        middle, half = self.mean, (self.most - self.least) / 2
        values = _sinhc(-half * np.asarray(s, dtype=np.complex128))
        terms = (
            comb(order, i) * middle ** (order - i) * half**i * values[i] for i in range(order + 1)
        )
        return np.asarray(np.exp(-middle * np.asarray(s)) * sum(terms))


@dataclass(frozen=True, slots=True)
class Shifted:
    """Another kernel, delayed by a fixed number of seconds."""

    kernel: Kernel
    seconds: float

    def __post_init__(self) -> None:
        settle(self, "seconds", ">= 0", "a gradient cannot arrive before it was begun")

    @property
    def mean(self) -> float:
        return self.kernel.mean + self.seconds

    @property
    def abscissa(self) -> float:
        return self.kernel.abscissa

    def transform(self, s: Complex, order: int = 0) -> Complex:
        terms = (
            comb(order, i) * self.seconds ** (order - i) * self.kernel.transform(s, i)
            for i in range(order + 1)
        )
        return np.asarray(np.exp(-self.seconds * np.asarray(s)) * sum(terms))


@dataclass(frozen=True, slots=True)
class Blend:
    """A mixture of several kernels, with weights that add up to 1."""

    kernels: Sequence[Kernel]
    weights: Sequence[float]

    def __post_init__(self) -> None:
        share = np.asarray(self.weights, dtype=np.float64)
        _check_weights(self, share, len(self.kernels))
        kept = [kernel for kernel, weight in zip(self.kernels, share, strict=True) if weight > 0]
        object.__setattr__(self, "kernels", tuple(kept))
        object.__setattr__(self, "weights", tuple((share[share > 0] / share.sum()).tolist()))

    @property
    def mean(self) -> float:
        return sum(w * kernel.mean for kernel, w in zip(self.kernels, self.weights, strict=True))

    @property
    def abscissa(self) -> float:
        return max(kernel.abscissa for kernel in self.kernels)

    def transform(self, s: Complex, order: int = 0) -> Complex:
        pairs = zip(self.kernels, self.weights, strict=True)
        return np.asarray(sum(weight * kernel.transform(s, order) for kernel, weight in pairs))


@dataclass(frozen=True, slots=True)
class Laplace:
    """A kernel given by its Laplace transform alone, analytic right of an abscissa below 0."""

    function: Callable[[Complex], Complex]
    mean: float
    abscissa: float = -inf

    def __post_init__(self) -> None:
        settle(self, "mean", "> 0", "use fixed(0.0) for no delay")
        if not self.abscissa < 0:
            raise ValueError(
                f"Laplace got abscissa={self.abscissa!r}, which must be < 0, where the transform "
                "has its first pole; for a heavy tail use measured(seconds)"
            )

    def transform(self, s: Complex, order: int = 0) -> Complex:
        s = np.asarray(s, dtype=np.complex128)
        if order == 0:
            return np.asarray(self.function(s), dtype=np.complex128)
        # Cauchy's integral: the mean over a circle is exact except for high powers of the radius.
        radius = np.minimum(0.25 / self.mean, (s.real - self.abscissa) / 4)
        turns = np.exp(2j * pi * np.arange(_CIRCLE) / _CIRCLE)
        around = self.function(s[..., None] + radius[..., None] * turns)
        return np.asarray(order * (around @ turns**-order) / _CIRCLE * (-1 / radius) ** order)


def fixed(seconds: float) -> Atoms:
    """Return the kernel of a constant delay."""
    return Atoms((seconds,))


def exponential(mean: float) -> Gamma:
    """Return the memoryless kernel."""
    return Gamma(1, mean)


def erlang(stages: int, mean: float) -> Gamma:
    """Return the kernel of a sum of exponential stages, whose total has this mean."""
    return Gamma(stages, mean)


def uniform(least: float, most: float) -> Uniform:
    """Return the kernel of uniformly distributed delays."""
    return Uniform(least, most)


def shifted_exponential(shift: float, scale: float) -> Shifted:
    """Return the kernel of a least time and an exponential time of mean `scale` on top."""
    return Shifted(Gamma(1, scale), shift)


def _sinhc(z: Complex) -> tuple[Complex, Complex, Complex]:
    """Return sinh(z)/z and its first two derivatives."""
    value, first, third = (spherical_in(n, z) for n in range(3))  # DLMF 10.49.8 and 10.51.5
    return value, first, (value + 2 * third) / 3


def _check_numbers(owner: object, name: str, numbers: Real) -> None:
    if numbers.ndim != 1 or not numbers.size:
        raise ValueError(f"{type(owner).__name__} got no {name}; give at least one number")
    for position, number in enumerate(numbers.tolist()):
        if not (isfinite(number) and number >= 0):
            raise ValueError(
                f"{type(owner).__name__} got {name}[{position}]={number!r}, which must be finite "
                "and >= 0; drop the tasks that never finished"
            )


def _check_weights(owner: object, weights: Real, count: int) -> None:
    legal = bool(np.all(np.isfinite(weights) & (weights >= 0))) and 0 < weights.sum() < inf
    if weights.shape != (count,) or not legal:
        raise ValueError(
            f"{type(owner).__name__} got weights={weights.tolist()} for {count} parts; give each "
            "one finite weight >= 0, not all of them 0"
        )
