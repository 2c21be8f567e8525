"""Step after a fixed time with whatever was done in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.core.protocol import (
    Assign,
    Cancel,
    Command,
    Discard,
    Event,
    Finished,
    SetTimer,
    Step,
    TimerFired,
    View,
    Want,
    Work,
)
from paceline.policies.gather import Combine, mean

TIMER = "deadline"


@dataclass
class Deadline:
    """Give everyone `budget` seconds of computing, then step on all that was done.

    In the manner of anytime minibatches (Ferdinand et al., 2019, arXiv 2006.05752). The step is
    taken when all have reported, at the latest `period` seconds after the round began. Results
    are weighed by their samples. This is the one policy whose batch varies: a round uses what
    was computed in it, at most the global batch from each worker. The learning rate stays.
    """

    period: float
    budget: float | None = None  # by default 80 % of the period, the rest is for messages
    combine: Combine = mean
    wants: frozenset[Want] = frozenset()

    def __post_init__(self) -> None:
        if self.budget is None:
            self.budget = 0.8 * self.period
        if not 0 < self.budget <= self.period:
            raise ValueError(
                f"budget={self.budget:g} of period={self.period:g} seconds: "
                "use 0 < budget <= period"
            )

    @property
    def work(self) -> Work:
        """What every worker is given."""
        assert self.budget is not None
        return Work(budget=self.budget)

    def react(self, view: View, event: Event) -> Iterator[Command]:
        due = isinstance(event, TimerFired) and event.name == TIMER
        if isinstance(event, Finished) and view.held[event.task].samples == 0:
            yield Discard(event.task)
        if view.held and (due or not view.running):
            yield Step(self.combine(view, view.held.values()))
            for id in list(view.running):
                yield Cancel(id)
        begins = not view.running and not view.held
        if (begins or due) and view.workers:
            yield SetTimer(TIMER, view.now + self.period)
        for worker in list(view.free):
            if view.lost:
                yield Assign(worker, redo=next(iter(view.lost)))
            else:
                yield Assign(worker, self.work)


def deadline(period: float, budget: float | None = None) -> Deadline:
    """Step every `period` seconds on what was computed in them."""
    return Deadline(period, budget)
