"""Step as soon as `k` usable results are held: the rule behind most of the literature."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import ceil, inf
from numbers import Integral, Real
from typing import TypeAlias

from paceline.core.checks import check_whole
from paceline.core.policy import Findings, Policy
from paceline.core.protocol import (
    Assign,
    Cancel,
    Command,
    Discard,
    Event,
    Finished,
    Prices,
    Result,
    Step,
    Task,
    TaskId,
    View,
    Want,
    Work,
    WorkerId,
)
from paceline.core.schema import Schema
from paceline.policies.choosers import Chooser
from paceline.policies.placement.base import Placement, as_placement
from paceline.policies.selection.selectors import Allocate, Bandit, Everyone, Selector

Combine: TypeAlias = Callable[[View, Collection[Result]], dict[TaskId, float]]
MakeWork: TypeAlias = Callable[[View, WorkerId], Work]


def in_order(results: Iterable[Result]) -> list[Result]:
    """Sort results by their offset in the data, so sums do not depend on the order of arrival."""

    def place(result: Result) -> tuple[int, int, TaskId]:
        task = result.task
        return task.offset, min(task.work.tiles or (0,)), task.id

    return sorted(results, key=place)


def mean(view: View, results: Collection[Result]) -> dict[TaskId, float]:
    """Weight results by their samples, so the step is the mean gradient of all samples.

    A result of H local steps of b samples is the sum of H gradients, each a mean over b samples.
    Its weight is b, its samples per local step. Then each of its H b samples counts the same as
    each sample of any other result. With weight H b, a result would count H times too much.
    """
    sizes = {result.task.id: _per_local_step(result) for result in in_order(results)}
    total = sum(sizes.values())
    return {id: size / total for id, size in sizes.items()}


def _per_local_step(result: Result) -> float:
    """Return the mean number of samples of the local steps that a result has taken."""
    steps = ceil(result.samples / result.task.samples) if result.task.work.steps > 1 else 1
    return result.samples / max(steps, 1)


def staleness_weighted(view: View, results: Collection[Result]) -> dict[TaskId, float]:
    """Give older results less weight: `mean` times 1 / (1 + staleness).

    Follows staleness-aware asynchronous SGD (Zhang et al., 2016, arXiv 1511.05950).
    """
    weights = mean(view, results)
    return {id: weight / (1 + view.staleness(view.held[id])) for id, weight in weights.items()}


@dataclass
class Gather(Policy):
    """Steps as soon as `k` usable results are held.

    k: results per step; None: the number of workers when the round begins; or a chooser.
        A selector may give a worker several of the k shares as one task with one result.
    max_staleness: a result is usable while the model has moved at most this many versions.
    refill: a worker that returned a result gets a new task at once; otherwise it waits for the
        step.
    preempt: a step cancels the tasks whose results have become too stale to use.
    select: selects the workers that get a task.
    hedge: spare tasks beyond k; the step cancels the tasks that still run when k results are held.
    work: the work of a task. Without a number of samples each task gets 1/k of the global batch,
        so a step uses `batch_size` samples for every `k`. The count may be off by fewer than k
        samples. This happens if k does not divide the batch and the step does not wait for all
        tasks.
    combine: computes the weight of each result.
    placement: sets the size of each task and its data; None: equal sizes, on all data.
    spares: a worker without a task gets one beyond k, if `select` takes everyone. Without spares a
        worker that joins during a round waits for the next, so the samples of a step stay the same.

    Lost tasks are assigned before new work, on the same samples, also to workers that wait for
    the step. So a lost worker costs time but no step.
    """

    k: int | Chooser | None = None
    max_staleness: float = 0
    refill: bool = False
    preempt: bool = True
    select: Selector = Everyone()
    hedge: int = 0
    work: Work | MakeWork = Work()
    combine: Combine = mean
    placement: Placement | None = None
    spares: bool = True
    waited: int = field(default=0, init=False)  # steps that waited for underrepresented data
    _round: int = field(default=-1, init=False, repr=False)  # the version of the next three:
    _quota: int = field(default=0, init=False, repr=False)  # shares that the step needs
    _given: int = field(default=0, init=False, repr=False)  # new shares assigned so far
    _waits: bool = field(default=False, init=False, repr=False)  # whether the step waits
    schema = Schema(
        "gather",
        1,
        {
            "steps_waited": "waited",
            "round": "_round",
            "quota": "_quota",
            "given": "_given",
            "waits": "_waits",
        },
        {name: name for name in ("k", "select", "work", "combine", "placement")},
    )

    def __post_init__(self) -> None:
        if isinstance(self.k, Integral):  # also a NumPy integer
            self.k = int(self.k)
        elif self.k is not None and not hasattr(self.k, "choose"):
            raise ValueError(f"k={self.k!r}: use a whole number from 1 on, or a chooser of k")
        if isinstance(self.k, int) and self.k < 1:
            raise ValueError(f"k={self.k}: a step needs at least one result; use k >= 1")
        if isinstance(self.work, Work):
            for name, value in (("steps", self.work.steps), ("samples", self.work.samples)):
                if value is not None:
                    check_whole(name, value)
        if not isinstance(self.max_staleness, Real):
            raise ValueError(f"max_staleness={self.max_staleness!r}: use >= 0")
        if not isinstance(self.hedge, Integral):
            raise ValueError(f"hedge={self.hedge!r}: use 0 or more spare tasks")
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness={self.max_staleness}: use >= 0")
        if self.hedge < 0:
            raise ValueError(f"hedge={self.hedge}: use 0 or more spare tasks")
        if self.hedge and isinstance(self.select, Everyone):
            raise ValueError(
                f"hedge={self.hedge}: every worker has a task already; use select=Bandit() or "
                "hedge=0"
            )
        parts = isinstance(self.work, Work) and self.work.parts is not None
        if parts and isinstance(self.select, Allocate):
            raise ValueError(
                "Allocate cannot divide the parts of a coded batch; use another select="
            )
        if self.hedge and isinstance(self.select, Allocate):
            raise ValueError(
                f"hedge={self.hedge}: with shares of different sizes, spare tasks would change "
                "the batch size; use select=Bandit() or hedge=0"
            )
        if self.placement is not None:
            self._check_placement(self.placement)

    def _check_placement(self, placement: Placement) -> None:
        if isinstance(self.select, Allocate):
            raise ValueError(
                "ata already divides the batch by speed; leave placement= out, or use k_sync or "
                "bandit with it"
            )
        if isinstance(self.work, Work) and self.work.parts is not None:
            raise ValueError("a coded batch has its own placement of parts; leave placement= out")
        if placement.tiles is not None and self.combine is not mean:
            raise ValueError(
                "Placed weights results by the samples that their data are due, not by "
                f"combine={getattr(self.combine, '__name__', self.combine)}; use "
                "asynchronous(damping=False), or leave combine= out"
            )

    @property
    def wants(self) -> frozenset[Want]:
        chooser = frozenset[Want]() if self.k is None or isinstance(self.k, int) else self.k.wants
        return chooser | self.select.wants

    def check(self, workers: Sequence[WorkerId], batch: int) -> None:
        """Raise ValueError if the policy cannot work with these workers and this batch."""
        n = len(workers)
        k = n if self.k is None else self.k if isinstance(self.k, int) else self.k.most
        if k > n and not self.refill and not isinstance(self.select, Allocate):
            raise ValueError(
                f"k={k} exceeds the {n} workers of this engine; use k <= {n}, "
                "or refill=True (rennala) to let quick workers deliver several results"
            )
        if k + self.hedge > n and not self.refill and self.hedge:
            raise ValueError(
                f"k={k} and hedge={self.hedge} are {k + self.hedge} tasks for {n} workers; "
                f"use hedge <= {n - k}, or k_sync({k}) to give every worker a task"
            )
        if isinstance(self.work, Work) and self.work.samples is None and k > batch:
            raise ValueError(
                f"batch_size={batch} cannot be shared among k={k} results; use batch_size >= {k}"
            )
        if self.placement is not None:
            own = self.work.samples if isinstance(self.work, Work) else None
            self.placement.check(workers, [batch / k if own is None else own] * k)

    def check_prices(self, prices: Prices, message_bytes: int) -> None:
        if isinstance(self.select, Bandit):
            self.select.check_prices(prices, message_bytes)

    def works(self) -> tuple[Work, ...]:
        return (self.work,) if isinstance(self.work, Work) else ()

    def may_redo(self, worker: WorkerId, task: Task) -> bool:
        if self.placement is None:
            return super().may_redo(worker, task)
        return self.placement.redo(worker, {task.id: task}) is not None

    def results_per_step(self, workers: int) -> int:
        return self.k if isinstance(self.k, int) else workers

    def placed(self, placement: object) -> Gather:
        return replace(self, placement=as_placement(placement))

    def findings(self) -> Findings:
        return Findings(waited=self.waited)

    def react(self, view: View, event: Event) -> Iterator[Command]:
        if not (self.k is None or isinstance(self.k, int)):
            self.k.learn(view, event)
        self.select.learn(view, event)
        if self.placement is not None:
            self.placement.learn(view, event)
        if isinstance(event, Finished):
            result = view.held[event.task]
            if view.staleness(result) > self.max_staleness or result.samples == 0:
                yield Discard(event.task)
        self._begin(view)
        if view.held_shares >= self._quota and not self._awaits(view):
            yield Step(self._weights(view))
            yield from self._retire(view)
            self._begin(view)
        yield from self._hand_out(view)

    def _begin(self, view: View) -> None:
        """Set the number of shares that the next step needs, once per version."""
        if view.version != self._round or not self._quota:
            match self.k:
                case None:
                    # A worker that is late for a moment does not change how a batch is divided.
                    quota = len(view.workers) + len(view.late)
                case int(number):
                    quota = number
                case chooser:
                    quota = chooser.choose(view)
            self._round, self._quota, self._given = view.version, max(quota, 1), 0
            self._waits = False

    def _awaits(self, view: View) -> bool:
        """Return whether the step must wait for workers whose data are underrepresented."""
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
        """Drop the results and tasks that the last step made too stale."""
        for result in list(view.held.values()):
            if view.staleness(result) > self.max_staleness:
                yield Discard(result.task.id)
        if self.preempt:
            stale = []
            for task in view.running.values():  # oldest first
                if view.staleness(task) <= self.max_staleness:
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
            # `Everyone` gives all candidates a task, even beyond k. But without a fixed k, a
            # worker that joins during a round waits for the next round.
            beyond = self.refill or (self.spares and self.k is not None)
            spares = isinstance(self.select, Everyone) and beyond
            due = self._due(view, candidates)
            chosen: dict[WorkerId, int] = dict.fromkeys(due, 1)
            if not self._waits:  # otherwise no other worker gets a task: results would pile up
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
                    break  # a lost task had more than one share
                yield self._assign(view, worker)

    def _due(self, view: View, candidates: Collection[WorkerId]) -> list[WorkerId]:
        """Return the workers whose data are underrepresented; each of them must get a task."""
        if self.placement is None:
            return []
        return [worker for worker in self.placement.awaited(view) if worker in candidates]

    def _sizes(self, view: View, chosen: Collection[WorkerId]) -> dict[WorkerId, int]:
        """Return the number of samples for each worker with new work, if the placement sets it."""
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
            tasks = min(tasks, self._quota + self.hedge)  # more only if the step waits for all
        if not view.running and not view.held:  # the round begins
            total = max(round(each * tasks) - redone, len(fresh))
        return self.placement.sizes(view, fresh, each, total, among)

    def _wanted(self, view: View) -> int:
        """Return the shares, spares included, that no worker has a task for yet."""
        missing = self._quota - view.held_shares - view.outstanding(self.max_staleness)
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
            longer = min(max(rest - self._given, 0), shares)  # shares with one sample more
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
        """Assign a lost task again; one from a round with a smaller k counts as more shares.

        One of this round keeps its shares: they may have a sample more than those of others.
        """
        shares, earlier = lost.work.shares, lost.version != view.version
        equal = isinstance(self.work, Work) and self.work.samples is None
        if earlier and equal and lost.work.parts is None:
            shares = max(round(lost.samples * self._quota / view.batch), shares)
        return Assign(worker, Work(shares=shares), redo=lost.id)
