"""How many workers, and which, make asynchronous SGD fastest at a given learning rate.

More workers bring more gradients a second, and staler ones: beyond some number they slow it down,
and then it diverges. With the learning rate tuned for each number this is another question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import e, inf, isfinite

from paceline.planner.theory import staleness
from paceline.planner.theory.asynchrony import Asynchrony
from paceline.planner.theory.kernels import Kernel
from paceline.planner.theory.responses import rate_weighted
from paceline.planner.theory.sdde import boundary

_SAME = 1e-9  # relative, of scores that count as equal


@dataclass(frozen=True, slots=True)
class Choice:
    """How many workers to use, and what the slowest direction then does."""

    workers: int
    rate: float  # at which the mean decays, per second
    gain: float  # x = η λ M of the steepest direction


def best_workers(
    kernel: Kernel,
    learning_rate: float,
    largest: float = 1.0,
    smallest: float | None = None,
    most: int | None = None,
) -> Choice:
    """Return the number of equal workers at which the slowest direction decays fastest.

    largest, smallest: curvatures between which all directions are; only these two are looked at,
        since the rate rises with the gain and then falls.
    most: how many there are.

    >>> from paceline.planner.theory.kernels import fixed
    >>> best_workers(fixed(1.0), learning_rate=0.02, largest=1.0, smallest=0.1).workers
    63
    """
    smallest = largest if smallest is None else smallest
    limit = _limit(kernel, learning_rate, largest, smallest, most)

    def score(workers: int) -> float:
        return _slowest(workers, kernel, learning_rate, largest, smallest)

    workers = _peak(score, limit)
    return Choice(workers, score(workers), learning_rate * largest * workers)


def soonest_workers(
    plan: Asynchrony, start: float, level: float, most: int | None = None
) -> tuple[int, float]:
    """Return the number of equal workers with which E x² falls soonest to a level, and the seconds.

    Noise hardly depends on their number, and stability does.
    """
    limit = _limit(plan.kernel, plan.learning_rate, plan.curvature, plan.curvature, most)
    seconds = {
        workers: Asynchrony(
            workers, plan.kernel, plan.learning_rate, plan.curvature, plan.noise
        ).hitting_time(start, level)
        for workers in range(1, limit + 1)
    }
    best = min(seconds, key=lambda workers: (seconds[workers], workers))
    return best, seconds[best]


def fastest_workers(
    kernels: Sequence[Kernel],
    learning_rate: float,
    largest: float = 1.0,
    smallest: float | None = None,
) -> Choice:
    """Return how many of unequal workers to use, the fastest first.

    The m fastest together have Λ = Σ 1/m_i and the gain η λ m.
    """
    if not kernels:
        raise ValueError("no workers were given; give the kernel of at least one")
    smallest = largest if smallest is None else smallest
    ordered = sorted(kernels, key=lambda kernel: kernel.mean)
    best = Choice(0, -inf, 0.0)
    for m in range(1, len(ordered) + 1):
        kernel = rate_weighted(ordered[:m])
        found = _slowest(m, kernel, learning_rate, largest, smallest)
        if found > best.rate + _SAME * abs(found):
            best = Choice(m, found, learning_rate * largest * m)
    return best


def saturating_workers(mean: float, seconds: float) -> float:
    """Return how many workers keep a link busy that takes `seconds` per gradient: (E X + c) / c."""
    if not (isfinite(mean) and mean >= 0 and isfinite(seconds) and seconds > 0):
        raise ValueError(
            f"mean={mean!r}, seconds={seconds!r}: give the mean response time, >= 0, and the "
            "seconds of the link per gradient, > 0"
        )
    return (mean + seconds) / seconds


def best_threshold(kernel: Kernel, workers: int, learning_rate: float, largest: float = 1.0) -> int:
    """Return the staleness beyond which to drop gradients, by a rule.

    It is the smallest with η λ (accepted staleness + 1/2) >= 1/e, as critical damping has it for
    equal delays; and M - 1, which drops few, if no threshold is so large. The rate is then 0.8 to
    1.0 of that at the best threshold.
    """
    for threshold in range(workers):
        stale = staleness.bound(kernel, workers, threshold).staleness
        if learning_rate * largest * (stale + 0.5) >= 1 / e:
            return threshold
    return workers - 1


def _slowest(
    workers: int, kernel: Kernel, learning_rate: float, largest: float, smallest: float
) -> float:
    ends = {largest, smallest}
    return min(Asynchrony(workers, kernel, learning_rate, each).rate for each in ends)


def _limit(
    kernel: Kernel, learning_rate: float, largest: float, smallest: float, most: int | None
) -> int:
    """Return the number of workers beyond which none need be looked at."""
    if not 0 < smallest <= largest < inf or not 0 < learning_rate < inf:
        raise ValueError(
            f"learning_rate={learning_rate!r}, largest={largest!r}, smallest={smallest!r}: use a "
            "learning rate > 0, and curvatures with 0 < smallest <= largest"
        )
    end = boundary(kernel) / (learning_rate * largest)
    if most is None and end == inf:
        raise ValueError(
            "with these delays the mean converges however many workers there are; give the most "
            "that there are, as most="
        )
    if most is not None and most < 1:
        raise ValueError(f"most={most}: there must be at least 1 worker")
    return max(int(min(end, inf if most is None else most)), 1)


def _peak(score: Callable[[int], float], limit: int) -> int:
    """Return the smallest number with the highest score, which rises, may be level, and falls."""
    low, high = 1, limit
    while low < high:
        middle = (low + high) // 2
        here, next_ = score(middle), score(middle + 1)
        if next_ > here + _SAME * abs(here):
            low = middle + 1
        else:
            high = middle
    return low
