"""Paceline on Ray: commands become actor calls; their answers and failures become events."""

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

from paceline.core.checks import check_seconds, check_whole
from paceline.core.errors import WorkersLost
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
    worker_names,
)
from paceline.engines.base import Job
from paceline.engines.checks import NOT_FINITE, ResultCheck, Skipping
from paceline.engines.ray.carrier import start_carriers
from paceline.engines.ray.cluster.join import store_need
from paceline.engines.ray.failures import Raised, reason_of
from paceline.engines.ray.pickled import check_pickled
from paceline.engines.ray.pool import Cluster, Gpus, Member, Pool, RayWorkers, gpus_each
from paceline.engines.ray.reducer import DriverReducer, Model, Reducer
from paceline.engines.ray.servers.placement import Placement
from paceline.engines.ray.servers.reducer import ShardedReducer
from paceline.engines.ray.servers.shell import Callbacks, Processes
from paceline.engines.ray.worker import Answer, Token, read
from paceline.engines.results import Refused, Results
from paceline.learners.base import Learner, Saved, for_workers, state_values

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec

logger = logger_of(__name__)


SPREAD_BYTES = 2**20
"""From this size on, servers keep the model if workers are on several nodes; see docs/scale.md."""
_MODEL_ATTEMPTS = 3  # how often a worker may fail to get a model before it counts as lost


@dataclass
class _Order:
    """A task for a worker, sent or waiting, and the model to compute it on."""

    task: Task
    model: Model
    attempts: int = 0  # failed ones to get the model

    def is_ready(self) -> bool:
        """Return whether the model's references exist; for a second attempt, the whole model."""
        return self.model.whole if self.attempts else self.model.known


class Ray:
    """Workers w0, w1, … as actors of a Ray cluster.

    address: of a running cluster; by default the one this process is connected to, or else a
        new one on this machine alone.
    timeout: seconds a task may take. A worker silent for longer (Ray does not report a paused
        process) is killed and counts as lost.
    start_timeout: seconds a worker may take to come up once its process exists. A worker waits
        without a limit while no node has room for it.
    respawns: restarts in a row of one worker; a result of the worker resets the count.
    cpus: CPUs that Ray reserves per worker; by default an equal share of the free cores, at most 1.
    gpus: GPUs that Ray reserves per worker: one number, or a dict by worker name. By default 1 if
        the learner's device is "cuda", and with "auto" 1 for as many workers as there are GPUs.
    servers: the processes that keep the model and take the steps. "driver": this process.
        "spread": one server process on each node that has a worker. Each server owns a slice of
        the model and of the optimizer's state, so no network card carries more than its share.
        A number: that many servers, on the workers' nodes in turn. By default "spread" if the
        workers are on several nodes and the model has 1 MiB or more, and "driver" otherwise.
    allow_insecure: join a cluster on several machines even if it requires no token. Then anyone
        who reaches one of its ports can run code on it; see docs/security.md.

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
        gpus: Gpus = None,
        servers: Literal["driver", "spread"] | int | None = None,
        allow_insecure: bool = False,
    ) -> None:
        check_whole("workers", workers)
        check_whole("respawns", respawns, 0)
        check_seconds("timeout", timeout)
        check_seconds("start_timeout", start_timeout)
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
        self._pool_gpus: dict[WorkerId, float] = {}
        self._server_pool: Pool | None = None
        self._lent_pool: Pool | None = None
        self._server_nodes: list[str] = []
        self._placement: Placement | None = None
        self._carriers: dict[str, Any] = {}
        self._carriers_tried: list[str] = []  # the nodes of the last attempt
        self._ours = False  # whether Ray itself was started by this engine
        self._keep = 0  # open `with` blocks, in which workers outlive a job
        self._cluster = self._make_cluster()
        self._origin = self._cluster.clock()  # `now` may be called after a job
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
        self._opened, self._has_joined = 0.0, False  # whether any worker has
        self._last_loss = ""  # which worker was lost last, and why
        self._calls = self._cluster.calls()
        self._events: deque[Event] = deque()
        self._timers: list[tuple[float, str]] = []
        self._orders: dict[TaskId, _Order] = {}
        self._homeless: list[TaskId] = []  # tasks that the next idle worker computes again
        self._senders: dict[TaskId, Member] = {}  # the workers of held encoded results
        self._raised = Raised()

    def __repr__(self) -> str:
        servers = "" if self.servers is None else f", servers={self.servers!r}"
        return f"Ray(workers={self.size}{servers})"

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        return worker_names(self.size)

    @property
    def is_exact(self) -> bool:
        return False

    def __enter__(self) -> Ray:
        self._keep += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._keep -= 1
        if not self._keep:
            self.shutdown()

    def members(self) -> list[str]:
        """Return the names of the present workers and servers."""
        return [name for pool in self._pools() for name in pool.members]

    def pids(self) -> dict[WorkerId, int]:
        """Return the process of each worker and server that is up on this machine."""
        return {name: pid for pool in self._pools() for name, pid in pool.pids().items()}

    def _pools(self) -> list[Pool]:
        pools = self._pool, self._server_pool, self._lent_pool
        return [pool for pool in pools if pool is not None]

    def lend(self) -> RayWorkers:
        timeouts = self._start_timeout, self._timeout
        return RayWorkers(self._start_lent, self._end_lent, *timeouts, self._cluster)

    def _start_lent(self, kind: type, learner: Learner) -> Pool:
        """Start an actor of a class in the place of each worker."""
        if self._pool is not None:
            self._pool.end()
            self._pool = None
        cluster, need = self._cluster, store_need(self.size, learner.message_bytes)
        self._ours = cluster.connect(self._address, self.size, need) or self._ours
        gpus = self._gpus_each(learner)
        make = cluster.make_workers(self._cpus, gpus, self.size, self._ours, kind)
        pool = Pool(list(gpus), make, 0, cluster)
        pool.fill()
        self._lent_pool = pool
        return pool

    def _end_lent(self) -> None:
        self._lent_pool = None
        if not self._keep:
            self.shutdown()

    @property
    def starting(self) -> str:
        """The reason why a job has not begun yet; "" once it has. Any thread may read it."""
        if self._reducer is not None:
            return ""
        pool = self._pool
        if pool is None:
            return "starting Ray"
        up = sum(member.joined for member in list(pool.members.values()))
        return f"starting workers: {up} of {self.size} are up"

    # --- one job ---------------------------------------------------------------------------------

    def open(self, job: Job, saved: Saved | None = None) -> None:
        if saved is not None:
            raise ValueError("Ray cannot take over work in flight; it is handed out again")
        self._clear()
        check_pickled(job.learner)
        cluster, size, state = self._cluster, job.learner.message_bytes, 0
        if self.servers not in (None, "driver"):
            state = size * state_values(job.server)
        if self._pool is None:
            need = store_need(self.size, size, state)
            self._ours = cluster.connect(self._address, self.size, need) or self._ours
        gpus = self._gpus_each(job.learner)
        if self._pool is not None and gpus != self._pool_gpus:
            self._pool.end()
            self._pool = None
        if self._pool is None:
            make = cluster.make_workers(self._cpus, gpus, self.size, self._ours)
            self._pool, self._pool_gpus = Pool(list(gpus), make, self._respawns, cluster), gpus
        if not self._ours:
            spread = self.servers != "driver" and len(cluster.nodes()) > 1 and size >= SPREAD_BYTES
            cluster.warn_small_stores(spread, self.size, size, state)
        self._pool.fill()
        self._job = job
        self._run = uuid.uuid4().hex
        self._opened = self._cluster.clock()
        self._learner = self._cluster.put(
            (for_workers(job.learner), job.tiles, job.codec, job.model_codec, job.server.layout)
        )
        self._version = job.steps
        self._check = ResultCheck(job.server.layout.size, job.server.vector.dtype)
        self._skipping = Skipping(job.skip_limit)
        self._start_carriers(job)
        for name in list(self._pool.members):
            self._set_up(name)
        while (up := sum(m.joined for m in self._pool.members.values())) < job.min_workers:
            if not self._calls.wait(inf):
                raise WorkersLost(
                    f"{up} workers came up and {job.min_workers} are needed to begin "
                    f"(the last one to fail: {self._last_loss}); Trainer(min_workers=…) begins "
                    "with fewer"
                )
        self._reducer = self._make_reducer(job)
        self._origin = self._cluster.clock() - job.began  # starting up is not training

    def _gpus_each(self, learner: Learner) -> dict[WorkerId, float]:
        device = str(getattr(learner, "device", "cpu"))
        return gpus_each(self._gpus, device, self.workers, self._cluster.gpus())

    def _start_carriers(self, job: Job) -> None:
        """Start carriers, which shorten the transfer of slices between nodes that are far apart."""
        nodes = sorted(self._cluster.nodes())
        small = job.learner.message_bytes < SPREAD_BYTES
        if self.servers == "driver" or len(nodes) == 1 or small or nodes == self._carriers_tried:
            return
        self._carriers_tried = nodes
        self._carriers = start_carriers(nodes, self._start_timeout)

    def _make_reducer(self, job: Job) -> Reducer:
        """Choose the processes that keep the model, and wait until they are ready."""
        assert self._pool is not None
        places = [m.place for m in self._pool.members.values() if m.joined and m.place]
        nodes = list(dict.fromkeys(place.node for place in places))
        servers = self.servers
        if servers is None:
            large = job.learner.message_bytes >= SPREAD_BYTES
            servers = "spread" if large and len(nodes) > 1 else "driver"
        if job.model_codec is not None and servers != "driver":
            if self.servers is not None:
                raise ValueError(
                    f"model_codec={job.model_codec}: servers publish slices of the model as they "
                    "are; use Ray(servers='driver') with it, or leave it out"
                )
            servers = "driver"
        if servers != "driver" and _is_two_ended(job.codec):
            if self.servers is not None:
                raise ValueError(
                    f"codec={job.codec}: servers see the results that a step uses, and would miss "
                    "the others' messages; use Ray(servers='driver') with it, or another codec"
                )
            servers = "driver"
        if servers == "driver":
            results = Results(job.server, job.wants, job.codec, job.model_codec, job.steps)
            return DriverReducer(results, self._stepped, encoded=job.codec is not None)
        count = len(nodes) if servers == "spread" else int(servers)
        if job.server.layout.size < count:
            raise ValueError(
                f"{count} servers for a model of {job.server.layout.size} values: use fewer, or "
                "servers='driver'"
            )
        job.server.recipe((0, 1))  # raises before the start if the optimizer cannot be cut
        nodes = [nodes[i % len(nodes)] for i in range(count)]
        if self._server_pool is not None and self._server_nodes != nodes:
            self._server_pool.end()
            self._server_pool = None
        if self._server_pool is None:
            names = [f"s{i}" for i in range(count)]
            placement = Placement(dict(zip(names, nodes, strict=True)), self._pool.nodes)
            make, self._placement = self._cluster.make_servers(placement), placement
            self._server_pool = Pool(names, make, self._respawns, self._cluster)
            self._server_nodes = nodes
        assert self._placement is not None
        self._server_pool.fill()
        processes = Processes(
            self._server_pool,
            self._placement,
            self._pool,
            self._carriers,
            self._calls,
            self._timeout,
            self._start_timeout,
        )
        asked = Callbacks(self._stepped, self._ship_all, self._redo, self._refuse_later)
        given = job.server, job.steps, job.wants, processes, asked, job.codec
        reducer = ShardedReducer(*given)
        reducer.wait()
        return reducer

    def interrupt(self, reason: str) -> None:
        self._calls.post(partial(self._events.append, Interrupted(reason)))

    def now(self) -> float:
        began = 0.0 if self._job is None else self._job.began
        return max(self._cluster.clock() - self._origin, began)  # rounding must not turn time back

    def save(self) -> None:
        return None

    def settle(self) -> None:
        self._results().settle()

    def close(self) -> None:
        """End the job. Outside of a `with` block the workers end with it."""
        for member in self._pool.members.values() if self._pool else ():
            if member.busy is not None:
                member.actor.abandon.remote(member.busy.pack())
            member.busy, member.joined, member.call = None, False, None
            member.model_version, member.model_bytes, member.refunds = (
                None,
                None,
                [],
            )  # the next job has other models
            member.waiting.clear()
        self._clear()
        if not self._keep:
            self.shutdown()

    def shutdown(self) -> None:
        """Kill workers and servers, and stop Ray if it was started here."""
        self._clear()
        for pool in self._pools():
            pool.end()
        self._pool = self._server_pool = self._lent_pool = None
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
                raise NotImplementedError("only nodes of a decentralized run send: see `lend`")

    def _start(self, task: Task) -> None:
        member = self._member(task.worker)
        if member is None:
            return  # it was lost a moment ago: its `Left` event follows
        self._orders[task.id] = _Order(task, self._results().publish())
        member.waiting.append(task.id)
        self._ship(member)

    def _redo(self, task: Task, model: Model) -> None:
        """Recompute a task whose result was lost after it was reported.

        Any worker gives the same result, so the policy need not know. The next idle worker gets the
        task: a busy worker may itself wait for the step that needs the result.
        """
        self._orders[task.id] = _Order(task, model)
        self._homeless.append(task.id)
        self._ship_all()

    def _ship_all(self) -> None:
        for member in self._pool.members.values() if self._pool else ():
            self._ship(member)

    def _ship(self, member: Member) -> None:
        """Send an idle worker its next task, only one, so that a straggler gathers no queue."""
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
            return True  # it waits for a server, whose call has its own deadline
        self._lose(member, f"it did not finish task {order.task.id} in {self._timeout:g} s")
        return False

    def _cancel(self, id: int) -> None:
        order = self._orders.pop(id, None)
        self._results().drop(id)
        member = None if order is None else self._member(order.task.worker)
        if member is None:
            return  # the task was lost with its worker
        if member.busy is not None and member.busy.task == id:
            member.actor.abandon.remote(member.busy.pack())  # before its next piece of work, if any
        else:
            member.waiting.remove(id)

    def _set_up(self, name: WorkerId) -> None:
        assert self._pool is not None and self._job is not None
        member = self._pool.members[name]
        member.call = self._calls.add(
            member.actor.set_up.remote(self._learner, self._job.seed, self._carriers),
            self._start_timeout,
            partial(self._is_up, member),
            partial(self._is_not_up, member),
        )

    def _is_not_up(self, member: Member) -> bool:
        """Count a worker as lost if it does not come up; return whether to wait longer.

        The timeout begins when its process exists: a node may join after many minutes.
        """
        if not self._cluster.has_process(member.actor):
            logger.warning(
                "worker %s waits for a node with room; it starts as soon as there is one",
                member.name,
            )
            return True
        if not member.placed:
            member.placed = True
            return True
        self._lose(member, f"it did not come up in {self._start_timeout:g} s")
        return False

    # --- events ----------------------------------------------------------------------------------

    def next_event(self) -> tuple[float, WorkerId, Event] | None:
        while True:
            now = self.now()
            if self._timers and self._timers[0][0] <= now:
                self._calls.take_arrived()  # earlier results are reported first
                self._events.append(TimerFired(heapq.heappop(self._timers)[1]))
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
        member.place, member.joined, self._has_joined = future.result(timeout=0), True, True
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
            fault = self._check.fault(order.task, *given)
            if fault == NOT_FINITE and self._skipping.may_skip(member.name):
                answer = self._skipped(answer, answer.samples, order.task)
            elif fault is not None:
                return self._refuse(member, order.task, fault)
            else:
                self._skipping.finite(member.name)
        member.busy = None
        self._orders.pop(id, None)
        assert self._pool is not None
        self._pool.trust(member.name)
        if answer.sent is not None:
            self._senders[id] = member
        if accepted:
            news = answer.seconds, answer.stats, self._calls.waited, answer.sent, member.model_bytes
            self._events.append(Finished(id, answer.samples or 0, *news, answer.skipped))
        else:
            self._refund(id)
        self._ship(member)

    def _refuse(self, member: Member, task: Task | None, why: str) -> None:
        """Reject a result and kill its worker; if the model is to blame, end the run too."""
        stops = self._job is not None and not self._job.skip_limit
        if stops and task is not None and why == NOT_FINITE and self._check.is_again(task):
            self._events.append(
                Interrupted(
                    f"results at version {task.version} are not finite, and not because of a "
                    "worker: look at the learning rate, the model and the samples"
                )
            )
        self._lose(member, f"its result was refused: {why}", distrust=True)

    def _skipped(self, answer: Answer, samples: int, task: Task) -> Answer:
        """Skip a result that is not finite, with its samples."""
        self._results().drop(task.id)
        logger.warning(
            "%d samples are skipped: their result is not finite (task %d, version %d)",
            samples, task.id, task.version,
        )  # fmt: skip
        if (reason := self._skipping.reason(task)) is not None:
            self._events.append(Interrupted(reason))
        return answer._replace(samples=0, stats={}, skipped=samples)

    def _refuse_later(self, token: Token, task: Task, why: str) -> None:
        """Reject a result that was accepted, if the process that computed it is still current."""
        assert self._pool is not None
        member = self._pool.members.get(token.worker)
        if member is not None and member.incarnation == token.incarnation:
            self._refuse(member, task, why)

    def _refund(self, id: TaskId) -> None:
        """Report an unused result to its worker, with the worker's next task."""
        member = self._senders.pop(id, None)
        if member is not None:
            member.refunds.append(id)

    def _failed(self, member: Member, future: Future[Any]) -> bool:
        """Return whether a call failed or its worker was replaced; replace a failed worker."""
        assert self._pool is not None
        if not self._pool.is_current(member):
            return True
        member.call = None
        error = future.exception(timeout=0)
        if error is None:
            return False
        has_raised = isinstance(error, ray.exceptions.RayTaskError)
        if has_raised and self._is_users_fault(member):
            raise error  # with the traceback of the user's code
        self._lose(member, reason_of(error), distrust=has_raised)
        return True

    def _is_users_fault(self, member: Member) -> bool:
        """Return whether the exception would occur on any worker."""
        assert self._pool is not None
        members = self._pool.members
        if member.busy is None:
            late = self._cluster.clock() > self._opened + self._start_timeout
            others = [
                name for name, other in members.items()
                if not late or self._cluster.has_process(other.actor)
            ]  # fmt: skip
            return not self._has_joined and self._raised.in_set_up(member.name, others)
        order = self._orders.get(member.busy.task)
        if order is None or member.place is None:
            return False  # cancelled meanwhile
        nodes = {each.place.node for each in members.values() if each.joined and each.place}
        where = member.name, member.place.node, len(nodes)
        return self._raised.in_task(order.task, *where, alone=self.size == 1)

    def _without_model(self, member: Member, id: TaskId) -> None:
        """Send a task again whose model was lost in transit, once the model is recovered."""
        self._results().recover_model()
        order = self._orders.get(id)
        if order is None:  # cancelled meanwhile
            self._ship(member)
            return
        order.attempts += 1
        member.waiting.appendleft(id)
        if order.model.gone or order.attempts > _MODEL_ATTEMPTS:
            # The policy must assign it on another model, which it does when a worker is lost.
            self._lose(member, f"it could not get the model for task {id}")
        else:
            self._ship(member)

    def _lose(self, member: Member, why: str, distrust: bool = False) -> None:
        """Report a worker as lost, kill its process, and start another in its place."""
        assert self._pool is not None
        logger.warning("worker %s is lost: %s", member.name, why)
        self._last_loss = f"{member.name}: {why}"
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
                f"one was {self._last_loss}. Ray reports {self._cluster.free_cpus():g} CPUs free"
            )

    def _start_again(self, name: WorkerId) -> None:
        assert self._pool is not None
        self._pool.start(name)
        self._set_up(name)

    def _results(self) -> Reducer:
        assert self._reducer is not None
        return self._reducer

    def _member(self, name: WorkerId) -> Member | None:
        """Return the current process of a worker, None if it is not connected."""
        assert self._pool is not None
        member = self._pool.members.get(name)
        return member if member is not None and member.joined else None


def _is_two_ended(codec: Codec | None) -> bool:
    """Return whether a codec needs the receiver to read every message."""
    if codec is None:
        return False
    from paceline.codecs.base import TwoEnded

    return isinstance(codec, TwoEnded)
