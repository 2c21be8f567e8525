"""Models of response time: how many seconds a worker takes for one task.

A model is a frozen value without state. It keeps state between two samples in `memory`, a dict of
floats that the engine holds for each worker and saves with the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, isfinite
from numbers import Real
from typing import Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class Delay(Protocol):
    """A model of response time; `memory` belongs to one worker, whose `now` never decreases."""

    @property
    def mean(self) -> float:
        """The expected seconds; `inf` if the expectation is not finite."""

    def sample(self, rng: np.random.Generator, now: float, memory: dict[str, float]) -> float:
        """Draw the seconds of a task that starts at `now`."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Takes the same number of seconds every time."""

    seconds: float

    def __post_init__(self) -> None:
        settle(self, "seconds", ">= 0", "give the seconds that every task takes")

    @property
    def mean(self) -> float:
        return self.seconds

    def sample(self, rng: np.random.Generator, now: float, memory: dict[str, float]) -> float:
        return self.seconds


@dataclass(frozen=True, slots=True)
class Exponential:
    """A memoryless time: P(seconds > t) = exp(-t / mean)."""

    mean: float

    def __post_init__(self) -> None:
        settle(self, "mean", "> 0", "use Fixed(0.0) for a worker that takes no time")

    def sample(self, rng: np.random.Generator, now: float, memory: dict[str, float]) -> float:
        return rng.exponential(self.mean)


@dataclass(frozen=True, slots=True)
class ShiftedExponential:
    """Takes at least `shift` seconds, and an exponential time of mean `scale` on top."""

    shift: float
    scale: float

    def __post_init__(self) -> None:
        settle(self, "shift", ">= 0", "use shift=0.0 for no least time")
        settle(self, "scale", "> 0", "use Fixed(shift) for no random part")

    @property
    def mean(self) -> float:
        return self.shift + self.scale

    def sample(self, rng: np.random.Generator, now: float, memory: dict[str, float]) -> float:
        return self.shift + rng.exponential(self.scale)


@dataclass(frozen=True, slots=True)
class Erlang:
    """Sums `stages` independent exponential times; their sum has mean `mean`."""

    stages: int
    mean: float

    def __post_init__(self) -> None:
        if not isinstance(self.stages, int | np.integer) or self.stages < 1:
            raise ValueError(
                f"Erlang got stages={self.stages!r}, which must be an integer >= 1; "
                f"use stages=1 for the exponential, more stages for less spread"
            )
        object.__setattr__(self, "stages", int(self.stages))
        settle(self, "mean", "> 0", "use Fixed(0.0) for a worker that takes no time")

    def sample(self, rng: np.random.Generator, now: float, memory: dict[str, float]) -> float:
        return rng.standard_gamma(self.stages) * self.mean / self.stages


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A log-normal time: median * exp(sigma * Z) with a standard normal Z."""

    median: float
    sigma: float

    def __post_init__(self) -> None:
        settle(self, "median", "> 0", "use Fixed(0.0) for a worker that takes no time")
        # A float holds exp(709) at most: this leaves room for the mean and for every sample.
        settle(self, "sigma", ">= 0", "sigma=1.0 is already a heavy spread", most=30.0)

    @property
    def mean(self) -> float:
        return self.median * exp(self.sigma**2 / 2)

    def sample(self, rng: np.random.Generator, now: float, memory: dict[str, float]) -> float:
        return self.median * exp(self.sigma * rng.standard_normal())


@dataclass(frozen=True, slots=True)
class Pareto:
    """A time with a heavy tail: P(seconds > t) = (minimum / t)**alpha for t >= minimum."""

    minimum: float
    alpha: float

    def __post_init__(self) -> None:
        settle(self, "minimum", "> 0", "give the least seconds that a task takes")
        # Below this a sample can exceed the largest float.
        settle(self, "alpha", ">= 0.1", "alpha <= 1 already has no finite mean")

    @property
    def mean(self) -> float:
        return self.minimum * self.alpha / (self.alpha - 1) if self.alpha > 1 else inf

    def sample(self, rng: np.random.Generator, now: float, memory: dict[str, float]) -> float:
        return self.minimum * exp(rng.standard_exponential() / self.alpha)


@dataclass(frozen=True, slots=True)
class Trace:
    """Replays recorded seconds in order, and starts over at the end."""

    seconds: Sequence[float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", tuple(float(value) for value in self.seconds))
        if not self.seconds:
            raise ValueError("Trace got no seconds; give at least one recorded value")
        for position, value in enumerate(self.seconds):
            if not (isfinite(value) and value >= 0):
                raise ValueError(
                    f"Trace got seconds[{position}]={value!r}, which must be finite and >= 0; "
                    f"drop the tasks that never finished"
                )

    @property
    def mean(self) -> float:
        return sum(self.seconds) / len(self.seconds)

    def sample(self, rng: np.random.Generator, now: float, memory: dict[str, float]) -> float:
        position = int(memory.get("position", 0.0)) % len(self.seconds)
        memory["position"] = position + 1.0
        return self.seconds[position]


def settle(model: object, name: str, bound: str, hint: str, most: float = inf) -> None:
    """Store a field as a float; refuse it unless finite, within `bound` (`"> 0"`) and <= `most`."""
    value: float = getattr(model, name)
    if not isinstance(value, Real):
        raise ValueError(f"{type(model).__name__} got {name}={value!r}, which is not a number")
    comparison, least = bound.split()
    above = value > float(least) or (comparison == ">=" and value == float(least))
    if not (isfinite(value) and above and value <= most):
        limit = "" if most == inf else f" and <= {most:g}"
        raise ValueError(
            f"{type(model).__name__} got {name}={value!r}, which must be finite and "
            f"{bound}{limit}; {hint}"
        )
    object.__setattr__(model, name, float(value))
