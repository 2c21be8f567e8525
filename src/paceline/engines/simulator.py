"""A discrete-event engine: real arithmetic, virtual time, the same bits for the same seed.

A task takes the time of three parts: the model's download, computing, and the result's upload. The
download takes latency + bytes / bandwidth. Computing follows a delay model, scaled by the amount of
work. With `Work.overlap` a worker answers when it has computed. Its result follows, and a step
waits for that; the worker's next task begins before its model has arrived. A gradient is computed
when it arrives, so a cancelled task costs nothing.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.checks import check_whole
from paceline.core.protocol import (
    MAIN,
    Assign,
    Cancel,
    Command,
    Discard,
    Event,
    Finished,
    Interrupted,
    Joined,
    Left,
    Release,
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
    some_names,
    worker_names,
)
from paceline.core.state import decode, encode
from paceline.delays.compound import Delays, PerWorker, resolve
from paceline.delays.links import Link
from paceline.delays.models import Delay, Exponential
from paceline.engines.base import Job
from paceline.engines.checks import NOT_FINITE, ResultCheck, Skipping
from paceline.engines.kinds import Fleet
from paceline.engines.results import Results
from paceline.learners.arrays import TimingOnly
from paceline.learners.base import Array, KeepingReplica, Outcome, Saved

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec
    from paceline.codecs.uplink import Uplink


@dataclass(frozen=True)
class SimulatedWorkers:
    """The workers of a simulator: their delays and links, departures and arrivals.

    unit: samples of one unit of work; None: an equal share of the global batch.
    update: seconds of a step.
    """

    delays: Mapping[WorkerId, Delay]
    links: Mapping[WorkerId, Link]
    schedule: Sequence[tuple[float, Joined | Left]] = ()
    unit: float | None = None
    update: float = 0.0


@dataclass(slots=True)
class _Run:
    """A task on a worker: how long it computes, and how many samples that is."""

    task: Task
    seconds: float
    samples: int
    wanted: bool = True
    news: Finished | None = None  # the event of its result, while the result is in flight
    without: float = 0.0  # samples that it computes before its model has arrived


@dataclass(slots=True)
class _Worker:
    delay: Delay
    link: Link
    memory: dict[str, float] = field(default_factory=dict)
    waiting: deque[Task] = field(default_factory=deque)
    run: _Run | None = None
    uplink: Uplink | None = None
    known: int | None = None  # the version of the public copy that it has
    got: int = 0  # bytes of the last model that it received
    last: int | None = None  # the version of its last task with `overlap`


@dataclass(slots=True)
class _Download:
    """A model that arrives after a worker has computed some samples on its own."""

    model: Array
    without: float

    def here(self, done: int) -> bool:
        return done >= self.without

    def __iter__(self) -> Iterator[Array]:
        yield self.model


class Simulator:
    """Workers w0, w1, … in virtual time.

    delays: seconds a worker needs for one unit of work: `unit` samples, by default an equal
        share of the global batch (batch_size / workers). One model for all, or one for each.
    link: the workers' connections; one for all or one for each.
    update: seconds a step takes on the server.
    schedule: departures and arrivals, as pairs (seconds, Left("w3") | Joined("w3")).
    names: the names of the workers in order, as those of a fleet; by default w0, w1, …
    interruptible: whether cancelled work ends at once. Otherwise it blocks its worker until it is
        done, as on Ray with a learner without micro-batches.
    """

    def __init__(
        self,
        workers: int,
        delays: Delays = Exponential(1.0),
        link: Link | Sequence[Link] = Link(),
        *,
        unit: float | None = None,
        update: float = 0.0,
        schedule: Sequence[tuple[float, Joined | Left]] = (),
        interruptible: bool = True,
        names: Sequence[WorkerId] | None = None,
    ) -> None:
        check_whole("workers", workers)
        if names is not None and len({*names}) != workers:
            raise ValueError(
                f"names={names!r}: give {workers} different names, one for each worker"
            )
        if update < 0 or (unit is not None and unit <= 0):
            raise ValueError(f"update={update}, unit={unit}: use update >= 0 and unit > 0")
        self.size = workers
        self._names = worker_names(workers) if names is None else tuple(names)
        if not isinstance(delays, Delay | PerWorker):
            delays = PerWorker(delays)  # once, and not for each worker
        self._delays, self._link = delays, link
        self._unit, self._update = unit, update
        self._schedule, self._interruptible = tuple(schedule), interruptible
        self._check_schedule()
        self._queue: list[tuple[float, int, Event | Task]] = []  # for `close`, if `open` fails

    def __repr__(self) -> str:
        told = f"delays={self._delays!r}, link={self._link!r}"
        return f"Simulator(workers={self.size}, {told if len(told) < 500 else told[:500] + '…'})"

    def _check_schedule(self) -> None:
        present = dict.fromkeys(self.workers, True)
        for at, event in sorted(self._schedule, key=lambda pair: pair[0]):
            joins = isinstance(event, Joined)
            if event.worker not in present:
                raise ValueError(
                    f"schedule names {event.worker}; the workers are {some_names(self.workers)}"
                )
            if present[event.worker] is joins:
                state = "already connected" if joins else "already gone"
                raise ValueError(f"schedule: {event} at {at:g} s, but the worker is {state}")
            present[event.worker] = joins

    def open(self, job: Job, saved: Saved | None = None) -> None:
        self._job = job
        self._replica = job.learner.replica(job.seed, job.tiles)
        self._arithmetic = not isinstance(job.learner, TimingOnly)
        self._per_sample = 1 / (self._unit or job.learner.batch_size / self.size)
        self._bytes = self._sent = job.learner.message_bytes
        self._rng = np.random.Generator(np.random.PCG64(job.seed))
        self._now = self._ready = job.began
        self._arrivals: dict[TaskId, float] = {}  # of results that follow their answer
        self._order = 0
        self._interruption: Interrupted | None = None
        self._lazy = False  # whether a message's length is known only when it is sent
        self._garbage = 0  # entries of the queue whose task was cancelled or lost
        self._skipping = Skipping(job.skip_limit)
        self._queue = []
        self._tasks: dict[TaskId, Task] = {}
        self._models: dict[int, Array] = {}
        self._users: dict[int, int] = {}  # tasks that use each kept model
        self._results = Results(job.server, job.wants, job.codec, job.model_codec, job.steps)
        self._bytes = self._results.whole_bytes or self._bytes
        self._check = ResultCheck(job.server.layout.size, job.server.vector.dtype)
        self._senders: dict[TaskId, WorkerId] = {}  # the worker of each encoded result
        links = [self._link] if isinstance(self._link, Link) else self._link
        self._workers = {
            name: _Worker(resolve(self._delays, name, i), links[i % len(links)])
            for i, name in enumerate(self.workers)
        }
        if not self._arithmetic and (job.codec is not None or job.model_codec is not None):
            raise ValueError("TimingOnly has no values to encode; give it message_bytes instead")
        if job.codec is not None:
            self._open_uplinks(job.codec)
        if saved is not None:
            self._load(saved)
            return
        for worker in self._workers:
            self._push(self._now, Joined(worker))
        for at, event in self._schedule:
            if at >= self._now:
                self._push(at, event)

    def _open_uplinks(self, codec: Codec) -> None:
        """Give every worker a sender, and measure the length of a message of noise."""
        from paceline.codecs.base import TwoEnded
        from paceline.codecs.uplink import Uplink

        layout, dtype = self._job.server.layout, self._job.server.vector.dtype
        self._whole = [(0, layout.size)]
        self._uplink = partial(Uplink, codec, layout.trained, layout.tensors)
        for worker in self._workers.values():
            worker.uplink = self._uplink()
        if isinstance(codec, TwoEnded):
            self._sent, self._lazy = 0, True
            return
        noise = np.random.Generator(np.random.PCG64(0)).standard_normal(layout.size).astype(dtype)
        self._sent = self._uplink().send(noise, 0, 1.0, self._whole)[0].nbytes

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        return self._names

    @property
    def fleet(self) -> Fleet:
        return Fleet.alike(self._names)

    @property
    def is_exact(self) -> bool:
        return True

    @property
    def starting(self) -> str:
        return ""  # a job begins at once

    @property
    def interruptible(self) -> bool:
        """Whether cancelled work ends at once."""
        return self._interruptible

    def lend(self) -> SimulatedWorkers:
        links = [self._link] if isinstance(self._link, Link) else self._link
        names = {name: i for i, name in enumerate(self.workers)}
        return SimulatedWorkers(
            {name: resolve(self._delays, name, i) for name, i in names.items()},
            {name: links[i % len(links)] for name, i in names.items()},
            self._schedule,
            self._unit,
            self._update,
        )

    def settle(self) -> None:
        pass

    def writer(self, folder: Path) -> None:
        return None

    def interrupt(self, reason: str) -> None:
        self._interruption = Interrupted(reason)

    def now(self) -> float:
        return self._now

    def close(self) -> None:
        self._queue.clear()

    def next_event(self) -> tuple[float, WorkerId, Event] | None:
        if self._interruption is not None:
            interruption, self._interruption = self._interruption, None
            return self._now, MAIN, interruption
        while self._queue:
            self._now, _, item = heapq.heappop(self._queue)
            if isinstance(item, Task):
                event = self._finish(item)
                if event is not None:
                    return self._now, MAIN, event
            else:
                if isinstance(item, Left):
                    self._leave(item.worker)
                return self._now, MAIN, item
        return None

    def execute(self, node: WorkerId, command: Command) -> None:
        match command:
            case Start(task):
                self._tasks[task.id] = task
                if self._arithmetic:
                    self._keep_model(task.version)
                worker = self._workers[task.worker]
                if worker.run is None:
                    self._begin(worker, task)
                else:
                    worker.waiting.append(task)
            case Cancel(id):
                self._cancel(self._tasks[id])
            case Step():
                self._step(command)
            case Discard(id):
                self._results.drop(id)
                self._arrivals.pop(id, None)
                self._refund(id)
            case SetTimer(name, at):
                if at < inf:
                    self._push(at, TimerFired(name))
            case Stop() | Assign() | Release():
                pass
            case Send():
                raise NotImplementedError("only nodes of a decentralized run send: see `lend`")

    def _push(self, at: float, item: Event | Task) -> None:
        self._order += 1  # ties are broken by order, never by chance
        heapq.heappush(self._queue, (at, self._order, item))

    def _begin(self, worker: _Worker, task: Task) -> None:
        link, total = worker.link, task.computed
        worker.got = self._bytes
        if self._job.model_codec is not None:
            changes = self._results.changes(worker.known, task.version)
            worker.known = task.version
            if changes is not None:
                worker.got = sum(each.nbytes for each in changes)
        begin = arrival = max(self._now, self._ready) + link.latency + worker.got / link.down
        early = task.work.overlap and worker.last == task.version - 1
        if early:
            begin = min(self._now + link.latency, arrival)
        seconds = worker.delay.sample(self._rng, begin, worker.memory) * total * self._per_sample
        if seconds > task.work.budget:
            total = int(total * task.work.budget / seconds)
            seconds = task.work.budget
        without = total * (arrival - begin) / seconds if seconds else 0.0
        worker.run = _Run(task, seconds, total, without=without)
        answered = max(begin + seconds, arrival) + link.latency
        way = self._sent / task.work.messages / link.up
        if task.work.overlap:
            self._arrivals[task.id] = answered + way
        self._push(answered if task.work.overlap else answered + way, task)

    def _finish(self, task: Task) -> Event | None:
        worker = self._workers[task.worker]
        run = worker.run
        if run is None or run.task.id != task.id:  # cancelled, or the worker left
            self._garbage -= 1
            return None
        if run.wanted and self._arithmetic and run.news is None:
            run.news = self._computed(worker, run)
            if self._lazy and (seconds := (run.news.sent or 0) / worker.link.up):
                if not task.work.overlap:
                    self._push(self._now + seconds, task)
                    return None
                self._arrivals[task.id] = self._now + seconds
        worker.run = None
        worker.last = task.version if task.work.overlap else None
        if worker.waiting:
            self._begin(worker, worker.waiting.popleft())
        if not run.wanted:  # could not be interrupted; the coordinator will discard it
            return Finished(task.id, run.samples, run.seconds)
        self._forget(task)
        if not self._arithmetic:
            self._results.hold(task.id, None, {})
            return Finished(task.id, run.samples, run.seconds)
        return run.news

    def _computed(self, worker: _Worker, run: _Run) -> Finished:
        """Compute a task, and hold its result as the receiver decodes it."""
        task = run.task
        got = None if self._job.model_codec is None else worker.got
        model = self._models[task.version]
        got_model = _Download(model, run.without)
        outcome = self._replica.compute(got_model, task, lambda done: done < run.samples)
        vector = None if outcome.vector is None else np.array(outcome.vector)
        sent = None
        if not self._counts(task, outcome):
            return self._skipped(run, outcome.samples, got)
        if worker.uplink is not None and vector is not None:
            rate = self._job.learner.rate(task.version)
            packed = worker.uplink.send(vector, task.id, rate, self._whole, model)[0]
            sent, vector = packed.nbytes, self._results.read(task.worker, packed)
            self._senders[task.id] = task.worker
        self._results.hold(task.id, vector, outcome.stats)
        return Finished(task.id, outcome.samples, run.seconds, outcome.stats, sent=sent, got=got)

    def _counts(self, task: Task, outcome: Outcome) -> bool:
        """Check a result; return True if it counts, False if it is skipped.

        Another worker would compute the same result, so a large one counts at once. A result that
        is not finite counts unless it is skipped. If it counts, the loss ends the run.
        """
        given = task, outcome.vector, outcome.samples, dict(outcome.stats)
        fault = self._check.fault(*given)
        if fault == NOT_FINITE:
            return not self._skipping.may_skip(task.worker)
        if fault is not None and (fault := self._check.fault(*given)) is not None:
            raise RuntimeError(f"the learner computed a wrong result for {task}: {fault}")
        self._skipping.finite(task.worker)
        return True

    def _skipped(self, run: _Run, samples: int, got: int | None) -> Finished:
        """Skip a result that is not finite, with its samples."""
        self._results.hold(run.task.id, None, {})
        if (reason := self._skipping.reason(run.task)) is not None:
            self.interrupt(reason)
        return Finished(run.task.id, 0, run.seconds, got=got, skipped=samples)

    def _cancel(self, task: Task) -> None:
        worker = self._workers[task.worker]
        if worker.run is not None and worker.run.task.id == task.id:
            if self._interruptible:
                worker.run = None
                self._sweep()
                if worker.waiting:
                    self._begin(worker, worker.waiting.popleft())
            else:
                worker.run.wanted = False
        else:
            worker.waiting.remove(task)
        self._results.drop(task.id)  # if it was in flight
        self._arrivals.pop(task.id, None)
        self._senders.pop(task.id, None)
        self._forget(task)

    def _sweep(self) -> None:
        """Count a cancelled task; clear such tasks from the queue once they are most of it."""
        self._garbage += 1
        if self._garbage > 64 and 2 * self._garbage > len(self._queue):
            self._queue = [entry for entry in self._queue if self._is_live(entry[2])]
            heapq.heapify(self._queue)
            self._garbage = 0

    def _is_live(self, item: Event | Task) -> bool:
        if not isinstance(item, Task):
            return True
        run = self._workers[item.worker].run
        return run is not None and run.task.id == item.id

    def _leave(self, name: WorkerId) -> None:
        worker = self._workers[name]
        gone = [*worker.waiting]
        if worker.run is not None and worker.run.wanted:
            gone.append(worker.run.task)
        if worker.run is not None:
            worker.run = None
            self._sweep()
        worker.waiting.clear()
        worker.known = worker.last = None
        if isinstance(self._replica, KeepingReplica):
            self._replica.forget(name)
        if worker.uplink is not None:
            worker.uplink = self._uplink()  # with an empty memory
            self._results.forget(name)
        for task in gone:
            self._results.drop(task.id)
            self._arrivals.pop(task.id, None)
            self._senders.pop(task.id, None)
            self._forget(task)

    def _step(self, step: Step) -> None:
        stats = self._results.step(step.weights, step.keep, step.lr_scale)
        if not step.keep:
            for id in step.weights:
                self._senders.pop(id, None)
        arrived = max((self._arrivals.pop(id, -inf) for id in step.weights), default=-inf)
        # Steps follow each other.
        self._ready = max(self._now, self._ready, arrived) + self._update
        self._push(self._ready, Stepped(self._results.version, stats))

    def _refund(self, id: TaskId) -> None:
        """Add a result that no step used back to the memory of its sender."""
        uplink = self._workers[self._senders.pop(id)].uplink if id in self._senders else None
        if uplink is not None:
            uplink.refund([id])

    def _keep_model(self, version: int) -> None:
        if version not in self._models:
            self._models[version] = np.array(self._results.opened(self._results.publish()))
        self._users[version] = self._users.get(version, 0) + 1

    def _forget(self, task: Task) -> None:
        del self._tasks[task.id]
        if self._arithmetic:
            self._users[task.version] -= 1
            if not self._users[task.version]:
                del self._users[task.version], self._models[task.version]

    def save(self) -> Saved:
        arrays = {f"model.{version}": model for version, model in self._models.items()}
        held, losses, counts = self._results.save()
        arrays |= held
        for name, worker in self._workers.items():
            if worker.uplink is not None:
                memory = worker.uplink.state_dict()
                arrays |= {f"uplink.{name}.{key}": array for key, array in memory.items()}
        workers = {
            name: {
                "memory": dict(worker.memory),
                "known": worker.known,
                "waiting": list(worker.waiting),
                "run": None
                if (run := worker.run) is None
                else [run.task, run.seconds, run.samples, run.wanted, run.news],
            }
            for name, worker in self._workers.items()
        }
        data: dict[str, Any] = {
            "now": self._now,
            "ready": self._ready,
            "order": self._order,
            "version": self._results.version,
            "rng": self._rng.bit_generator.state,
            "queue": sorted([*item] for item in self._queue if self._is_live(item[2])),
            "tasks": list(self._tasks.values()),
            "losses": losses,
            "workers": workers,
        }
        if any(count is not None for count in counts.values()):
            data["counts"] = counts
        if self._job.overlaps:
            early = {
                name: [worker.last, worker.run.without if worker.run else 0.0]
                for name, worker in self._workers.items()
            }
            data["overlap"] = [self._arrivals, early]
        return Saved(arrays, encode(data))

    def _load(self, saved: Saved) -> None:
        data = decode(saved.data)
        if set(data["workers"]) != set(self._workers):
            raise ValueError(
                f"the saved run had {len(data['workers'])} workers and this simulator has "
                f"{self.size}; give it as many workers"
            )
        self._now, self._ready = data["now"], data["ready"]
        self._order, self._results.version = data["order"], data["version"]
        self._rng.bit_generator.state = data["rng"]
        self._queue = [(at, order, item) for at, order, item in data["queue"]]  # still a heap
        self._tasks = {task.id: task for task in data["tasks"]}
        memories: dict[WorkerId, dict[str, Array]] = {}
        for name, state in data["workers"].items():
            worker = self._workers[name]
            worker.memory, worker.waiting = state["memory"], deque(state["waiting"])
            worker.known = state.get("known")
            worker.run = None if state["run"] is None else _Run(*state["run"])
            if worker.uplink is not None:
                prefix = f"uplink.{name}."
                memory = {k.removeprefix(prefix): v for k, v in saved.arrays.items()
                          if k.startswith(prefix)}  # fmt: skip
                worker.uplink.load_state_dict(memory, self._whole)
                memories[name] = memory
        self._arrivals, early = data.get("overlap", [{}, {}])
        for name, (last, without) in early.items():
            worker = self._workers[name]
            worker.last = last
            if worker.run is not None:
                worker.run.without = without
        self._results.load(saved.arrays, data["losses"], data.get("counts", {}), memories)
        if self._arithmetic:
            for task in self._tasks.values():
                self._models[task.version] = saved.arrays[f"model.{task.version}"]
                self._users[task.version] = self._users.get(task.version, 0) + 1
