"""The processes of an engine: creating them, replacing the lost, ending them all."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from paceline.core.protocol import TaskId
from paceline.engines.ray.calls import Call, Calls
from paceline.engines.ray.cluster import connect
from paceline.engines.ray.server import Server
from paceline.engines.ray.worker import Place, Token, Worker, actor_class, start_time


@dataclass(eq=False)
class Member:
    """One life of one worker or server."""

    name: str
    incarnation: int
    actor: Any
    place: Place | None = None
    joined: bool = False
    call: Call | None = None  # the one whose answer is awaited
    busy: Token | None = None  # what it is computing, wanted or not
    waiting: deque[TaskId] = field(default_factory=deque)
    known: int | None = None  # the version of the public copy of the model that it has
    got: int | None = None  # bytes that its last model took, if they were fewer
    unused: list[TaskId] = field(default_factory=list)  # results that it does not know are not used


def make_workers(
    cpus: float | None, gpus: float, size: int, fixed: bool, kind: type = Worker
) -> Callable[[str], Any]:
    """Return what makes a worker's actor, once it is sure that all of them have room."""
    if cpus is None:
        unused = ray.available_resources().get("CPU", 0.0)
        cpus = min(1.0, int(unused / size * 1000) / 1000)
    if fixed:  # a cluster that will not grow
        for name, each in (("CPU", cpus), ("GPU", gpus)):
            there = ray.cluster_resources().get(name, 0.0)
            if each * size > there:
                raise ValueError(
                    f"{size} workers with {each:g} {name}s each need {each * size:g}, and "
                    f"this machine has {there:g}; use {there / size:.3g} or less"
                )
    actor = actor_class(kind, num_cpus=cpus, num_gpus=gpus, scheduling_strategy="SPREAD")
    return lambda name: actor.remote()


def make_servers(nodes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return what makes a server's actor on its node, or on the next if that one is gone."""
    actor = actor_class(Server, num_cpus=0)
    order = list(dict.fromkeys(nodes.values()))

    def make(name: str) -> Any:
        chosen = next_node(nodes[name], order, alive_nodes())
        if chosen is None:
            raise RuntimeError(f"no node is left on which server {name} could be started")
        on = NodeAffinitySchedulingStrategy(chosen, soft=False)  # soft ones are not followed
        return actor.options(scheduling_strategy=on).remote()

    return make


def next_node(wished: str, others: Sequence[str], alive: Collection[str]) -> str | None:
    """Return a node if it is there, or else the next one, or else any; None if none is."""
    start = others.index(wished)
    # Those that came later are the last choice: nobody has measured the way to them.
    turn = [*others[start:], *others[:start], *sorted(alive)]
    return next((node for node in turn if node in alive), None)


def alive_nodes() -> set[str]:
    """Return the nodes that Ray believes to be there."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


_LONGEST_PAUSE = 30.0  # seconds before a process that keeps failing is started again


class Cluster:
    """Ray itself, as far as an engine needs it. Tests have one that is simulated."""

    def __init__(self, allow_insecure: bool = False) -> None:
        self._allow_insecure = allow_insecure

    def connect(self, address: str | None, workers: int, message_bytes: int) -> bool:
        """Make sure that it runs; return whether it was started here and is ours to stop."""
        return connect(address, workers, message_bytes, self._allow_insecure)

    def make_workers(
        self, cpus: float | None, gpus: float, size: int, fixed: bool, kind: type = Worker
    ) -> Callable[[str], Any]:
        return make_workers(cpus, gpus, size, fixed, kind)

    def make_servers(self, nodes: Mapping[str, str]) -> Callable[[str], Any]:
        return make_servers(nodes)

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

    def node(self) -> str:
        """Return where this process is."""
        found: str = ray.get_runtime_context().get_node_id()
        return found

    def nodes(self) -> set[str]:
        return alive_nodes()

    def free_cpus(self) -> float:
        return float(ray.available_resources().get("CPU", 0))

    def shutdown(self) -> None:
        ray.shutdown()


class Pool:
    """Actors by name. A name whose respawns are used up is missing until `fill`."""

    def __init__(
        self, names: Sequence[str], make: Callable[[str], Any], respawns: int, cluster: Cluster
    ) -> None:
        self._names, self._make, self._respawns = names, make, respawns
        self.cluster, self._node = cluster, cluster.node()
        self.members: dict[str, Member] = {}
        self._failures: dict[str, int] = {}  # one after the other, without a result in between
        self._paused: dict[str, int] = {}  # those to be started later, with their next incarnation

    def fill(self) -> None:
        """Start what is missing, with all respawns before it."""
        self._failures.clear()
        self._paused.clear()
        for name in self._names:
            if name in self.members:
                self.members[name].incarnation = 0
            else:
                self._spawn(name, 0)

    def is_current(self, member: Member) -> bool:
        """Tell whether this life is the one that counts."""
        return self.members.get(member.name) is member

    def pids(self) -> dict[str, int]:
        """Return the processes on this machine."""
        places = {name: member.place for name, member in self.members.items()}
        return {n: p.pid for n, p in places.items() if p is not None and p.node == self._node}

    def replace(self, member: Member) -> bool:
        """Make sure that a lost one is dead; return whether a new one takes its place."""
        if self.remove_lost(member) is None:
            return False
        self.start(member.name)
        return True

    def remove_lost(self, member: Member, distrust: bool = False) -> float | None:
        """Make sure that a lost one is dead; return in how many seconds to start another.

        None: never. The first time it is at once, and then twice as long each time, until there
        has been a result. distrust: its last one was refused, so that it is not at once either.
        """
        self.cluster.kill(member.actor)
        self._make_sure(member)
        del self.members[member.name]
        if member.incarnation >= self._respawns:
            return None
        self._paused[member.name] = member.incarnation + 1
        failures = self._failures[member.name] = self._failures.get(member.name, 0) + 1
        doublings = failures - 1 if distrust else failures - 2
        return min(2.0 ** min(doublings, 10), _LONGEST_PAUSE) if doublings >= 0 else 0.0

    def start(self, name: str) -> None:
        """Start one again that was lost."""
        self._spawn(name, self._paused.pop(name))

    def trust(self, name: str) -> None:
        """Forget failures: there has been a result."""
        self._failures.pop(name, None)

    @property
    def expecting(self) -> bool:
        """Whether there are members, or will be."""
        return bool(self.members or self._paused)

    def remove(self, name: str) -> None:
        """End one that is not needed any more; `fill` starts it again."""
        self.cluster.kill(self.members.pop(name).actor)

    def end(self) -> None:
        """End them all, those that do not obey after two seconds by force."""
        for member in self.members.values():
            self.cluster.kill(member.actor)
        patience = time.monotonic() + 2.0
        while any(map(self._is_running, self.members.values())) and time.monotonic() < patience:
            time.sleep(0.02)
        for member in self.members.values():
            self._make_sure(member)
        self.members.clear()

    def _spawn(self, name: str, incarnation: int) -> None:
        self.members[name] = Member(name, incarnation, self._make(name))

    def _is_running(self, member: Member) -> bool:
        place = member.place
        if place is None or place.node != self._node or not place.started:
            return False
        return start_time(place.pid) == place.started

    def _make_sure(self, member: Member) -> None:
        # A stopped process does not obey Ray: it would wake up later, and go on.
        if member.place is not None and self._is_running(member):
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.place.pid, signal.SIGKILL)
