"""Pairs of nodes that cannot fetch objects from each other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import combinations
from math import inf

from paceline.engines.ray.servers.events import Probe, Way
from paceline.engines.ray.servers.fleet import Fleet
from paceline.engines.ray.servers.links import PROBE_BYTES
from paceline.engines.ray.servers.placement import Pair, Placement


class Routes:
    """Probes routes, and failed ones once more, since a node may have been busy.

    do: makes a call.
    pause: seconds from one probe of all routes to the next.
    """

    def __init__(
        self, placement: Placement, fleet: Fleet, do: Callable[[Probe], None], pause: float
    ) -> None:
        self._placement, self._fleet, self._do, self._pause = placement, fleet, do, pause
        self._checked = -inf  # when all routes were probed last

    def check(self) -> None:
        """Probe all routes between worker nodes, unless that was done a moment ago."""
        now, nodes = self._fleet.now, self._fleet.worker_nodes()
        if len(nodes) < 2 or now < self._checked + self._pause or self._fleet.probing:
            return
        self._checked = now
        self._do(Probe("routes", list(combinations(nodes, 2)), PROBE_BYTES[0]))

    def confirm(self, found: Mapping[Way, float]) -> None:
        """Probe the failed routes again."""
        self._placement.cut -= {frozenset(way) for way, seconds in found.items() if seconds < inf}
        if failed := [way for way, seconds in found.items() if seconds == inf]:
            self._do(Probe("failed routes", failed, PROBE_BYTES[0]))

    def named(self, cut: Collection[Pair]) -> str:
        """Name pairs of nodes for a message."""
        pairs = [" and ".join(sorted(map(self._fleet.address, pair))) for pair in cut]
        return f"nodes that cannot fetch objects from each other: {'; '.join(sorted(pairs))}"
