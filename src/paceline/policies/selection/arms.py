"""The statistics of each worker's speed: sums over its response times, complete or censored.

A task that was cancelled after c seconds would have taken longer. Such a time is right-censored:
it adds its seconds but no end. For exponential times, sum of seconds / number of ends is then the
maximum-likelihood mean. Leaving censored times out, or treating them as complete, makes slow
workers look fast.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from math import exp, inf, log
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.core.protocol import Cancel, Event, Finished, View, WorkerId
from paceline.core.schema import converted

Floats: TypeAlias = NDArray[np.float64]

_LARGEST = 1e100  # limit of a new observation's weight; beyond it all weights are scaled down


def response(view: View, news: Event | Cancel, seen: float) -> tuple[WorkerId, float, bool] | None:
    """Return the worker, its seconds per sample, and whether that is the complete time.

    seen: when the last result arrived; a task that is cancelled ran at least until then.
    """
    match news:
        case Finished(id):
            result = view.held[id]
            if result.samples:
                seconds = (result.at - result.task.since) / result.samples
                return result.task.worker, seconds, True
        case Cancel(id):
            task = view.running[id]
            seconds = max(seen - task.since, 0.0) / (task.samples * task.work.steps)
            return task.worker, seconds, False
    return None


@dataclass(frozen=True)
class Times:
    """Sums over the observations of some workers; without forgetting, each has weight 1."""

    seconds: Floats  # to the power of the shape, of complete and censored times
    squares: Floats  # of complete times
    ended: Floats  # number of complete times
    cut: Floats  # number of censored times
    truncated: Floats = field(default_factory=lambda: np.zeros((0, 1)), kw_only=True)
    """Sums of min(seconds, level), one row for each level of the index."""

    def of(self, chosen: NDArray[np.bool_]) -> Times:
        """Return the sums of the chosen workers."""
        plain = (sums[chosen] for sums in (self.seconds, self.squares, self.ended, self.cut))
        return Times(*plain, truncated=self.truncated[:, chosen])

    @property
    def count(self) -> Floats:
        """The number of ends; a worker without an end counts as if one task ended now."""
        return np.where(self.ended > 0, self.ended, np.minimum(self.cut, 1.0))


class Arms:
    """The sums of all workers; each worker keeps its row for the whole run.

    shape: times are summed to this power, which suits Weibull times of that shape.
    discount: the factor of an observation's weight in each round.
    window: rounds after which an observation is forgotten.
    levels: for each of them, times are also summed truncated at that many seconds.
    """

    schema = converted(
        *("arms", 1, "names", "sums", "base", "round", "recent", "old", "fresh", "random")
    )

    def __init__(
        self,
        seed: int,
        shape: float,
        discount: float,
        window: int | None,
        levels: tuple[float, ...] = (),
    ) -> None:
        self.names: list[WorkerId] = []
        self.rows: dict[WorkerId, int] = {}
        self._shape, self._window = shape, window
        self._rate = -log(discount)
        self._levels = np.array(levels)
        # Seconds, squares, ended, cut and the truncated sums; weighted as of `_base`.
        self._sums = np.zeros((4 + len(levels), 16))
        self._base = 0  # the round in which a new observation has weight 1
        self._round = 0
        # With a window: a row's observations with their rounds, and (round, row) in their order.
        self._recent: dict[int, deque[tuple[int, tuple[float, ...]]]] = {}
        self._old: deque[tuple[int, int]] = deque()
        self._fresh: list[int] = []  # rows of workers without any task yet, in random order
        self._places: dict[int, int] = {}  # row -> index in `_fresh`
        self._random = np.random.Generator(np.random.PCG64(seed))

    def __len__(self) -> int:
        return len(self.names)

    def admit(self, workers: Iterable[WorkerId]) -> None:
        """Make rows for workers that have none."""
        for worker in workers:
            if worker in self.rows:
                continue
            row = self.rows[worker] = len(self.names)
            self.names.append(worker)
            self._add_fresh(row)
        if len(self.names) > self._sums.shape[1]:
            wider = np.zeros((len(self._sums), 2 * len(self.names)))
            wider[:, : self._sums.shape[1]] = self._sums
            self._sums = wider

    def take_fresh(self, candidates: Collection[WorkerId], count: int) -> list[int]:
        """Remove and return up to `count` rows of candidates that never had a task."""
        taken: list[int] = []
        aside: list[int] = []
        while self._fresh and len(taken) < count:
            row = self._fresh[-1]
            self._drop_fresh(row)
            if self._sums[2:4, row].any():
                continue  # it had a task without being selected
            (taken if self.names[row] in candidates else aside).append(row)
        for row in reversed(aside):
            self._places[row] = len(self._fresh)
            self._fresh.append(row)
        return taken

    def is_fresh(self, row: int) -> bool:
        """Whether a worker waits for its first task."""
        return row in self._places

    def _add_fresh(self, row: int) -> None:
        """Add a row at a random place."""
        other = int(self._random.integers(len(self._fresh) + 1))
        self._fresh.append(row)
        moved = self._fresh[other]
        self._fresh[-1], self._fresh[other] = moved, row
        self._places[moved], self._places[row] = len(self._fresh) - 1, other

    def _drop_fresh(self, row: int) -> None:
        """Remove a row, and move the last row to its place."""
        if (place := self._places.pop(row, None)) is not None:
            last = self._fresh.pop()
            if last != row:
                self._fresh[place], self._places[last] = last, place

    def begin(self, round: int) -> None:
        """Begin a round: reduce the weight of older observations."""
        self._round = round
        if self._window is not None:
            while self._old and self._old[0][0] <= round - self._window:
                self._expire(self._old.popleft()[1], round - self._window)
        if self._weight() > _LARGEST:
            self._sums /= self._weight()
            self._base = round

    def observe(self, worker: WorkerId, seconds: float, ended: bool) -> int:
        """Add a complete or censored response time; return the worker's row."""
        self.admit([worker])
        row = self.rows[worker]
        truncated = np.minimum(seconds, self._levels).tolist()
        square = seconds**2 if ended else 0.0
        self._add(row, (seconds**self._shape, square, ended, not ended, *truncated))
        return row

    def arrive(self, worker: WorkerId) -> int:
        """Record that a worker joined; return its row."""
        self.admit([worker])
        row = self.rows[worker]
        if not self._sums[2:4, row].any() and row not in self._places:
            self._add_fresh(row)
        return row

    def leave(self, worker: WorkerId) -> int | None:
        """Reduce a departed worker's data to one observation: it may return as another machine."""
        row = self.rows.get(worker)
        if row is not None:
            self._drop_fresh(row)
            times = self.times(slice(row, row + 1))
            observations = float(times.ended[0] + times.cut[0])
            amounts = self._sums[:, row] / self._weight() / max(observations, 1.0)
            self._sums[:, row] = 0.0
            self._recent.pop(row, None)
            if observations:
                self._add(row, tuple(amounts.tolist()))
        return row

    def _expire(self, row: int, until: int) -> None:
        """Forget a row's observations up to a round, by summing the others again."""
        kept = self._recent.get(row, deque())
        while kept and kept[0][0] <= until:
            kept.popleft()
        self._sums[:, row] = np.sum([amounts for _, amounts in kept], axis=0) if kept else 0.0

    def times(self, rows: slice | NDArray[np.intp]) -> Times:
        """Return the sums of some workers with the current weights."""
        sums = self._sums[:, rows] / self._weight()
        return Times(*sums[:4], truncated=sums[4:])

    def horizon(self) -> float:
        """Return the number of rounds that observations cover, at most the rounds so far."""
        forgotten = inf if self._rate == 0 else 1 / (1 - exp(-self._rate))
        return min(self._round + 1, forgotten, inf if self._window is None else self._window)

    @property
    def forgets(self) -> bool:
        return self._rate > 0 or self._window is not None

    def _weight(self) -> float:
        return exp((self._round - self._base) * self._rate)

    def _add(self, row: int, amounts: tuple[float, ...]) -> None:
        weight = self._weight()
        self._sums[:, row] += [amount * weight for amount in amounts]
        if self._window is not None:  # then there is no discount, and all weights are 1
            self._recent.setdefault(row, deque()).append((self._round, amounts))
            self._old.append((self._round, row))

    def state_dict(self) -> dict[str, Any]:
        return {
            "names": self.names,
            "sums": self._sums[:, : len(self)].tolist(),
            "base": self._base,
            "round": self._round,
            "recent": {row: list(kept) for row, kept in self._recent.items()},
            "old": list(self._old),
            "fresh": self._fresh,
            "random": self._random.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.names = state["names"]
        self.rows = {name: row for row, name in enumerate(self.names)}
        self._sums = np.zeros((len(self._sums), max(len(self.names), 16)))
        self._sums[:, : len(self.names)] = state["sums"]
        self._base, self._round = state["base"], state["round"]
        self._recent = {row: deque(kept) for row, kept in state["recent"].items()}
        self._old, self._fresh = deque(state["old"]), state["fresh"]
        self._places = {row: place for place, row in enumerate(self._fresh)}
        self._random.bit_generator.state = state["random"]
