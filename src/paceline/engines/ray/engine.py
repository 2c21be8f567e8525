"""Paceline on Ray: commands become actor calls, whatever comes of them becomes an event."""

from __future__ import annotations

import heapq
import logging
import queue
import time
import uuid
from collections import OrderedDict, deque
from concurrent.futures import Future
from math import inf
from types import TracebackType
from typing import Any, NamedTuple

import ray

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
    Send,
    SetTimer,
    Start,
    Step,
    Stepped,
    Stop,
    Task,
    TimerFired,
    WorkerId,
)
from paceline.engines.base import Job
from paceline.engines.ray.cluster import connect
from paceline.engines.ray.pool import Member, Pool
from paceline.engines.ray.reducer import DriverReducer, Reducer
from paceline.engines.ray.worker import Place, Token, pack, read
from paceline.learners.base import Saved

logger = logging.getLogger(__name__)


_LONGEST_WAIT = 3600.0  # what a lock can wait for has a limit


class WorkersLost(RuntimeError):
    """No worker is left, and none may be started again."""


class _Call(NamedTuple):
    """A call on its way, and the time by which it must be answered."""

    deadline: float
    member: Member
    task: Task | None  # None: the worker is being set up


class Ray:
    """Workers w0, w1, … as actors of a Ray cluster.

    address: of a running cluster; by default the one this process is connected to, or else a
        new one on this machine alone.
    timeout: seconds a task may take. A worker silent for longer (Ray does not report a paused
        process) is killed and counts as lost.
    start_timeout: seconds a worker may take to come up.
    respawns: how often one worker is started again after it was lost.
    cpus, gpus: what Ray reserves per worker; by default an equal share of the cores that are
        free, at most one.

    Use it as a context manager to keep the worker processes for several runs.
    """

    def __init__(
        self,
        workers: int,
        *,
        address: str | None = None,
        timeout: float = 600.0,
        start_timeout: float = 180.0,
        respawns: int = 3,
        cpus: float | None = None,
        gpus: float = 0.0,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers={workers}: use at least 1")
        self.size = workers
        self._address, self._timeout, self._start_timeout = address, timeout, start_timeout
        self._respawns, self._cpus, self._gpus = respawns, cpus, gpus
        self._pool: Pool | None = None
        self._ours = False  # whether Ray itself was started by this engine
        self._keep = False  # whether workers outlive a job
        self._clear()

    def _clear(self) -> None:
        """Forget everything about a job."""
        self._job: Job | None = None
        self._run = ""
        self._reducer: Reducer | None = None
        self._learner: Any = None
        self._origin = 0.0
        self._version = 0
        self._inbox: queue.SimpleQueue[tuple[_Call, Future[Any]] | Interrupted]
        self._inbox = queue.SimpleQueue()
        self._events: deque[Event] = deque()
        self._timers: list[tuple[float, str]] = []
        # Calls without an answer, by worker. All of a kind have equal patience, so that in order
        # of submission the first is the first to be overdue.
        self._calls: OrderedDict[WorkerId, _Call] = OrderedDict()
        self._setting_up: OrderedDict[WorkerId, _Call] = OrderedDict()
        self._tasks: dict[int, tuple[Task, Any]] = {}  # shipped or waiting, with their model

    def __repr__(self) -> str:
        return f"Ray(workers={self.size})"

    def __enter__(self) -> Ray:
        self._keep = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._keep = False
        self.shutdown()

    def pids(self) -> dict[WorkerId, int]:
        """Return the process of each worker that is up on this machine."""
        return self._pool.pids() if self._pool else {}

    # --- one job ---------------------------------------------------------------------------------

    def open(self, job: Job, saved: Saved | None = None) -> None:
        if saved is not None:
            raise ValueError("Ray cannot take over work in flight; it is handed out again")
        self._clear()
        if not ray.is_initialized():
            self._ours = connect(self._address, self.size, job.learner.message_bytes)
        if self._pool is None:
            self._pool = Pool(self._respawns, self._cpus, self._gpus, self.size, self._ours)
        self._pool.fill()
        self._job = job
        self._run = uuid.uuid4().hex
        self._reducer = DriverReducer(job.server)
        self._learner = ray.put(job.learner)
        self._origin = time.monotonic() - job.began
        self._version = job.steps
        for name in self._pool.names():
            self._set_up(name)
        while (up := sum(m.joined for m in self._pool.members.values())) < job.min_workers:
            if not self._wait(inf):
                raise WorkersLost(
                    f"{up} workers came up and {job.min_workers} are needed to begin; "
                    "Trainer(min_workers=…) begins with fewer"
                )
        self._origin = time.monotonic() - job.began  # starting up is not training

    def interrupt(self, reason: str) -> None:
        self._inbox.put(Interrupted(reason))

    def now(self) -> float:
        return time.monotonic() - self._origin

    def save(self) -> None:
        return None

    def close(self) -> None:
        """End the job. Outside of a `with` block the workers end with it."""
        for member in self._pool.members.values() if self._pool else ():
            if member.busy is not None:
                member.actor.abandon.remote(tuple(member.busy))
            member.busy, member.joined = None, False
            member.waiting.clear()
        self._clear()
        if not self._keep:
            self.shutdown()

    def shutdown(self) -> None:
        """Kill the workers, and stop Ray if it was started here."""
        self._clear()
        if self._pool is not None:
            self._pool.end()
            self._pool = None
        if self._ours:
            ray.shutdown()
            self._ours = False

    # --- commands --------------------------------------------------------------------------------

    def execute(self, node: WorkerId, command: Command) -> None:
        match command:
            case Start(task):
                self._start(task)
            case Cancel(id):
                self._cancel(id)
            case Discard(id):
                self._results().drop(id)
            case Step(weights, _, keep):
                assert self._job is not None
                stats = self._results().step(weights, keep, self._job.wants)
                self._version += 1
                self._events.append(Stepped(self._version, stats))
            case SetTimer(name, at):
                if at < inf:
                    heapq.heappush(self._timers, (at, name))
            case Stop() | Assign():
                pass
            case Send():
                raise NotImplementedError("this engine has one node; peers need a gossip engine")

    def _start(self, task: Task) -> None:
        member = self._member(task.worker)
        if member is None:
            return  # it was lost a moment ago: its departure is the next news
        self._tasks[task.id] = task, self._results().publish()
        if member.busy is None:
            self._ship(member, task)
        else:
            member.waiting.append(task.id)

    def _ship(self, member: Member, task: Task) -> None:
        """Put the one task on an actor; a straggler never gathers a queue."""
        token = Token(self._run, member.name, member.incarnation, task.id)
        self._results().expect(token)
        member.busy = token
        _, model = self._tasks[task.id]
        self._call(member, task, member.actor.compute.remote(pack(token, task), model))

    def _cancel(self, id: int) -> None:
        task, _ = self._tasks.pop(id, (None, None))
        self._results().drop(id)
        member = None if task is None else self._member(task.worker)
        if member is None:
            return  # lost with its worker
        if member.busy is not None and member.busy.task == id:
            member.actor.abandon.remote(
                member.busy
            )  # it ends at the next piece of work, or by itself
        else:
            member.waiting.remove(id)

    def _set_up(self, name: WorkerId) -> None:
        assert self._pool is not None and self._job is not None
        member = self._pool.member(name)
        self._call(member, None, member.actor.set_up.remote(self._learner, self._job.seed))

    def _call(self, member: Member, task: Task | None, ref: Any) -> None:
        """Have the answer, or what went wrong, put into the inbox by Ray's own thread."""
        inbox = self._inbox
        patience = self._start_timeout if task is None else self._timeout
        call = _Call(self.now() + patience, member, task)
        (self._setting_up if task is None else self._calls)[member.name] = call
        ref.future().add_done_callback(lambda future: inbox.put((call, future)))

    # --- events ----------------------------------------------------------------------------------

    def next_event(self) -> tuple[float, WorkerId, Event] | None:
        while True:
            now = self.now()
            if self._timers and self._timers[0][0] <= now:
                return now, MAIN, TimerFired(heapq.heappop(self._timers)[1])
            if self._events:
                return now, MAIN, self._events.popleft()
            if not self._wait(self._timers[0][0] if self._timers else inf):
                return None

    def _wait(self, until: float) -> bool:
        """Take in one answer, or what has become of an overdue one; False if none can come."""
        books = (self._calls, self._setting_up)
        first = min([until, *(next(iter(calls.values())).deadline for calls in books if calls)])
        if first == inf and self._inbox.empty():
            return False
        try:  # what has arrived is not overdue, however long nobody looked
            message = self._inbox.get(timeout=min(max(first - self.now(), 0.0), _LONGEST_WAIT))
        except queue.Empty:
            self._expire(self.now())
            return True
        if isinstance(message, Interrupted):
            self._events.append(message)
        elif self._is_current(message[0]):
            self._take(*message)
        return True

    def _is_current(self, call: _Call) -> bool:
        assert self._pool is not None
        return self._pool.members.get(call.member.name) is call.member

    def _expire(self, now: float) -> None:
        """Give up the workers whose call is overdue."""
        for calls in (self._calls, self._setting_up):
            while calls and (call := next(iter(calls.values()))).deadline <= now:
                if call.task is None:
                    why = f"did not come up in {self._start_timeout:g} s"
                else:
                    why = f"did not finish task {call.task.id} in {self._timeout:g} s"
                self._lose(call.member, why)

    def _take(self, call: _Call, future: Future[Any]) -> None:
        member = call.member
        calls = self._setting_up if call.task is None else self._calls
        if calls.get(member.name) is not call:
            return  # answered before
        del calls[member.name]
        error = future.exception()
        if error is not None:
            if not isinstance(error, ray.exceptions.RayError) or isinstance(
                error, ray.exceptions.RayTaskError
            ):
                raise error  # the user's own code failed: with its own traceback
            self._lose(member, type(error).__name__)
            return
        match future.result():
            case Place() as place:
                member.place, member.joined = place, True
                self._events.append(Joined(member.name))
            case reply:
                answer = read(reply)
                member.busy = None
                if member.waiting:
                    self._ship(member, self._tasks[member.waiting.popleft()][0])
                if self._results().accept(answer):
                    id = answer.token.task
                    self._tasks.pop(id, None)
                    self._events.append(Finished(id, answer.samples, answer.seconds, answer.stats))

    def _lose(self, member: Member, why: str) -> None:
        """Count a worker as gone, make sure that it is, and start another in its place."""
        assert self._pool is not None
        logger.warning("worker %s is lost: %s", member.name, why)
        self._calls.pop(member.name, None)
        self._setting_up.pop(member.name, None)
        if member.joined:
            self._events.append(Left(member.name))
        for id in [*([member.busy.task] if member.busy else []), *member.waiting]:
            self._tasks.pop(id, None)
            self._results().drop(id)
        if self._pool.replace(member):
            self._set_up(member.name)
        elif not self._pool.members:
            raise WorkersLost(
                f"all {self.size} workers are lost and respawns={self._respawns} used up; the last "
                f"one: {why}. Ray reports {ray.available_resources().get('CPU', 0):g} CPUs free"
            )

    def _results(self) -> Reducer:
        assert self._reducer is not None
        return self._reducer

    def _member(self, name: WorkerId) -> Member | None:
        """Return the worker, None if the one that was meant is gone."""
        assert self._pool is not None
        member = self._pool.members.get(name)
        return member if member is not None and member.joined else None
