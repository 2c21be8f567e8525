"""The worker processes of an engine: creating them, replacing the lost, ending them all."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import ray

from paceline.core.protocol import TaskId, WorkerId
from paceline.engines.ray.worker import Place, Token, actor_class, start_time


@dataclass(eq=False)
class Member:
    """One life of one worker."""

    name: WorkerId
    incarnation: int
    actor: Any
    place: Place | None = None
    joined: bool = False
    busy: Token | None = None  # what it is computing, wanted or not
    waiting: deque[TaskId] = field(default_factory=deque)


class Pool:
    """Actors by worker name. A name whose respawns are used up is missing until `fill`."""

    def __init__(
        self, respawns: int, cpus: float | None, gpus: float, size: int, fixed: bool
    ) -> None:
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
        self._actor = actor_class(num_cpus=cpus, num_gpus=gpus, scheduling_strategy="SPREAD")
        self._respawns, self._size = respawns, size
        self._node = ray.get_runtime_context().get_node_id()
        self.members: dict[WorkerId, Member] = {}

    def fill(self) -> None:
        """Start what is missing, with all respawns before it."""
        for name in (f"w{i}" for i in range(self._size)):
            if name in self.members:
                self.members[name].incarnation = 0
            else:
                self._spawn(name, 0)

    def names(self) -> list[WorkerId]:
        return list(self.members)

    def member(self, name: WorkerId) -> Member:
        return self.members[name]

    def pids(self) -> dict[WorkerId, int]:
        """Return the processes of the workers on this machine."""
        places = {name: member.place for name, member in self.members.items()}
        return {n: p.pid for n, p in places.items() if p is not None and p.node == self._node}

    def replace(self, member: Member) -> bool:
        """Make sure that a lost worker is dead; return whether a new one takes its place."""
        ray.kill(member.actor)
        self._make_sure(member)
        del self.members[member.name]
        if member.incarnation >= self._respawns:
            return False
        self._spawn(member.name, member.incarnation + 1)
        return True

    def end(self) -> None:
        """End all workers, those that do not obey after two seconds by force."""
        for member in self.members.values():
            ray.kill(member.actor)
        patience = time.monotonic() + 2.0
        while any(map(self._is_running, self.members.values())) and time.monotonic() < patience:
            time.sleep(0.02)
        for member in self.members.values():
            self._make_sure(member)
        self.members.clear()

    def _spawn(self, name: WorkerId, incarnation: int) -> None:
        self.members[name] = Member(name, incarnation, self._actor.remote())

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
