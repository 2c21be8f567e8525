"""The metrics of a run, computed entry by entry from its journal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from operator import attrgetter
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from paceline.core.averages import mean_loss
from paceline.core.journal import Entry, Header
from paceline.core.ledger import Ledger
from paceline.core.positions import distinct_samples
from paceline.core.protocol import (
    Cancel,
    Discard,
    Evaluated,
    Finished,
    Joined,
    Left,
    Prices,
    Result,
    Start,
    Step,
    Task,
    TaskId,
    WorkerId,
    magnitude,
)
from paceline.report.columns import Columns, Kind
from paceline.report.evaluations import Evaluation, timed
from paceline.report.workers import Fate, Span, Tally

TOTALS = ("started", "wasted", "busy_seconds", "down_bytes", "up_bytes", "dollars")
_totals = attrgetter(*TOTALS)
COLUMNS = ("step", "seconds", "loss", "samples", "results", "staleness", *TOTALS)
_FRACTIONS = ("seconds", "loss", "staleness", "busy_seconds", "dollars")
KINDS: dict[str, Kind] = {name: "d" if name in _FRACTIONS else "q" for name in COLUMNS}


@dataclass(slots=True)
class Meter:
    """Counts journal entries as they come in, in constant time per entry.

    Messages: a started task costs one model down, and the result of a task that is not cancelled
    one result up. A coded or encoded result is shorter than a model. If models are sent as changes,
    a cancelled task is charged the bytes of its worker's previous model. The meter ignores what the
    data plane adds (copies of servers) or spares (workers of one node that share a model).
    Seconds: a worker is busy from a task's start until its result arrives, or until its
    cancellation or loss. From the arrival until the driver takes the result in, for example after
    an evaluation in a callback, the worker waits for the driver. On Ray, work that cannot be
    interrupted continues after its cancellation, and is not charged.
    Dollars: the price of a worker times its seconds, plus the price of a byte times its bytes. The
    seconds are those in which it has a task or waits for the driver. With `Prices.idle` they are
    those in which it is connected.
    """

    message_bytes: int = 0  # the size of a model, and of a result
    prices: Prices = Prices()
    version: int = 0
    began: float = 0.0  # the second at which this run began, above 0 if it was resumed
    started: int = 0
    used: int = 0
    cancelled: int = 0
    discarded: int = 0
    lost: int = 0
    redone: int = 0
    samples_used: int = 0
    samples_started: int = 0
    samples_skipped: int = 0  # given up, since their result was not finite
    states_lost: int = 0  # inner optimizers that began without the state that they should keep
    busy_seconds: float = 0.0  # time with a task, summed over workers
    worker_seconds: float = 0.0  # time connected, summed over workers
    compute_seconds: float = 0.0  # measured by the workers themselves
    driver_seconds: float = 0.0  # time in which the results of idle workers waited for the driver
    down_bytes: int = 0
    up_bytes: int = 0
    dollars: float = 0.0
    tiles: tuple[int, ...] = ()  # the samples of each tile (data shard)
    workers: dict[WorkerId, Tally] = field(default_factory=dict)
    listener: Callable[[Span], None] | None = None  # receives each task with its fate
    last_weights: dict[int, float] = field(default_factory=dict)  # of each tile in the last step
    last_loss: float | None = None  # of the last step that reported one; may be nan
    columns: Columns = field(default_factory=lambda: Columns(KINDS))
    evaluations: list[Evaluation] = field(default_factory=list)
    priced: bool = field(init=False)  # whether anything costs anything
    _now: float = 0.0
    _rate: float = 0.0  # dollars per second of all workers that are paid now
    _busy: int = 0  # workers that have a task
    _present: set[WorkerId] = field(default_factory=set)
    # Tasks, their workers' tallies, and the bytes charged for the model; None: before a resume.
    _running: dict[TaskId, tuple[Task, Tally, int | None]] = field(default_factory=dict)
    _held: dict[TaskId, Result] = field(default_factory=dict)
    # The newest cancelled tasks and their workers: a late result shows the worker's speed.
    _cancelled: dict[TaskId, WorkerId] = field(default_factory=dict)
    _weight: dict[int, float] = field(default_factory=dict)  # the sum over steps for each tile

    def __post_init__(self) -> None:
        self.priced = self.prices.charges_hours or self.prices.charges_bytes

    @classmethod
    def begin(cls, header: Header, folder: Path | None = None) -> Self:
        """Return a meter at the start of a journal: at zero, or at the state of a resumed run.

        folder: holds a temporary file with the metrics of older steps until `close`; by default
            they stay in memory, 96 bytes a step.
        """
        meter, books = cls(header.message_bytes, header.prices), books_of(header)
        meter.columns = Columns(KINDS, folder)
        meter.tiles = header.tiles
        meter.version, meter.samples_used = books.version, books.samples
        meter.began = meter._now = books.now
        for worker in books.workers:
            meter._join(worker)
        for task in books.running.values():
            meter._start(task, meter._tally(task.worker), None)
        meter._held = dict(books.held)
        for result in books.held.values():  # its worker may be gone
            meter._tally(result.task.worker)
        return meter

    # The methods below run for every entry, and a journal may have millions. They therefore match
    # no patterns field by field, and pass on values instead of looking them up again.

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
        elif isinstance(event, Evaluated):
            self.evaluations.append(timed(event, self.columns, now))
        for command in commands:
            if isinstance(command, Start):
                self._send_out(command.task)
            elif isinstance(command, Cancel):
                self._settle(task := self._give_up(command.task), now, "cancelled")
                self._cancelled[task.id] = task.worker
                if len(self._cancelled) > 16 * len(self.workers):  # most never have a result
                    del self._cancelled[next(iter(self._cancelled))]
            elif isinstance(command, Step):
                self._step(command, now)
            elif (
                isinstance(command, Discard)
                and (result := self._held.pop(command.task, None)) is not None
            ):
                self._settle(result.task, result.at, "discarded", result.samples)

    def _come_or_go(self, event: Joined | Left, now: float) -> None:
        worker = event.worker
        if isinstance(event, Joined):
            self._join(worker)
            return
        if (tally := self.workers.get(worker)) is not None:
            for id in list(tally.tasks):
                self._settle(self._give_up(id), now, "lost")
            self._leave(worker, tally)

    def _send_out(self, task: Task) -> None:
        """Count a started task, and the model that its worker receives."""
        worker = task.worker
        tally = self._tally(worker)
        down = self.message_bytes if tally.model_bytes is None else tally.model_bytes
        self._start(task, tally, down)
        self.started += 1
        tally.started += 1
        self._carry(worker, tally, down, 0)
        if task.attempt > 1 or task.copy_of is not None:
            self.redone += 1
        else:
            self.samples_started += task.computed

    def _finish(self, event: Finished, now: float) -> None:
        id, samples, seconds, got = event.task, event.samples, event.seconds, event.got
        self.compute_seconds += seconds
        if id not in self._running:
            if (worker := self._cancelled.pop(id, None)) is not None:
                self._tally(worker).finish_late(samples, seconds)
            return
        self.samples_skipped += event.skipped
        self.states_lost += "new_state" in event.stats
        arrived = max(now - event.waited, self._running[id][0].since)
        task, tally, charged = self._end(id, arrived)
        self._held[id] = Result(task, arrived, samples, seconds, event.stats)
        tally.finish(arrived, task, samples, seconds)
        sent, more = event.sent, 0
        if sent is None:
            sent = self.message_bytes
            if task.work.parts is not None:
                sent = -(-sent // task.work.messages)
        if got is not None:  # the start charged the size of the previous model
            more = 0 if charged is None else got - charged
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
            staleness, since = version - task.version, task.since
            # The time before a resume is not part of these metrics.
            spent = end - (since if since > self.began else self.began)
            workers[task.worker].use(samples, staleness, spent)
            if listener is not None:
                listener(Span(task, end, "used", samples, staleness, version + 1))

    def unsettled(self) -> list[Span]:
        """Return the tasks whose fate is not known yet."""
        spans = [Span(task, self._now, "unfinished") for task, *_ in self._running.values()]
        held = self._held.values()
        return spans + [Span(r.task, r.at, "unfinished", r.samples) for r in held]

    def _step(self, step: Step, now: float) -> None:
        held = self._held
        results = [held[id] for id in step.weights]
        weights = [magnitude(weight) for weight in step.weights.values()]
        losses = [result.stats.get("loss") for result in results]
        counts = [result.stats.get("count") for result in results]
        loss = mean_loss(list(step.weights.values()), losses, counts)
        version, count = self.version, len(results)
        samples = (
            0 if step.keep else distinct_samples(results)
        )  # counted by the last of their steps
        staleness = sum([version - r.task.version for r in results]) / max(count, 1)
        row = (
            version + 1,
            now,
            nan if loss is None else loss,
            samples,
            count,
            staleness,
            *_totals(self),
        )
        self.columns.add(row)
        if loss is not None:
            self.last_loss = loss
        self.last_weights = {}
        for weight, result in zip(weights, results, strict=True):
            if tiles := result.task.work.tiles:
                for tile, size in tiles.items():
                    part = weight * size / result.task.samples
                    self.last_weights[tile] = self.last_weights.get(tile, 0.0) + part
        self.weigh(self.last_weights)
        if not step.keep:
            self._use(results)
        self.version += 1
        self.samples_used += samples
        if not step.keep:
            for id in step.weights:
                del held[id]

    def weigh(self, parts: Mapping[int, float]) -> None:
        """Count the weights that a step gave to tiles (data shards)."""
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
        tally.model_bytes = None  # its replacement has no model
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

    def _end(self, id: TaskId, at: float) -> tuple[Task, Tally, int | None]:
        """End a task at a given time, which may be earlier than now."""
        found = self._running.pop(id)
        task, tally, _ = found
        tasks = tally.tasks
        tasks.discard(id)
        at = max(at, tally.began)
        tally.end(task, at)
        if not tasks:
            self._busy -= 1
            self.busy_seconds -= self._now - at
            self.driver_seconds += self._now - at
            if self.priced and not self.prices.idle:
                self._release(task.worker, tally, self._busy)
        return found

    def _give_up(self, id: TaskId) -> Task:
        task, tally, _ = self._end(id, self._now)
        tally.give_up(task, self._now)
        return task

    def _hire(self, worker: WorkerId, tally: Tally) -> None:
        if self.priced:
            self._rate += (tally.price or self._price(worker, tally))[0]

    def _release(self, worker: WorkerId, tally: Tally, others: int) -> None:
        if self.priced:  # without paid workers the rate is exactly 0
            price, _ = tally.price or self._price(worker, tally)
            self._rate = max(self._rate - price, 0.0) if others else 0.0

    def _price(self, worker: WorkerId, tally: Tally) -> tuple[float, float]:
        """Return the price of a second of a worker, and of a byte to or from it."""
        tally.price = self.prices.second(worker), self.prices.byte(worker)
        return tally.price

    def _carry(self, worker: WorkerId, tally: Tally, down: int, up: int) -> None:
        """Count bytes to and from a worker, and their cost."""
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
        """Return the weight of each tile (data shard) in all steps over the weight due to its size.

        A tile has the ratio 1 if every step is on all data.
        """
        steps = len(self.columns["step"])
        if not self.tiles or not steps:
            return np.empty(0)
        sizes = np.array(self.tiles)
        had = np.array([self._weight.get(tile, 0.0) for tile in range(len(sizes))])
        ratio: NDArray[np.float64] = had / (steps * sizes / sizes.sum())
        return ratio

    def arrays(self) -> dict[str, NDArray[np.float64]]:
        """Return one value per step: step, seconds, loss, samples, results, staleness, costs.

        The costs (started, wasted, busy_seconds, down_bytes, up_bytes, dollars) are totals since
        the run was (re)started, at the moment of the step. A task that is cancelled or started in
        response to the step appears in the next row.
        """
        return self.columns.arrays()

    def close(self) -> None:
        """Load the metrics of all steps into memory and close the file."""
        self.columns.close()


def books_of(header: Header) -> Ledger:
    """Return the ledger at the start of a journal: empty, or that of the resumed run."""
    books = Ledger(header.batch)
    if header.state is not None:
        books.restore(header.state["ledger"])
    return books
