"""The ledger: connected workers, running tasks and held results, which every policy reads.

The ledger checks the order of events and commands, so policies and engines need no such checks. An
operation costs the same with ten workers as with a million; only `outstanding` iterates, over the
stale versions that still run. Policies read some collections from the front: these are
`OrderedDict`s, since a plain dict scans the gaps that removals leave.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from paceline.core.copies import Copies
from paceline.core.errors import PolicyError
from paceline.core.legal import fault_of_step, fault_of_work
from paceline.core.positions import distinct_samples, give_back, shorten
from paceline.core.protocol import (
    MAIN,
    Assign,
    Cancel,
    Command,
    Discard,
    Evaluated,
    Event,
    Finished,
    Interrupted,
    Joined,
    Left,
    LrScaled,
    Peer,
    Prices,
    Received,
    Result,
    Send,
    SetTimer,
    Start,
    Step,
    Stepped,
    Stop,
    Task,
    TaskId,
    TimerFired,
    WorkerId,
)
from paceline.core.schema import Schema, SchemaError, load_state

MAX_ATTEMPTS = 3
"""A task is dropped after it lost this many workers, since its samples may be the cause."""


class Ledger:
    """The state of a run that all policies share; implements `View`."""

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
        added={"late": "late"},
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

    def record(self, now: float, event: Event) -> tuple[Event | Cancel, ...]:
        """Record an event; return the events to react to, and tasks that it makes needless."""
        if now < self.now:
            raise ValueError(f"time went backwards: {event} at {now}, after {self.now}")
        self.now = now
        match event:
            case Finished(id, samples, seconds, stats, waited):
                if id in self.late:
                    worker = self.late.pop(id).worker
                    self.workers[worker] = 0
                    self._refresh(worker)
                    return (Joined(worker),)
                if id not in self.running:  # cancelled, or its worker left
                    return ()
                others = self._copies.others(self.running[id])
                task, whole = self._end(id), samples + event.skipped
                if whole < task.samples * task.work.steps and (samples or not others):
                    shorten(self._next_in_tile, task, samples)
                self.held[id] = Result(task, max(now - waited, task.since), samples, seconds, stats)
                self.held_shares += task.work.shares
                self._results[task.worker] = self._results.get(task.worker, 0) + 1
                self._refresh(task.worker)
                if others and samples:
                    return self._overtake(event, others)
            case Joined(worker) if self._is_peer(worker):
                pass
            case Left(worker) if self._is_peer(worker):
                self.copies.pop(worker, None)
            case Joined(worker):
                if worker in self.workers or any(t.worker == worker for t in self.late.values()):
                    raise ValueError(f"{worker} joined twice; report Left({worker!r}) in between")
                self.workers[worker] = 0
                self._refresh(worker)
            case Left(worker):
                self.late = {id: task for id, task in self.late.items() if task.worker != worker}
                if worker not in self.workers:
                    return ()
                self._lose(self._end_all(worker))
                del self.workers[worker]
                self._refresh(worker)
                if worker == self.node:  # a node that returns has no copies of its peers
                    self.copies = {worker: self.copies[worker]}
            case Received(sender, version):
                self.copies[sender] = version
            case TimerFired(name):
                if self.timers.get(name, inf) > now:  # moved or cleared meanwhile
                    return ()
                del self.timers[name]
            case LrScaled(scale):
                self.lr_scale = scale
                return ()
            case Evaluated():
                return ()
            case Stepped() | Interrupted():
                pass
        return (event,)

    def apply(self, command: Command) -> Command:
        """Check and apply a command; return the command for the engine."""
        match command:
            case Assign():
                return Start(self._stamp(command))
            case Cancel(id):
                if id not in self.running:
                    raise self._error(command, "this task is not running")
                others = self._copies.others(self.running[id])
                task = self._end(id)
                if not others:
                    self._give_back(task, task.samples * task.work.steps)
                self._refresh(task.worker)
            case Discard(id):
                if id not in self.held:
                    raise self._error(command, "no result of this task is held")
                self._give_back(self.held[id].task, self.held[id].samples)
                self._release(id)
            case Step(weights, _, keep):
                if (fault := fault_of_step(command, self.held, self.copies)) is not None:
                    raise self._error(command, fault)
                self.version += 1
                self.samples += distinct_samples([self.held[id] for id in weights])
                if not keep:
                    for id in weights:
                        self._release(id)
                if command.lr_scale != self.lr_scale:
                    return replace(command, lr_scale=self.lr_scale)
            case SetTimer(name, at):
                if at <= self.now:
                    raise self._error(command, f"the time is already {self.now:g}")
                if at == inf:
                    self.timers.pop(name, None)
                else:
                    self.timers[name] = at
            case Stop(reason):
                self.stopped = reason
            case Send(to):
                if self.node == MAIN or self.node in to or not to:
                    raise self._error(
                        command, "only a node of a decentralized run sends, and only to other nodes"
                    )
                self.copies[self.node] = self.version
            case Start():
                raise self._error(command, "only the ledger makes Start; use Assign")
        return command

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
        for index in (self.timers, self.late, self._results, self._tasks, self._by_version):
            index.clear()
        self.held_shares = self._shares = 0

    def _stamp(self, command: Assign) -> Task:
        worker, work, version = command.worker, command.work, self.version
        if worker not in self.workers:
            raise self._error(command, f"no such worker; present are {_some(self.workers)}")
        id = self.next_task
        if command.redo is not None:
            task = self._again(command, id)
        else:
            samples = self.batch if work.samples is None else work.samples
            if work.tiles is not None:
                samples = sum(work.tiles.values())
            if (fault := fault_of_work(work, samples)) is not None:
                raise self._error(command, fault)
            tile_offsets: tuple[int, ...] = ()
            if work.tiles is not None:
                offset, tile_offsets = (
                    0,
                    tuple(self._next_in_tile.get(tile, 0) for tile in work.tiles),
                )
                for (tile, count), begin in zip(work.tiles.items(), tile_offsets, strict=True):
                    self._next_in_tile[tile] = begin + count * work.steps
            elif work.parts is None:
                offset = self.next_offset
                self.next_offset += samples * work.steps
            else:  # at one version, all workers with a part compute it on the same samples
                offset = version * self.batch * work.steps
            task = Task(
                id, worker, work, version, self.now, samples, offset, tile_offsets=tile_offsets
            )
        self.next_task += 1
        self.running[id] = task
        self.workers[worker] += 1
        self._tasks.setdefault(worker, {})[id] = None
        shares = task.work.shares
        self._by_version[version] = self._by_version.get(version, 0) + shares
        self._shares += shares
        self.idle.pop(worker, None)
        self.free.pop(worker, None)
        return task

    def _again(self, command: Assign, id: TaskId) -> Task:
        """Return a lost or running task as the new one of another worker, on the same samples."""
        assert command.redo is not None
        running = self.running.get(command.redo)
        before = self.lost.pop(command.redo, running)
        if before is None:
            raise self._error(command, "no such task is lost or running")
        if running is not None and (before.work.parts is not None or self.workers[command.worker]):
            raise self._error(
                command, "a running task without parts can be redone, by a worker that has no task"
            )
        shares = command.work.shares if running is None else before.work.shares
        attempt = before.attempt + 1 if running is None else before.attempt
        copied = None if running is None else running.id
        task = Task(id, command.worker, replace(before.work, shares=shares), self.version, self.now,
            before.samples, before.offset, attempt, before.tile_offsets, copied)  # fmt: skip
        if running is not None:
            self._copies.add(running, task)
        return task

    def _overtake(self, event: Finished, others: Sequence[Task]) -> tuple[Event | Cancel, ...]:
        """End the other tasks on the samples of a result: the newest is cancelled.

        Each older one is overdue. Its worker counts as having left, until it answers.
        """
        newest = max(event.task, *(task.id for task in others))
        news: list[Event | Cancel] = [event]
        for task in others:
            self._end(task.id)
            if task.id == newest:
                news.insert(0, Cancel(task.id))
            else:
                self.late[task.id] = task
                self._lose(self._end_all(task.worker))
                del self.workers[task.worker]
                news.append(Left(task.worker))
            self._refresh(task.worker)
        return tuple(news)

    def _end_all(self, worker: WorkerId) -> list[Task]:
        """End the tasks of a worker; return those whose samples no other task computes."""
        tasks = [self.running[id] for id in self._tasks.get(worker, ())]
        alone = [task for task in tasks if not self._copies.others(task)]
        for task in tasks:
            self._end(task.id)
        return alone

    def _is_peer(self, worker: WorkerId) -> bool:
        return self.node not in (MAIN, worker)

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
        if self.workers.get(worker) != 0:  # busy, or disconnected
            self.idle.pop(worker, None)
            self.free.pop(worker, None)
        else:
            self.idle.setdefault(worker)
            if self._results.get(worker):
                self.free.pop(worker, None)
            else:
                self.free.setdefault(worker)

    def _error(self, command: Command, why: str) -> PolicyError:
        return PolicyError(f"{command} at t={self.now:g}: {why}")


def _some(names: Iterable[str], most: int = 8) -> str:
    listed = list(names)
    return ", ".join(listed[:most]) + (", …" if len(listed) > most else "") or "none"
