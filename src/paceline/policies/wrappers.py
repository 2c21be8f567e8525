"""Policies around policies: when a run begins, when it ends, and which workers it uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, cast

from paceline.core.policy import Policy, Wrapper
from paceline.core.protocol import (
    Command,
    Event,
    Joined,
    Left,
    SetTimer,
    Stop,
    Task,
    TaskId,
    TimerFired,
    View,
    WorkerId,
    some_names,
)
from paceline.core.schema import Schema


@dataclass
class Until(Wrapper):
    """Stops the run after a number of steps, seconds or samples, counted from the start."""

    inner: Policy
    steps: float = inf
    seconds: float = inf
    samples: float = inf
    _armed: bool = field(default=False, init=False, repr=False)
    schema = Schema("until", 1, {"armed": "_armed"}, {"inner": "inner"})

    def react(self, view: View, event: Event) -> Iterator[Command]:
        timer = f"until {self.seconds:g}"
        if not self._armed and view.now < self.seconds < inf:
            yield SetTimer(
                f"until {self.seconds:g}", self.seconds
            )  # even if nothing else happens by then
        self._armed = True
        if event != TimerFired(timer):
            yield from self.inner.react(view, event)
        # Stop only after a complete reaction, so that a resumed run continues exactly.
        if (reason := self.reached(view)) is not None:
            yield Stop(reason)

    def reached(self, view: View) -> str | None:
        """Return the reason to stop, None if no limit is reached."""
        if view.version >= self.steps:
            return f"{view.version} steps taken"
        if view.now >= self.seconds:
            return f"{view.now:g} seconds passed"
        if view.samples >= self.samples:
            return f"{view.samples} samples used"
        return None


@dataclass
class MinWorkers(Wrapper):
    """Starts the inner policy once `n` workers are connected, and then passes on all events."""

    n: int
    inner: Policy
    _ready: bool = field(default=False, init=False, repr=False)
    schema = Schema("min_workers", 1, {"ready": "_ready"}, {"inner": "inner"})

    def react(self, view: View, event: Event) -> Iterator[Command]:
        self._ready = self._ready or len(view.workers) >= self.n
        if self._ready:
            yield from self.inner.react(view, event)


@dataclass
class OnlyWorkers(Wrapper):
    """Shows only some workers to the inner policy; the other workers get no tasks.

    >>> from paceline.policies.named import sync
    >>> OnlyWorkers(["w0", "w2"], sync()).workers
    ('w0', 'w2')
    """

    workers: Sequence[WorkerId]
    inner: Policy
    schema = Schema("among", 1, parts={"inner": "inner"})

    def __post_init__(self) -> None:
        self.workers = tuple(self.workers)
        if not self.workers or len(set(self.workers)) < len(self.workers):
            raise ValueError(f"workers={self.workers}: name at least one, and each of them once")

    def check(self, workers: Sequence[WorkerId], batch: int) -> None:
        """Raise ValueError for unknown workers, or if the inner policy cannot use the chosen."""
        there = set(workers)
        if missing := [worker for worker in self.workers if worker not in there]:
            raise ValueError(
                f"OnlyWorkers names {', '.join(missing)}; this engine has the {len(workers)} "
                f"workers {some_names(workers)}"
            )
        super().check(self.workers, batch)

    def results_per_step(self, workers: int) -> int:
        return super().results_per_step(len(self.workers))

    def may_redo(self, worker: WorkerId, task: Task) -> bool:
        return worker in self.workers and super().may_redo(worker, task)

    def react(self, view: View, event: Event) -> Iterator[Command]:
        part = _Part(view, self.workers)
        if isinstance(event, Joined | Left) and event.worker not in self.workers:
            if view.running or view.held or not part.workers:
                return
            event = Joined(part.workers[0])  # let the inner policy start, or continue
        yield from self.inner.react(cast(View, part), event)


class _Part:
    """A view of the ledger that shows only some workers."""

    def __init__(self, view: View, workers: Sequence[WorkerId]) -> None:
        self._view, self._known = view, frozenset(workers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)

    @property
    def workers(self) -> list[WorkerId]:
        return [worker for worker in self._view.workers if worker in self._known]

    @property
    def late(self) -> dict[TaskId, Task]:
        return {id: t for id, t in self._view.late.items() if t.worker in self._known}

    @property
    def idle(self) -> list[WorkerId]:
        return [worker for worker in self._view.idle if worker in self._known]

    @property
    def free(self) -> list[WorkerId]:
        return [worker for worker in self._view.free if worker in self._known]
