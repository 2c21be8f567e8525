"""Extracts from a journal the times of each worker's tasks, and its connection."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt

import numpy as np
from scipy.optimize import nnls

from paceline.core.journal import Journal
from paceline.core.ledger import Ledger
from paceline.core.protocol import (
    Cancel,
    Finished,
    Joined,
    Left,
    Start,
    Stepped,
    Task,
    TaskId,
    WorkerId,
)
from paceline.delays.laws import ENOUGH


@dataclass(frozen=True, slots=True)
class Observation:
    """The times of one task on its worker.

    turn: how many tasks the worker had begun since it joined; the first may be a warm-up.
    began: when the worker could start it: after its earlier tasks, and once the model was there.
    response: seconds from then until the result arrived, or until the task was cancelled or lost.
    seconds: of the worker's own computing; `response` if the task did not finish.
    censored: whether the times are only lower bounds: no sample was finished.
    after: whether the task before did not finish, and so may still have delayed this one.
    """

    turn: int
    began: float
    samples: int
    response: float
    seconds: float
    got: int  # bytes
    sent: int
    censored: bool
    after: bool = False

    @property
    def communication(self) -> float:
        """Seconds of the response beyond computing; a rounding error counts as 0."""
        rest = self.response - self.seconds
        return rest if rest > 1e-9 * self.response else 0.0


@dataclass(slots=True)
class _Record:
    task: Task
    turn: int
    got: int
    finished: Finished | None = None
    ended: float = inf  # when the result arrived, or the task was cancelled or lost


def observe(journal: Journal) -> dict[WorkerId, list[Observation]]:
    """Return the observations of each worker's tasks, in the order of their start."""
    header = journal.header
    books = Ledger(header.batch)
    if header.state is not None:
        books.restore(header.state["ledger"])
    ready = {books.version: -inf}  # -> when the model of a version was there
    records: dict[WorkerId, list[_Record]] = {}
    known: dict[TaskId, _Record] = {}
    turns: dict[WorkerId, int] = {}
    now = books.now

    def start(task: Task) -> None:
        turn = turns.get(task.worker, 0)
        turns[task.worker] = turn + 1
        known[task.id] = _Record(task, turn, header.message_bytes)
        records.setdefault(task.worker, []).append(known[task.id])

    for task in books.running.values():
        start(task)
    for entry in journal:
        now = entry.now
        match entry.event:
            case Joined(worker):
                turns[worker] = 0
            case Left(worker):
                for record in reversed(records.get(worker, ())):
                    if record.finished is None:
                        record.ended = min(record.ended, now)
                    if record.turn == 0:
                        break
            case Finished(id, _, _, _, waited, _, got) if id in known:
                known[id].finished, known[id].ended = entry.event, now - waited
                known[id].got = header.message_bytes if got is None else got
            case Stepped(version):
                ready[version] = now
        for command in entry.commands:
            match command:
                case Start(task):
                    start(task)
                case Cancel(id):
                    known[id].ended = now
    first = books.version
    return {
        worker: list(_in_turn(tasks, header.message_bytes, ready, first, now))
        for worker, tasks in records.items()
    }


def _in_turn(
    records: Sequence[_Record],
    message_bytes: int,
    ready: Mapping[int, float],
    first: int,
    now: float,
) -> Iterator[Observation]:
    """Yield the observations of a worker, whose tasks each begin when the one before has ended."""
    free, after = -inf, False
    for record in records:
        task, done = record.task, record.finished
        if record.turn == 0:
            free, after = -inf, False
        there = -inf if task.version <= first else ready.get(task.version, inf)
        if task.work.overlap:  # it began before; its messages are not seen
            there = -inf
        began, ended = max(task.since, free, there), min(record.ended, now)
        if done is None and ended <= began:
            continue  # it never began
        free = ended
        response = max(ended - began, 0.0)
        sent = -(-message_bytes // task.work.messages)
        sizes = record.got, sent if done is None or done.sent is None else done.sent
        if done is None:
            yield Observation(
                record.turn, began, task.computed, response, response, *sizes, True, after
            )
        elif done.samples:
            yield Observation(
                record.turn, began, done.samples, response, done.seconds, *sizes, False, after
            )
        elif done.seconds:  # its budget ended before the first sample
            yield Observation(
                record.turn, began, 1, done.seconds, done.seconds, *sizes, True, after
            )
        after = done is None


def blocks(tasks: Sequence[Observation]) -> bool:
    """Return whether finished tasks after a cancelled one seem to wait for it to end."""
    finished = [task for task in tasks if not task.censored]
    behind = np.array([task.communication for task in finished if task.after])
    others = np.array([task.communication for task in finished if not task.after])
    if min(behind.size, others.size) < 3:
        return False
    more = float(behind.mean() - others.mean())
    error = sqrt(float(behind.var(ddof=1) / behind.size + others.var(ddof=1) / others.size))
    return more > 4 * error and more > 0.05 * float(np.mean([task.seconds for task in finished]))


def warmups(tasks: Sequence[Observation], most: int = 3, factor: float = 3.0) -> int:
    """Count the first tasks of a worker that took much longer than all later ones."""
    for count in range(most, 0, -1):
        later = [task.seconds / task.samples for task in tasks if task.turn >= count]
        early = [task.seconds / task.samples for task in tasks if task.turn == count - 1]
        if early and len(later) >= ENOUGH and min(early) > factor * max(later):
            return count
    return 0


def connection(tasks: Sequence[Observation]) -> tuple[float, float, float]:
    """Fit the seconds beyond computing by 2 latency + got / down + sent / up; return all three.

    If all messages have one size, the latency holds all the time; if down and up cannot be
    separated, both are equal.
    """
    seconds = np.array([task.communication for task in tasks])
    got = np.array([task.got for task in tasks], dtype=np.float64)
    sent = np.array([task.sent for task in tasks], dtype=np.float64)
    scale = max(float(got.max()), float(sent.max()), 1.0)
    ones = np.full(len(tasks), 2.0)
    both = np.stack([ones, got / scale, sent / scale], axis=1)
    alike = np.stack([ones, (got + sent) / scale], axis=1)
    # Sizes that differ by less than 1 % of the largest say nothing about bandwidth.
    shaken = 0.01 * sqrt(len(tasks))
    if np.linalg.matrix_rank(both, tol=shaken) == 3:
        latency, down, up = nnls(both, seconds)[0].tolist()
    elif np.linalg.matrix_rank(alike, tol=shaken) == 2:
        latency, down = nnls(alike, seconds)[0].tolist()
        up = down
    else:
        latency, down, up = float(seconds.mean()) / 2, 0.0, 0.0
    down, up = (scale / slowness if slowness > 0 else inf for slowness in (down, up))
    return latency, down, up
