"""The figures of a run, gathered entry by entry from its journal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from operator import attrgetter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.core.journal import Entry, Header
from paceline.core.ledger import Ledger, distinct_samples
from paceline.core.protocol import (
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
_totals = attrgetter(*TOTALS)
COLUMNS = ("step", "seconds", "loss", "samples", "results", "delay", *TOTALS)
_FRACTIONS = ("seconds", "loss", "delay", "busy_seconds", "dollars")
KINDS: dict[str, Kind] = {name: "d" if name in _FRACTIONS else "q" for name in COLUMNS}


@dataclass(slots=True)
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
    priced: bool = field(init=False)  # whether anything costs anything
    _now: float = 0.0
    _rate: float = 0.0  # dollars per second of all who are paid at the moment
    _busy: int = 0  # workers that have a task
    _present: set[WorkerId] = field(default_factory=set)
    # Tasks, who has them, and the bytes that their models were charged; None: by the run before.
    _running: dict[TaskId, tuple[Task, Tally, int | None]] = field(default_factory=dict)
    _held: dict[TaskId, Result] = field(default_factory=dict)
    _weight: dict[int, float] = field(default_factory=dict)  # that steps gave each tile

    def __post_init__(self) -> None:
        self.priced = self.prices.charges_hours or self.prices.charges_bytes

    @classmethod
    def begin(cls, header: Header, folder: Path | None = None) -> Meter:
        """Start where a journal does: at nothing, or in the middle of a run that was resumed.

        folder: for what is known of older steps, in a file that ends with `close`; by default it is
            kept in memory, 96 bytes a step.
        """
        meter, books = cls(header.message_bytes, header.prices), books_of(header)
        meter.columns = Columns(KINDS, folder)
        meter.tiles, meter.peer = header.tiles, header.peer
        meter.version, meter.samples_used = books.version, books.samples
        meter.began = meter._now = books.now
        for worker in books.workers:
            meter._join(worker)
        for task in books.running.values():
            meter._start(task, meter._tally(task.worker), None)
        meter._held = dict(books.held)
        for result in books.held.values():  # whose worker may be gone
            meter._tally(result.task.worker)
        return meter

    # What follows is done for every entry of a journal of millions: hence no pattern is matched
    # field by field, and what is looked up once is handed on.

    def observe(self, entry: Entry) -> None:
        now, event, commands = entry
        if passed := now - self._now:
            self.dollars += passed * self._rate
            self.busy_seconds += passed * self._busy
            self.worker_seconds += passed * len(self._present)
            self._now = now
        if isinstance(event, Finished):
            self._finish(event, now)
        elif isinstance(event, Joined | Left):
            self._come_or_go(event, now)
        for command in commands:
            if isinstance(command, Start):
                self._send_out(command.task)
            elif isinstance(command, Cancel):
                self._settle(self._give_up(command.task), now, "cancelled")
            elif isinstance(command, Step):
                self._step(command, now)
            elif isinstance(command, Discard):
                if (result := self._held.pop(command.task, None)) is not None:
                    self._settle(result.task, result.at, "discarded", result.samples)
            elif isinstance(command, Send):
                assert self.peer is not None
                to, tensors = command.to, command.tensors
                self.letters += len(to)
                each = len(self.peer.tensors if tensors is None else tensors)
                self.tensors_sent += len(to) * each

    def _come_or_go(self, event: Joined | Left, now: float) -> None:
        worker = event.worker
        if self.peer and worker != self.peer.name:
            return  # a neighbor, whose time is in its own journal
        if isinstance(event, Joined):
            self._join(worker)
            return
        if (tally := self.workers.get(worker)) is not None:
            for id in list(tally.tasks):
                self._settle(self._give_up(id), now, "lost")
            self._leave(worker, tally)

    def _send_out(self, task: Task) -> None:
        """Count a task that a worker is given, and the model that goes with it."""
        worker = task.worker
        tally = self._tally(worker)
        down = self.message_bytes if tally.model_bytes is None else tally.model_bytes
        if self.peer is not None:
            down = 0
        self._start(task, tally, down)
        self.started += 1
        tally.started += 1
        self._carry(worker, tally, down, 0)
        if task.attempt > 1:
            self.redone += 1
        else:
            self.samples_started += task.computed

    def _finish(self, event: Finished, now: float) -> None:
        id, samples, seconds, got = event.task, event.samples, event.seconds, event.got
        self.compute_seconds += seconds
        if id not in self._running:
            return
        task, tally, charged = self._end(id)
        arrived = max(now - event.waited, task.since)
        self._held[id] = Result(task, arrived, samples, seconds, event.stats)
        tally.finish(arrived, task, samples, seconds)
        sent, more = event.sent, 0
        if sent is None:
            sent = self.message_bytes
            if task.work.parts is not None:
                sent = -(-sent // task.work.messages)
        if got is not None:  # it was charged as its worker's last one when it started
            more = 0 if charged is None else got - charged
            if self.peer is None:
                tally.model_bytes = got
        self._carry(task.worker, tally, more, sent)

    def _settle(self, task: Task, end: float, fate: Fate, samples: int = 0) -> None:
        """Count a task that no step uses."""
        tally = self.workers[task.worker]
        setattr(self, fate, getattr(self, fate) + 1)
        setattr(tally, fate, getattr(tally, fate) + 1)
        if self.listener is not None:
            self.listener(Span(task, end, fate, samples))

    def _use(self, results: Sequence[Result]) -> None:
        """Count the results that the next step uses."""
        version, workers, listener = self.version, self.workers, self.listener
        self.used += len(results)
        for result in results:
            task, end, samples = result.task, result.at, result.samples
            delay, since = version - task.version, task.since
            # Of what the run before spent on it, this one's figures know nothing.
            spent = end - (since if since > self.began else self.began)
            workers[task.worker].use(samples, delay, spent)
            if listener is not None:
                listener(Span(task, end, "used", samples, delay, version + 1))

    def unsettled(self) -> list[Span]:
        """Return the tasks that nobody knows the fate of yet."""
        spans = [Span(task, self._now, "unfinished") for task, *_ in self._running.values()]
        held = self._held.values()
        return spans + [Span(r.task, r.at, "unfinished", r.samples) for r in held]

    def _step(self, step: Step, now: float) -> None:
        held = self._held
        results = [held[id] for id in step.weights]
        weights = [magnitude(weight) for weight in step.weights.values()]
        known = [
            (w, r.stats["loss"]) for w, r in zip(weights, results, strict=True) if "loss" in r.stats
        ]
        total = sum([weight for weight, _ in known])
        loss = sum([w * loss for w, loss in known]) / total if total else nan
        version, samples, count = self.version, distinct_samples(results), len(results)
        delay = sum([version - r.task.version for r in results]) / max(count, 1)
        row = (version + 1, now, loss, samples, count, delay, *_totals(self))
        self.columns.add(row)
        if total:
            self.last_loss = loss
        self.last_weights = {}
        for weight, result in zip(weights, results, strict=True):
            if tiles := result.task.work.tiles:
                for tile, size in tiles.items():
                    part = weight * size / result.task.samples
                    self.last_weights[tile] = self.last_weights.get(tile, 0.0) + part
        self.weigh(self.last_weights)
        self._use(results)
        self.version += 1
        self.samples_used += samples
        if not step.keep:
            for id in step.weights:
                del held[id]

    def weigh(self, parts: Mapping[int, float]) -> None:
        """Count the weights that a step gave to tiles."""
        for tile, part in parts.items():
            self._weight[tile] = self._weight.get(tile, 0.0) + part

    def _tally(self, worker: WorkerId) -> Tally:
        if (tally := self.workers.get(worker)) is None:
            tally = self.workers[worker] = Tally()
        return tally

    def _join(self, worker: WorkerId) -> None:
        self._present.add(worker)
        tally = self._tally(worker)
        tally.join(self._now)
        if self.prices.idle:
            self._hire(worker, tally)

    def _leave(self, worker: WorkerId, tally: Tally) -> None:
        tally.model_bytes = None  # another comes in its place, who has no model
        if worker in self._present:
            self._present.remove(worker)
            tally.leave(self._now)
            if self.prices.idle:
                self._release(worker, tally, len(self._present))

    def _start(self, task: Task, tally: Tally, charged: int | None) -> None:
        tasks, id = tally.tasks, task.id
        tally.start(task, self._now)
        if not tasks:
            self._busy += 1
            if self.priced and not self.prices.idle:
                self._hire(task.worker, tally)
        tasks.add(id)
        self._running[id] = task, tally, charged

    def _end(self, id: TaskId) -> tuple[Task, Tally, int | None]:
        found = self._running.pop(id)
        task, tally, _ = found
        tasks = tally.tasks
        tasks.discard(id)
        tally.end(task, self._now)
        if not tasks:
            self._busy -= 1
            if self.priced and not self.prices.idle:
                self._release(task.worker, tally, self._busy)
        return found

    def _give_up(self, id: TaskId) -> Task:
        task, tally, _ = self._end(id)
        tally.give_up(task, self._now)
        return task

    def _hire(self, worker: WorkerId, tally: Tally) -> None:
        if self.priced:
            self._rate += (tally.price or self._price(worker, tally))[0]

    def _release(self, worker: WorkerId, tally: Tally, others: int) -> None:
        if self.priced:  # and rounding leaves nothing behind once nobody is paid
            price, _ = tally.price or self._price(worker, tally)
            self._rate = max(self._rate - price, 0.0) if others else 0.0

    def _price(self, worker: WorkerId, tally: Tally) -> tuple[float, float]:
        """Look up the price of a second of a worker, and of a byte to or from it."""
        tally.price = self.prices.second(worker), self.prices.byte(worker)
        return tally.price

    def _carry(self, worker: WorkerId, tally: Tally, down: int, up: int) -> None:
        """Count bytes to and from a worker, and what they cost."""
        self.down_bytes += down
        self.up_bytes += up
        tally.down_bytes += down
        tally.up_bytes += up
        if self.priced:
            self.dollars += (down + up) * (tally.price or self._price(worker, tally))[1]

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


def books_of(header: Header) -> Ledger:
    """Return the books that a journal starts with: empty, or those of the run before."""
    books = Ledger(header.batch)
    if header.state is not None:
        books.restore(header.state["ledger"])
    return books
