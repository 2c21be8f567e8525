"""The entries of a ledger and the counts that follow from them, kept together.

An operation costs the same with ten workers as with a million; only `outstanding` iterates, over
the stale versions that still run. Policies read some collections from the front: these are
`OrderedDict`s, since a plain dict scans the gaps that removals leave.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import inf
from typing import Any

from paceline.core.copies import Copies
from paceline.core.positions import give_back
from paceline.core.protocol import MAIN, Peer, Prices, Result, Task, TaskId, WorkerId
from paceline.core.schema import Schema, SchemaError, load_state

MAX_ATTEMPTS = 3
"""A task is dropped after it lost this many workers, since its samples may be the cause."""


class Books:
    """Connected workers, running tasks, held results and lost tasks, with their indices."""

    schema = Schema(
        "ledger",
        1,
        {
            **{name: name for name in ("now", "version", "samples", "stopped", "timers")},
            **{name: name for name in ("batch", "message_bytes", "prices")},
            **{name: name for name in ("workers", "idle", "free", "copies")},
            **{name: name for name in ("running", "held", "lost")},
            **{"next_task": "next_task", "next_offset": "next_offset"},
            "next_shard_offsets": "_next_in_tile",
        },
        added={"late": "late", "draining": "draining"},
    )

    def __init__(
        self,
        batch: int = 1,
        message_bytes: int = 0,
        prices: Prices | None = None,
        peer: Peer | None = None,
    ) -> None:
        self.now = 0.0
        self.version = 0
        self.batch, self.message_bytes, self.prices = batch, message_bytes, prices or Prices()
        self.samples = 0
        self.lr_scale = 1.0  # not in the schema: a resumed run records it as its first event
        self.held_shares = 0
        self.workers: dict[WorkerId, int] = {}  # -> number of tasks outstanding
        self.idle: OrderedDict[WorkerId, None] = OrderedDict()
        self.free: OrderedDict[WorkerId, None] = OrderedDict()
        self.running: OrderedDict[TaskId, Task] = OrderedDict()
        self.held: OrderedDict[TaskId, Result] = OrderedDict()
        self.lost: OrderedDict[TaskId, Task] = OrderedDict()
        # Overdue tasks whose samples another one computed. Their workers join when they answer.
        self.late: dict[TaskId, Task] = {}
        self.draining: list[WorkerId] = []  # workers that leave when they have no task
        self.node = MAIN if peer is None else peer.name
        self.tensors = () if peer is None else peer.tensors
        # All nodes begin with the same model, so each holds a copy of its neighbors'.
        known = () if peer is None else (peer.name, *peer.neighbors)
        self.copies: dict[WorkerId, int] = dict.fromkeys(known, 0)
        self.timers: dict[str, float] = {}
        self.stopped: str | None = None
        self._results: dict[WorkerId, int] = {}  # -> number of results held
        self._tasks: dict[WorkerId, dict[TaskId, None]] = {}  # -> tasks running
        self._by_version: OrderedDict[int, int] = OrderedDict()  # -> shares running
        self._shares = 0  # running, of all versions
        self._copies = Copies()
        self.next_task = 0  # the id of the next task
        self.next_offset = 0  # of the next samples in the data stream
        self._next_in_tile: dict[int, int] = {}  # tile (data shard) -> next offset in its stream

    def staleness(self, item: Task | Result) -> int:
        task = item.task if isinstance(item, Result) else item
        return self.version - task.version

    def outstanding(self, max_staleness: float) -> int:
        stale = 0
        if max_staleness < inf:
            for version, count in self._by_version.items():  # in increasing order
                if self.version - version <= max_staleness:
                    break
                stale += count
        return self._shares - stale - self._copies.surplus(self.version - max_staleness)

    def restore(self, data: Mapping[str, Any]) -> None:
        """Load saved state; recompute all counts that follow from tasks and results."""
        load_state(self, data)
        kinds = {"running": Task, "held": Result, "lost": Task, "late": Task}
        for name, kind in kinds.items():
            if not all(isinstance(item, kind) for item in getattr(self, name).values()):
                raise SchemaError(f"ledger.{name} has values other than {kind.__name__}")
        self._results, self._tasks, self._by_version = {}, {}, OrderedDict()
        for task in self.running.values():  # in increasing order of versions
            self._tasks.setdefault(task.worker, {})[task.id] = None
            before = self._by_version.get(task.version, 0)
            self._by_version[task.version] = before + task.work.shares
        for result in self.held.values():
            worker = result.task.worker
            self._results[worker] = self._results.get(worker, 0) + 1
        self.held_shares = sum(result.task.work.shares for result in self.held.values())
        self._shares = sum(self._by_version.values())
        self._copies = Copies(self.running.values())

    def abandon(self) -> None:
        """Remove all workers and mark all unused work as lost, as after a restart."""
        for group in list(self._copies):
            for other in group[1:]:  # the first is enough
                self._end(other.id)
        unused = [*(result.task for result in self.held.values()), *self.running.values()]
        for task in sorted(unused, key=lambda task: task.id):  # no worker failed: no attempt
            if task.work.parts is None:
                self.lost[task.id] = replace(task, attempt=task.attempt - 1)
        for book in (self.workers, self.idle, self.free, self.running, self.held, self.copies):
            book.clear()
        for index in (
            self.timers,
            self.late,
            self.draining,
            self._results,
            self._tasks,
            self._by_version,
        ):
            index.clear()
        self.held_shares = self._shares = 0

    def _end(self, id: TaskId) -> Task:
        """Remove a task from the running ones; the caller refreshes its worker."""
        task = self.running.pop(id)
        self._copies.end(task)
        self.workers[task.worker] -= 1
        del self._tasks[task.worker][id]
        self._shares -= task.work.shares
        left = self._by_version[task.version] - task.work.shares
        if left:
            self._by_version[task.version] = left
        else:
            del self._by_version[task.version]
        return task

    def _end_all(self, worker: WorkerId) -> list[Task]:
        """End the tasks of a worker; return those whose samples no other task computes."""
        tasks = [self.running[id] for id in self._tasks.get(worker, ())]
        alone = [task for task in tasks if not self._copies.others(task)]
        for task in tasks:
            self._end(task.id)
        return alone

    def _give_back(self, task: Task, samples: int) -> None:
        """Return a task's unused samples to their tiles; if that cannot be, the task is lost."""
        if not give_back(self._next_in_tile, task, samples):
            self.lost[task.id] = replace(task, attempt=task.attempt - 1)  # no worker failed

    def _lose(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            # Parts of a batch are useful at one version only, and other workers have them too.
            if task.attempt < MAX_ATTEMPTS and task.work.parts is None:
                self.lost[task.id] = task

    def _release(self, id: TaskId) -> None:
        task = self.held.pop(id).task
        self.held_shares -= task.work.shares
        worker = task.worker
        self._results[worker] -= 1
        self._refresh(worker)

    def _refresh(self, worker: WorkerId) -> None:
        if self.workers.get(worker) != 0 or worker in self.draining:  # or busy, or disconnected
            self.idle.pop(worker, None)
            self.free.pop(worker, None)
        else:
            self.idle.setdefault(worker)
            if self._results.get(worker):
                self.free.pop(worker, None)
            else:
                self.free.setdefault(worker)
