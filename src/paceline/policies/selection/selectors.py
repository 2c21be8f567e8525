"""Selectors: all workers get a task, or those with the least expected time or cost.

Workers are the arms of a combinatorial bandit. Each has an optimistic index (`indices.py`) from its
response times so far (`arms.py`). A response time is the seconds from task to result, divided by
the samples, so it remains valid when shares change.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, Protocol

import numpy as np

from paceline.core.protocol import (
    Cancel,
    Event,
    Finished,
    Joined,
    Left,
    Prices,
    View,
    Want,
    WorkerId,
)
from paceline.core.schema import Schema
from paceline.policies.selection.arms import Floats, response
from paceline.policies.selection.indices import KL, Index
from paceline.policies.selection.ranking import Ranking, Rows


class Selector(Protocol):
    """Chooses the workers that get a task, and the size of each task."""

    @property
    def wants(self) -> frozenset[Want]: ...
    def choose(
        self, view: View, candidates: Collection[WorkerId], wanted: int
    ) -> Mapping[WorkerId, int]:
        """Return the shares of each worker that gets a task; shares beyond `wanted` are cut."""

    def learn(self, view: View, news: Event | Cancel) -> None:
        """Update from an event, or from a task that is about to be cancelled."""


@dataclass(frozen=True)
class Everyone:
    """Gives a task to every candidate."""

    wants: frozenset[Want] = frozenset()
    schema = Schema("everyone", 1)

    def choose(
        self, view: View, candidates: Collection[WorkerId], wanted: int
    ) -> Mapping[WorkerId, int]:
        return dict.fromkeys(candidates, 1)

    def learn(self, view: View, news: Event | Cancel) -> None:
        pass


@dataclass
class Learned:
    """The common part of the selectors below: learns the workers' speeds from their results."""

    index: Index = KL()
    discount: float = 1.0
    window: int | None = None
    seed: int = 0
    _ranking: Ranking = field(init=False, repr=False, compare=False)
    _seen: float = field(default=0.0, init=False, repr=False)  # when the last result arrived

    @property
    def wants(self) -> frozenset[Want]:
        return frozenset()

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed={self.seed}: use 0 or more")
        if not 0 < self.discount <= 1:
            raise ValueError(f"discount={self.discount}: use a number above 0, up to 1")
        if self.window is not None and (self.window < 1 or self.discount < 1):
            raise ValueError(
                f"window={self.window}, discount={self.discount}: use a window of 1 round or more, "
                "or a discount, and not both"
            )
        self._ranking = Ranking(self.index, self.seed, self.discount, self.window)

    def learn(self, view: View, news: Event | Cancel) -> None:
        if (seen := response(view, news, self._seen)) is not None:
            self._ranking.observe(*seen)
        match news:
            case Finished(id):
                self._seen = view.held[id].at
            case Joined(worker):
                self._ranking.arrive(worker)
            case Left(worker):
                self._ranking.leave(worker)

    def seconds(self) -> dict[WorkerId, float]:
        """Return the estimated seconds per sample of each worker that was tried."""
        arms = self._ranking.arms
        times = arms.times(slice(0, len(arms)))
        tried = times.ended + times.cut > 0
        means = self.index.means(times.of(tried)).tolist()
        names = [name for name, seen in zip(arms.names, tried, strict=True) if seen]
        return dict(zip(names, means, strict=True))

    def _best(
        self, view: View, candidates: Collection[WorkerId], count: int
    ) -> dict[WorkerId, float]:
        def cost(rows: Rows, seconds: Floats) -> Floats:
            return self._cost(view, rows, seconds)

        return self._ranking.best(view.version, view.workers, candidates, count, cost)

    def _cost(self, view: View, rows: Rows, seconds: Floats) -> Floats:
        return seconds


@dataclass
class Bandit(Learned):
    """Gives tasks to the workers with the least expected time, or cost.

    A combinatorial bandit after Egger, Bitar, Wachter-Zeh and Gündüz (arXiv 2202.08302). The
    number of tasks is the number of results wanted, and the step waits for all of them.

    index: the degree of optimism about workers with few trials: `KL`, `Thompson`, `LCB`, …
    discount: the factor of an observation's weight in each round; use 0.98 if speeds change
        within some hundred rounds.
    window: the rounds after which an observation is forgotten; an alternative to `discount`.
    seed: the seed of random draws, of ties, and of the order in which workers are first tried.
    minimize: "time", or "dollars" by the trainer's prices.
    """

    minimize: Literal["time", "dollars"] = "time"
    _samples: float = field(default=0.0, init=False, repr=False)  # of the last finished task
    schema = Schema("bandit", 1, {"seen": "_seen", "samples": "_samples"}, {"ranking": "_ranking"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.minimize not in ("time", "dollars"):
            raise ValueError(f"minimize={self.minimize!r}: use 'time' or 'dollars'")

    def check_prices(self, prices: Prices, message_bytes: int) -> None:
        """Raise ValueError if dollars are minimized and the prices do not allow it."""
        if self.minimize == "time":
            return
        if prices.idle:
            raise ValueError(
                "minimize='dollars' with Prices(idle=True): a worker that is paid while idle "
                "costs the same whether chosen or not, so the fastest workers are the cheapest; "
                "use minimize='time'"
            )
        if not (prices.charges_hours or (message_bytes and prices.charges_bytes)):
            raise ValueError(
                "minimize='dollars' needs prices; give Trainer(prices=Prices(per_hour=…))"
            )

    def choose(
        self, view: View, candidates: Collection[WorkerId], wanted: int
    ) -> Mapping[WorkerId, int]:
        if wanted < 1:
            return {}
        return dict.fromkeys(self._best(view, candidates, wanted), 1)

    def learn(self, view: View, news: Event | Cancel) -> None:
        super().learn(view, news)
        if isinstance(news, Finished):
            task = view.held[news.task].task
            self._samples = task.samples * task.work.steps

    def _cost(self, view: View, rows: Rows, seconds: Floats) -> Floats:
        if self.minimize == "time":
            return seconds
        prices, names = view.prices, self._ranking.arms.names
        chosen = [names[row] for row in rows.tolist()]
        per_second = np.array([prices.second(worker) for worker in chosen])
        per_byte = np.array([prices.byte(worker) for worker in chosen])
        messages: Floats = 2 * view.message_bytes * per_byte
        return per_second * seconds * (self._samples or 1.0) + messages


@dataclass
class Allocate(Learned):
    """Distributes the k shares of a step so that the expected time of the last result is least.

    Task allocation after ATA (Maranjyan, Saad, Richtárik, Orabona, 2025, arXiv 2502.00775). A
    fast worker gets several of the k shares as one task, and a slow worker gets none. Here k may
    exceed the number of workers; more shares allow a finer division.
    The arguments are those of `Bandit`.
    """

    schema = Schema("allocate", 1, {"seen": "_seen"}, {"ranking": "_ranking"})

    def choose(
        self, view: View, candidates: Collection[WorkerId], wanted: int
    ) -> Mapping[WorkerId, int]:
        if wanted < 1:
            return {}
        best = self._best(view, candidates, wanted)
        shares = allocate(list(best.values()), wanted)
        return {worker: share for worker, share in zip(best, shares, strict=True) if share}


def allocate(seconds: Sequence[float], shares: int) -> list[int]:
    """Return shares that minimize the largest share * seconds, in O(n log n).

    A worker with an index of 0 seconds gets one share: more could be far too many.

    >>> allocate([0.5, 0.6, 0.7, 3.0], 7)
    [3, 2, 2, 0]
    """
    given = [0] * len(seconds)
    unknown = [i for i, s in enumerate(seconds) if s <= 0]
    known = [i for i, s in enumerate(seconds) if 0 < s < inf]
    for i in unknown[:shares]:
        given[i] = 1
    left = shares - sum(given)
    if not known:
        for turn in range(left if unknown else 0):
            given[unknown[turn % len(unknown)]] += 1
        return given
    # Each worker first gets the whole shares that fit in the time of a fractional division …
    pace = left / sum(1 / seconds[i] for i in known)
    for i in known:
        given[i] = int(pace / seconds[i])
    # … then each remaining share goes to the worker that would finish it first.
    queue = [((given[i] + 1) * seconds[i], i) for i in known]
    heapq.heapify(queue)
    for _ in range(left - sum(given[i] for i in known)):
        _, i = queue[0]
        given[i] += 1
        heapq.heapreplace(queue, ((given[i] + 1) * seconds[i], i))
    return given
