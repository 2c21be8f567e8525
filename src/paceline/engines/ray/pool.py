"""The worker processes of an engine: creating them, replacing the lost, ending them all."""

from __future__ import annotations

import contextlib
import os
import signal
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
    """Actors by worker name. A name whose respawns are used up is gone for good."""

    def __init__(self, size: int, respawns: int, cpus: float | None, gpus: float) -> None:
        if cpus is None:
            unused = ray.available_resources().get("CPU", 0.0)
            cpus = min(1.0, int(unused / size * 1000) / 1000)
        self._actor = actor_class(num_cpus=cpus, num_gpus=gpus, scheduling_strategy="SPREAD")
        self._respawns = respawns
        self._node = ray.get_runtime_context().get_node_id()
        self.members: dict[WorkerId, Member] = {}
        for i in range(size):
            self._spawn(f"w{i}", 0)

    def names(self) -> list[WorkerId]:
        return list(self.members)

    def member(self, name: WorkerId) -> Member:
        return self.members[name]

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
        """End all workers."""
        for member in self.members.values():
            ray.kill(member.actor)
        self.members.clear()

    def _spawn(self, name: WorkerId, incarnation: int) -> None:
        self.members[name] = Member(name, incarnation, self._actor.remote())

    def _make_sure(self, member: Member) -> None:
        place = member.place
        if place is None or place.node != self._node or not place.started:
            return
        # A stopped process does not obey Ray: it would wake up later, and go on.
        if start_time(place.pid) == place.started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(place.pid, signal.SIGKILL)
