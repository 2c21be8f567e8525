"""The figures of a run, gathered entry by entry from its journal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import nan
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.core.journal import Entry, Header, Journal
from paceline.core.ledger import Ledger, distinct_samples
from paceline.core.protocol import (
    SHARED,
    Cancel,
    Discard,
    Finished,
    Joined,
    Left,
    Peer,
    Prices,
    Result,
    Send,
    Start,
    Step,
    Task,
    TaskId,
    WorkerId,
    magnitude,
)
from paceline.report.columns import Columns, Kind
from paceline.report.workers import Fate, Span, Tally

TOTALS = ("started", "wasted", "busy_seconds", "down_bytes", "up_bytes", "dollars")
COLUMNS = ("step", "seconds", "loss", "samples", "results", "delay", *TOTALS)
_FRACTIONS = ("seconds", "loss", "delay", "busy_seconds", "dollars")
KINDS: dict[str, Kind] = {name: "d" if name in _FRACTIONS else "q" for name in COLUMNS}


@dataclass(frozen=True, slots=True)
class Stretch:
    """Samples in a row of the data stream, and what became of them."""

    task: TaskId
    draw: int
    samples: int
    fate: Fate
    tile: int | None = None  # of placed data, which has a stream of its own


@dataclass
class Meter:
    """Counts as entries come in; each entry costs the same, however long the run.

    Messages: a task that is started costs one model down, and a result that somebody waits for
    one result up, which if coded or encoded is shorter than a model. Where models are sent as
    changes, a task that is cancelled is charged as many bytes as its worker's model before. What
    the data plane adds beneath (copies of servers) or spares (workers of one node that share a
    model) is not in it.
    Seconds: a worker is busy from a task's start until its result, cancellation or loss. On Ray,
    work that cannot be interrupted goes on after its cancellation, and is not charged.
    Dollars: the seconds in which a worker has a task (with `Prices.idle`, in which it is there)
    times its price, and its bytes times theirs.
    Without a main node: bytes up are those of letters to peers, bytes down those from peers.
    """

    message_bytes: int = 0  # of a model, and of a result
    prices: Prices = Prices()
    version: int = 0
    began: float = 0.0  # when this run took over, above 0 if it was resumed
    started: int = 0
    used: int = 0
    cancelled: int = 0
    discarded: int = 0
    lost: int = 0
    redone: int = 0
    samples_used: int = 0
    samples_started: int = 0
    busy_seconds: float = 0.0  # of workers having a task, summed over workers
    worker_seconds: float = 0.0  # of workers being there
    compute_seconds: float = 0.0  # measured by the workers themselves
    down_bytes: int = 0
    up_bytes: int = 0
    dollars: float = 0.0
    tiles: tuple[int, ...] = ()  # the samples of each
    peer: Peer | None = None  # whose figures these are, if there is no main node
    letters: int = 0  # to peers, each counted
    tensors_sent: int = 0  # in them
    workers: dict[WorkerId, Tally] = field(default_factory=dict)
    listener: Callable[[Span], None] | None = None  # told of each task when its fate is known
    last_weights: dict[int, float] = field(default_factory=dict)  # of tiles in the last step
    last_loss: float | None = None  # of the last step whose results told one, nan if they told nan
    columns: Columns = field(default_factory=lambda: Columns(KINDS))
    _now: float = 0.0
    _price: dict[WorkerId, tuple[float, float]] = field(default_factory=dict)
    _rate: float = 0.0  # dollars per second of all who are paid at the moment
    _busy: int = 0  # workers that have a task
    _present: set[WorkerId] = field(default_factory=set)
    _running: dict[TaskId, Task] = field(default_factory=dict)
    _of_worker: dict[WorkerId, set[TaskId]] = field(default_factory=dict)
    _held: dict[TaskId, Result] = field(default_factory=dict)
    _got: dict[WorkerId, int] = field(default_factory=dict)  # bytes of the last model it was sent
    _charged: dict[TaskId, int] = field(default_factory=dict)
    _weight: dict[int, float] = field(default_factory=dict)  # that steps gave each tile

    def __post_init__(self) -> None:
        self.priced = self.prices.charges_hours or self.prices.charges_bytes

    @classmethod
    def begin(cls, header: Header, folder: Path | None = None) -> Meter:
        """Start where a journal does: at nothing, or in the middle of a run that was resumed.

        folder: for what is known of older steps, in a file that ends with `close`; by default it is
            kept in memory, 96 bytes a step.
        """
        meter, books = cls(header.message_bytes, header.prices), _books(header)
        meter.columns = Columns(KINDS, folder)
        meter.tiles, meter.peer = header.tiles, header.peer
        meter.version, meter.samples_used = books.version, books.samples
        meter.began = meter._now = books.now
        for worker in books.workers:
            meter._join(worker)
        for task in books.running.values():
            meter._start(task)
        meter._held = dict(books.held)
        for result in books.held.values():  # whose worker may be gone
            meter.workers.setdefault(result.task.worker, Tally())
        return meter

    def observe(self, entry: Entry) -> None:
        self._pass_time(entry.now)
        match entry.event:
            case Finished() as event:
                self._finish(event, entry.now)
            case Joined(worker) | Left(worker) if self.peer and worker != self.peer.name:
                pass  # a neighbor, whose time is in its own journal
            case Joined(worker):
                self._join(worker)
            case Left(worker):
                for id in list(self._of_worker.get(worker, ())):
                    self._settle(self._give_up(id), entry.now, "lost")
                self._leave(worker)
        for command in entry.commands:
            match command:
                case Start(task):
                    self._start(task)
                    self.started += 1
                    self.workers[task.worker].started += 1
                    down = self._got.get(task.worker, self.message_bytes)
                    if self.peer is not None:
                        down = 0
                    self._charged[task.id] = down
                    self._carry(task.worker, down, 0)
                    if task.attempt > 1:
                        self.redone += 1
                    else:
                        self.samples_started += task.computed
                case Cancel(id):
                    self._settle(self._give_up(id), entry.now, "cancelled")
                case Discard(id):
                    if (result := self._held.pop(id, None)) is not None:
                        self._settle(result.task, result.at, "discarded", result.samples)
                case Step():
                    self._step(command, entry.now)
                case Send(to, tensors):
                    assert self.peer is not None
                    self.letters += len(to)
                    each = len(self.peer.tensors if tensors is None else tensors)
                    self.tensors_sent += len(to) * each

    def _finish(self, event: Finished, now: float) -> None:
        id, got = event.task, event.got
        self.compute_seconds += event.seconds
        if id not in self._running:
            return
        charged = self._charged.get(id, got or 0)  # by the run before, if resumed
        task = self._end(id)
        worker = task.worker
        arrived = max(now - event.waited, task.since)
        self._held[id] = Result(task, arrived, event.samples, event.seconds, event.stats)
        self.workers[worker].finish(arrived, task, event.samples, event.seconds)
        sent, more = event.sent, 0
        if sent is None:
            sent = -(-self.message_bytes // task.work.messages)
        if got is not None:  # it was charged as its worker's last one when it started
            more = got - charged
            if self.peer is None:
                self._got[worker] = got
        self._carry(worker, more, sent)

    def _settle(self, task: Task, end: float, fate: Fate, samples: int = 0) -> None:
        """Count what became of a task."""
        delay = self.version - task.version if fate == "used" else 0
        tally = self.workers[task.worker]
        setattr(self, fate, getattr(self, fate) + 1)
        setattr(tally, fate, getattr(tally, fate) + 1)
        if fate == "used":
            tally.samples += samples
            tally.delay += delay
            # Of what the run before spent on it, this one's figures know nothing.
            tally.used_seconds += max(end - max(task.since, self.began), 0.0)
        if self.listener is not None:
            step = self.version + 1 if fate == "used" else 0
            self.listener(Span(task, end, fate, samples, delay, step))

    def unsettled(self) -> list[Span]:
        """Return the tasks that nobody knows the fate of yet."""
        spans = [Span(task, self._now, "unfinished") for task in self._running.values()]
        held = self._held.values()
        return spans + [Span(r.task, r.at, "unfinished", r.samples) for r in held]

    def _step(self, step: Step, now: float) -> None:
        results = [self._held[id] for id in step.weights]
        weights = [magnitude(weight) for weight in step.weights.values()]
        known = [
            (w, r.stats["loss"]) for w, r in zip(weights, results, strict=True) if "loss" in r.stats
        ]
        total = sum(weight for weight, _ in known)
        samples = distinct_samples(results)
        row = {
            "step": self.version + 1,
            "seconds": now,
            "loss": sum(w * loss for w, loss in known) / total if total else nan,
            "samples": samples,
            "results": len(results),
            "delay": sum(self.version - r.task.version for r in results) / max(len(results), 1),
            **{name: getattr(self, name) for name in TOTALS},
        }
        self.columns.add(row)
        if total:
            self.last_loss = row["loss"]
        self.last_weights = {}
        for weight, result in zip(step.weights.values(), results, strict=True):
            for tile, count in (result.task.work.tiles or {}).items():
                part = magnitude(weight) * count / result.task.samples
                self.last_weights[tile] = self.last_weights.get(tile, 0.0) + part
        self.weigh(self.last_weights)
        for result in results:
            self._settle(result.task, result.at, "used", result.samples)
        self.version += 1
        self.samples_used += samples
        if not step.keep:
            for id in step.weights:
                del self._held[id]

    def weigh(self, parts: Mapping[int, float]) -> None:
        """Count the weights that a step gave to tiles."""
        for tile, part in parts.items():
            self._weight[tile] = self._weight.get(tile, 0.0) + part

    def _join(self, worker: WorkerId) -> None:
        self._present.add(worker)
        self.workers.setdefault(worker, Tally()).join(self._now)
        if self.prices.idle:
            self._hire(worker)

    def _leave(self, worker: WorkerId) -> None:
        self._got.pop(worker, None)  # another comes in its place, who has no model
        if worker in self._present:
            self._present.remove(worker)
            self.workers[worker].leave(self._now)
            if self.prices.idle:
                self._release(worker, len(self._present))

    def _start(self, task: Task) -> None:
        tasks = self._of_worker.setdefault(task.worker, set())
        self.workers.setdefault(task.worker, Tally()).start(task, self._now)
        if not tasks:
            self._busy += 1
            if not self.prices.idle:
                self._hire(task.worker)
        tasks.add(task.id)
        self._running[task.id] = task

    def _end(self, id: TaskId) -> Task:
        task = self._running.pop(id)
        self._charged.pop(id, None)
        tasks = self._of_worker[task.worker]
        tasks.discard(id)
        self.workers[task.worker].end(task, self._now)
        if not tasks:
            self._busy -= 1
            if not self.prices.idle:
                self._release(task.worker, self._busy)
        return task

    def _give_up(self, id: TaskId) -> Task:
        task = self._end(id)
        self.workers[task.worker].give_up(task, self._now)
        return task

    def _hire(self, worker: WorkerId) -> None:
        if self.priced:
            self._rate += self._price_of(worker)[0]

    def _release(self, worker: WorkerId, others: int) -> None:
        if self.priced:  # and rounding leaves nothing behind once nobody is paid
            self._rate = max(self._rate - self._price_of(worker)[0], 0.0) if others else 0.0

    def _price_of(self, worker: WorkerId) -> tuple[float, float]:
        """Return the price of a second of a worker, and of a byte to or from it."""
        if (known := self._price.get(worker)) is None:
            known = self._price[worker] = self.prices.second(worker), self.prices.byte(worker)
        return known

    def _carry(self, worker: WorkerId, down: int, up: int) -> None:
        """Count bytes to and from a worker, and what they cost."""
        tally = self.workers[worker]
        self.down_bytes += down
        self.up_bytes += up
        tally.down_bytes += down
        tally.up_bytes += up
        if self.priced:
            self.dollars += (down + up) * self._price_of(worker)[1]

    def _pass_time(self, now: float) -> None:
        self.dollars += (now - self._now) * self._rate
        self.busy_seconds += (now - self._now) * self._busy
        self.worker_seconds += (now - self._now) * len(self._present)
        self._now = now

    @property
    def now(self) -> float:
        """The seconds of the run at its newest entry."""
        return self._now

    @property
    def wasted(self) -> int:
        """The tasks whose result was not used and never will be."""
        return self.cancelled + self.discarded + self.lost

    @property
    def waiting(self) -> float:
        """The share of the workers' time in which they had nothing to do."""
        return 1 - self.busy_seconds / self.worker_seconds if self.worker_seconds else 0.0

    def represented(self) -> NDArray[np.float64]:
        """Return for each tile the weight it has had in all steps, over what its size calls for.

        1 is what it would have had if every step were on all data.
        """
        steps = len(self.columns["step"])
        if not self.tiles or not steps:
            return np.empty(0)
        sizes = np.array(self.tiles)
        had = np.array([self._weight.get(tile, 0.0) for tile in range(len(sizes))])
        ratio: NDArray[np.float64] = had / (steps * sizes / sizes.sum())
        return ratio

    def arrays(self) -> dict[str, NDArray[np.float64]]:
        """Return one value per step: step, seconds, loss, samples, results, mean delay, and costs.

        The costs (started, wasted, busy_seconds, down_bytes, up_bytes, dollars) are totals since
        the run was (re)started, at the moment of the step: what is cancelled or started in
        response to it appears in the next row.
        """
        return self.columns.arrays()

    def close(self) -> None:
        """Need no file any more: the run is over, and what is known of its steps is in memory."""
        self.columns.close()


def _books(header: Header) -> Ledger:
    books = Ledger(header.batch)
    if header.state is not None:
        books.restore(header.state["ledger"])
    return books


def sample_fates(journal: Journal) -> list[Stretch]:
    """Say what became of every sample that was handed out, in the order of the data stream.

    A sample that was redone after its worker was lost appears once, with its last fate.
    """
    books = _books(journal.header)
    tasks: dict[TaskId, Task] = {**books.lost, **books.running}
    tasks.update((id, result.task) for id, result in books.held.items())
    seen: dict[TaskId, int] = {id: result.samples for id, result in books.held.items()}
    fates: dict[TaskId, tuple[Fate, int]] = {id: ("lost", 0) for id in books.lost}
    for entry in journal:
        match entry.event:
            case Finished(id, samples):
                seen[id] = samples
            case Left(worker):
                for id, task in tasks.items():
                    if task.worker == worker and id not in fates and id not in seen:
                        fates[id] = "lost", 0
        for command in entry.commands:
            match command:
                case Start(task):
                    tasks[task.id] = task
                case Cancel(id):
                    fates[id] = "cancelled", 0
                case Discard(id):
                    fates.setdefault(id, ("discarded", 0))
                case Step(weights):
                    fates.update((id, ("used", seen[id])) for id in weights)
    last: dict[tuple[int, int, int], Task] = {}
    for task in tasks.values():
        for place in _places(task, *fates.get(task.id, ("unfinished", 0))):
            before = last.get(place)
            # Several compute the same part of a batch; if one is used, it is.
            if before is None or fates.get(before.id, ("unfinished", 0))[0] != "used":
                last[place] = task
    _drop_given_back(last, fates)
    stretches: list[Stretch] = []
    for (tile, draw, total), task in sorted(last.items(), key=lambda item: item[0]):
        fate, count = fates.get(task.id, ("unfinished", 0))
        if tile != SHARED:
            stretches.append(Stretch(task.id, draw, total, fate, tile))
        elif fate == "used" and task.work.parts is None:
            stretches.append(Stretch(task.id, draw, count, "used"))
            if count < total:
                stretches.append(Stretch(task.id, draw + count, total - count, "cut short"))
        else:
            stretches.append(Stretch(task.id, draw, total, fate))
    return stretches


def _places(task: Task, fate: Fate, count: int) -> list[tuple[int, int, int]]:
    """Return in which stream of data the samples of a task are, where, and how many."""
    if task.work.tiles is not None:
        if fate != "used":
            return list(task.stretches())
        done = task.drawn(count)  # the rest is drawn again
        return [(tile, draw, done[tile]) for tile, draw, _ in task.stretches() if done[tile]]
    if task.work.parts is None:
        return [(SHARED, task.draw, task.samples * task.work.steps)]
    return [(SHARED, *task.part(index)) for index in task.work.parts]


def _drop_given_back(
    last: dict[tuple[int, int, int], Task], fates: Mapping[TaskId, tuple[Fate, int]]
) -> None:
    """Leave out samples of tiles that were not used and then drawn again by a later task."""
    drawn: dict[int, list[tuple[int, int, TaskId]]] = {}
    for (tile, draw, total), task in sorted(last.items(), key=lambda item: item[1].id):
        if tile == SHARED:
            continue
        before = drawn.setdefault(tile, [])
        # What was given back was the last that had been drawn.
        while before and before[-1][0] + before[-1][1] > draw:
            start, count, id = before[-1]
            if fates.get(id, ("unfinished", 0))[0] not in ("cancelled", "discarded"):
                break
            before.pop()
            del last[tile, start, count]
        before.append((draw, total, task.id))
