"""Models of response time: how many seconds a worker takes for one task.

A model is a frozen value without state of its own. What it must remember between two samples it
keeps in `memory`, a dict of floats that the engine holds for each worker and saves with the run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import exp, inf, isfinite
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np


@runtime_checkable
class Delay(Protocol):
    """A model of response time; `memory` belongs to one worker, whose `now` never goes back."""

    @property
    def mean(self) -> float:
        """The expected seconds, `inf` where no finite expectation exists."""

    def sample(self, rng: np.random.Generator, now: float, memory: dict[str, float]) -> float:
        """Draw the seconds of a task that starts at `now`."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Takes the same number of seconds every time."""

    seconds: float

    def __post_init__(self) -> None:
        _settle(self, "seconds", ">= 0", "give the seconds that every task takes")

    @property
    def mean(self) -> float:
        return self.seconds

    def sample(self, rng: np.random.Generator, now: float, memory: dict[str, float]) -> float:
        return self.seconds


@dataclass(frozen=True, slots=True)
class Exponential:
    """Is memoryless: P(seconds > t) = exp(-t / mean)."""

    mean: float

    def __post_init__(self) -> None:
        _settle(self, "mean", "> 0", "use Fixed(0.0) for a worker that takes no time")

    def sample(self, rng: np.random.Generator, now: float, memory: dict[str, float]) -> float:
        return rng.exponential(self.mean)


@dataclass(frozen=True, slots=True)
class ShiftedExponential:
    """Takes at least `shift` seconds, and an exponential time of mean `scale` on top."""

    shift: float
    scale: float

    def __post_init__(self) -> None:
        _settle(self, "shift", ">= 0", "use shift=0.0 for no least time")
        _settle(self, "scale", "> 0", "use Fixed(shift) for no random part")

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
        _settle(self, "mean", "> 0", "use Fixed(0.0) for a worker that takes no time")

    def sample(self, rng: np.random.Generator, now: float, memory: dict[str, float]) -> float:
        return rng.standard_gamma(self.stages) * self.mean / self.stages


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Is median * exp(sigma * Z) with a standard normal Z."""

    median: float
    sigma: float

    def __post_init__(self) -> None:
        _settle(self, "median", "> 0", "use Fixed(0.0) for a worker that takes no time")
        # A float holds exp(709) at most: this leaves room for the mean and for every sample.
        _settle(self, "sigma", ">= 0", "sigma=1.0 is already a heavy spread", most=30.0)

    @property
    def mean(self) -> float:
        return self.median * exp(self.sigma**2 / 2)

    def sample(self, rng: np.random.Generator, now: float, memory: dict[str, float]) -> float:
        return self.median * exp(self.sigma * rng.standard_normal())


@dataclass(frozen=True, slots=True)
class Pareto:
    """Has a heavy tail: P(seconds > t) = (minimum / t)**alpha for t >= minimum."""

    minimum: float
    alpha: float

    def __post_init__(self) -> None:
        _settle(self, "minimum", "> 0", "give the least seconds that a task takes")
        # Below this a sample can exceed the largest float.
        _settle(self, "alpha", ">= 0.1", "alpha <= 1 already has no finite mean")

    @property
    def mean(self) -> float:
        return self.minimum * self.alpha / (self.alpha - 1) if self.alpha > 1 else inf

    def sample(self, rng: np.random.Generator, now: float, memory: dict[str, float]) -> float:
        return self.minimum * exp(rng.standard_exponential() / self.alpha)


@dataclass(frozen=True, slots=True)
class Bursts:
    """Alternates between two models in time, staying exponential times of the given mean seconds.

    A task keeps the model of its start. `mean` is that of a task which starts at a random moment;
    back-to-back tasks start more often while they are short, so their average is lower.
    """

    fast: Delay
    slow: Delay
    fast_for: float
    slow_for: float

    def __post_init__(self) -> None:
        _check_models(self, {"fast": self.fast, "slow": self.slow})
        _settle(self, "fast_for", "> 0", "use the slow model alone if it is never fast")
        _settle(self, "slow_for", "> 0", "use the fast model alone if it is never slow")

    @property
    def mean(self) -> float:
        share = self.slow_for / (self.fast_for + self.slow_for)
        return (1 - share) * self.fast.mean + share * self.slow.mean

    def sample(self, rng: np.random.Generator, now: float, memory: dict[str, float]) -> float:
        until = memory.get("until", -inf)
        if now >= until:
            self._move(rng, now, until, memory)
        if memory["slow"]:
            return _sample_nested(self.slow, "slow.", rng, now, memory)
        return _sample_nested(self.fast, "fast.", rng, now, memory)

    def _move(
        self, rng: np.random.Generator, now: float, until: float, memory: dict[str, float]
    ) -> None:
        """Bring the state from its switch at `until` to `now`."""
        both = self.fast_for + self.slow_for
        behind = now - until
        # The start state weighs exp(-behind / relaxation): after 40 of these no float can tell,
        # and a fresh stationary draw spares walking through a long idle time switch by switch.
        if behind > 40 * self.fast_for * self.slow_for / both:
            slow = rng.random() < self.slow_for / both
            behind = -rng.exponential(self.slow_for if slow else self.fast_for)
        else:
            slow = bool(memory["slow"])
        while behind >= 0:
            slow = not slow
            behind -= rng.exponential(self.slow_for if slow else self.fast_for)
        memory["slow"] = float(slow)
        memory["until"] = now - behind


@dataclass(frozen=True, slots=True)
class Trace:
    """Replays recorded seconds in their order, and begins again at the end."""

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


@dataclass(frozen=True, slots=True)
class Mixture:
    """Draws one of several models for every sample, in proportion to their weights."""

    models: Sequence[Delay]
    weights: Sequence[float]
    _cumulative: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "models", tuple(self.models))
        object.__setattr__(self, "weights", tuple(float(weight) for weight in self.weights))
        _check_models(self, {f"models[{at}]": model for at, model in enumerate(self.models)})
        legal = all(isfinite(weight) and weight >= 0 for weight in self.weights)
        if len(self.weights) != len(self.models) or not legal or not 0 < sum(self.weights) < inf:
            raise ValueError(
                f"Mixture got weights={self.weights} for {len(self.models)} models; give each "
                f"model one finite weight >= 0, not all of them 0"
            )
        object.__setattr__(self, "_cumulative", tuple(accumulate(self.weights)))

    @property
    def mean(self) -> float:
        pairs = zip(self.models, self.weights, strict=True)
        # A model that is never drawn may have an infinite mean, and 0 * inf is not a number.
        return sum(model.mean * weight for model, weight in pairs if weight) / self._cumulative[-1]

    def sample(self, rng: np.random.Generator, now: float, memory: dict[str, float]) -> float:
        drawn = bisect_right(self._cumulative, rng.random() * self._cumulative[-1])
        return _sample_nested(self.models[drawn], f"{drawn}.", rng, now, memory)


@dataclass(frozen=True, slots=True)
class Scaled:
    """Multiplies the seconds of another model, for instance for a slower machine."""

    model: Delay
    factor: float

    def __post_init__(self) -> None:
        _check_models(self, {"model": self.model})
        _settle(self, "factor", "> 0", "use Fixed(0.0) for a worker that takes no time")

    @property
    def mean(self) -> float:
        return self.factor * self.model.mean

    def sample(self, rng: np.random.Generator, now: float, memory: dict[str, float]) -> float:
        # It remembers nothing itself, so the whole memory is the model's.
        return self.factor * self.model.sample(rng, now, memory)


@dataclass(frozen=True, slots=True)
class PerWorker:
    """Gives every worker its own model: by name, or by turns in the order of a sequence."""

    models: Mapping[str, Delay] | Sequence[Delay]

    def __post_init__(self) -> None:
        if isinstance(self.models, Mapping):
            object.__setattr__(self, "models", dict(self.models))
            _check_models(self, {f"models[{name!r}]": m for name, m in self.models.items()})
        else:
            object.__setattr__(self, "models", tuple(self.models))
            _check_models(self, {f"models[{at}]": m for at, m in enumerate(self.models)})

    def for_worker(self, worker: str, index: int) -> Delay:
        """Return the model of the worker with this name, the `index`-th of its engine."""
        if not isinstance(self.models, Mapping):
            return self.models[index % len(self.models)]
        if worker not in self.models:
            raise ValueError(
                f"worker {worker!r} has no delay; there are delays for {sorted(self.models)}; "
                f"add one for it, or give a sequence, which goes round"
            )
        return self.models[worker]


Delays: TypeAlias = Delay | PerWorker | Sequence[Delay] | Mapping[str, Delay]
"""What a user may say about the response times of all workers."""


def resolve(delays: Delays, worker: str, index: int) -> Delay:
    """Return the model of one worker, the `index`-th of its engine."""
    match delays:
        case PerWorker():
            return delays.for_worker(worker, index)
        case Delay():
            return delays
        case Mapping() | Sequence():
            return PerWorker(delays).for_worker(worker, index)
    raise TypeError(
        f"delays={delays!r} is not a Delay, a PerWorker, a sequence or a mapping of Delays; "
        f"wrap plain seconds as Fixed(seconds)"
    )


def _sample_nested(
    model: Delay, prefix: str, rng: np.random.Generator, now: float, memory: dict[str, float]
) -> float:
    """Sample a model whose keys stand under a prefix in `memory`, apart from its neighbors'."""
    before = {key[len(prefix) :]: value for key, value in memory.items() if key.startswith(prefix)}
    after = dict(before)
    seconds = model.sample(rng, now, after)
    if after != before:
        for key in before.keys() - after.keys():
            del memory[prefix + key]
        memory.update({prefix + key: value for key, value in after.items()})
    return seconds


def _settle(model: object, name: str, bound: str, hint: str, most: float = inf) -> None:
    """Store a field as a float once it is finite and within `bound` (`"> 0"`) and `most`."""
    value: float = getattr(model, name)
    comparison, least = bound.split()
    above = value > float(least) or (comparison == ">=" and value == float(least))
    if not (isfinite(value) and above and value <= most):
        limit = "" if most == inf else f" and <= {most:g}"
        raise ValueError(
            f"{type(model).__name__} got {name}={value!r}, which must be finite and "
            f"{bound}{limit}; {hint}"
        )
    object.__setattr__(model, name, float(value))


def _check_models(owner: object, models: Mapping[str, Delay]) -> None:
    """Refuse an empty collection, and whatever is not a model."""
    if not models:
        raise ValueError(f"{type(owner).__name__} got no models; give at least one Delay")
    for name, model in models.items():
        if not isinstance(model, Delay):
            raise TypeError(
                f"{type(owner).__name__} got {name}={model!r}, which is not a Delay; "
                f"wrap plain seconds as Fixed(seconds)"
            )
