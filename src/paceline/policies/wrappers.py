"""Policies around policies: when to begin and when to end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from paceline.core.protocol import Command, Event, Policy, SetTimer, Stop, TimerFired, View, Want


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
