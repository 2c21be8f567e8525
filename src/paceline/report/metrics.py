"""The figures of a run, gathered entry by entry from its journal."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import nan
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.core.journal import Entry, Header, Journal
from paceline.core.ledger import Ledger
from paceline.core.protocol import (
    Cancel,
    Discard,
    Finished,
    Joined,
    Left,
    Result,
    Start,
    Step,
    Task,
    TaskId,
    WorkerId,
)
from paceline.core.state import load_state

COLUMNS = ("step", "seconds", "loss", "samples", "results", "delay")
Fate: TypeAlias = Literal["used", "cancelled", "discarded", "lost", "unfinished", "cut short"]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Samples in a row of the data stream, and what became of them."""

    task: TaskId
    draw: int
    samples: int
    fate: Fate


@dataclass
class Meter:
    """Counts as entries come in; each entry costs the same, however long the run."""

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
    columns: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in COLUMNS})
    _now: float = 0.0
    _busy: int = 0  # workers that have a task
    _present: set[WorkerId] = field(default_factory=set)
    _running: dict[TaskId, Task] = field(default_factory=dict)
    _of_worker: dict[WorkerId, set[TaskId]] = field(default_factory=dict)
    _held: dict[TaskId, Result] = field(default_factory=dict)

    @classmethod
    def begin(cls, header: Header) -> Meter:
        """Start where a journal does: at nothing, or in the middle of a run that was resumed."""
        meter, books = cls(), _books(header)
        meter.version, meter.samples_used = books.version, books.samples
        meter.began = meter._now = books.now
        meter._present.update(books.workers)
        for task in books.running.values():
            meter._start(task)
        meter._held = dict(books.held)
        return meter

    def observe(self, entry: Entry) -> None:
        self._pass_time(entry.now)
        match entry.event:
            case Joined(worker):
                self._present.add(worker)
            case Left(worker):
                self._present.discard(worker)
                for id in list(self._of_worker.get(worker, ())):
                    self._end(id)
                    self.lost += 1
            case Finished(id, samples, seconds, stats):
                self.compute_seconds += seconds
                if id in self._running:
                    self._held[id] = Result(self._end(id), entry.now, samples, seconds, stats)
        for command in entry.commands:
            match command:
                case Start(task):
                    self._start(task)
                    self.started += 1
                    if task.attempt > 1:
                        self.redone += 1
                    else:
                        self.samples_started += task.samples * task.work.steps
                case Cancel(id):
                    self._end(id)
                    self.cancelled += 1
                case Discard(id):
                    if self._held.pop(id, None) is not None:
                        self.discarded += 1
                case Step():
                    self._step(command, entry.now)

    def _step(self, step: Step, now: float) -> None:
        results = [self._held[id] for id in step.weights]
        weights = [abs(weight) for weight in step.weights.values()]
        known = [
            (w, r.stats["loss"]) for w, r in zip(weights, results, strict=True) if "loss" in r.stats
        ]
        total = sum(weight for weight, _ in known)
        samples = sum(result.samples for result in results)
        row = {
            "step": self.version + 1,
            "seconds": now,
            "loss": sum(w * loss for w, loss in known) / total if total else nan,
            "samples": samples,
            "results": len(results),
            "delay": sum(self.version - r.task.version for r in results) / max(len(results), 1),
        }
        for name, value in row.items():
            self.columns[name].append(value)
        self.version += 1
        self.used += len(results)
        self.samples_used += samples
        if not step.keep:
            for id in step.weights:
                del self._held[id]

    def _start(self, task: Task) -> None:
        tasks = self._of_worker.setdefault(task.worker, set())
        self._busy += not tasks
        tasks.add(task.id)
        self._running[task.id] = task

    def _end(self, id: TaskId) -> Task:
        task = self._running.pop(id)
        tasks = self._of_worker[task.worker]
        tasks.discard(id)
        self._busy -= not tasks
        return task

    def _pass_time(self, now: float) -> None:
        self.busy_seconds += (now - self._now) * self._busy
        self.worker_seconds += (now - self._now) * len(self._present)
        self._now = now

    @property
    def waiting(self) -> float:
        """The share of the workers' time in which they had nothing to do."""
        return 1 - self.busy_seconds / self.worker_seconds if self.worker_seconds else 0.0

    def arrays(self) -> dict[str, NDArray[np.float64]]:
        """Return one value per step: step, seconds, loss, samples, results, mean delay."""
        return {name: np.array(values) for name, values in self.columns.items()}


def _books(header: Header) -> Ledger:
    books = Ledger(header.batch)
    if header.state is not None:
        load_state(books, header.state["ledger"])
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
    last = {(task.draw, task.samples): task for task in tasks.values()}
    stretches: list[Stretch] = []
    for task in sorted(last.values(), key=lambda task: task.draw):
        total = task.samples * task.work.steps
        fate, count = fates.get(task.id, ("unfinished", 0))
        if fate == "used":
            stretches.append(Stretch(task.id, task.draw, count, "used"))
            if count < total:
                rest = total - count
                stretches.append(Stretch(task.id, task.draw + count, rest, "cut short"))
        else:
            stretches.append(Stretch(task.id, task.draw, total, fate))
    return stretches
