"""A journal done again, one task after the other in this process: what it must have led to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from paceline.codes.blocks import decoded
from paceline.core.journal import Entry, Header
from paceline.core.ledger import MAX_ATTEMPTS, Ledger
from paceline.core.protocol import Cancel, Discard, Finished, Left, Start, Step, Task, TaskId
from paceline.learners.base import Array, Learner, Server


@dataclass
class History:
    """What a journal says of the model and of the samples, the latter by their places."""

    began: int  # the version that it starts from
    models: dict[int, Array] = field(default_factory=dict)  # after each step
    used: dict[int, set[int]] = field(default_factory=dict)  # by each step
    dropped: list[tuple[int, set[int]]] = field(default_factory=list)  # at which entry
    entry_of: dict[int, int] = field(default_factory=dict)  # of each step
    pending: set[int] = field(default_factory=set)  # in the end


def serial(
    header: Header,
    entries: list[Entry],
    learner: Learner,
    server: Server,
    seed: int,
    exact: bool = True,
) -> History:
    """Take the steps of a journal again.

    server: as it was when the journal began.
    exact: whether to compute; else it is about samples alone.
    """
    books = Ledger(header.batch)
    if header.state is not None:
        books.restore(header.state["ledger"])
    replica = learner.replica(seed)
    running: dict[TaskId, Task] = dict(books.running)
    lost: dict[TaskId, Task] = dict(books.lost)
    held: dict[TaskId, tuple[Task, int]] = {}
    history = History(books.version, {books.version: server.vector.copy()})
    version = books.version
    for index, entry in enumerate(entries):
        match entry.event:
            case Finished(id, samples) if id in running:
                held[id] = running.pop(id), samples
                if samples < held[id][0].computed:
                    history.dropped.append((index, _places([held[id][0]], samples)))
            case Left(worker):
                for id in [id for id, task in running.items() if task.worker == worker]:
                    lost[id] = running.pop(id)
                    if lost[id].attempt >= MAX_ATTEMPTS:
                        history.dropped.append((index, _places([lost.pop(id)])))
        for command in entry.commands:
            match command:
                case Start(task):
                    running[task.id] = task
                    again = [id for id, old in lost.items() if _places([old]) == _places([task])]
                    for id in again if task.attempt > 1 or header.state is not None else ():
                        del lost[id]
                case Cancel(id):
                    history.dropped.append((index, _places([running.pop(id)])))
                case Discard(id) if id in held:
                    history.dropped.append((index, _places([held.pop(id)[0]])))
                case Step(weights):
                    results = [held.pop(id) for id in weights]
                    if exact:
                        vectors = [
                            replica.compute(
                                [history.models[task.version]], task, _until(samples)
                            ).vector
                            for task, samples in results
                        ]
                        span = 0, server.layout.size
                        factors, sums = decoded(list(weights.values()), vectors, span)  # type: ignore[arg-type]
                        server.step(factors, sums, frozenset())
                    version += 1
                    history.models[version] = server.vector.copy()
                    history.used[version] = _places(task for task, _ in results)
                    history.entry_of[version] = index
    open_tasks = [*running.values(), *lost.values(), *(task for task, _ in held.values())]
    history.pending = _places(open_tasks)
    return history


def _until(samples: int) -> Any:
    return lambda done: done < samples


def _places(tasks: Iterable[Task], beyond: int = 0) -> set[int]:
    """Return where in the stream of data the samples are; parts have theirs by the step.

    beyond: how many of the first are left out.
    """
    places: set[int] = set()
    for task in tasks:
        if task.work.parts is None:
            places |= set(range(task.draw + beyond, task.draw + task.samples * task.work.steps))
    return places
