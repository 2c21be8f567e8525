"""Step as soon as `k` usable results are held: the rule behind most of the literature."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from typing import TypeAlias

from paceline.core.protocol import (
    Assign,
    Cancel,
    Command,
    Discard,
    Event,
    Finished,
    Result,
    Step,
    Task,
    TaskId,
    View,
    Want,
    Work,
    WorkerId,
)
from paceline.policies.choosers import Chooser
from paceline.policies.placement import Placement
from paceline.policies.selectors import Allocate, Everyone, Selector

Combine: TypeAlias = Callable[[View, Collection[Result]], dict[TaskId, float]]
MakeWork: TypeAlias = Callable[[View, WorkerId], Work]


def in_order(results: Iterable[Result]) -> list[Result]:
    """Sort by place in the data, so that sums do not depend on who was first."""

    def place(result: Result) -> tuple[int, int, TaskId]:
        task = result.task
        return task.draw, min(task.work.tiles or (0,)), task.id

    return sorted(results, key=place)


def mean(view: View, results: Collection[Result]) -> dict[TaskId, float]:
    """Weigh by samples: the step is the gradient of all samples together, whatever the shares."""
    total = sum(result.samples for result in results)
    return {result.task.id: result.samples / total for result in in_order(results)}


def faded(view: View, results: Collection[Result]) -> dict[TaskId, float]:
    """Let older results weigh less: `mean` times 1 / (1 + delay).

    In the manner of staleness-aware asynchronous SGD (Zhang et al., 2016, arXiv 1511.05950).
    """
    weights = mean(view, results)
    return {id: weight / (1 + view.delay(view.held[id])) for id, weight in weights.items()}


@dataclass
class Gather:
    """Step as soon as `k` usable results are held.

    k: results per step; None: as many as there are workers when the round begins; or a chooser.
        A selector may give a worker several of the k shares at once, which then come as one.
    max_delay: a result is usable while the model has moved at most this many versions.
    refill: a worker that has delivered starts again at once; otherwise it waits for the step.
    preempt: a step cancels work whose result could no longer be used.
    select: who gets a task.
    hedge: spare tasks given beyond k; what is still running when k are there is cancelled.
    work: what a task is; unless it says how many samples, each gets 1/k of the global batch, so
        that a step uses `batch_size` samples whatever `k` is. When k does not divide it and not
        everyone is awaited, the count may be off by fewer than k samples.
    combine: the weight of each result.
    placement: the sizes of tasks, and whose data they are on; None: equal ones, on all data.

    What was lost with a worker is handed out again before anything new, on the same samples; a
    worker that waits computes for one that is missing. So a lost worker costs time and no step.
    """

    k: int | Chooser | None = None
    max_delay: float = 0
    refill: bool = False
    preempt: bool = True
    select: Selector = Everyone()
    hedge: int = 0
    work: Work | MakeWork = Work()
    combine: Combine = mean
    placement: Placement | None = None
    waited: int = field(default=0, init=False)  # steps held up for data that had fallen behind
    _round: int = field(default=-1, init=False, repr=False)  # the version these belong to:
    _quota: int = field(default=0, init=False, repr=False)  # shares it needs
    _given: int = field(default=0, init=False, repr=False)  # new shares handed out for it
    _waits: bool = field(default=False, init=False, repr=False)  # it is held up

    def __post_init__(self) -> None:
        if isinstance(self.k, int) and self.k < 1:
            raise ValueError(f"k={self.k}: a step needs at least one result; use k >= 1")
        if self.max_delay < 0:
            raise ValueError(f"max_delay={self.max_delay}: a delay counts versions; use >= 0")
        if self.hedge < 0:
            raise ValueError(f"hedge={self.hedge}: use 0 or more spare tasks")
        if self.hedge and isinstance(self.select, Everyone):
            raise ValueError(
                f"hedge={self.hedge}: everyone has a task already; give select=Bandit() or hedge=0"
            )
        parts = isinstance(self.work, Work) and self.work.parts is not None
        if parts and isinstance(self.select, Allocate):
            raise ValueError("parts of a batch are whole: Allocate cannot give shares of them")
        if self.hedge and isinstance(self.select, Allocate):
            raise ValueError(
                f"hedge={self.hedge}: with shares of different size the batch would not stay what "
                "it is; use select=Bandit() or hedge=0"
            )
        if self.placement is not None:
            self._check_placement(self.placement)

    def _check_placement(self, placement: Placement) -> None:
        if isinstance(self.select, Allocate):
            raise ValueError(
                "ata shares the batch out by speed already; give it no placement, or use k_sync "
                "or bandit with one"
            )
        if isinstance(self.work, Work) and self.work.parts is not None:
            raise ValueError("parts of a batch are the same for all who have them: no placement")
        if placement.tiles is not None and self.combine is not mean:
            raise ValueError(
                "placed data are weighed by what they are owed, and not by "
                f"{getattr(self.combine, '__name__', self.combine)}; use "
                "asynchronous(damping=False), or leave combine= out"
            )

    @property
    def wants(self) -> frozenset[Want]:
        chooser = frozenset[Want]() if self.k is None or isinstance(self.k, int) else self.k.wants
        return chooser | self.select.wants

    def check(self, workers: int, batch: int) -> None:
        """Refuse what cannot work with so many workers and such a batch."""
        k = workers if self.k is None else self.k if isinstance(self.k, int) else self.k.most
        if k > workers and not self.refill and not isinstance(self.select, Allocate):
            raise ValueError(
                f"k={k} exceeds the {workers} workers of this engine; use k <= {workers}, "
                "or refill=True (rennala) to let quick workers deliver several results"
            )
        if k + self.hedge > workers and not self.refill and self.hedge:
            raise ValueError(
                f"k={k} and hedge={self.hedge} are {k + self.hedge} tasks for {workers} workers; "
                f"use hedge <= {workers - k}, or k_sync({k}) to give everyone a task"
            )
        if isinstance(self.work, Work) and self.work.samples is None and k > batch:
            raise ValueError(
                f"batch_size={batch} cannot be shared among k={k} results; use batch_size >= {k}"
            )
        if self.placement is not None:
            own = self.work.samples if isinstance(self.work, Work) else None
            self.placement.check(workers, [batch / k if own is None else own] * k)

    def react(self, view: View, event: Event) -> Iterator[Command]:
        if not (self.k is None or isinstance(self.k, int)):
            self.k.learn(view, event)
        self.select.learn(view, event)
        if self.placement is not None:
            self.placement.learn(view, event)
        if isinstance(event, Finished):
            result = view.held[event.task]
            if view.delay(result) > self.max_delay or result.samples == 0:
                yield Discard(event.task)
        self._begin(view)
        if view.gathered >= self._quota and not self._awaits(view):
            yield Step(self._weights(view))
            yield from self._retire(view)
            self._begin(view)
        yield from self._hand_out(view)

    def _begin(self, view: View) -> None:
        """Settle how many results the next step needs, once per version."""
        if view.version != self._round or not self._quota:
            match self.k:
                case None:
                    quota = len(view.workers)
                case int(number):
                    quota = number
                case chooser:
                    quota = chooser.choose(view)
            self._round, self._quota, self._given = view.version, max(quota, 1), 0
            self._waits = False

    def _awaits(self, view: View) -> bool:
        """Tell whether the step must wait for someone whose data have fallen behind."""
        if self.placement is None or not self.placement.awaited(view):
            return False
        self.waited += not self._waits
        self._waits = True
        return True

    def _weights(self, view: View) -> dict[TaskId, float]:
        if self.placement is not None:
            weights = self.placement.weigh(in_order(view.held.values()), self._quota)
            if weights is not None:
                return weights
        return self.combine(view, view.held.values())

    def _retire(self, view: View) -> Iterator[Command]:
        """Give up what the step just taken has made too old."""
        for result in list(view.held.values()):
            if view.delay(result) > self.max_delay:
                yield Discard(result.task.id)
        if self.preempt:
            stale = []
            for task in view.running.values():  # oldest first
                if view.delay(task) <= self.max_delay:
                    break
                stale.append(task.id)
            for id in stale:
                self.select.learn(view, Cancel(id))
                if self.placement is not None:
                    self.placement.learn(view, Cancel(id))
                yield Cancel(id)

    def _hand_out(self, view: View) -> Iterator[Command]:
        candidates = view.idle if self.refill else view.free
        if candidates:
            # Everyone gets a task, wanted or not; but without a fixed k, who joins in mid-round
            # waits for the next one.
            spares = isinstance(self.select, Everyone) and (self.refill or self.k is not None)
            due = self._due(view, candidates)
            chosen: dict[WorkerId, int] = dict.fromkeys(due, 1)
            if not self._waits:  # held up, nobody else gets anything: results would pile up
                others = [w for w in candidates if w not in chosen] if due else candidates
                wanted = self._wanted(view) - len(due)
                chosen.update(self.select.choose(view, others, wanted))
            sizes = self._sizes(view, chosen)
            for worker, shares in chosen.items():
                limit = inf if spares or worker in due else self._wanted(view)
                if limit < 1:
                    break
                yield self._assign(view, worker, int(min(shares, limit)), sizes.get(worker))
        missing = self._wanted(view) - self.hedge
        if not self.refill and view.idle and missing > 0:
            for worker in list(islice(view.idle, missing)):
                if self._wanted(view) - self.hedge < 1:
                    break  # what was lost is more than one share
                yield self._assign(view, worker)

    def _due(self, view: View, candidates: Collection[WorkerId]) -> list[WorkerId]:
        """Return those who get a task in any case: their data have fallen behind."""
        if self.placement is None:
            return []
        return [worker for worker in self.placement.awaited(view) if worker in candidates]

    def _sizes(self, view: View, chosen: Collection[WorkerId]) -> dict[WorkerId, int]:
        """Return how many samples each shall have who gets new work, as far as that is settled."""
        if self.placement is None or not chosen:
            return {}
        each = view.batch / self._quota
        if isinstance(self.work, Work) and self.work.samples is not None:
            each = self.work.samples
        lost, fresh, redone = dict(view.lost), list[WorkerId](), 0
        for worker in chosen:
            if (task := self.placement.redo(worker, lost)) is None:
                fresh.append(worker)
            else:
                redone += lost.pop(task.id).samples
        if not fresh:
            return {}
        total, among = None, None
        tasks = len(chosen)
        if not isinstance(self.select, Everyone):
            among = {*chosen, *(task.worker for task in view.running.values())}
            tasks = min(tasks, self._quota + self.hedge)  # more only if all of them are awaited
        if not view.running and not view.held:  # the round begins
            total = max(round(each * tasks) - redone, len(fresh))
        return self.placement.sizes(view, fresh, each, total, among)

    def _wanted(self, view: View) -> int:
        """Return the shares, spares included, for which nobody has a task yet."""
        missing = self._quota - view.gathered - view.outstanding(self.max_delay)
        return missing + self.hedge

    def _assign(
        self, view: View, worker: WorkerId, shares: int = 1, samples: int | None = None
    ) -> Assign:
        if self.placement is not None:
            return self._place(self.placement, view, worker, samples)
        if view.lost:
            return self._redo(view, worker, next(iter(view.lost.values())))
        work = self.work if isinstance(self.work, Work) else self.work(view, worker)
        if work.samples is None and work.parts is None:
            share, rest = divmod(view.batch, self._quota)
            longer = min(max(rest - self._given, 0), shares)  # by one sample
            work = replace(work, samples=max(share * shares + longer, 1))
        elif shares > 1 and work.samples is not None:
            work = replace(work, samples=work.samples * shares)
        self._given += shares
        return Assign(worker, work if shares == work.shares else replace(work, shares=shares))

    def _place(
        self, placement: Placement, view: View, worker: WorkerId, samples: int | None
    ) -> Assign:
        if (lost := placement.redo(worker, view.lost)) is not None:
            return Assign(worker, Work(shares=lost.work.shares), redo=lost.id)
        work = self.work if isinstance(self.work, Work) else self.work(view, worker)
        if not isinstance(self.work, Work) and work.samples is not None:
            samples = work.samples
        if samples is None:
            samples = self._sizes(view, [worker])[worker]
        return Assign(worker, placement.work(view, worker, replace(work, samples=samples)))

    def _redo(self, view: View, worker: WorkerId, lost: Task) -> Assign:
        """Hand a lost task out again; of a round with a smaller k, as more shares of this one."""
        shares = lost.work.shares
        if isinstance(self.work, Work) and self.work.samples is None and lost.work.parts is None:
            shares = max(round(lost.samples * self._quota / view.batch), shares)
        return Assign(worker, Work(shares=shares), redo=lost.id)
