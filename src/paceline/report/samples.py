"""The fate of every sample that was handed out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.core.journal import Journal
from paceline.core.protocol import (
    SHARED,
    Cancel,
    Discard,
    Finished,
    Left,
    Start,
    Step,
    Task,
    TaskId,
)
from paceline.report.metrics import books_of
from paceline.report.workers import Fate


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive samples of the data stream, and their fate."""

    task: TaskId
    offset: int
    samples: int
    fate: Fate
    tile: int | None = None  # a data shard; each tile of placed data has its own stream


def sample_fates(journal: Journal) -> list[Stretch]:
    """Return the fate of every sample that was handed out, in the order of the data stream.

    A sample that was redone after its worker was lost appears once, with its last fate.
    """
    books = books_of(journal.header)
    tasks: dict[TaskId, Task] = {**books.lost, **books.running}
    tasks.update((id, result.task) for id, result in books.held.items())
    seen: dict[TaskId, int] = {id: result.samples for id, result in books.held.items()}
    fates: dict[TaskId, tuple[Fate, int]] = {id: ("lost", 0) for id in books.lost}
    for entry in journal:
        match entry.event:
            case Finished(id, samples, skipped=skipped):
                seen[id] = samples
                if skipped:  # the policy discards the result, which has no samples
                    fates[id] = "skipped", 0
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
                case Step(weights, keep=False):  # the last step that uses them
                    fates.update((id, ("used", seen[id])) for id in weights)
    last: dict[tuple[int, int, int], Task] = {}
    for task in tasks.values():
        for place in _places(task, *fates.get(task.id, ("unfinished", 0))):
            before = last.get(place)
            # Several tasks may compute the same samples; they count as used if one of them is used.
            if before is None or fates.get(before.id, ("unfinished", 0))[0] != "used":
                last[place] = task
    _drop_given_back(last, fates)
    stretches: list[Stretch] = []
    for (tile, offset, total), task in sorted(last.items(), key=lambda item: item[0]):
        fate, count = fates.get(task.id, ("unfinished", 0))
        if tile != SHARED:
            stretches.append(Stretch(task.id, offset, total, fate, tile))
        elif fate == "used" and task.work.parts is None:
            stretches.append(Stretch(task.id, offset, count, "used"))
            if count < total:
                stretches.append(Stretch(task.id, offset + count, total - count, "cut short"))
        else:
            stretches.append(Stretch(task.id, offset, total, fate))
    return stretches


def _places(task: Task, fate: Fate, count: int) -> list[tuple[int, int, int]]:
    """Return the data stream, offset and number of each run of samples of a task."""
    if task.work.tiles is not None:
        if fate != "used":
            return list(task.stretches())
        done = task.drawn(count)  # the rest is handed out again
        return [(tile, offset, done[tile]) for tile, offset, _ in task.stretches() if done[tile]]
    if task.work.parts is None:
        return [(SHARED, task.offset, task.samples * task.work.steps)]
    return [(SHARED, *task.part(index)) for index in task.work.parts]


def _drop_given_back(
    last: dict[tuple[int, int, int], Task], fates: Mapping[TaskId, tuple[Fate, int]]
) -> None:
    """Leave out unused samples of tiles that a later task got again."""
    drawn: dict[int, list[tuple[int, int, TaskId]]] = {}
    for (tile, offset, total), task in sorted(last.items(), key=lambda item: item[1].id):
        if tile == SHARED:
            continue
        before = drawn.setdefault(tile, [])
        # Only the newest samples of a stream are ever returned to it.
        while before and before[-1][0] + before[-1][1] > offset:
            start, count, id = before[-1]
            if fates.get(id, ("unfinished", 0))[0] not in ("cancelled", "discarded"):
                break
            before.pop()
            del last[tile, start, count]
        before.append((offset, total, task.id))
