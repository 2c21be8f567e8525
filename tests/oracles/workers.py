"""Numbers of workers by trying each of them, and by a formula, to compare theory with."""

from __future__ import annotations

from math import isfinite

from paceline.planner.theory.asynchrony import Asynchrony
from paceline.planner.theory.kernels import Kernel


def best_of_all(kernel: Kernel, rate: float, largest: float, smallest: float, most: int) -> int:
    """Return the number of equal workers with the fastest decay; every number is tried."""
    rates = [
        min(Asynchrony(m, kernel, rate, each).rate for each in (largest, smallest))
        for m in range(1, most + 1)
    ]
    return 1 + rates.index(max(rates))


def soonest_workers(plan: Asynchrony, start: float, level: float, most: int) -> tuple[int, float]:
    """Return the number of equal workers with which E x² falls soonest to a level, and the seconds.

    Noise hardly depends on their number, and stability does.
    """
    seconds = {
        workers: Asynchrony(
            workers, plan.kernel, plan.learning_rate, plan.curvature, plan.noise
        ).hitting_time(start, level)
        for workers in range(1, most + 1)
    }
    best = min(seconds, key=lambda workers: (seconds[workers], workers))
    return best, seconds[best]


def saturating_workers(mean: float, seconds: float) -> float:
    """Return how many workers keep a link busy that takes `seconds` per gradient: (E X + c) / c."""
    if not (isfinite(mean) and mean >= 0 and isfinite(seconds) and seconds > 0):
        raise ValueError(
            f"mean={mean!r}, seconds={seconds!r}: give the mean response time, >= 0, and the "
            "seconds of the link per gradient, > 0"
        )
    return (mean + seconds) / seconds
