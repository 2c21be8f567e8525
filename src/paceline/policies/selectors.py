"""Who gets a task."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from paceline.core.protocol import Cancel, Event, View, Want, WorkerId


class Selector(Protocol):
    """Chooses who gets a task, and how large a one."""

    @property
    def wants(self) -> frozenset[Want]: ...
    def choose(
        self, view: View, candidates: Collection[WorkerId], wanted: int
    ) -> Mapping[WorkerId, int]:
        """Return the shares for each who gets a task. `wanted` are missing; more are spares."""

    def learn(self, view: View, news: Event | Cancel) -> None:
        """Take in what happened, and what is about to be cancelled."""


@dataclass(frozen=True)
class Everyone:
    """Gives a task to every candidate."""

    wants: frozenset[Want] = frozenset()

    def choose(
        self, view: View, candidates: Collection[WorkerId], wanted: int
    ) -> Mapping[WorkerId, int]:
        return dict.fromkeys(candidates, 1)

    def learn(self, view: View, news: Event | Cancel) -> None:
        pass
