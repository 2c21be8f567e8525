"""The processes of an engine: creating them, replacing the lost, ending them all."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from paceline.core.protocol import TaskId
from paceline.engines.ray.calls import Call
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
        alive = alive_nodes()
        start = order.index(nodes[name])
        chosen = next((n for n in order[start:] + order[:start] if n in alive), None)
        if chosen is None:
            raise RuntimeError(f"no node is left on which server {name} could be started")
        on = NodeAffinitySchedulingStrategy(chosen, soft=False)  # soft ones are not followed
        return actor.options(scheduling_strategy=on).remote()

    return make


def alive_nodes() -> set[str]:
    """Return the nodes that Ray believes to be there."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


class Pool:
    """Actors by name. A name whose respawns are used up is missing until `fill`."""

    def __init__(self, names: Sequence[str], make: Callable[[str], Any], respawns: int) -> None:
        self._names, self._make, self._respawns = names, make, respawns
        self._node = ray.get_runtime_context().get_node_id()
        self.members: dict[str, Member] = {}

    def fill(self) -> None:
        """Start what is missing, with all respawns before it."""
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
        ray.kill(member.actor)
        self._make_sure(member)
        del self.members[member.name]
        if member.incarnation >= self._respawns:
            return False
        self._spawn(member.name, member.incarnation + 1)
        return True

    def remove(self, name: str) -> None:
        """End one that is not needed any more; `fill` starts it again."""
        ray.kill(self.members.pop(name).actor)

    def end(self) -> None:
        """End them all, those that do not obey after two seconds by force."""
        for member in self.members.values():
            ray.kill(member.actor)
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
