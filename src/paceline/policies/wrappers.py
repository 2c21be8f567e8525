"""Policies around policies: when to begin, when to end, and who is there at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, cast

from paceline.core.protocol import (
    Command,
    Event,
    Joined,
    Left,
    Policy,
    SetTimer,
    Stop,
    TimerFired,
    View,
    Want,
    WorkerId,
)


@dataclass
class Until:
    """Stops the inner policy after so many steps, seconds or samples, counted from the start."""

    inner: Policy
    steps: float = inf
    seconds: float = inf
    samples: float = inf
    _armed: bool = field(default=False, init=False, repr=False)

    @property
    def wants(self) -> frozenset[Want]:
        return self.inner.wants

    def react(self, view: View, event: Event) -> Iterator[Command]:
        timer = f"until {self.seconds:g}"
        if not self._armed and view.now < self.seconds < inf:
            yield SetTimer(
                f"until {self.seconds:g}", self.seconds
            )  # even if nothing else happens by then
        self._armed = True
        if event != TimerFired(timer):
            yield from self.inner.react(view, event)
        # Only after a whole reaction: the run can then be taken up again as if it never ended.
        if (reason := self.reached(view)) is not None:
            yield Stop(reason)

    def reached(self, view: View) -> str | None:
        """Return which end is reached, None if none is."""
        if view.version >= self.steps:
            return f"{view.version} steps taken"
        if view.now >= self.seconds:
            return f"{view.now:g} seconds passed"
        if view.samples >= self.samples:
            return f"{view.samples} samples used"
        return None


@dataclass
class MinWorkers:
    """Holds the inner policy back until `n` workers have joined; from then on it is let be."""

    n: int
    inner: Policy
    _ready: bool = field(default=False, init=False, repr=False)

    @property
    def wants(self) -> frozenset[Want]:
        return self.inner.wants

    def react(self, view: View, event: Event) -> Iterator[Command]:
        self._ready = self._ready or len(view.workers) >= self.n
        if self._ready:
            yield from self.inner.react(view, event)


@dataclass
class Among:
    """Lets the inner policy know of some workers only; the others get nothing to do.

    >>> from paceline.policies.named import sync
    >>> Among(["w0", "w2"], sync()).workers
    ('w0', 'w2')
    """

    workers: Sequence[WorkerId]
    inner: Policy

    def __post_init__(self) -> None:
        self.workers = tuple(self.workers)
        if not self.workers or len(set(self.workers)) < len(self.workers):
            raise ValueError(f"workers={self.workers}: name at least one, and each of them once")

    @property
    def wants(self) -> frozenset[Want]:
        return self.inner.wants

    def check(self, workers: int, batch: int) -> None:
        """Refuse workers that are not there, and what the inner policy cannot do with the rest."""
        there = {f"w{i}" for i in range(workers)}
        if missing := [worker for worker in self.workers if worker not in there]:
            raise ValueError(
                f"Among names {', '.join(missing)}; this engine has the {workers} workers w0 to "
                f"w{workers - 1}"
            )
        if check := getattr(self.inner, "check", None):
            check(len(self.workers), batch)

    def react(self, view: View, event: Event) -> Iterator[Command]:
        part = _Part(view, self.workers)
        if isinstance(event, Joined | Left) and event.worker not in self.workers:
            if view.running or view.held or not part.workers:
                return
            event = Joined(part.workers[0])  # held back until now, or to be taken up again
        yield from self.inner.react(cast(View, part), event)


class _Part:
    """The books, as far as they are about some workers."""

    def __init__(self, view: View, workers: Sequence[WorkerId]) -> None:
        self._view, self._known = view, frozenset(workers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)

    @property
    def workers(self) -> list[WorkerId]:
        return [worker for worker in self._view.workers if worker in self._known]

    @property
    def idle(self) -> list[WorkerId]:
        return [worker for worker in self._view.idle if worker in self._known]

    @property
    def free(self) -> list[WorkerId]:
        return [worker for worker in self._view.free if worker in self._known]
