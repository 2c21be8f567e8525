"""How many results a step waits for, where that changes as training goes on."""

from __future__ import annotations

from typing import Protocol

from paceline.core.protocol import Event, View, Want


class Chooser(Protocol):
    """A number that may change from step to step: a schedule, a test, a plan."""

    @property
    def wants(self) -> frozenset[Want]: ...
    @property
    def most(self) -> int:
        """The largest number it may ever choose."""

    def choose(self, view: View) -> int:
        """Return the number of shares that the step to `view.version + 1` needs."""

    def learn(self, view: View, event: Event) -> None: ...
