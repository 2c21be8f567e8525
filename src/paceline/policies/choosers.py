"""Choosers: the number of results that a step waits for, if it changes during training.

More results reduce a step's noise only if each adds its own samples, as in
`Gather(k=…, work=Work(samples=32))`. Otherwise each of k results is 1/k of a constant batch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, fsum, inf, isfinite, log
from typing import Literal, Protocol

from paceline.core.protocol import Event, Stepped, View, Want
from paceline.core.schema import Schema


class Chooser(Protocol):
    """A number that may change from step to step: a schedule, a test, a plan."""

    @property
    def wants(self) -> frozenset[Want]: ...
    @property
    def most(self) -> int:
        """The largest number it may ever choose."""

    def choose(self, view: View) -> int:
        """Return the number of shares that the step to `view.version + 1` needs."""

    def learn(self, view: View, event: Event) -> None: ...


# --- schedules fixed in advance ------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """Waits for `plan[start]` results from each start on; `unit` is that of the starts."""

    plan: Mapping[int, int] | Mapping[float, int]
    unit: Literal["steps", "seconds"] = "steps"
    _starts: tuple[float, ...] = field(default=(), init=False, repr=False)
    _sizes: tuple[int, ...] = field(default=(), init=False, repr=False)
    schema = Schema("schedule", 1)

    def __post_init__(self) -> None:
        if self.unit not in ("steps", "seconds"):
            raise ValueError(f"unit={self.unit!r}: a schedule counts 'steps' or 'seconds'")
        plan = dict(sorted(self.plan.items()))
        if 0 not in plan:
            raise ValueError(f"plan={self.plan!r} does not say how to begin; give a k from 0 on")
        for start, k in plan.items():
            if not (isfinite(start) and start >= 0):
                raise ValueError(
                    f"plan={self.plan!r} has a k from {start!r} on; use {self.unit} >= 0"
                )
            if not isinstance(k, int) or k < 1:
                raise ValueError(f"plan={self.plan!r} has k={k!r}; use whole numbers k >= 1")
        for one, other in pairwise(plan.values()):
            if other < one:
                raise ValueError(
                    f"plan={self.plan!r} goes from k={one} down to k={other}; k may only grow"
                )
        object.__setattr__(self, "plan", plan)
        object.__setattr__(self, "_starts", tuple(plan))
        object.__setattr__(self, "_sizes", tuple(plan.values()))

    @property
    def wants(self) -> frozenset[Want]:
        return frozenset()

    @property
    def most(self) -> int:
        return self._sizes[-1]

    def choose(self, view: View) -> int:
        at = view.version if self.unit == "steps" else view.now
        return self._sizes[bisect_right(self._starts, at) - 1]

    def learn(self, view: View, event: Event) -> None:
        pass


def switching_times(
    seconds: Sequence[float],
    lr: float,
    smoothness: float,
    convexity: float,
    variance: float,
    samples: int,
    gap: float,
) -> list[tuple[float, float]]:
    """Return for k = 1, 2, … the time to go from k to k + 1 results and the error bound then.

    seconds: expected seconds of a step that waits for 1, 2, … results.
    smoothness, convexity: L and c of the loss.
    variance: the variance of the gradient of one sample; each result has `samples` of them.
    gap: the distance of the loss from its minimum at the start.

    After j steps the error is at most a_k + (1 - lr c)^j (gap - a_k), a_k = lr L variance /
    (2 c k samples). Switching times that minimize this bound at every time: Kas Hanna, Bitar,
    Parag, Dasari, El Rouayheb (2020, arXiv 2002.11005).
    """
    _check_bound(seconds, lr, smoothness, convexity, variance, samples, gap)
    # Derived here, not quoted. With k the bound falls at a speed proportional to
    # (error - a_k) / seconds_k, so k + 1 is better as soon as its speed is larger. Both speeds are
    # equal at error = a_k + seconds_k (a_k - a_(k+1)) / (seconds_(k+1) - seconds_k).
    floor = lr * smoothness * variance / (2 * convexity * samples)  # a_k is floor / k
    now, error = 0.0, gap
    times = []
    for k, (one, other) in enumerate(pairwise(seconds), start=1):
        excess = one * (floor / k - floor / (k + 1)) / (other - one) if other > one else inf
        if error - floor / k > excess:  # otherwise k is too slow already: switch at once
            now += one / -log(1 - lr * convexity) * log((error - floor / k) / excess)
            error = floor / k + excess
        times.append((float(now), float(error)))  # NumPy's own floats cannot be saved
    return times


def bound_optimal(
    seconds: Sequence[float],
    lr: float,
    smoothness: float,
    convexity: float,
    variance: float,
    samples: int,
    gap: float,
) -> Schedule:
    """Return the schedule with the `switching_times` of these arguments."""
    times = switching_times(seconds, lr, smoothness, convexity, variance, samples, gap)
    return Schedule({0.0: 1} | {at: k for k, (at, _) in enumerate(times, start=2)}, "seconds")


def _check_bound(seconds: Sequence[float], lr: float, *others: float) -> None:
    if not len(seconds) or not all(isfinite(each) and each > 0 for each in seconds):
        raise ValueError(
            f"seconds={seconds!r}: give the finite seconds > 0 of a step with 1, 2, … results"
        )
    names = ("smoothness", "convexity", "variance", "samples", "gap")
    given = dict(zip(("lr", *names), (lr, *others), strict=True))
    for name, value in given.items():
        if not (isfinite(value) and value > 0):
            raise ValueError(f"{name}={value!r}: the bound needs it finite and > 0")
    if lr * given["convexity"] >= 1:
        raise ValueError(
            f"lr={lr} with convexity={given['convexity']}: the bound needs lr * convexity < 1; "
            f"use lr < {1 / given['convexity']:g}"
        )


# --- choosers that use the statistics of steps ---------------------------------------------------


class _Grows:
    """The common part of both tests: k, and the last step that had another k."""

    first: int
    last: int
    lag: int
    _k: int
    _before: int

    @property
    def most(self) -> int:
        return self.last

    def choose(self, view: View) -> int:
        return self._k

    @property
    def _product(self) -> Want:
        return "dot" if self.lag == 1 else ("dot", self.lag)

    def _begin(self) -> None:
        if not 1 <= self.first <= self.last:
            raise ValueError(f"first={self.first}, last={self.last}: use 1 <= first <= last")
        if self.lag < 1:
            raise ValueError(f"lag={self.lag}: a product is with a step before; use lag >= 1")
        self._k = self.first

    def _is_of_k(self, event: Stepped) -> bool:
        """Return whether the event has an inner product of two steps that both had this k.

        The very first step has no step before it, so its product, 0.0, does not count.
        """
        return "dot" in event.stats and event.version - self.lag > self._before

    def _grow(self, view: View, k: float) -> None:
        self._k = int(min(k, self.last))
        self._before = view.version + 1  # the step in progress still has the old k


@dataclass
class GrowWhenStationary(_Grows):
    """Waits for `step` more results whenever training has become stationary.

    Far from the optimum, successive steps point the same way. In the stationary phase noise moves
    the model back and forth, and the inner product of steps is negative more often than not. A
    counter goes up by 1 with each negative product and down by 1 with each other one, not below 0.
    Once it is above `threshold`, more than `burn_in` steps after the last change, k grows and the
    counter restarts. Pflug (1990); for k as in Kas Hanna et al. (2020, arXiv 2002.11005).

    With a learning rate lr and a curvature h the product is negative with probability 1/2 +
    asin(lr h / 2) / pi in one dimension. So `threshold` should be several times 1 / (lr h).
    The bound at 0 is that of a CUSUM test (Page, 1954). Without it, a long descent would take the
    counter far below 0, from where it rises slowly.

    lag: the steps between the two factors. Under a staleness of d versions it must be d + 1. At
        every shorter lag the product stays positive in the stationary phase, and k never grows.
    """

    first: int
    last: int
    step: int = 1
    threshold: int = 10  # our own values, also burn_in: those of the paper were not available
    burn_in: int = 100
    lag: int = 1
    _k: int = field(default=0, init=False, repr=False)
    _before: int = field(default=0, init=False, repr=False)  # the last step with another k
    _count: int = field(default=0, init=False, repr=False)
    schema = Schema(
        "grow_when_stationary", 1, {"k": "_k", "changed_at": "_before", "count": "_count"}
    )

    def __post_init__(self) -> None:
        self._begin()
        if self.step < 1:
            raise ValueError(f"step={self.step}: k may only grow; use step >= 1")
        if self.threshold < 0 or self.burn_in < 0:
            raise ValueError(
                f"threshold={self.threshold}, burn_in={self.burn_in}: counts; use both >= 0"
            )

    @property
    def wants(self) -> frozenset[Want]:
        return frozenset({self._product})

    def learn(self, view: View, event: Event) -> None:
        if not isinstance(event, Stepped) or not self._is_of_k(event) or self._k == self.last:
            return
        self._count = max(self._count + (1 if event.stats["dot"] < 0 else -1), 0)
        if self._count > self.threshold and event.version - self._before > self.burn_in:
            self._grow(view, self._k + self.step)
            self._count = 0


@dataclass
class GrowOnNoise(_Grows):
    """Waits for more results once a step's noise is above `noise` times its signal.

    Steps on independent samples share only the gradient G: E<g_j, g_(j - lag)> is about |G|^2, and
    E|g_j|^2 is |G|^2 + V / k. The last `memory` products give the means of both. If
    V / k > noise |G|^2, k grows to the value at which both sides would be equal, at most twofold;
    then the means restart. This is the norm test of Byrd, Chin, Nocedal, Wu (2012) and
    Bollapragada, Byrd, Nocedal (2018, arXiv 1710.11258), without gradients of single samples.

    lag: as in `GrowWhenStationary`; under a staleness of d versions use d + 1.
    """

    first: int
    last: int
    noise: float = 1.0
    memory: int = 20
    lag: int = 1
    _k: int = field(default=0, init=False, repr=False)
    _before: int = field(default=0, init=False, repr=False)  # the last step with another k
    _seen: list[tuple[float, float]] = field(default_factory=list, init=False, repr=False)
    schema = Schema("grow_on_noise", 1, {"k": "_k", "changed_at": "_before", "products": "_seen"})

    def __post_init__(self) -> None:
        self._begin()
        if not (isfinite(self.noise) and self.noise > 0):
            raise ValueError(f"noise={self.noise}: noise over signal; use a finite noise > 0")
        if self.memory < 1:
            raise ValueError(f"memory={self.memory}: an average is of products; use memory >= 1")

    @property
    def wants(self) -> frozenset[Want]:
        return frozenset({"norm", self._product})

    def learn(self, view: View, event: Event) -> None:
        if not isinstance(event, Stepped) or not self._is_of_k(event) or self._k == self.last:
            return
        self._seen.append((event.stats["dot"], event.stats["norm"] ** 2))
        if len(self._seen) < self.memory:
            return
        signal, square = (fsum(column) / self.memory for column in zip(*self._seen, strict=True))
        noise = square - signal
        if noise > self.noise * signal:
            ratio = noise / (self.noise * signal) if signal > 0 else inf
            self._grow(view, ceil(self._k * min(ratio, 2.0)))
            self._seen.clear()
        else:
            del self._seen[0]
