"""A journal done again, one task after the other in this process: what it must have led to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from paceline.codecs.base import Codec
from paceline.codes.blocks import decoded
from paceline.core.books import MAX_ATTEMPTS
from paceline.core.journal import Entry, Header
from paceline.core.ledger import Ledger
from paceline.core.protocol import Cancel, Discard, Finished, Left, Start, Step, Stop, Task, TaskId
from paceline.data.partition.base import Partition
from paceline.learners.base import Array, Learner, Server

Places: TypeAlias = set[tuple[int, int]]
"""Samples by their tile and their place in its stream; -1 is the stream of all data."""


@dataclass
class History:
    """What a journal says of the model and of the samples, the latter by their places."""

    began: int  # the version that it starts from
    models: dict[int, Array] = field(default_factory=dict)  # after each step
    used: dict[int, Places] = field(default_factory=dict)  # by each step
    dropped: list[tuple[int, Places]] = field(default_factory=list)  # at which entry
    entry_of: dict[int, int] = field(default_factory=dict)  # of each step
    pending: Places = field(default_factory=set)  # in the end
    saved_at: float = 0.0  # when the state was saved that it starts from
    times: list[float] = field(default_factory=list)  # of its entries
    stopped: bool = False  # whether the end is in it

    def last_before(self, other: History) -> int:
        """Return the last entry that the state knows from which another journal goes on.

        A checkpoint is taken at a step; at SIGTERM it is taken at the end, after other entries.
        """
        step = self.entry_of.get(other.began, -1)
        at_the_end = bool(self.times) and other.saved_at > self.times[max(step, 0)]
        if self.stopped and other.began == max(self.models):  # all may have come at one time
            at_the_end = other.saved_at >= self.times[-1]
        return bisect_right(self.times, other.saved_at) - 1 if at_the_end else step


def serial(
    header: Header,
    entries: list[Entry],
    learner: Learner,
    server: Server,
    seed: int,
    exact: bool = True,
    tiles: Partition | None = None,
    down: Codec | None = None,
) -> History:
    """Take the steps of a journal again.

    server: as it was when the journal began.
    exact: whether to compute; else it is about samples alone.
    down: the codec of models, if it is elementwise.
    """
    books = Ledger(header.batch)
    if header.state is not None:
        books.restore(header.state["ledger"])
    replica = learner.replica(seed, tiles)
    running: dict[TaskId, Task] = dict(books.running)
    lost: dict[TaskId, Task] = dict(books.lost)
    held: dict[TaskId, tuple[Task, int]] = {}
    history = History(books.version, {books.version: server.vector.copy()})
    history.saved_at, history.times = books.now, [entry.now for entry in entries]
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
                case Stop():
                    history.stopped = True
                case Discard(id) if id in held:
                    history.dropped.append((index, _places([held.pop(id)[0]])))
                case Step(weights):
                    results = [held[id] for id in weights]
                    if exact:
                        vectors = [
                            replica.compute(
                                [_sent(history.models[task.version], down)], task, _until(samples)
                            ).vector
                            for task, samples in results
                        ]
                        span = 0, server.layout.size
                        factors, sums = decoded(list(weights.values()), vectors, span)  # type: ignore[arg-type]
                        server.step(factors, sums, frozenset())
                    version += 1
                    history.models[version] = server.vector.copy()
                    history.used[version] = set()
                    if not command.keep:  # otherwise they count for the last step that uses them
                        used = [_places([task]) - _places([task], done) for task, done in results]
                        history.used[version] = set[tuple[int, int]]().union(*used)
                        for id in weights:
                            del held[id]
                    history.entry_of[version] = index
    open_tasks = [*running.values(), *lost.values(), *(task for task, _ in held.values())]
    history.pending = _places(open_tasks)
    return history


def _sent(model: Array, down: Codec | None) -> Array:
    """Return a model as workers get it."""
    if down is None:
        return model
    sent = down.decode(down.encode(torch.from_numpy(model), 0), model.size)
    return sent.numpy().astype(model.dtype)


def _until(samples: int) -> Any:
    return lambda done: done < samples


def _places(tasks: Iterable[Task], beyond: int = 0) -> Places:
    """Return where in the stream of data the samples are; parts have theirs by the step.

    beyond: how many of the first are left out.
    """
    places: Places = set()
    for task in tasks:
        if task.work.tiles is not None:
            done = task.drawn(beyond)
            for tile, draw, samples in task.stretches():
                places |= {(tile, place) for place in range(draw + done[tile], draw + samples)}
        elif task.work.parts is None:
            end = task.offset + task.samples * task.work.steps
            places |= {(-1, place) for place in range(task.offset + beyond, end)}
    return places
