"""Models made of models: workers whose speed changes over time, or differs between workers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf, isfinite
from typing import TypeAlias

import numpy as np

from paceline.delays.models import Delay, settle


@dataclass(frozen=True, slots=True)
class Bursts:
    """Alternates between two models, each for exponential times of the given mean seconds.

    A task keeps the model of its start. `mean` is that of a task that starts at a random moment.
    Back-to-back tasks start more often in the fast phase, so their average is lower.
    """

    fast: Delay
    slow: Delay
    fast_for: float
    slow_for: float

    def __post_init__(self) -> None:
        _check_models(self, {"fast": self.fast, "slow": self.slow})
        settle(self, "fast_for", "> 0", "use the slow model alone if it is never fast")
        settle(self, "slow_for", "> 0", "use the fast model alone if it is never slow")

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
        # The old state has weight exp(-behind / relaxation), below float precision after 40
        # relaxation times. A stationary draw then avoids walking through every switch.
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
        # A model of weight 0 may have an infinite mean, and 0 * inf is NaN.
        return sum(model.mean * weight for model, weight in pairs if weight) / self._cumulative[-1]

    def sample(self, rng: np.random.Generator, now: float, memory: dict[str, float]) -> float:
        drawn = bisect_right(self._cumulative, rng.random() * self._cumulative[-1])
        return _sample_nested(self.models[drawn], f"{drawn}.", rng, now, memory)


@dataclass(frozen=True, slots=True)
class Scaled:
    """Multiplies the seconds of another model, such as for a slower machine."""

    model: Delay
    factor: float

    def __post_init__(self) -> None:
        _check_models(self, {"model": self.model})
        settle(self, "factor", "> 0", "use Fixed(0.0) for a worker that takes no time")

    @property
    def mean(self) -> float:
        return self.factor * self.model.mean

    def sample(self, rng: np.random.Generator, now: float, memory: dict[str, float]) -> float:
        # This class keeps no state, so the whole memory belongs to the model.
        return self.factor * self.model.sample(rng, now, memory)


@dataclass(frozen=True, slots=True)
class Changed:
    """Follows one model before the time `at` and another after it; `mean` is that of the first."""

    before: Delay
    after: Delay
    at: float

    def __post_init__(self) -> None:
        _check_models(self, {"before": self.before, "after": self.after})
        settle(self, "at", "> 0", "use the second model alone if it is never the first")

    @property
    def mean(self) -> float:
        return self.before.mean

    def sample(self, rng: np.random.Generator, now: float, memory: dict[str, float]) -> float:
        model, prefix = (self.before, "before.") if now < self.at else (self.after, "after.")
        return _sample_nested(model, prefix, rng, now, memory)


@dataclass(frozen=True, slots=True)
class PerWorker:
    """Gives each worker its own model: by name, or by position in a sequence that repeats."""

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
"""The forms in which a user may give the response times of all workers."""


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
    """Sample a model whose keys in `memory` have a prefix, so that nested models do not collide."""
    before = {key[len(prefix) :]: value for key, value in memory.items() if key.startswith(prefix)}
    after = dict(before)
    seconds = model.sample(rng, now, after)
    if after != before:
        for key in before.keys() - after.keys():
            del memory[prefix + key]
        memory.update({prefix + key: value for key, value in after.items()})
    return seconds


def _check_models(owner: object, models: Mapping[str, Delay]) -> None:
    """Refuse an empty collection, and any value that is not a model."""
    if not models:
        raise ValueError(f"{type(owner).__name__} got no models; give at least one Delay")
    for name, model in models.items():
        if not isinstance(model, Delay):
            raise TypeError(
                f"{type(owner).__name__} got {name}={model!r}, which is not a Delay; "
                f"wrap plain seconds as Fixed(seconds)"
            )
