"""What stale gradients cost in steps, from training with fresh and with stale ones.

Theory knows the cost near the minimum of a quadratic. Early in the training of a network it is
higher, and it depends on the optimizer. So some steps are taken with fresh gradients and as many
with stale ones, and the steps to the same loss are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import TypeAlias

import numpy as np

Curve: TypeAlias = tuple[tuple[int, float], ...]
"""Numbers of steps in ascending order, each with the loss after them."""

_FAR = 3.0  # multiple of the first loss above which training has diverged
_FALLEN = 0.05  # share of the fall with fresh gradients that stale ones must reach to be compared


@dataclass(frozen=True)
class StaleTraining:
    """Losses of training from the first model, with fresh gradients and with stale ones.

    lr: the learning rate of both, divided by 1 - β with momentum.
    staleness: the mean of the stale gradients, in versions.
    fresh, stale: the losses of models after these steps.
    """

    lr: float
    staleness: float
    fresh: Curve
    stale: Curve

    def ratio(self, staleness: float, target: float = -inf, lr: float | None = None) -> float:
        """Return the steps with gradients of this staleness relative to those with fresh ones.

        It is measured at the target, or at the lowest loss that both trainings reached. Extra steps
        are assumed to grow in proportion to staleness and learning rate. The ratio is `inf` if the
        loss hardly fell with stale gradients.

        >>> fresh, stale = ((0, 4.0), (10, 2.0)), ((0, 4.0), (20, 2.0))
        >>> found = StaleTraining(0.1, 4.0, fresh, stale)
        >>> found.ratio(4.0), found.ratio(2.0), found.ratio(4.0, lr=0.05)
        (2.0, 1.5, 1.5)
        """
        if not staleness:
            return 1.0
        lowest, reached = (min(loss for _, loss in each) for each in (self.fresh, self.stale))
        first = self.fresh[0][1]
        if first - reached < _FALLEN * (first - lowest):
            return inf
        level = max(target if target < first else -inf, lowest, reached)
        extra = max(steps_to(self.stale, level) / steps_to(self.fresh, level), 1.0) - 1
        return 1 + extra * staleness / self.staleness * (1.0 if lr is None else lr / self.lr)


def steps_to(curve: Curve, level: float) -> float:
    """Return the steps until the loss falls to a level, between two points of a curve.

    >>> steps_to(((0, 4.0), (10, 2.0), (20, 1.0)), 1.5)
    15.0
    """
    before = curve[0]
    for point in curve:
        if point[1] <= level:
            fallen = before[1] - point[1]
            part = (before[1] - level) / fallen if fallen > 0 else 1.0
            return before[0] + part * (point[0] - before[0])
        before = point
    return inf


def smoothed(losses: Sequence[float]) -> Curve:
    """Return numbers of steps, each a quarter above the last, with the mean loss around each."""
    steps, found = 2, list[tuple[int, float]]()
    while steps < len(losses) - 1:
        side = min(round(0.2 * steps), len(losses) - 1 - steps)
        near = losses[steps - side : steps + side + 1]
        found.append((steps, sum(near) / len(near)))
        steps = max(steps + 1, round(1.25 * steps))
    return tuple(found)


def diverged(loss: float, first: float) -> bool:
    """Return whether a loss is far above the first one, or nan."""
    return not loss <= first + (_FAR - 1) * abs(first)


def compared(
    lr: float, fresh: Sequence[float], stale: Sequence[float], ages: Sequence[float]
) -> StaleTraining | None:
    """Return both trainings; None if the loss does not fall even with fresh gradients.

    fresh, stale: the loss that each step reports.
    ages: the staleness of each result of the second. A step reports the loss of the model that its
        result began from, which is so many versions older.
    """
    if not (fresh and stale and lr > 0 and isfinite(fresh[0])):
        return None
    first = fresh[0]
    steady = ages[len(ages) // 2 :]
    staleness = sum(steady) / len(steady)
    of_fresh = ((0, first), *smoothed(fresh))
    if not staleness or not min(loss for _, loss in of_fresh) < first:
        return None
    by_version: dict[int, list[float]] = {}
    for step, (loss, age) in enumerate(zip(stale, ages, strict=True)):
        by_version.setdefault(round(step - age), []).append(loss)
    versions = sorted(by_version)
    means = [sum(by_version[version]) / len(by_version[version]) for version in versions]
    # No result began from some versions.
    of_all = np.interp(range(versions[0], versions[-1] + 1), versions, means)
    of_stale = ((0, first), *smoothed(of_all.tolist()))
    if of_stale[-1][1] > first or any(diverged(loss, first) for loss in stale):
        of_stale = ((0, first),)
    return StaleTraining(lr, staleness, of_fresh, of_stale)
