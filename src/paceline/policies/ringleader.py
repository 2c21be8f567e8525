"""Ringleader ASGD: every worker's data count by their share, however fast the worker is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.core.checks import check_whole
from paceline.core.policy import Policy
from paceline.core.protocol import (
    Assign,
    Command,
    Discard,
    Event,
    Finished,
    Step,
    Task,
    TaskId,
    View,
    Work,
    WorkerId,
)
from paceline.core.schema import Schema
from paceline.policies.gather import in_order
from paceline.policies.placement.base import Placement, as_placement
from paceline.policies.placement.tiles import Placed


@dataclass
class Ringleader(Policy):
    """Steps along the mean over workers of the mean of each worker's results.

    Ringleader ASGD (Maranjyan and Richtárik, 2025, arXiv 2509.22860) for data that differ between
    workers. Steps begin when every worker has a result in the table. The result that completes it
    leads to the first step. Then each other worker leads one step, when its next result arrives.
    Every step uses the whole table. After a step of each worker, the round ends. Results of a
    worker that has led its step are for the next round. With n workers that stay, a result is at
    most 2n - 2 versions old when a step uses it.

    samples: of a task; by default 1/n of the batch, so that a step has at least one batch. With
        `Placed(…, move=False)` faster workers get larger tasks.
    most: results of a worker for one round. A worker that has them waits, and leads its step
        without a further one. Each result takes the memory of a model, and two rounds may have
        some at a time.
    placement: `Placed`; then a worker counts by its fraction of the data, otherwise 1/n.
    """

    samples: int | None = None
    most: int = 4
    placement: Placement | None = None
    _table: dict[WorkerId, list[TaskId]] = field(default_factory=dict, init=False, repr=False)
    _next: dict[WorkerId, list[TaskId]] = field(default_factory=dict, init=False, repr=False)
    _led: set[WorkerId] = field(default_factory=set, init=False, repr=False)
    schema = Schema(
        "ringleader",
        1,
        {"table": "_table", "next": "_next", "led": "_led"},
        {"placement": "placement"},
    )

    def __post_init__(self) -> None:
        if self.samples is not None:
            check_whole("samples", self.samples)
        check_whole("most", self.most)
        if self.placement is not None and not isinstance(self.placement, Placed):
            raise ValueError(
                f"placement={self.placement!r}: ringleader is for data that stay with the workers; "
                "use Placed(…), or leave placement= out"
            )

    def check(self, workers: Sequence[WorkerId], batch: int) -> None:
        if self.samples is None and batch < len(workers):
            raise ValueError(
                f"batch_size={batch} cannot be shared among {len(workers)} workers; use "
                f"batch_size >= {len(workers)}"
            )
        if self.placement is not None:
            each = batch / len(workers) if self.samples is None else self.samples
            self.placement.check(workers, [each] * len(workers))

    def placed(self, placement: object) -> Ringleader:
        return replace(self, placement=as_placement(placement))

    def may_redo(self, worker: WorkerId, task: Task) -> bool:
        if self.placement is None:
            return super().may_redo(worker, task)
        return self.placement.redo(worker, {task.id: task}) is not None

    def react(self, view: View, event: Event) -> Iterator[Command]:
        if self.placement is not None:
            self.placement.learn(view, event)
        self._forget(view)
        leads: WorkerId | None = None
        if isinstance(event, Finished) and event.task in view.held:
            result = view.held[event.task]
            if result.samples == 0:
                yield Discard(event.task)
            else:
                worker = result.task.worker
                leads = None if worker in self._led else worker
                table = self._table if leads else self._next
                table.setdefault(worker, []).append(event.task)
        if self._is_full(view) and (leads := leads or self._waiting(view)):
            yield from self._step(view, leads)  # one for each event; the next comes with the step
        for worker in list(view.idle):
            if len(self._results(worker)) < self.most:
                yield self._assign(view, worker)

    def _is_full(self, view: View) -> bool:
        """Return whether the table has a result of every worker that has not led its step."""
        known = self._table.keys() | self._led  # results that a step used may be lost since
        return bool(self._table and view.workers) and known >= set(view.workers)

    def _results(self, worker: WorkerId) -> Sequence[TaskId]:
        """Return the results of a worker in the table that its next result goes to."""
        return (self._next if worker in self._led else self._table).get(worker, ())

    def _waiting(self, view: View) -> WorkerId | None:
        """Return a worker that waits to lead a step: its next result would be one too many.

        If the others have left, any worker leads the last step of the round.
        """
        if self._led.issuperset(view.workers):
            return next(iter(view.workers))
        idle = (worker for worker in view.idle if worker not in self._led)
        return next((worker for worker in idle if len(self._results(worker)) >= self.most), None)

    def _forget(self, view: View) -> None:
        """Leave out results that were lost after they had arrived."""
        for table in (self._table, self._next):
            for worker, tasks in list(table.items()):
                kept = [task for task in tasks if task in view.held]
                if kept:
                    table[worker] = kept
                else:
                    del table[worker]
        if not self._table:
            self._table, self._next, self._led = self._next, {}, set()

    def _step(self, view: View, worker: WorkerId) -> Iterator[Command]:
        """Step along the table; the last step of a round makes room for the next table."""
        self._led.add(worker)
        ends = self._led.issuperset(view.workers)
        weights = self._weights(view)
        if ends:  # also those of workers whose data others have by now, which earlier steps used
            ids = [id for tasks in self._table.values() for id in tasks]
            weights |= {id: 0.0 for id in ids if id not in weights}
        yield Step(weights, keep=not ends)
        if ends:
            self._table, self._next, self._led = self._next, {}, set()

    def _weights(self, view: View) -> dict[TaskId, float]:
        """Return the weight of each result: its part of its worker's samples, times that worker's
        part of the data."""
        known: Mapping[WorkerId, float] = {}
        if isinstance(self.placement, Placed):
            known = self.placement.fractions()
        # Without a placement, or before it has dealt its data out, all workers count the same.
        shares = {w: known[w] for w in self._table if w in known} or dict.fromkeys(self._table, 1.0)
        results = [view.held[task] for worker in shares for task in self._table[worker]]
        samples = dict.fromkeys(shares, 0)
        for result in results:
            samples[result.task.worker] += result.samples
        total = sum(shares.values())
        return {
            result.task.id: shares[result.task.worker]
            / total
            * (result.samples / samples[result.task.worker])
            for result in in_order(results)
        }

    def _assign(self, view: View, worker: WorkerId) -> Assign:
        placement = self.placement
        if placement is None:
            lost = next(iter(view.lost.values()), None)
        else:
            lost = placement.redo(worker, view.lost)
        if lost is not None:
            return Assign(worker, redo=lost.id)
        each = view.batch / len(view.workers) if self.samples is None else self.samples
        if placement is None:
            return Assign(worker, Work(samples=max(round(each), 1)))
        size = placement.sizes(view, [worker], each, None, None)[worker]
        return Assign(worker, placement.work(view, worker, Work(samples=size)))


def ringleader(samples: int | None = None, most: int = 4) -> Ringleader:
    """Let each worker lead one step of a round, along the mean of all workers' results.

    For data that differ between workers, with `placement=Placed(…)`. See `Ringleader`.
    """
    return Ringleader(samples, most)
