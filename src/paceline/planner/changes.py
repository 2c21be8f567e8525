"""Whether workers, and the steps of a policy, take as long as their profile says.

Both tests ask for a factor of 1.3 or more that is no chance. Workers are compared one by one, by
their newest tasks. Steps show what single workers do not: laws of another shape, and slow tasks
that fall into the same step, or into different ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import StalledError
from paceline.core.policy import Policy
from paceline.core.protocol import WorkerId
from paceline.delays.empirical import PRECISION, autocorrelation, log_rank
from paceline.delays.fit import fit
from paceline.delays.laws import Flags, Vector
from paceline.delays.links import Link
from paceline.delays.models import Delay, Fixed
from paceline.planner.forecast.encoded import shrinkage
from paceline.planner.forecast.timeline import Timeline
from paceline.planner.measure.profile import Profile, WorkerProfile

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec

NEWEST = 20
"""Newest tasks of a worker, and newest steps, to compare with the profile."""
ENOUGH = 8
"""Tasks of a worker, or steps, needed for a comparison."""
SURE = 1e-4
"""The p-value below which a worker's speed, or the time of a step, has changed."""
CHANGED = 1.3
"""Factor of slowdown or speedup that is worth planning again."""
WARM = 3
"""First steps of a policy that are not compared, since they may take long on a real cluster."""

_DRAWN = 400  # samples of a worker's law, to compare its times with
_SEEDS = 4  # simulations of a policy's steps; their spread is that of the forecast


@dataclass
class Seen:
    """Times of a worker's newest tasks.

    seconds: of computing a sample; a lower bound for cancelled and running tasks.
    whole: whether each task finished.
    ways: seconds of a task's messages.
    """

    seconds: list[float]
    whole: list[bool]
    ways: list[float]

    def add(self, seconds: float, whole: bool, way: float | None) -> None:
        self.seconds = [*self.seconds, seconds][-NEWEST:]
        self.whole = [*self.whole, whole][-NEWEST:]
        if way is not None:
            self.ways = [*self.ways, way][-NEWEST:]

    @property
    def pace(self) -> float:
        """The likeliest mean of exponential times; the largest lower bound if no task has ended."""
        ended = sum(self.whole)
        return sum(self.seconds) / ended if ended else max(self.seconds)

    @property
    def tells_law(self) -> bool:
        """Whether there are enough tasks for a law, and not only lower bounds."""
        return len(self.seconds) >= ENOUGH and any(self.whole)

    def law(self, known: WorkerProfile) -> WorkerProfile:
        """Return a worker's profile with the law of these tasks.

        A worker that never ends a task is assumed to need the sum of all its times.
        """
        if not any(self.whole):
            return WorkerProfile(Fixed(sum(self.seconds)), known.link)
        law = fit(self.seconds, [not whole for whole in self.whole])
        return WorkerProfile(law.bounded, known.link, law.observations, law.autocorrelation)


# --- one worker ----------------------------------------------------------------------------------


def changed(
    known: WorkerProfile, seen: Seen, share: float, before: float, seed: int
) -> tuple[WorkerProfile | None, str]:
    """Return a worker's new profile and a text, or None if it has not changed.

    share: the samples of an equal share of the batch.
    before: seconds of a task's messages by the profile.
    """
    if len(seen.seconds) < ENOUGH:
        return None, ""
    usual = known.compute.mean
    times = seen.pace / usual if usual else inf if seen.pace else 1.0
    if not any(seen.whole):  # the true pace is slower still
        times = max(times, 1.0)
    new, link, told = known, known.link, []
    if not 1 / CHANGED < times < CHANGED and _differ(known, seen, share, seed):
        new = seen.law(known)
        told.append(f"takes {times:.2g} times as long")
    way = float(np.median(seen.ways or [0.0]))
    if len(seen.ways) >= ENOUGH and abs(way - before) > (CHANGED - 1) * (usual * share + before):
        link = Link(way / 2)
        if before > 0 and way > 0:
            slower = way / before
            old = known.link
            link = Link(old.latency * slower, old.down / slower, old.up / slower)
        told.append(f"needs {way:.2g} s for its messages instead of {before:.2g} s")
    return (replace(new, link=link) if told else None), " and ".join(told)


def _differ(known: WorkerProfile, seen: Seen, share: float, seed: int) -> bool:
    """Return whether a worker's times contradict its law; a fixed law allows no other times.

    The test is that of `drifted`, for tasks of which perhaps none has ended. The law stands for
    as many tasks as it was fitted to, at equally likely values.
    """
    if isinstance(known.compute, Fixed):
        return True
    drawn = _drawn(known.compute, share, seed)
    usual = _likely(drawn, known.observations or _DRAWN)
    newer = np.array(seen.seconds), np.array(seen.whole)
    return log_rank(_ended(usual), newer, known.autocorrelation) < SURE


def _drawn(law: Delay, share: float, seed: int) -> Vector:
    """Return seconds per sample, of tasks of an equal share one after the other."""
    rng, memory = np.random.Generator(np.random.PCG64([seed, 3])), dict[str, float]()
    drawn, now = np.empty(_DRAWN), 0.0
    for place in range(_DRAWN):
        drawn[place] = law.sample(rng, now, memory)
        now += share * float(drawn[place])
    return drawn


def _likely(values: Vector, most: int) -> Vector:
    """Return at most so many equally likely values of a sample."""
    size = min(most, values.size)
    places = ((np.arange(size) + 0.5) / size * values.size).astype(int)
    return np.asarray(np.sort(values)[places])


# --- the steps of a policy -----------------------------------------------------------------------


@dataclass
class Paced:
    """A policy in its first state on profiled workers, with the codec and seed of its run.

    Comparable are policies without stale gradients, whose steps do not depend on the loss.
    """

    policy: Policy
    profile: Profile
    codec: Codec | None
    seed: int

    @cached_property
    def early(self) -> list[float]:
        """Simulated seconds of the first steps; empty if they cannot be compared.

        A policy that learns which workers are fast takes longer at first.
        """
        return self._simulated(WARM)

    @cached_property
    def later(self) -> list[float]:
        """Simulated seconds of steps 20 to 40."""
        return self._simulated(NEWEST)

    def _simulated(self, first: int) -> list[float]:
        found: list[float] = []
        shrunk = shrinkage(self.codec, self.profile)[0]
        for place in range(0 if self.policy.wants else _SEEDS):
            timeline = Timeline(self.policy, self.profile, self.seed + place, shrunk)
            try:
                timeline.reach(first + NEWEST)
            except StalledError:
                return []
            if timeline.staleness:
                return []
            found += timeline.each[first:]
        return found

    def usual(self, age: int) -> list[float]:
        """Return what to compare the newest steps with, once the policy has taken `age` steps."""
        return self.later if age >= 2 * NEWEST else self.early

    def missed(self, seconds: Sequence[float], age: int) -> str:
        """Return in words how the newest steps differ from the forecast; "" if they do not.

        The forecast stands for no more steps than each worker had tasks when it was profiled.
        """
        if len(seconds) < ENOUGH or not (usual := np.array(self.usual(age))).size:
            return ""
        mean, now = float(usual.mean()), float(np.mean(seconds))
        if 1 / CHANGED * mean < now < CHANGED * mean:
            return ""
        observed = [w.observations for w in self.profile.workers.values() if w.observations]
        known, newer = _likely(usual, min(observed, default=usual.size)), np.array(seconds)
        each = PRECISION * mean  # rounding has no order
        runs = max(autocorrelation(np.round(values / each)) for values in (usual, newer))
        if log_rank(_ended(known), _ended(newer), runs) >= SURE:
            return ""
        return f"a step takes {now:.2g} s instead of {mean:.2g} s"

    def corrected(self, seen: Mapping[WorkerId, Seen]) -> Profile:
        """Return the profile with the laws of the newest tasks, where they tell one."""
        workers = {
            name: seen[name].law(known) if seen[name].tells_law else known
            for name, known in self.profile.workers.items()
        }
        return replace(self.profile, workers=workers)


def _ended(seconds: Vector) -> tuple[Vector, Flags]:
    return seconds, np.ones(seconds.size, dtype=bool)
