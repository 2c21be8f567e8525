"""Tunes every arm of a comparison alike, controls included.

Each arm gets the same number of trials, on another seed than the measured ones:

1. Its learning rate times each of `FACTORS`. If the best factor of any arm is the first or the
   last, all arms try one more factor at that end. A best learning rate that is then still at an
   end is reported as `at_edge`.
2. An arm with a knob of its own tries the other values at its best learning rate. The other arms
   try as many learning rates around their best one instead.

The best trial has the highest score. All arms of a comparison have the same score: an accuracy, or
the time to a target with a minus.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

FACTORS = (0.1, 0.3, 1.0)  # the usual rate is often the largest stable one
SEED = 100  # measured seeds count from 0


@dataclass(frozen=True)
class Trial:
    """The settings of an arm: its learning rate over its usual one, and its knob."""

    arm: str
    rate: float = 1.0
    knob: float | None = None  # None: the usual value


@dataclass(frozen=True)
class Tuned:
    """The best trial of an arm, its score, and the number of trials."""

    best: Trial
    score: float
    trials: int
    usual: float  # the score at the usual settings; nan if not tried
    at_edge: bool = False  # whether its learning rate is the smallest or the largest that was tried

    def report(self) -> dict[str, Any]:
        """Return the choice for a table or for JSON."""
        found = {"rate": round(self.best.rate, 4), "trials": self.trials}
        found |= {} if self.best.knob is None else {"knob": self.best.knob}
        found |= {"at_edge": True} if self.at_edge else {}
        return found | ({"untuned": round(self.usual, 2)} if math.isfinite(self.usual) else {})


Scores = Callable[[Sequence[Trial]], Iterable[float]]


def tune(
    arms: Iterable[str],
    scores: Scores,
    knobs: Mapping[str, Sequence[float]] | None = None,
    factors: Sequence[float] = FACTORS,
) -> dict[str, Tuned]:
    """Return the best trial of each arm.

    scores: returns the score of each trial, the higher the better; nan counts as the worst.
    knobs: the values to try beside the usual one, for arms that have a knob.
    factors: of the learning rate, in growing order; with one factor only knobs are tuned.
    """
    names, knobs = list(arms), knobs or {}
    extra = max((len(knobs.get(name, ())) for name in names), default=0)
    if len(factors) == 1 and any(len(knobs.get(name, ())) != extra for name in names):
        raise ValueError("with one factor, give every arm the same number of knob values")
    tried: dict[Trial, float] = {}

    def attempt(trials: Sequence[Trial]) -> None:
        for trial, score in zip(trials, scores(trials), strict=True):
            tried[trial] = -math.inf if math.isnan(score) else score

    def best(name: str) -> Trial:
        return max((t for t in tried if t.arm == name), key=tried.__getitem__)

    attempt([Trial(name, factor) for name in names for factor in factors])
    chosen = {best(name).rate for name in names}
    more = [
        end * end / next_to_it
        for end, next_to_it in (factors[:2], factors[:-3:-1])
        if end in chosen
    ] if len(factors) > 1 else []  # fmt: skip
    attempt([Trial(name, factor) for name in names for factor in more])
    attempt([trial for name in names for trial in _last(best(name), knobs.get(name, ()), extra)])
    count = len(factors) + len(more) + extra

    def tuned(name: str) -> Tuned:
        rates = {trial.rate for trial in tried if trial.arm == name}
        chosen, usual = best(name), tried.get(Trial(name), math.nan)
        at_edge = len(rates) > 1 and chosen.rate in (min(rates), max(rates))
        return Tuned(chosen, tried[chosen], count, usual, at_edge)

    return {name: tuned(name) for name in names}


def _last(best: Trial, knob: Sequence[float], count: int) -> list[Trial]:
    """Return `count` trials: first values of the knob, then learning rates around the best one."""
    values = [Trial(best.arm, best.rate, value) for value in knob]
    powers = [side / 2 ** (1 + i // 2) for i, side in zip(range(count), cycle((-1, 1)))]
    rates = [Trial(best.arm, best.rate * 3**power, best.knob) for power in powers]
    return values + rates[: count - len(values)]
