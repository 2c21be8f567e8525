"""Servers whose node will be taken away: they leave before it, and return on another node."""

from __future__ import annotations

from collections.abc import Collection

from paceline.engines.ray.servers.fleet import Fleet
from paceline.engines.ray.servers.placement import Placement
from paceline.engines.ray.servers.slices import Slot

PAUSE_SECONDS = 30.0
"""Until a server is started again whose process did not come up."""


class Moves:
    """Decides which servers give up their slices, and which get one.

    ready: servers whose process has come up, and that have no slice yet.
    """

    def __init__(self, placement: Placement, fleet: Fleet) -> None:
        self._placement, self._fleet = placement, fleet
        self._away: list[str] = []  # servers that left with their node
        self._not_before = 0.0  # when the next one may be started
        self.ready: list[str] = []

    def leave(self, nodes: Collection[str]) -> None:
        """Note which nodes will be taken away."""
        self._placement.leaving = frozenset(nodes)

    def leaving(self, slots: Collection[Slot]) -> list[Slot]:
        """Return the slices on nodes that will be taken away, if there is another node."""
        alive = {*self._fleet.alive()}
        if not alive - self._placement.leaving:
            return []
        return [s for s in slots if self._fleet.node(s.server) in self._placement.leaving]

    def left(self, server: str) -> None:
        """Note that a server has given up its slice."""
        self._away.append(server)

    def returning(self, slots: Collection[Slot], without: Collection[str]) -> str | None:
        """Return a server to start, if a node with workers has none.

        without: nodes that get no server, since their link is slow.
        """
        if not self._away or self._fleet.now < self._not_before:
            return None
        taken = {*(self._fleet.node(slot.server) for slot in slots), *without}
        coming = {*self._placement.nodes.values(), *self._placement.leaving}
        if {*self._fleet.worker_nodes()} - taken - coming:
            return self._away.pop(0)
        return None

    def not_up(self, server: str) -> None:
        """Note that the process of a server did not come up."""
        self._away.append(server)
        self._not_before = self._fleet.now + PAUSE_SECONDS
