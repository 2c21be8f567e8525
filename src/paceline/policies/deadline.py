"""Step after a fixed time on the samples computed in that time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from paceline.core.checks import check_seconds
from paceline.core.policy import Policy
from paceline.core.protocol import (
    Assign,
    Cancel,
    Command,
    Discard,
    Event,
    Finished,
    SetTimer,
    Step,
    TaskId,
    TimerFired,
    View,
    Want,
    Work,
    WorkerId,
)
from paceline.core.schema import Schema
from paceline.policies.gather import Combine, in_order, mean
from paceline.policies.placement.base import Placement, as_placement

TIMER = "deadline"


@dataclass
class Deadline(Policy):
    """Gives every worker `budget` seconds to compute, then steps on all samples computed.

    Follows anytime minibatches (Ferdinand et al., 2019, arXiv 2006.05752). The step is taken when
    all workers have reported, or with the results held `period` seconds after the round began.
    Results are weighted by their samples. This is the only policy whose batch varies: a round uses
    the samples computed in it, at most the global batch from each worker. The learning rate stays.
    """

    period: float
    budget: float | None = None  # by default 80 % of the period; the rest is for messages
    combine: Combine = mean
    placement: Placement | None = None
    wants: frozenset[Want] = frozenset()
    schema = Schema("deadline", 1, parts={"combine": "combine", "placement": "placement"})

    def __post_init__(self) -> None:
        check_seconds("period", self.period)
        if self.budget is None:
            self.budget = 0.8 * self.period
        check_seconds("budget", self.budget)
        if self.budget > self.period:
            raise ValueError(
                f"budget={self.budget:g} of period={self.period:g} seconds: "
                "use 0 < budget <= period"
            )
        if self.placement is not None and self.placement.tiles is None:
            raise ValueError(
                "a deadline gives all workers the same time, so shares already follow speed: "
                "leave BySpeed() out, or give Placed(…)"
            )

    def check(self, workers: Sequence[WorkerId], batch: int) -> None:
        """Raise ValueError if the placement cannot work with these workers and this batch."""
        if self.placement is not None:
            self.placement.check(workers, [batch / len(workers)] * len(workers))

    @property
    def work(self) -> Work:
        """The work of every task."""
        assert self.budget is not None
        return Work(budget=self.budget)

    def works(self) -> tuple[Work]:
        return (self.work,)

    def placed(self, placement: object) -> Deadline:
        return replace(self, placement=as_placement(placement))

    def react(self, view: View, event: Event) -> Iterator[Command]:
        if self.placement is not None:
            self.placement.learn(view, event)
        due = isinstance(event, TimerFired) and event.name == TIMER
        if isinstance(event, Finished) and view.held[event.task].samples == 0:
            yield Discard(event.task)
        if view.held and (due or not view.running):
            yield Step(self._weights(view))
            for id in list(view.running):
                if self.placement is not None:
                    self.placement.learn(view, Cancel(id))
                yield Cancel(id)
        begins = not view.running and not view.held
        if (begins or due) and view.workers:
            yield SetTimer(TIMER, view.now + self.period)
        for worker in list(view.free):
            yield self._assign(view, worker)

    def _weights(self, view: View) -> dict[TaskId, float]:
        if self.placement is not None:
            weights = self.placement.weigh(in_order(view.held.values()), len(view.workers))
            if weights is not None:
                return weights
        return self.combine(view, view.held.values())

    def _assign(self, view: View, worker: WorkerId) -> Assign:
        if self.placement is None:
            lost = next(iter(view.lost.values()), None)
        else:
            lost = self.placement.redo(worker, view.lost)
        if lost is not None:
            return Assign(worker, redo=lost.id)
        if self.placement is None:
            return Assign(worker, self.work)
        # Up to the whole batch, drawn from all tiles (data shards) of the worker.
        self.placement.sizes(view, [worker], view.batch, view.batch, None)
        work = replace(self.work, samples=view.batch)
        return Assign(worker, self.placement.work(view, worker, work))


def deadline(period: float, budget: float | None = None) -> Deadline:
    """Step every `period` seconds on the samples computed in that time."""
    return Deadline(period, budget)
