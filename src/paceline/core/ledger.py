"""The ledger: connected workers, running tasks and held results, which every policy reads.

The ledger checks the order of events and commands, so policies and engines need no such checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf

from paceline.core.books import Books
from paceline.core.errors import PolicyError
from paceline.core.legal import fault_of_step, fault_of_work
from paceline.core.positions import distinct_samples, draw, shorten
from paceline.core.protocol import (
    MAIN,
    Assign,
    Cancel,
    Command,
    Discard,
    Draining,
    Evaluated,
    Event,
    Finished,
    Interrupted,
    Joined,
    Left,
    LrScaled,
    Received,
    Release,
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


class Ledger(Books):
    """The state of a run that all policies share; implements `View`."""

    def record(self, now: float, event: Event) -> tuple[Event | Cancel | Release, ...]:
        """Record an event; return the events to react to, and commands that follow from it."""
        news = self._record(now, event)
        return (*news, *self._released()) if self.draining else news

    def _record(self, now: float, event: Event) -> tuple[Event | Cancel, ...]:
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
            case Draining(worker):
                if worker in self.workers and worker not in self.draining:
                    self.draining.append(worker)
                return ()
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
                if not keep:  # otherwise later steps use them again, and the last one counts them
                    self.samples += distinct_samples([self.held[id] for id in weights])
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
            case Start() | Release():
                raise self._error(command, "only the ledger makes it; use Assign")
        return command

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
            offset, in_tiles = 0, draw(self._next_in_tile, work)
            if work.parts is not None:  # at one version, all workers with a part have its samples
                offset = version * self.batch * work.steps
            elif work.tiles is None:
                offset = self.next_offset
                self.next_offset += samples * work.steps
            task = Task(id, worker, work, version, self.now, samples, offset, tile_offsets=in_tiles)
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

    def _released(self) -> list[Event | Release]:
        """Let the workers go that drain and have no task left."""
        done = [worker for worker in self.draining if not self.workers.get(worker)]
        self.draining = [worker for worker in self.draining if worker not in done]
        there = [worker for worker in done if worker in self.workers]
        for worker in there:
            del self.workers[worker]
            self._refresh(worker)
        return [news for worker in there for news in (Release(worker), Left(worker))]

    def _is_peer(self, worker: WorkerId) -> bool:
        return self.node not in (MAIN, worker)

    def _error(self, command: Command, why: str) -> PolicyError:
        return PolicyError(f"{command} at t={self.now:g}: {why}")


def _some(names: Iterable[str], most: int = 8) -> str:
    listed = list(names)
    return ", ".join(listed[:most]) + (", …" if len(listed) > most else "") or "none"
