"""A worker: an actor that computes one task at a time and can be told to give it up."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ray

from paceline.core.protocol import Stats, Task, TaskId, WorkerId
from paceline.learners.base import Array, Learner, Replica


class Token(NamedTuple):
    """Names one attempt at one task, for ever: a result is used under its own token only."""

    run: str
    worker: WorkerId
    incarnation: int
    task: TaskId


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker lives."""

    node: str
    pid: int
    started: str  # tells the process from a later one with the same pid


@dataclass(frozen=True, slots=True)
class Answer:
    """What a worker returns: its vector lies in the object store, outside of the pickle."""

    token: Token
    vector: Array | None
    samples: int
    seconds: float
    stats: Stats


class Worker:
    """Wrapped by `ray.remote` where it is created, so this stays a plain class."""

    def __init__(self) -> None:
        self._replica: Replica | None = None
        self._abandoned: Token | None = None

    def set_up(self, learner: Learner, seed: int) -> Place:
        """Build the replica; an earlier one is forgotten."""
        self._replica = None  # the old one's memory first
        self._replica = learner.replica(seed)
        pid = os.getpid()
        return Place(ray.get_runtime_context().get_node_id(), pid, start_time(pid))

    def compute(self, token: Token, task: Task, model: Array) -> Answer:
        assert self._replica is not None
        begin = time.monotonic()
        until = begin + task.work.budget

        def proceed(done: int) -> bool:
            return self._abandoned != token and time.monotonic() < until

        outcome = self._replica.compute(model, task, proceed)
        seconds = time.monotonic() - begin
        return Answer(token, outcome.vector, outcome.samples, seconds, outcome.stats)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def abandon(self, token: Token) -> None:
        """Make a task end at the next piece of work."""
        self._abandoned = token


def start_time(pid: int) -> str:
    """Return when a process of this host began, as Linux counts it; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def actor_class(**options: Any) -> Any:
    """Return the worker as an actor class. Restarts and retries are ours: Ray's would apply a
    result twice or hide a fault."""
    return ray.remote(
        concurrency_groups={"control": 1}, max_restarts=0, max_task_retries=0, **options
    )(Worker)
