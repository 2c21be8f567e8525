"""A worker: an actor that computes one task at a time and can be told to give it up."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import ray

from paceline.core.protocol import Stats, Task, TaskId, Work, WorkerId
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


class Answer(NamedTuple):
    """What a worker returns: its vector lies in the object store, outside of the pickle."""

    token: Token
    vector: Array | None
    samples: int
    seconds: float
    stats: Stats


# Calls carry plain tuples, which Ray packs ten times as fast as it pickles dataclasses: 0.06
# against 0.6 ms a call, as much as all the rest of it.
Order: TypeAlias = tuple[Any, ...]
Reply: TypeAlias = tuple[Any, ...]


def pack(token: Token, task: Task) -> Order:
    """Return a task for its way to a worker."""
    work = task.work
    parts = None if work.parts is None else tuple(work.parts.items())
    return (
        *(tuple(token), task.version, task.since, task.samples, task.draw, task.attempt),
        *(parts, work.samples, work.steps, work.budget, work.tag),
    )


def unpack(order: Order) -> tuple[Token, Task]:
    """Invert `pack`; lists are what Ray makes of tuples."""
    name, version, since, samples, draw, attempt, parts, asked, steps, budget, tag = order
    token = Token(*name)
    work = Work(
        None if parts is None else dict(parts),
        asked,
        steps,
        budget,
        tuple(tag) if isinstance(tag, list) else tag,
    )
    task = Task(token.task, token.worker, work, version, since, samples, draw, attempt)
    return token, task


def read(reply: Reply) -> Answer:
    """Return a worker's reply as an answer."""
    name, vector, samples, seconds, stats = reply
    return Answer(Token(*name), vector, samples, seconds, stats)


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

    def compute(self, order: Order, model: Array) -> Reply:
        assert self._replica is not None
        token, task = unpack(order)
        begin = time.monotonic()
        until = begin + task.work.budget

        def proceed(done: int) -> bool:
            return self._abandoned != token and time.monotonic() < until

        outcome = self._replica.compute(model, task, proceed)
        seconds = time.monotonic() - begin
        return tuple(token), outcome.vector, outcome.samples, seconds, dict(outcome.stats)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def abandon(self, token: tuple[Any, ...]) -> None:
        """Make a task end at the next piece of work."""
        self._abandoned = Token(*token)


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
