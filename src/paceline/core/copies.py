"""Running tasks that compute the same samples: the first result of them counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from paceline.core.protocol import Task, TaskId

_Key: TypeAlias = tuple[object, ...]


def samples_of(task: Task) -> tuple[object, ...]:
    """Return a key of the samples that a task computes: equal keys mean the same samples."""
    return task.offset, *task.stretches(), *sorted(task.work.parts or ())


class Copies:
    """Tasks of which several run on the same samples; a task that runs once is not in here."""

    def __init__(self, running: Iterable[Task] = ()) -> None:
        self._groups: dict[_Key, dict[TaskId, Task]] = {}
        first: dict[_Key, Task] = {}
        for task in running:
            if task.work.parts is None:  # parts are computed several times by design
                self._join(first.setdefault(samples_of(task), task), task)

    def add(self, before: Task, task: Task) -> None:
        """Note that a task computes the samples of one that runs already."""
        self._join(before, task)

    def others(self, task: Task) -> list[Task]:
        """Return the other running tasks on the samples of a task, oldest first."""
        if not self._groups:
            return []
        group = self._groups.get(samples_of(task), {})
        return [other for id, other in group.items() if id != task.id]

    def end(self, task: Task) -> None:
        """Note that a task runs no longer."""
        if not self._groups:
            return
        key = samples_of(task)
        group = self._groups.get(key, {})
        group.pop(task.id, None)
        if len(group) == 1:
            del self._groups[key]

    def surplus(self, oldest: float) -> int:
        """Return the shares that tasks of a version from `oldest` on count more than once."""
        counted = 0
        for group in self._groups.values():
            fresh = [task.work.shares for task in group.values() if task.version >= oldest]
            counted += sum(fresh) - max(fresh, default=0)
        return counted

    def __iter__(self) -> Iterator[list[Task]]:
        return (list(group.values()) for group in self._groups.values())

    def _join(self, before: Task, task: Task) -> None:
        if before.id != task.id:
            group = self._groups.setdefault(samples_of(task), {before.id: before})
            group[task.id] = task
