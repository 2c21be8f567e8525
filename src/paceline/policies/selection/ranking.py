"""Finds the best of many workers by their index, updating only some indices at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.core.protocol import WorkerId
from paceline.core.schema import converted
from paceline.policies.selection.arms import Arms, Floats
from paceline.policies.selection.indices import Index

Rows: TypeAlias = NDArray[np.intp]
Cost: TypeAlias = Callable[[Rows, Floats], Floats]
"""Turns the expected seconds of some workers into the cost by which they are ranked."""

REFRESH = 2048
"""The figures updated for one choice, besides those with new observations. With more workers, the
other figures are updated in later choices. A choice among 100,000 workers then takes under 1 ms,
and 3 ms if each has its own price."""


_FORGOTTEN = 1e-9  # observations with less weight in total count as none


class Ranking:
    """Ranks workers by an index of their times; workers that were never tried come first."""

    schema = converted("ranking", 1, "figures", "news", "next", "limit", arms="arms")

    def __init__(self, index: Index, seed: int, discount: float, window: int | None) -> None:
        self.arms = Arms(seed, index.shape, discount, window, index.levels)
        self._index, self._seed = index, seed
        self._figures = np.full(16, np.inf)  # inf: never given a task
        self._news: dict[int, None] = {}  # rows with observations since the last choice
        self._next = 0  # the row to update next
        self._limit = -np.inf  # an estimate of the largest figure among the best
        self._gone: set[int] = set()  # rows of workers that left
        self._informed = False  # whether all connected workers have a row

    def observe(self, worker: WorkerId, seconds: float, ended: bool) -> None:
        self._news[self.arms.observe(worker, seconds, ended)] = None

    def arrive(self, worker: WorkerId) -> None:
        row = self.arms.arrive(worker)
        self._gone.discard(row)
        self._news[row] = None
        if row < len(self._figures) and not self.arms.is_fresh(row):
            self._figures[row] = -np.inf  # until it is computed from the observations

    def leave(self, worker: WorkerId) -> None:
        if (row := self.arms.leave(worker)) is not None:
            self._gone.add(row)
            self._news[row] = None

    def best(
        self,
        round: int,
        workers: Collection[WorkerId],
        candidates: Collection[WorkerId],
        count: int,
        cost: Cost,
    ) -> dict[WorkerId, float]:
        """Return the `count` best candidates among the connected workers, with their figures."""
        arms = self.arms
        known = len(arms.rows) - len(self._gone)
        # Workers may join or leave before the first event. A drained worker is gone with its last
        # result, and its `Left` follows.
        if not self._informed or known != len(workers):
            arms.admit(workers)
            self._gone = {row for name, row in arms.rows.items() if name not in workers}
            self._news.update(dict.fromkeys(self._gone))
            self._informed = True
        rng = np.random.default_rng((self._seed, round))
        self._refresh(round, cost, rng)
        fresh = arms.take_fresh(candidates, count)
        # If they return no result, the next choice finds them by this figure.
        self._figures[fresh] = -np.inf
        chosen = {arms.names[row]: -np.inf for row in fresh}
        missing = count - len(fresh)
        if missing > 0:
            # An upper limit of the rows that cannot be chosen; workers that left come last.
            others = len(workers) - len(candidates) + len(fresh)
            if 8 * len(candidates) < len(arms):
                rows = np.array([arms.rows[worker] for worker in candidates], dtype=np.intp)
                rows = rows[_smallest(self._figures[rows], len(rows), rng)]
            else:
                rows = self._front(min(missing + others, len(arms)), rng)
            for row in rows.tolist():
                worker, figure = arms.names[row], float(self._figures[row])
                if figure < np.inf and worker in candidates and worker not in chosen:
                    chosen[worker] = figure
                    missing -= 1
                    if not missing:
                        break
        return chosen

    def _refresh(self, round: int, cost: Cost, rng: np.random.Generator) -> None:
        """Update all figures, or those with new observations and the next of the rest."""
        self.arms.begin(round)
        size = len(self.arms)
        if size > len(self._figures):
            wider = np.full(2 * size, np.inf)
            wider[: len(self._figures)] = self._figures
            self._figures = wider
        turn = np.arange(self._next, min(self._next + REFRESH, size), dtype=np.intp)
        self._next = 0 if self._next + REFRESH >= size else self._next + REFRESH
        if len(turn) < size:
            turn = np.concatenate([turn, np.fromiter(self._news, np.intp)])
        self._news.clear()
        times = self.arms.times(turn)
        seen = times.ended + times.cut > _FORGOTTEN
        forgotten = turn[~seen]
        self._figures[forgotten[self._figures[forgotten] < np.inf]] = -np.inf  # to be tried again
        rows, times = turn[seen], times.of(seen)
        prior = 0.0
        if self.arms.forgets and len(rows):  # a common mean, for forgotten workers
            prior = float(self._index.means(times).min())
        values = self._index.values(times, self.arms.horizon(), prior, rng)
        self._figures[rows] = cost(rows, values)
        if self._gone:
            self._figures[[row for row in turn.tolist() if row in self._gone]] = np.inf

    def _front(self, count: int, rng: np.random.Generator) -> Rows:
        """Return the rows of the `count` smallest figures, smallest first."""
        figures = self._figures[: len(self.arms)]
        rows = np.flatnonzero(figures <= self._limit)
        if len(rows) > 4 * count + 1024:
            equal = np.flatnonzero(figures == figures.min())  # a wide radius makes many figures 0
            if len(equal) >= count:
                return equal[rng.choice(len(equal), count, replace=False)]
        if not count <= len(rows) <= 4 * count + 1024:
            reach = min(2 * count + 256, len(figures) - 1)
            self._limit = float(np.partition(figures, reach)[reach])
            rows = np.flatnonzero(figures <= self._limit)
        return rows[_smallest(figures[rows], count, rng)]

    def state_dict(self) -> dict[str, Any]:
        return {
            "figures": self._figures[: len(self.arms)].tolist(),
            "news": list(self._news),
            "next": self._next,
            "limit": self._limit,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._figures = np.array([*state["figures"], np.inf])
        self._news = dict.fromkeys(state["news"])
        self._next, self._limit = state["next"], state["limit"]
        self._informed = False


def _smallest(figures: Floats, count: int, rng: np.random.Generator) -> Rows:
    """Return the positions of the `count` smallest, smallest first, ties in random order."""
    shuffled = rng.permutation(len(figures))
    return shuffled[np.argsort(figures[shuffled], kind="stable")[:count]]
