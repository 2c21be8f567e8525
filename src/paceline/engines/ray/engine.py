"""Paceline on Ray: commands become actor calls, whatever comes of them becomes an event."""

from __future__ import annotations

import heapq
import uuid
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import ray

from paceline.core.logs import logger_of
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
    Stat,
    Step,
    Stepped,
    Stop,
    Task,
    TaskId,
    TimerFired,
    WorkerId,
)
from paceline.engines.base import Job, PeersJob
from paceline.engines.door import NOT_FINITE, Door
from paceline.engines.ray.carrier import start_carriers
from paceline.engines.ray.peer import PeerProcess
from paceline.engines.ray.peers import RayPeers
from paceline.engines.ray.pool import Cluster, Member, Pool
from paceline.engines.ray.reducer import DriverReducer, Model, Reducer, Refused
from paceline.engines.ray.sharded import ShardedReducer
from paceline.engines.ray.worker import Token, read
from paceline.learners.base import Saved

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec

logger = logger_of(__name__)


SPREAD_BYTES = 2**20
"""From this size on, a model on several nodes is kept by servers; see docs/scale.md."""
_MODEL_ATTEMPTS = 3  # how often a worker may fail to get its model before it is given up


class WorkersLost(RuntimeError):
    """No worker is left, and none may be started again."""


@dataclass
class _Order:
    """A task for a worker, sent or waiting, with the model it is to be computed on."""

    task: Task
    model: Model
    attempts: int = 0  # to get the model

    def is_ready(self) -> bool:
        """Whether the model can be named; for a second attempt, whether it is there."""
        return self.model.whole if self.attempts else self.model.known


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
    servers: who keeps the model and takes the steps. "driver": this process. "spread": one server
        process on each node that has a worker, each with a slice of the model and of the
        optimizer's state, so that no network card carries more than its share. A number: so many
        servers, on the workers' nodes in turn. By default "spread" if the workers are on several
        nodes and the model has 1 MiB or more, and "driver" otherwise.
    allow_insecure: join a cluster on several machines although it wants no token, so that whoever
        reaches one of its ports can run code on it; see docs/security.md.

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
        servers: Literal["driver", "spread"] | int | None = None,
        allow_insecure: bool = False,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers={workers}: use at least 1")
        if servers not in (None, "driver", "spread") and not (
            isinstance(servers, int) and servers >= 1
        ):
            raise ValueError(f"servers={servers!r}: use 'driver', 'spread', or a number from 1 on")
        self.size = workers
        self._address, self._timeout, self._start_timeout = address, timeout, start_timeout
        self._respawns, self._cpus, self._gpus = respawns, cpus, gpus
        self.servers = servers  # may be changed from one run to the next
        self._allow_insecure = allow_insecure
        self._pool: Pool | None = None
        self._server_pool: Pool | None = None
        self._peers_pool: Pool | None = None
        self._server_nodes: list[str] = []
        self._carriers: dict[str, Any] = {}
        self._carriers_tried: list[str] = []  # the nodes that were asked
        self._ours = False  # whether Ray itself was started by this engine
        self._keep = False  # whether workers outlive a job
        self._cluster = self._make_cluster()
        self._origin = self._cluster.clock()  # which outlives a job, as who looks on may do
        self._clear()

    def _make_cluster(self) -> Cluster:
        return Cluster(self._allow_insecure)

    def _clear(self) -> None:
        """Forget everything about a job."""
        self._job: Job | None = None
        self._run = ""
        self._reducer: Reducer | None = None
        self._learner: Any = None
        self._version = 0
        self._calls = self._cluster.calls()
        self._events: deque[Event] = deque()
        self._timers: list[tuple[float, str]] = []
        self._orders: dict[TaskId, _Order] = {}
        self._homeless: list[TaskId] = []  # to be computed again by whoever is idle
        self._senders: dict[TaskId, Member] = {}  # of encoded results that are held

    def __repr__(self) -> str:
        servers = "" if self.servers is None else f", servers={self.servers!r}"
        return f"Ray(workers={self.size}{servers})"

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

    def members(self) -> list[str]:
        """Return the names of the workers and servers that there are."""
        return [name for pool in self._pools() for name in pool.members]

    def pids(self) -> dict[WorkerId, int]:
        """Return the process of each worker and server that is up on this machine."""
        return {name: pid for pool in self._pools() for name, pid in pool.pids().items()}

    def _pools(self) -> list[Pool]:
        pools = self._pool, self._server_pool, self._peers_pool
        return [pool for pool in pools if pool is not None]

    def peers(self) -> RayPeers:
        patience = self._start_timeout, self._timeout
        return RayPeers(self._start_peers, self._end_peers, patience, self._cluster)

    def _start_peers(self, job: PeersJob) -> Pool:
        """Start a node in each worker's place; it ends with the job."""
        if self._pool is not None:
            self._pool.end()
            self._pool = None
        cluster, size = self._cluster, job.learner.message_bytes
        self._ours = cluster.connect(self._address, self.size, size) or self._ours
        make = cluster.make_workers(self._cpus, self._gpus, self.size, self._ours, PeerProcess)
        pool = Pool([f"w{i}" for i in range(self.size)], make, 0, cluster)
        pool.fill()
        self._peers_pool = pool
        return pool

    def _end_peers(self) -> None:
        self._peers_pool = None
        if not self._keep:
            self.shutdown()

    # --- one job ---------------------------------------------------------------------------------

    def open(self, job: Job, saved: Saved | None = None) -> None:
        if saved is not None:
            raise ValueError("Ray cannot take over work in flight; it is handed out again")
        self._clear()
        if self._pool is None:
            cluster, size = self._cluster, job.learner.message_bytes
            self._ours = cluster.connect(self._address, self.size, size) or self._ours
            make = cluster.make_workers(self._cpus, self._gpus, self.size, self._ours)
            names = [f"w{i}" for i in range(self.size)]
            self._pool = Pool(names, make, self._respawns, cluster)
        self._pool.fill()
        self._job = job
        self._run = uuid.uuid4().hex
        self._learner = self._cluster.put(
            (job.learner, job.tiles, job.codec, job.down, job.server.layout)
        )
        self._version = job.steps
        self._door = Door(job.server.layout.size, job.server.vector.dtype)
        self._start_carriers(job)
        for name in list(self._pool.members):
            self._set_up(name)
        while (up := sum(m.joined for m in self._pool.members.values())) < job.min_workers:
            if not self._calls.wait(inf):
                raise WorkersLost(
                    f"{up} workers came up and {job.min_workers} are needed to begin; "
                    "Trainer(min_workers=…) begins with fewer"
                )
        self._reducer = self._make_reducer(job)
        self._origin = self._cluster.clock() - job.began  # starting up is not training

    def _start_carriers(self, job: Job) -> None:
        """Have what shortens the way of slices between nodes that are far apart."""
        nodes = sorted(self._cluster.nodes())
        small = job.learner.message_bytes < SPREAD_BYTES
        if self.servers == "driver" or len(nodes) == 1 or small or nodes == self._carriers_tried:
            return
        self._carriers_tried = nodes
        self._carriers = start_carriers(nodes, self._start_timeout)

    def _make_reducer(self, job: Job) -> Reducer:
        """Choose who keeps the model, and have them ready."""
        assert self._pool is not None
        places = [m.place for m in self._pool.members.values() if m.joined and m.place]
        nodes = list(dict.fromkeys(place.node for place in places))
        servers = self.servers
        if servers is None:
            large = job.learner.message_bytes >= SPREAD_BYTES
            servers = "spread" if large and len(nodes) > 1 else "driver"
        if job.down is not None and servers != "driver":
            if self.servers is not None:
                raise ValueError(
                    f"down={job.down}: servers publish slices of the model as they are; use "
                    "Ray(servers='driver') with it, or leave it out"
                )
            servers = "driver"
        if servers != "driver" and _is_lazy(job.codec):
            if self.servers is not None:
                raise ValueError(
                    f"codec={job.codec}: servers see the results that a step uses, and would miss "
                    "the others' messages; use Ray(servers='driver') with it, or another codec"
                )
            servers = "driver"
        if servers == "driver":
            codecs = job.codec, job.down
            return DriverReducer(job.server, job.wants, self._stepped, *codecs, job.steps)
        count = len(nodes) if servers == "spread" else int(servers)
        if job.server.layout.size < count:
            raise ValueError(
                f"{count} servers for a model of {job.server.layout.size} values: use fewer, or "
                "servers='driver'"
            )
        job.server.recipe((0, 1))  # an optimizer that cannot be cut is refused before the start
        nodes = [nodes[i % len(nodes)] for i in range(count)]
        if self._server_pool is not None and self._server_nodes != nodes:
            self._server_pool.end()
            self._server_pool = None
        if self._server_pool is None:
            names = [f"s{i}" for i in range(count)]
            make = self._cluster.make_servers(dict(zip(names, nodes, strict=True)))
            self._server_pool = Pool(names, make, self._respawns, self._cluster)
            self._server_nodes = nodes
        self._server_pool.fill()
        reducer = ShardedReducer(
            job.server,
            job.steps,
            job.wants,
            self._server_pool,
            self._pool,
            self._carriers,
            self._calls,
            (self._timeout, self._start_timeout),
            self._stepped,
            self._ship_all,
            self._redo,
            job.codec,
        )
        reducer.wait()
        return reducer

    def interrupt(self, reason: str) -> None:
        self._calls.post(partial(self._events.append, Interrupted(reason)))

    def now(self) -> float:
        began = 0.0 if self._job is None else self._job.began
        return max(self._cluster.clock() - self._origin, began)  # rounding must not take us back

    def save(self) -> None:
        return None

    def settle(self) -> None:
        self._results().settle()

    def close(self) -> None:
        """End the job. Outside of a `with` block the workers end with it."""
        for member in self._pool.members.values() if self._pool else ():
            if member.busy is not None:
                member.actor.abandon.remote(tuple(member.busy))
            member.busy, member.joined, member.call = None, False, None
            member.known, member.got, member.unused = None, None, []  # of another job's models
            member.waiting.clear()
        self._clear()
        if not self._keep:
            self.shutdown()

    def shutdown(self) -> None:
        """Kill workers and servers, and stop Ray if it was started here."""
        self._clear()
        for pool in self._pools():
            pool.end()
        self._pool = self._server_pool = self._peers_pool = None
        for carrier in self._carriers.values():
            self._cluster.kill(carrier)
        self._carriers, self._carriers_tried = {}, []
        if self._ours:
            self._cluster.shutdown()
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
                self._refund(id)
            case Step(weights, _, keep):
                self._results().step(weights, keep)
                for id in () if keep else weights:
                    self._senders.pop(id, None)
            case SetTimer(name, at):
                if at < inf:
                    heapq.heappush(self._timers, (at, name))
            case Stop() | Assign():
                pass
            case Send():
                raise NotImplementedError("peers have an engine of their own: see `peers`")

    def _start(self, task: Task) -> None:
        member = self._member(task.worker)
        if member is None:
            return  # it was lost a moment ago: its departure is the next news
        self._orders[task.id] = _Order(task, self._results().publish())
        member.waiting.append(task.id)
        self._ship(member)

    def _redo(self, task: Task, model: Model) -> None:
        """Have a task computed again whose result was lost after it was reported.

        Any worker gives the same result, so that nobody else needs to know. Whoever is the next to
        be idle has it: those who are not may wait for the very step that needs it.
        """
        self._orders[task.id] = _Order(task, model)
        self._homeless.append(task.id)
        self._ship_all()

    def _ship_all(self) -> None:
        for member in self._pool.members.values() if self._pool else ():
            self._ship(member)

    def _ship(self, member: Member) -> None:
        """Put the next task on an idle actor, only one; a straggler never gathers a queue."""
        if member.busy is not None or not member.joined:
            return
        tasks = [*self._homeless, *member.waiting]
        if (id := next((id for id in tasks if self._orders[id].is_ready()), None)) is None:
            return
        (self._homeless if id in self._homeless else member.waiting).remove(id)
        order, task = self._orders[id], self._orders[id].task
        token = Token(self._run, member.name, member.incarnation, task.id)
        member.busy = token
        reply = self._results().dispatch(member, token, task, order.model)
        member.call = self._calls.add(
            reply,
            self._timeout,
            partial(self._finished, member),
            partial(self._overdue, member, order),
        )

    def _overdue(self, member: Member, order: _Order) -> bool:
        if not order.model.whole and not self._homeless:
            return True  # it waits for a server, who has a deadline of its own
        self._lose(member, f"did not finish task {order.task.id} in {self._timeout:g} s")
        return False

    def _cancel(self, id: int) -> None:
        order = self._orders.pop(id, None)
        self._results().drop(id)
        member = None if order is None else self._member(order.task.worker)
        if member is None:
            return  # lost with its worker
        if member.busy is not None and member.busy.task == id:
            member.actor.abandon.remote(tuple(member.busy))  # at the next piece, or by itself
        else:
            member.waiting.remove(id)

    def _set_up(self, name: WorkerId) -> None:
        assert self._pool is not None and self._job is not None
        member = self._pool.members[name]
        member.call = self._calls.add(
            member.actor.set_up.remote(self._learner, self._job.seed, self._carriers),
            self._start_timeout,
            partial(self._is_up, member),
            partial(self._lose, member, f"did not come up in {self._start_timeout:g} s"),
        )

    # --- events ----------------------------------------------------------------------------------

    def next_event(self) -> tuple[float, WorkerId, Event] | None:
        while True:
            now = self.now()
            if self._timers and self._timers[0][0] <= now:
                return now, MAIN, TimerFired(heapq.heappop(self._timers)[1])
            if self._events:
                return now, MAIN, self._events.popleft()
            if not self._calls.wait(self._origin + self._timers[0][0] if self._timers else inf):
                return None

    def _stepped(self, stats: dict[Stat, float]) -> None:
        self._version += 1
        self._events.append(Stepped(self._version, stats))

    def _is_up(self, member: Member, future: Future[Any]) -> None:
        if self._failed(member, future):
            return
        member.place, member.joined = future.result(timeout=0), True
        self._events.append(Joined(member.name))
        self._ship(member)

    def _finished(self, member: Member, future: Future[Any]) -> None:
        if self._failed(member, future):
            return
        answer = read(future.result(timeout=0))
        id = answer.token.task
        if answer.token != member.busy:
            return self._refuse(member, None, f"it is under the name of task {id}")
        if answer.samples is None:
            member.busy = None
            return self._without_model(member, id)
        order = self._orders.get(id)
        try:
            accepted = self._results().accept(answer)
        except Refused as error:
            return self._refuse(member, None, str(error))
        if accepted and order is not None:
            given = self._results().vector(id), answer.samples, answer.stats, answer.norm
            if (fault := self._door.fault(order.task, *given)) is not None:
                return self._refuse(member, order.task, fault)
        member.busy = None
        self._orders.pop(id, None)
        assert self._pool is not None
        self._pool.trust(member.name)
        if answer.sent is not None:
            self._senders[id] = member
        if accepted:
            news = answer.samples, answer.seconds, answer.stats, self._calls.waited, answer.sent
            self._events.append(Finished(id, *news, member.got))
        else:
            self._refund(id)
        self._ship(member)

    def _refuse(self, member: Member, task: Task | None, why: str) -> None:
        """Let a result not in; end its worker, unless it is not the worker's fault."""
        if task is not None and why == NOT_FINITE and self._door.is_again(task):
            self._events.append(
                Interrupted(
                    f"results at version {task.version} are not finite, and not because of a "
                    "worker: look at the learning rate, the model and the samples"
                )
            )
        self._lose(member, f"its result was refused: {why}", distrust=True)

    def _refund(self, id: TaskId) -> None:
        """Have the worker told, with its next task, that a result of its was not used."""
        member = self._senders.pop(id, None)
        if member is not None:
            member.unused.append(id)

    def _failed(self, member: Member, future: Future[Any]) -> bool:
        """Tell whether a call has come to nothing, and see to what follows from it."""
        assert self._pool is not None
        if not self._pool.is_current(member):
            return True
        member.call = None
        error = future.exception(timeout=0)
        if error is None:
            return False
        if isinstance(error, ray.exceptions.RayTaskError):
            raise error  # the user's own code failed: with its own traceback
        self._lose(member, type(error).__name__)
        return True

    def _without_model(self, member: Member, id: TaskId) -> None:
        """Send a task again whose model was lost on the way, when it is to be had again."""
        self._results().miss_model()
        order = self._orders.get(id)
        if order is None:  # cancelled meanwhile
            self._ship(member)
            return
        order.attempts += 1
        member.waiting.appendleft(id)
        if order.model.gone or order.attempts > _MODEL_ATTEMPTS:
            # The policy has to hand it out on another model, which it does if a worker is lost.
            self._lose(member, f"could not get the model for task {id}")
        else:
            self._ship(member)

    def _lose(self, member: Member, why: str, distrust: bool = False) -> None:
        """Count a worker as gone, make sure that it is, and start another in its place."""
        assert self._pool is not None
        logger.warning("worker %s is lost: %s", member.name, why)
        was_joined, member.joined = member.joined, False
        if member.call is not None:
            self._calls.drop(member.call)
        if was_joined:
            self._events.append(Left(member.name))
        for id in [*([member.busy.task] if member.busy else []), *member.waiting]:
            self._orders.pop(id, None)
            self._results().drop(id, lost=True)
        pause = self._pool.remove_lost(member, distrust)
        if pause is not None and pause > 0:
            self._calls.later(pause, partial(self._start_again, member.name))
        elif pause is not None:
            self._start_again(member.name)
        elif not self._pool.expecting:
            raise WorkersLost(
                f"all {self.size} workers are lost and respawns={self._respawns} used up; the last "
                f"one: {why}. Ray reports {self._cluster.free_cpus():g} CPUs free"
            )

    def _start_again(self, name: WorkerId) -> None:
        assert self._pool is not None
        self._pool.start(name)
        self._set_up(name)

    def _results(self) -> Reducer:
        assert self._reducer is not None
        return self._reducer

    def _member(self, name: WorkerId) -> Member | None:
        """Return the worker, None if the one that was meant is gone."""
        assert self._pool is not None
        member = self._pool.members.get(name)
        return member if member is not None and member.joined else None


def _is_lazy(codec: Codec | None) -> bool:
    if codec is None:
        return False
    from paceline.codecs.lazy import Lazy

    return isinstance(codec, Lazy)
