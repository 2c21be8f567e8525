"""How large each worker's task is, which of the data it is on, and what its result weighs.

By default every task is an equal share of the batch, from data that all can read. `BySpeed` gives
quick workers larger shares of it. With `Placed` (placed.py) the data stay with the workers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.core.protocol import (
    Cancel,
    Event,
    Finished,
    Left,
    Result,
    Task,
    TaskId,
    View,
    Work,
    WorkerId,
)
from paceline.data.partition.base import Partition
from paceline.data.placement import Most, limits, shares
from paceline.policies.arms import response

_LEAST = 1e-12  # seconds a sample: who takes no time is still not infinitely fast
_CUT_SHORT = 2.0  # what a task that was given up would have needed, at a guess, of the time it had


class Placement(Protocol):
    """What a policy asks about its tasks."""

    @property
    def tiles(self) -> Partition | None:
        """How the data are cut; None: everyone draws from all of them."""

    def check(self, workers: int, samples: Sequence[float]) -> None:
        """Refuse what cannot work with so many workers and results of a step that are this large,
        if all are alike."""

    def learn(self, view: View, news: Event | Cancel) -> None:
        """Take in what happened, and what is about to be cancelled."""

    def sizes(
        self,
        view: View,
        workers: Sequence[WorkerId],
        each: float,
        total: int | None,
        among: Collection[WorkerId] | None,
    ) -> dict[WorkerId, int]:
        """Return the samples for each of those who get a task now.

        each: what all would get if they were alike.
        total: what they shall have together; None: others have tasks already.
        among: who has tasks and who gets them, if that is not everyone.
        """

    def work(self, view: View, worker: WorkerId, work: Work) -> Work:
        """Say from which tiles a task's samples come."""

    def redo(self, worker: WorkerId, lost: Mapping[TaskId, Task]) -> Task | None:
        """Return the first lost task that a worker can do."""

    def weigh(self, results: Collection[Result], k: int) -> dict[TaskId, float] | None:
        """Return the weights of a step's results, in order; None: leave them to the policy."""

    def awaited(self, view: View) -> list[WorkerId]:
        """Return who is there and must be in the next step, and is not yet."""


class Pace:
    """The samples a second of each worker, smoothed over its tasks."""

    def __init__(self, smoothing: float) -> None:
        self._smoothing = smoothing
        self._seconds: dict[WorkerId, float] = {}  # a sample, of those who are there
        self._total = 0.0  # of their speeds
        self._seen = 0.0  # when the last result arrived

    def learn(self, view: View, news: Event | Cancel) -> None:
        if (seen := response(view, news, self._seen)) is not None:
            self._observe(*seen)
        match news:
            case Finished(id):
                self._seen = view.held[id].at
            case Left(worker) if worker in self._seconds:
                self._total -= 1 / self._seconds.pop(worker)

    def _observe(self, worker: WorkerId, seconds: float, ended: bool) -> None:
        before = self._seconds.get(worker)
        if not ended:
            seconds *= _CUT_SHORT
            if before is not None and seconds < before:
                return  # no news: it was expected to take longer
        after = seconds = max(seconds, _LEAST)
        if before is not None:
            after = before + self._smoothing * (seconds - before)
            self._total -= 1 / before
        self._seconds[worker] = after
        self._total += 1 / after

    @property
    def mean(self) -> float:
        """The mean speed of those who are known."""
        return self._total / len(self._seconds) if self._seconds else 1.0

    def of(self, workers: Iterable[WorkerId]) -> list[float]:
        """Return speeds; who is not known is taken to be like the others."""
        seconds, mean = self._seconds, self.mean
        return [1 / seconds[w] if w in seconds else mean for w in workers]

    def known(self) -> dict[WorkerId, float]:
        """Return the speeds of those who have done something."""
        return {worker: 1 / seconds for worker, seconds in self._seconds.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self._seconds, "total": self._total, "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seconds, self._total = state["seconds"], state["total"]
        self._seen = state["seen"]


def sized(
    workers: Sequence[WorkerId],
    amounts: Sequence[float],
    mean: float,
    each: float,
    total: int | None,
    most: Most,
) -> dict[WorkerId, int]:
    """Return shares in proportion to amounts: of a total, or of `each` for a mean amount."""
    given = limits(most, workers)
    if total is not None:
        return dict(zip(workers, shares(total, amounts, 1, given), strict=True))
    alone = [max(round(each * amount / mean), 1) for amount in amounts]
    if given is not None:
        alone = [int(min(pair)) for pair in zip(alone, given, strict=True)]
    return dict(zip(workers, alone, strict=True))


def check_most(most: Most, workers: int, samples: Sequence[float]) -> None:
    """Refuse limits of unknown workers, and those within which a step has no room."""
    names = [f"w{i}" for i in range(workers)]
    if isinstance(most, Mapping) and (unknown := [name for name in most if name not in names]):
        raise ValueError(
            f"most names {', '.join(unknown)}; this engine has the workers w0 to w{workers - 1}"
        )
    given = limits(most, names)
    if given is None:
        return
    if min(given) < 1:
        raise ValueError(f"most={most}: everyone needs one sample at least")
    # Whoever comes: those with the least room, and more than once if results are more than workers.
    least = [*sorted(given)[: len(samples)], *[min(given)] * (len(samples) - workers)]
    if sum(least) < sum(samples):
        raise ValueError(
            f"most={most}: {len(samples)} results within these limits may have {sum(least):g} "
            f"samples, and a step needs {sum(samples):g}; use larger limits, or a smaller batch"
        )


def check_smoothing(smoothing: float) -> None:
    if not 0 < smoothing <= 1:
        raise ValueError(f"smoothing={smoothing}: use a number above 0, up to 1 (the last alone)")


@dataclass
class BySpeed:
    """Gives each worker a share of the batch in proportion to its measured speed.

    All can read all data, so who computes a sample does not matter: results are weighed by their
    samples, and the step is the gradient of the global batch whatever the shares. Where everyone
    who gets a task is awaited, they add up to `batch_size`; where only k of them are, they do
    about on the average.
    most: the samples that fit into a worker's memory, for all alike or for each by name.
    smoothing: how much the last task counts for: 1 for itself alone.
    """

    most: Most = None
    smoothing: float = 0.3
    _pace: Pace = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_smoothing(self.smoothing)
        self._pace = Pace(self.smoothing)

    @property
    def tiles(self) -> None:
        return None

    def check(self, workers: int, samples: Sequence[float]) -> None:
        check_most(self.most, workers, samples)

    def learn(self, view: View, news: Event | Cancel) -> None:
        self._pace.learn(view, news)

    def sizes(
        self,
        view: View,
        workers: Sequence[WorkerId],
        each: float,
        total: int | None,
        among: Collection[WorkerId] | None,
    ) -> dict[WorkerId, int]:
        pace = self._pace
        mean = pace.mean if among is None else sum(pace.of(among)) / len(among)
        return sized(workers, pace.of(workers), mean, each, total, self.most)

    def work(self, view: View, worker: WorkerId, work: Work) -> Work:
        return work

    def redo(self, worker: WorkerId, lost: Mapping[TaskId, Task]) -> Task | None:
        return next(iter(lost.values()), None)

    def weigh(self, results: Collection[Result], k: int) -> None:
        return None

    def awaited(self, view: View) -> list[WorkerId]:
        return []

    def speeds(self) -> dict[WorkerId, float]:
        """Return the samples a second of each worker, as far as is known."""
        return self._pace.known()
