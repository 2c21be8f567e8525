"""The size of each worker's task, the data that it uses, and the weight of its result.

By default every task is an equal share of the batch, from data that all workers can read.
`BySpeed` gives fast workers larger shares. With `Placed` (tiles.py) the data stay with the workers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol, runtime_checkable

from paceline.core.protocol import (
    Cancel,
    Event,
    Joined,
    Left,
    Result,
    Task,
    TaskId,
    View,
    Work,
    WorkerId,
    some_names,
)
from paceline.core.schema import Schema
from paceline.data.partition.base import Partition
from paceline.data.placement import Most, limits, shares
from paceline.policies.placement.pace import Pace


@runtime_checkable
class Placement(Protocol):
    """Sets the sizes, the data and the weights of a policy's tasks."""

    @property
    def tiles(self) -> Partition | None:
        """The partition of the data into tiles (data shards); None: workers use all data."""

    def check(self, workers: Sequence[WorkerId], samples: Sequence[float]) -> None:
        """Raise ValueError if the placement cannot work with these workers.

        samples: the size of each result of a step, if all workers are equally fast.
        """

    def learn(self, view: View, news: Event | Cancel) -> None:
        """Update from an event, or from a task that is about to be cancelled."""

    def sizes(
        self,
        view: View,
        workers: Sequence[WorkerId],
        each: float,
        total: int | None,
        among: Collection[WorkerId] | None,
    ) -> dict[WorkerId, int]:
        """Return the number of samples for each worker that gets a task now.

        each: the samples per worker if all were equally fast.
        total: the samples of all these workers together; None: other workers have tasks already.
        among: the workers that have or get a task; None: all workers.
        """

    def work(self, view: View, worker: WorkerId, work: Work) -> Work:
        """Return the work with the tiles that its samples come from."""

    def redo(self, worker: WorkerId, lost: Mapping[TaskId, Task]) -> Task | None:
        """Return the first lost task that a worker has the data for."""

    def weigh(self, results: Collection[Result], k: int) -> dict[TaskId, float] | None:
        """Return the weights of a step's results, in order; None: the policy sets them."""

    def awaited(self, view: View) -> list[WorkerId]:
        """Return the connected workers that the next step needs and that have no result yet."""


def as_placement(given: object) -> Placement:
    """Return the given placement; raise ValueError if it is not one."""
    if isinstance(given, type) or not isinstance(given, Placement):
        raise ValueError(
            f"placement={given!r}: give an object, pl.BySpeed() or pl.policies.Placed(partition)"
        )
    return given


def sized(
    workers: Sequence[WorkerId],
    amounts: Sequence[float],
    mean: float,
    each: float,
    total: int | None,
    max_samples: Most,
) -> dict[WorkerId, int]:
    """Return shares in proportion to amounts: of `total`, or such that `mean` gets `each`."""
    given = limits(max_samples, workers)
    if total is not None:
        return dict(zip(workers, shares(total, amounts, 1, given), strict=True))
    alone = [max(round(each * amount / mean), 1) for amount in amounts]
    if given is not None:
        alone = [int(min(pair)) for pair in zip(alone, given, strict=True)]
    return dict(zip(workers, alone, strict=True))


def check_known(max_samples: Most, workers: Sequence[WorkerId]) -> None:
    """Raise ValueError for limits of workers that the engine does not have."""
    there, given = set(workers), max_samples if isinstance(max_samples, Mapping) else {}
    if unknown := [name for name in given if name not in there]:
        raise ValueError(
            f"max_samples names {', '.join(unknown)}; this engine has the workers "
            f"{some_names(workers)}"
        )


def check_most(max_samples: Most, workers: Sequence[WorkerId], samples: Sequence[float]) -> None:
    """Raise ValueError for limits that are too small for a step of these workers."""
    given = limits(max_samples, workers)
    if given is None:
        return
    if min(given) < 1:
        raise ValueError(f"max_samples={max_samples}: every worker needs at least 1 sample")
    # The worst case: workers with the smallest limits, repeated if results exceed workers.
    least = [*sorted(given)[: len(samples)], *[min(given)] * (len(samples) - len(workers))]
    if sum(least) < sum(samples):
        raise ValueError(
            f"max_samples={max_samples}: {len(samples)} results within these limits may have "
            f"{sum(least):g} samples, and a step needs {sum(samples):g}; use larger limits, or a "
            "smaller batch"
        )


def check_smoothing(smoothing: float) -> None:
    if not 0 < smoothing <= 1:
        raise ValueError(f"smoothing={smoothing}: use a number above 0, up to 1 (no smoothing)")


@dataclass
class BySpeed:
    """Gives each worker a share of the batch, so that all results arrive at the same time.

    Shares are in proportion to measured speed. A worker behind a slow link gets less, by the time
    that its messages take, but at least a quarter of that. All workers can read all data, so any
    worker may compute any sample. Results are weighted by their samples, and the step is the
    gradient of the global batch for all shares. If a step waits for all tasks, the shares add up to
    `batch_size`; if it waits for k only, about so on average.
    max_samples: the samples that fit into a worker's memory: one limit for all, or by name. By
        default that of the worker's kind of machine, if the engine has kinds. A lost task goes to
        a worker with room for it; if there is none, to one with the most room.
    smoothing: the weight of the median of the last three tasks in the average speed.
    """

    max_samples: Most = None
    smoothing: float = 0.3
    _pace: Pace = field(init=False, repr=False, compare=False)
    _room: float | None = field(default=None, init=False, repr=False, compare=False)
    schema = Schema("by_speed", 1, parts={"pace": "_pace"})

    def __post_init__(self) -> None:
        check_smoothing(self.smoothing)
        self._pace = Pace(self.smoothing)

    @property
    def tiles(self) -> None:
        return None

    def check(self, workers: Sequence[WorkerId], samples: Sequence[float]) -> None:
        check_most(self.max_samples, workers, samples)

    def learn(self, view: View, news: Event | Cancel) -> None:
        self._pace.learn(view, news)
        if self._room is None or isinstance(news, Joined | Left):
            self._room = max(limits(self.max_samples, [*view.workers]) or [inf])  # of any worker

    def sizes(
        self,
        view: View,
        workers: Sequence[WorkerId],
        each: float,
        total: int | None,
        among: Collection[WorkerId] | None,
    ) -> dict[WorkerId, int]:
        pace, names = self._pace, list(workers)
        if total is not None:
            speeds, fixed = pace.parts(names, total / len(names))
            given = limits(self.max_samples, names)
            return dict(zip(names, shares(total, speeds, 1, given, fixed), strict=True))
        mean = pace.mean if among is None else sum(pace.of(among)) / len(among)
        return sized(names, pace.of(names), mean, each, total, self.max_samples)

    def work(self, view: View, worker: WorkerId, work: Work) -> Work:
        return work

    def redo(self, worker: WorkerId, lost: Mapping[TaskId, Task]) -> Task | None:
        (limit,) = limits(self.max_samples, [worker]) or [inf]
        most = inf if self._room is None else self._room
        return next((task for task in lost.values() if min(task.samples, most) <= limit), None)

    def weigh(self, results: Collection[Result], k: int) -> None:
        return None

    def awaited(self, view: View) -> list[WorkerId]:
        return []

    def speeds(self) -> dict[WorkerId, float]:
        """Return the samples a second of each worker that was measured."""
        return self._pace.known()
