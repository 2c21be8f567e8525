"""Paceline on Ray: settings, worker processes and servers; `job.py` runs one job on them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from paceline.core.checks import check_seconds, check_whole
from paceline.core.logs import logger_of
from paceline.core.protocol import Command, Event, Interrupted, WorkerId, some_names
from paceline.engines.base import Job, Writer
from paceline.engines.kinds import Kind, fleet_of
from paceline.engines.ray.cluster.join import store_need
from paceline.engines.ray.job import RayJob, Timeouts
from paceline.engines.ray.pickled import check_pickled
from paceline.engines.ray.pool import Cluster, Gpus, Pool, RayWorkers, gpus_each
from paceline.engines.ray.reducer import DriverReducer, Reducer
from paceline.engines.ray.servers.choice import SPREAD_BYTES, Servers, chunk_count, server_count
from paceline.engines.ray.servers.placement import Placement
from paceline.engines.ray.servers.processes import Processes
from paceline.engines.ray.servers.reducer import ShardedReducer
from paceline.engines.ray.servers.shell import Callbacks
from paceline.engines.ray.transport.calls import new_secret
from paceline.engines.results import Results
from paceline.learners.base import Learner, Saved, state_values

logger = logger_of(__name__)


class Ray:
    """Workers as actors of a Ray cluster.

    workers: the number of workers, all alike; they are called w0, w1, …
    fleet: instead of `workers`, the kinds of machine: `[Kind("a100", count=4, gpus=1)]`. Their
        workers are called a100-0, a100-1, … Limits, prices and measured speeds go by these names.
    address: of a running cluster; by default the one this process is connected to, or else a
        new one on this machine alone.
    timeout: seconds a task may take at most. A worker silent for longer (Ray does not report a
        paused process) is killed and counts as lost. Once response times are known, so is one
        that is silent for 20 times the longest of them, and for a minute.
    start_timeout: seconds a worker may take to come up once its process exists. A worker waits
        without a limit while no node has room for it.
    respawns: restarts in a row of one worker; a result of the worker resets the count. The loss
        of a whole node does not count, and neither does waiting for one.
    cpus: CPUs that Ray reserves per worker; by default an equal share of the free cores, at most 1.
    gpus: GPUs that Ray reserves per worker: one number, or a dict by worker name. By default 1 if
        the learner's device is "cuda", and with "auto" 1 for as many workers as there are GPUs.
    servers: the processes that keep the model and take the steps. "driver": this process.
        "spread": one server process on each node that has a worker. Each server owns a slice of
        the model and of the optimizer's state, so no network card carries more than its share.
        A number: that many servers, on the workers' nodes in turn. By default "spread" if the
        workers are on several nodes and the model has 1 MiB or more, and "driver" otherwise.
    sum_on_nodes: with servers on several nodes, add up the results of the workers of a node before
        they leave it. With w workers on each node, a node then sends about 2 / (w + 1) of the
        bytes. Sums are rounded in another order: the bits depend on which workers share a node.
    allow_insecure: join a cluster on several machines even if it requires no token. Then anyone
        who reaches one of its ports can run code on it; see docs/security.md.

    Use it as a context manager to keep the worker processes for several runs.
    """

    def __init__(
        self,
        workers: int | None = None,
        *,
        fleet: Sequence[Kind] | None = None,
        address: str | None = None,
        timeout: float = 600.0,
        start_timeout: float = 180.0,
        respawns: int = 3,
        cpus: float | None = None,
        gpus: Gpus = None,
        servers: Servers = None,
        sum_on_nodes: bool = False,
        allow_insecure: bool = False,
    ) -> None:
        check_whole("respawns", respawns, 0)
        check_seconds("timeout", timeout)
        check_seconds("start_timeout", start_timeout)
        if servers not in (None, "driver", "spread") and not (
            isinstance(servers, int) and servers >= 1
        ):
            raise ValueError(f"servers={servers!r}: use 'driver', 'spread', or a number from 1 on")
        if sum_on_nodes and servers == "driver":
            raise ValueError(
                "sum_on_nodes=True: with servers='driver' there are no servers that could add up; "
                "use servers='spread'"
            )
        self.fleet = fleet_of(workers, fleet, cpus, gpus)
        self.size, self._has_kinds = len(self.fleet.workers), fleet is not None
        self._address, self._timeout, self._start_timeout = address, timeout, start_timeout
        self._respawns, self._gpus = respawns, gpus
        self.servers, self.sum_on_nodes = servers, sum_on_nodes  # may change between runs
        self._allow_insecure = allow_insecure
        self._pool: Pool | None = None
        self._pool_gpus: dict[WorkerId, float] = {}
        self._server_pool: Pool | None = None
        self._lent_pool: Pool | None = None
        self._server_nodes: list[str] = []
        self._placement: Placement | None = None
        self._ours = False  # whether Ray itself was started by this engine
        self._keep = 0  # open `with` blocks, in which workers outlive a job
        self._cluster = self._make_cluster()
        self._origin = self._cluster.clock()  # `now` may be called after a job
        self._open: RayJob | None = None
        self._secret: bytes | None = None  # of the processes of the job
        self._end_watch: Callable[[], None] = lambda: None
        self._clear()

    def _make_cluster(self) -> Cluster:
        return Cluster(self._allow_insecure)

    _learns_timeouts = True

    def _make_job(self, job: Job, pool: Pool) -> RayJob:
        timeouts = Timeouts(self._timeout, self._start_timeout, self._learns_timeouts)
        return RayJob(job, pool, self.fleet, self._calls, self._events, timeouts, self._secret)

    def _clear(self) -> None:
        """Forget everything about a job."""
        ended, self._open = self._open, None
        self._end_watch()
        self._end_watch = lambda: None
        if ended is not None:
            self._origin = ended.origin
            ended.end()
        self._calls = self._cluster.calls()
        self._events: deque[Event] = deque()

    def __repr__(self) -> str:
        servers = "" if self.servers is None else f", servers={self.servers!r}"
        fleet = some_names(self.workers)
        told = f"fleet of {fleet}" if self._has_kinds else f"workers={self.size}"
        return f"Ray({told}{servers})"

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        return self.fleet.workers

    @property
    def is_exact(self) -> bool:
        return False

    def __enter__(self) -> Self:
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
        make = cluster.make_workers(self.fleet, gpus, self._ours, kind)
        pool = Pool(list(gpus), make, self._respawns, cluster)
        pool.fill()
        self._lent_pool = pool
        return pool

    def _end_lent(self) -> None:
        self._lent_pool = None
        if not self._keep:
            self.shutdown()

    @property
    def starting(self) -> str:
        if self._open is not None and self._open.started:
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
            state = size * (state_values(job.server) + (job.model_codec is not None))
        if self._pool is None:
            need = store_need(self.size, size, state)
            self._ours = cluster.connect(self._address, self.size, need) or self._ours
        gpus = self._gpus_each(job.learner)
        if self._pool is not None and gpus != self._pool_gpus:
            self._pool.end()
            self._pool = None
        if self._pool is None:
            make = cluster.make_workers(self.fleet, gpus, self._ours)
            self._pool, self._pool_gpus = Pool(list(gpus), make, self._respawns, cluster), gpus
        if not self._ours:
            spread = self.servers != "driver" and len(cluster.nodes()) > 1 and size >= SPREAD_BYTES
            cluster.warn_small_stores(spread, self.size, size, state)
        self._pool.fill()
        self._secret = new_secret() if self._may_be_direct(job) else None
        under_way = self._open = self._make_job(job, self._pool)
        under_way.begin()
        under_way.reducer = self._make_reducer(job, self._pool, under_way)
        under_way.reducer.leave(under_way.drains.leaving)
        under_way.start_clock()
        calls = self._calls
        self._end_watch = cluster.watch(
            lambda nodes: calls.post(partial(under_way.drains.drain_nodes, nodes))
        )

    def _gpus_each(self, learner: Learner) -> dict[WorkerId, float]:
        device = str(getattr(learner, "device", "cpu"))
        given = self._gpus
        if self._has_kinds:
            usual, kinds = float(device.startswith("cuda")), self.fleet.kinds
            given = {w: usual if kind.gpus is None else kind.gpus for w, kind in kinds.items()}
        return gpus_each(given, device, self.workers, self._cluster.gpus())

    def _may_be_direct(self, job: Job) -> bool:
        """Return whether slices may go from process to process instead of by Ray's stores.

        Small ones go within Ray's calls. Where Ray encrypts its traffic, ours must not go in plain.
        """
        large = job.learner.message_bytes >= SPREAD_BYTES
        several = self.servers != "driver" and len(self._cluster.nodes()) > 1
        return several and large and os.environ.get("RAY_USE_TLS", "0") != "1"

    def _is_direct(self, pool: Pool) -> bool:
        """Return whether slices go from process to process, now that the workers are up.

        The workers of one node share a store: there each slice of the model arrives once.
        """
        return self._secret is not None and len(pool.nodes()) >= self.size

    def _make_reducer(self, job: Job, pool: Pool, under_way: RayJob) -> Reducer:
        """Start the processes that keep the model, and wait until they are ready."""
        nodes = pool.nodes() or [self._cluster.node()]  # an interrupt may come before all workers
        count = server_count(self.servers, job, len(nodes), self.sum_on_nodes)
        if self.sum_on_nodes and count < 2:
            logger.warning(
                "sum_on_nodes=True has no effect: results are added up on nodes for servers on "
                "other nodes, and there are %d servers; use servers='spread' and several nodes",
                count,
            )
        if not count and job.overlaps:
            logger.warning(
                "overlap=True has no effect: the driver keeps the model, and workers begin when it "
                "has arrived; use Ray(servers='spread') with workers on several nodes"
            )
        if not count:
            results = Results(job.server, job.wants, job.codec, job.model_codec, job.steps)
            return DriverReducer(results, under_way.stepped, encoded=job.codec is not None)
        nodes = [nodes[i % len(nodes)] for i in range(count)]
        if self._server_pool is not None and self._server_nodes != nodes:
            self._server_pool.end()
            self._server_pool = None
        if self._server_pool is None:
            names = [f"s{i}" for i in range(count)]
            placement = Placement(dict(zip(names, nodes, strict=True)), pool.nodes)
            make, self._placement = self._cluster.make_servers(placement), placement
            self._server_pool = Pool(names, make, self._respawns, self._cluster)
            self._server_nodes = nodes
        self._server_pool.fill()
        if self._is_direct(pool):
            reducer = self._on_servers(job, pool, under_way, direct=True)
            if (why := reducer.unreachable()) is None:
                reducer.leave_slow_links()
                return reducer
            logger.warning(
                "slices go through Ray's object stores, which takes more time and CPU: %s; open "
                "all ports between these hosts for direct transport",
                why,
            )
        reducer = self._on_servers(job, pool, under_way, direct=False)
        reducer.leave_slow_links()
        return reducer

    def _on_servers(self, job: Job, pool: Pool, under_way: RayJob, direct: bool) -> ShardedReducer:
        """Cut the model among the servers, and wait until they have their slices."""
        assert self._server_pool is not None and self._placement is not None
        servers = len(self._server_pool.members)
        processes = Processes(
            self._server_pool,
            self._placement,
            pool,
            self._cluster.transport(direct),
            self._secret if direct else None,
            self._calls,
            self._timeout,
            self._start_timeout,
            self.sum_on_nodes,
            self._chunks(job, servers, direct),
            job.adapts,
        )
        asked = Callbacks(
            *(under_way.stepped, under_way.ship_all, under_way.ask_anew),
            *(under_way.redo, under_way.refuse_later),
        )
        codecs = job.codec, job.model_codec
        reducer = ShardedReducer(job.server, job.steps, job.wants, processes, asked, codecs)
        reducer.wait()
        return reducer

    def _chunks(self, job: Job, servers: int, direct: bool) -> int:
        return chunk_count(job.server.vector.nbytes, servers, direct)

    def execute(self, node: WorkerId, command: Command) -> None:
        self._under_way().execute(command)

    def next_event(self) -> tuple[float, WorkerId, Event] | None:
        return self._under_way().next_event()

    def _under_way(self) -> RayJob:
        assert self._open is not None, "a job is opened first"
        return self._open

    def drain(self, *workers: WorkerId) -> None:
        """Have workers finish their tasks and leave; each is started again where Ray has room.

        Any thread may call it, for instance a callback. Workers on nodes that Ray drains (`ray
        drain-node`) do so without this call.
        """
        if self._open is not None:
            self._calls.post(partial(self._open.drains.drain, workers))

    def interrupt(self, reason: str) -> None:
        self._calls.post(partial(self._events.append, Interrupted(reason)))

    def now(self) -> float:
        """Return the seconds of the run, also after its end."""
        if self._open is not None:
            return self._open.now()
        return max(self._cluster.clock() - self._origin, 0.0)

    def save(self) -> None:
        return None

    def settle(self) -> None:
        self._under_way().reducer.settle()

    def writer(self, folder: Path) -> Writer | None:
        return self._under_way().reducer.writer(folder)

    def close(self) -> None:
        """End the job. Outside of a `with` block the workers end with it."""
        self._clear()
        if not self._keep:
            self.shutdown()

    def shutdown(self) -> None:
        """Kill workers and servers, and stop Ray if it was started here."""
        self._clear()
        for pool in self._pools():
            pool.end()
        self._pool = self._server_pool = self._lent_pool = None
        if self._ours:
            self._cluster.shutdown()
            self._ours = False
