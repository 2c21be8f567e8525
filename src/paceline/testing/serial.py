"""A journal done again, one task after the other in this process: what it must have led to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.codes.blocks import decoded
from paceline.core.journal import Entry, Header
from paceline.core.ledger import Ledger
from paceline.core.protocol import Finished, Start, Step, Task, TaskId
from paceline.learners.base import Array, Learner, Server


@dataclass
class History:
    """The model after each step, and the samples that each step used."""

    began: int
    models: dict[int, Array] = field(default_factory=dict)
    samples: dict[int, Mapping[Any, int]] = field(default_factory=dict)


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
    tasks: dict[TaskId, Task] = {}
    counts: dict[TaskId, int] = {}
    history = History(books.version, {books.version: server.vector.copy()})
    version = books.version
    for entry in entries:
        if isinstance(entry.event, Finished):
            counts.setdefault(entry.event.task, entry.event.samples)
        for command in entry.commands:
            if isinstance(command, Start):
                tasks[command.task.id] = command.task
            if not isinstance(command, Step):
                continue
            if exact:
                vectors = [
                    _result(replica, history, tasks[id], counts[id]) for id in command.weights
                ]
                span = 0, server.layout.size
                factors, sums = decoded(list(command.weights.values()), vectors, span)
                server.step(factors, sums, frozenset())
            version += 1
            history.models[version] = server.vector.copy()
            history.samples[version] = _places([tasks[id] for id in command.weights])
    return history


def _result(replica: Any, history: History, task: Task, samples: int) -> Array:
    outcome = replica.compute([history.models[task.version]], task, lambda done: done < samples)
    vector: Array = outcome.vector
    return vector


def _places(tasks: list[Task]) -> dict[Any, int]:
    """Return where in the stream of data the samples are. Of parts, the step's own are."""
    places: dict[Any, int] = {}
    for task in tasks:
        if task.work.parts is not None:
            continue
        for place in range(task.draw, task.draw + task.samples * task.work.steps):
            places[place] = places.get(place, 0) + 1
    return places
