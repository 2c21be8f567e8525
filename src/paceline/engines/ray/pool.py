"""The processes of an engine: starting them, replacing lost ones, ending all."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import ray
from ray._private.state import actors as actor_table  # the public call needs a dashboard
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from paceline.core.logs import logger_of
from paceline.core.protocol import TaskId, some_names
from paceline.engines.kinds import Fleet
from paceline.engines.ray.actors import actor_class, make_workers
from paceline.engines.ray.calls import Call, Calls
from paceline.engines.ray.cluster.join import connect, refuse_torchrun, warn_small_stores
from paceline.engines.ray.notices import Notices, drain_node, draining_nodes
from paceline.engines.ray.place import Place, start_time
from paceline.engines.ray.reclaimed import Notice
from paceline.engines.ray.servers.placement import Placement
from paceline.engines.ray.servers.server import Server
from paceline.engines.ray.transport.calls import Direct, Stores, Transport
from paceline.engines.ray.worker import Token, Worker
from paceline.learners.base import Learner

logger = logger_of(__name__)


@dataclass(eq=False)
class Member:
    """One process (incarnation) of a worker or server."""

    name: str
    incarnation: int
    actor: Any
    place: Place | None = None
    joined: bool = False
    placed: bool = False  # whether its process existed at its first overdue check
    call: Call | None = None  # the call whose answer is awaited
    busy: Token | None = None  # the task that it computes, cancelled or not
    sent_at: float = 0.0  # when it got that task
    draining: bool = False  # whether it finishes its task and leaves
    proven: bool = False  # whether it has answered a task of this job
    queued: int = 0  # calls that a server has not answered
    waiting: deque[TaskId] = field(default_factory=deque)
    model_version: int | None = None  # the version of the public copy of the model that it has
    model_bytes: int | None = None  # bytes of its last model, if it came encoded
    refunds: list[TaskId] = field(default_factory=list)  # unused results, not yet reported to it
    released: deque[int] = field(default_factory=deque)  # keys of objects that it need not hold
    pushes: bool = True  # whether it sends a result to servers before one of them asks

    def reset(self) -> None:
        """Forget the job that has ended; the process stays."""
        self.busy, self.joined, self.call, self.proven = None, False, None, False
        self.draining = False
        self.model_version, self.model_bytes, self.refunds = None, None, []
        self.waiting.clear()
        self.released, self.pushes = deque(), True


@dataclass(frozen=True)
class RayWorkers:
    """The places of an engine's workers, for actors of another class.

    start: makes an actor of a class in each place, for a learner.
    end: releases what the engine keeps for these actors; the pool itself must have ended.
    start_timeout: seconds for an actor to come up.
    timeout: seconds after which a silent actor is overdue.
    """

    start: Callable[[type, Learner], Pool]
    end: Callable[[], None]
    start_timeout: float
    timeout: float
    cluster: Cluster


Gpus: TypeAlias = "float | Mapping[str, float] | None"
"""GPUs of each worker: one number for all, or by name; None: as the learner's device requires."""


def gpus_each(given: Gpus, device: str, names: Sequence[str], there: float) -> dict[str, float]:
    """Return the GPUs that Ray reserves for each worker, if the cluster has `there` in all."""
    if isinstance(given, Mapping):
        if unknown := sorted({*given} - {*names}):
            raise ValueError(f"gpus= names {unknown}; the workers are {some_names(names)}")
        each = {name: given.get(name, 0.0) for name in names}
    elif given is not None:
        each = dict.fromkeys(names, given)
    elif device == "auto":
        each = {name: float(index < int(there)) for index, name in enumerate(names)}
    else:
        each = dict.fromkeys(names, float(device.startswith("cuda")))
    if device.startswith("cuda"):
        index = int(device.partition(":")[2] or 0)
        for name, gpus in each.items():
            if not gpus:
                raise ValueError(
                    f"device={device!r} and gpus=0 for {name}: such workers would share the first "
                    "GPU of their machine; leave gpus= out for one GPU each, use gpus=0.5 for two "
                    'workers on one, or device="auto" for the CPU where there is no GPU'
                )
            if index >= max(gpus, 1):
                raise ValueError(
                    f"device={device!r} and gpus={gpus:g} for {name}: a worker sees its own GPUs "
                    'alone, counted from 0; use device="cuda"'
                )
    return each


def make_servers(placement: Placement) -> Callable[[str], Any]:
    """Return a function that makes a server's actor on the node that the placement chooses."""
    actor = actor_class(Server, num_cpus=0)  # Ray gives it one thread

    def make(name: str) -> Any:
        chosen = placement.choose(name, alive_nodes())
        if chosen is None:
            raise RuntimeError(f"no node is left to start server {name} on")
        on = NodeAffinitySchedulingStrategy(chosen, soft=False)  # Ray ignores soft ones
        cores = {node["NodeID"]: node["Resources"].get("CPU", 1.0) for node in ray.nodes()}
        neighbors = sum(node == chosen for node in placement.nodes.values())  # with this one
        threads = max(int(cores.get(chosen, 1.0) / max(neighbors, 1)), 1)
        return actor.options(scheduling_strategy=on).remote(threads=threads)

    return make


def alive_nodes() -> set[str]:
    """Return the nodes that Ray reports as alive."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


_LISTENING = 300.0  # seconds until a worker is asked again for notices
_LONGEST_PAUSE = 30.0  # seconds before a process that keeps failing is started again


class Cluster:
    """The calls of Ray that an engine needs. Tests replace it by a simulated cluster."""

    def __init__(self, allow_insecure: bool = False) -> None:
        self._allow_insecure = allow_insecure

    def connect(self, address: str | None, workers: int, store_bytes: int) -> bool:
        """Make sure that Ray runs; return whether this engine started it and must stop it."""
        refuse_torchrun(workers)
        return connect(address, workers, store_bytes, self._allow_insecure)

    def warn_small_stores(self, servers: bool, workers: int, model: int, state: int) -> None:
        warn_small_stores(servers, workers, model, state)

    def gpus(self) -> float:
        """Return the number of GPUs in the cluster."""
        return float(ray.cluster_resources().get("GPU", 0.0))

    def make_workers(
        self, fleet: Fleet, gpus: Mapping[str, float], fixed: bool, actor: type = Worker
    ) -> Callable[[str], Any]:
        return make_workers(fleet, gpus, fixed, actor)

    def make_servers(self, placement: Placement) -> Callable[[str], Any]:
        return make_servers(placement)

    def transport(self, direct: bool) -> Transport:
        """Return how slices go from process to process."""
        return Direct() if direct else Stores()

    def calls(self) -> Calls:
        """Make the inbox for the answers of its actors."""
        return Calls()

    def clock(self) -> float:
        return time.monotonic()

    def put(self, thing: Any) -> Any:
        return ray.put(thing)

    def get(self, refs: Any, timeout: float) -> Any:
        """Wait for an object, or a list of them."""
        return ray.get(refs, timeout=timeout)

    def kill(self, actor: Any) -> None:
        ray.kill(actor)

    def tell_waiting(self, name: str) -> None:
        """Say that a worker has no process yet, since no node has room for it."""
        logger.warning(
            "worker %s waits for a node with room; it starts as soon as there is one", name
        )

    def has_process(self, actor: Any) -> bool:
        """Return whether an actor has a process, and waits for a node no longer."""
        return int(actor_table(actor._actor_id.hex()).get("Pid", 0)) > 0

    def node(self) -> str:
        """Return the node of this process."""
        found: str = ray.get_runtime_context().get_node_id()
        return found

    def nodes(self) -> set[str]:
        return alive_nodes()

    def has_lost(self, node: str) -> bool:
        """Return whether a node is known to be gone."""
        return node not in self.nodes()

    def address(self, node: str) -> str:
        """Return how a message names a node."""
        found = [n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == node]
        return f"{found[0] if found else 'unknown'} (node {node[:8]})"

    def watch(self, tell: Callable[[frozenset[str]], None]) -> Callable[[], None]:
        """Tell which nodes Ray drains, from a thread; return what ends it."""
        return Notices(draining_nodes, tell).end

    def listen(self, actor: Any, tell: Callable[[Notice | None], None]) -> None:
        """Tell what a worker learns of its end, or None after a while; from another thread."""

        def answered(future: Future[Any]) -> None:
            if future.exception(timeout=0) is None:  # or it is gone
                tell(future.result(timeout=0))

        actor.notice.remote(_LISTENING).future().add_done_callback(answered)

    def drain(self, node: str, why: str) -> None:
        """Have Ray start nothing more on a node that will be taken away."""
        drain_node(node, why)

    def free_cpus(self) -> float:
        return float(ray.available_resources().get("CPU", 0))

    def shutdown(self) -> None:
        ray.shutdown()


class Pool:
    """Actors by name. A name whose respawns are used up is missing until `fill`.

    respawns: restarts of a process without a result in between.
    """

    def __init__(
        self, names: Sequence[str], make: Callable[[str], Any], respawns: int, cluster: Cluster
    ) -> None:
        self._names, self._make, self.respawns = names, make, respawns
        self.cluster, self._node = cluster, cluster.node()
        self.members: dict[str, Member] = {}
        self._failures: dict[str, int] = {}  # in a row, without a result in between
        self._paused: set[str] = set()  # names to start later
        self._made = 0  # processes so far

    @property
    def size(self) -> int:
        """The number of names."""
        return len(self._names)

    def fill(self) -> None:
        """Start all missing actors, and reset the respawns of all."""
        self._failures.clear()
        self._paused.clear()
        for name in self._names:
            if name not in self.members:
                self._spawn(name)

    def is_current(self, member: Member) -> bool:
        """Return whether a member is the current process of its name."""
        return self.members.get(member.name) is member

    def pids(self) -> dict[str, int]:
        """Return the processes on this machine."""
        places = {name: member.place for name, member in self.members.items()}
        return {n: p.pid for n, p in places.items() if p is not None and p.node == self._node}

    def replace(self, member: Member) -> bool:
        """Kill a lost member; return whether a new one takes its place."""
        if self.remove_lost(member) is None:
            return False
        self.start(member.name)
        return True

    def remove_lost(self, member: Member, distrust: bool = False) -> float | None:
        """Kill a lost member; return in how many seconds to start another, None for never.

        The first restart is at once; each further one without a result waits twice as long.
        distrust: it raised an exception or its result was refused, so the first one waits too.
        The loss of its whole node is no failure: the next process waits for another node.
        """
        self.cluster.kill(member.actor)
        self._make_sure(member)
        del self.members[member.name]
        if member.place is not None and self.cluster.has_lost(member.place.node):
            self._paused.add(member.name)
            return 0.0
        failures = self._failures[member.name] = self._failures.get(member.name, 0) + 1
        if failures > self.respawns:
            return None
        self._paused.add(member.name)
        doublings = failures - 1 if distrust else failures - 2
        return min(2.0 ** min(doublings, 10), _LONGEST_PAUSE) if doublings >= 0 else 0.0

    def release(self, member: Member) -> Callable[[], None]:
        """Have a member end that is not lost; return what makes sure of that later."""
        self.cluster.kill(member.actor)
        del self.members[member.name]
        self._paused.add(member.name)
        self.trust(member.name)
        return partial(self._make_sure, member)

    def start(self, name: str) -> None:
        """Start a lost member again."""
        self._paused.remove(name)
        self._spawn(name)

    def trust(self, name: str) -> None:
        """Reset the respawns of a member that has returned a result."""
        self._failures.pop(name, None)

    @property
    def expecting(self) -> bool:
        """Whether members exist, or will be started."""
        return bool(self.members or self._paused)

    def nodes(self) -> list[str]:
        """Return the nodes that have members, each once."""
        places = [m.place for m in self.members.values() if m.joined]
        return list(dict.fromkeys(place.node for place in places if place is not None))

    def with_process(self) -> list[str]:
        """Return the members whose process exists, so that they wait for no node."""
        has_process = self.cluster.has_process
        return [name for name, member in self.members.items() if has_process(member.actor)]

    def add(self, name: str) -> None:
        """Start a member that was removed."""
        self._spawn(name)

    def remove(self, name: str) -> None:
        """Kill a member that is no longer needed; `fill` starts it again."""
        self.cluster.kill(self.members.pop(name).actor)

    def end(self) -> None:
        """Kill all members; after two seconds, send SIGKILL to those still running on this node."""
        for member in self.members.values():
            self.cluster.kill(member.actor)
        patience = time.monotonic() + 2.0
        while any(map(self._is_running, self.members.values())) and time.monotonic() < patience:
            time.sleep(0.02)
        for member in self.members.values():
            self._make_sure(member)
        self.members.clear()

    def _spawn(self, name: str) -> None:
        self.members[name] = Member(name, self._made, self._make(name))
        self._made += 1

    def _is_running(self, member: Member) -> bool:
        place = member.place
        if place is None or place.node != self._node or not place.started:
            return False
        return start_time(place.pid) == place.started

    def _make_sure(self, member: Member) -> None:
        # A paused process does not obey Ray: it would wake up later, and continue.
        if member.place is not None and self._is_running(member):
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.place.pid, signal.SIGKILL)
