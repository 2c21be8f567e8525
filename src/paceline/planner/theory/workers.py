"""How many workers, which, and what staleness make SGD fastest at a given learning rate.

More workers bring more gradients a second, and staler ones: beyond some number they slow it down,
and then it diverges. With the learning rate tuned for each number this is another question.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, e, inf

import numpy as np

from paceline.planner.theory import staleness
from paceline.planner.theory.asynchrony import Asynchrony
from paceline.planner.theory.kernels import Kernel, Real
from paceline.planner.theory.responses import rate_weighted
from paceline.planner.theory.sdde import boundary

_SAME = 1e-9  # relative, of scores that count as equal
_SIZES = 32  # numbers of unequal workers to try, at most
_ATOMS = 128  # of their delays together, at most


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


def fastest_workers(
    kernels: Sequence[Kernel],
    learning_rate: float,
    largest: float = 1.0,
    smallest: float | None = None,
) -> Choice:
    """Return how many of unequal workers to use, the fastest first.

    The m fastest together have Λ = Σ 1/m_i and the gain η λ m. Of more than 32 workers, every
    second, third, … number is tried.
    """
    if not kernels:
        raise ValueError("no workers were given; give the kernel of at least one")
    smallest = largest if smallest is None else smallest
    ordered = sorted(kernels, key=lambda kernel: kernel.mean)
    best = Choice(0, -inf, 0.0)
    every = ceil(len(ordered) / _SIZES)
    for m in range(len(ordered) - (len(ordered) - 1) // every * every, len(ordered) + 1, every):
        kernel = rate_weighted(ordered[:m], _ATOMS)
        found = _slowest(m, kernel, learning_rate, largest, smallest)
        if found > best.rate + _SAME * abs(found):
            best = Choice(m, found, learning_rate * largest * m)
    return best


def best_threshold(
    kernel: Kernel,
    workers: int,
    learning_rate: float,
    largest: float = 1.0,
    smallest: float | None = None,
) -> int:
    """Return the staleness beyond which to drop gradients, by a rule.

    It is the smallest with η λ (accepted staleness + 1/2) >= x, and M - 1, which drops few, if no
    threshold is so large. For a single curvature x is 1/e, as critical damping has it for equal
    delays. The rate is then 0.8 to 1.0 of that at the best threshold. With two curvatures x is the
    gain at which the slowest direction falls fastest with any number of workers.

    >>> from paceline.planner.theory.kernels import fixed
    >>> best_threshold(fixed(1.0), workers=50, learning_rate=0.04)
    9
    """
    wanted = 1 / e
    if smallest is not None and smallest < largest:
        wanted = best_workers(kernel, learning_rate, largest, smallest, 4 * workers).gain

    def enough(threshold: int) -> bool:
        stale = staleness.bound(kernel, workers, threshold).staleness
        return learning_rate * largest * (stale + 0.5) >= wanted

    return min(bisect_left(range(workers), True, key=enough), workers - 1)


def best_fastest(times: Real, ways: Real, batch: int) -> int:
    """Return the number k of results to wait for that makes synchronous steps fastest.

    A result has batch / k samples, so a step takes E X_(k:n). This is the trade between stragglers
    and larger shares of Dutta et al. (2018, arXiv 1803.01113), for unequal workers.

    times: drawn seconds per sample; a row has one draw for each worker.
    ways: seconds of the messages of each worker.

    >>> times = np.array([[1.0, 1.0, 1.0, 9.0]])
    >>> best_fastest(times, np.zeros(4), batch=12)
    3
    """
    most = min(times.shape[1], batch)
    means = [
        float(np.partition(times * (batch / k) + ways, k - 1, axis=1)[:, k - 1].mean())
        for k in range(1, most + 1)
    ]
    best = min(means)
    return 1 + max(place for place, mean in enumerate(means) if mean <= best * (1 + _SAME))


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
