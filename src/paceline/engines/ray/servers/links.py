"""Nodes with slow links: how they are found, left out, and taken back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf

import numpy as np

from paceline.engines.ray.servers.events import Probe, Way
from paceline.engines.ray.servers.fleet import Fleet
from paceline.engines.ray.servers.slices import Kept, LeftOut, Result, Slot, Step

# The link of a node is slow if every transfer from it and to it takes three times as long as the
# median transfer between other nodes, and a quarter of a second longer.
SLOW_FACTOR, SLOW_SECONDS = 3.0, 0.25
SLOW_STEPS = 2
"""Steps in a row with a slow link, after which a server is left out. One step is enough if every
transfer took longer by SEVERE_SECONDS, which is about what it costs to cut the model anew."""
SEVERE_SECONDS = 2.0
STAYS = 0.8
"""A server stays behind a slow link if this much of the link's bytes, or less, are left with it."""
# A left-out server returns after GOOD_PROBES good probes of its node's link in a row. A probe is
# good if it exceeds the usual time by less than half of what counts as slow. Each time that the
# server is left out again, the interval between probes doubles.
GOOD_PROBES, PROBE_SECONDS, LONGEST_INTERVAL = 3, 30.0, 3600.0
PROBE_BYTES = 2**17, 2**23
"""The smallest probe, more than Ray sends inside a call, and the largest."""


def slow_nodes(
    sources: Sequence[str],
    arrivals: Sequence[tuple[str, Sequence[float]]],
    longer: float = SLOW_SECONDS,
) -> dict[str, bool]:
    """Return whether the link of each server's node is slow, for nodes that can be compared.

    sources: the node of each result.
    arrivals: for each server its node, and the seconds until each result was there.
    longer: seconds by which a slow transfer takes longer than the median.

    One sort of all transfers; each node's median is then found by rank among those of the others.
    """
    if not sources or not arrivals:
        return {}
    nodes = dict.fromkeys([*sources, *(node for node, _ in arrivals)])
    numbers = {node: i for i, node in enumerate(nodes)}
    start = np.array([numbers[node] for node in sources])
    end = np.array([numbers[node] for node, _ in arrivals])
    seconds = np.array([times for _, times in arrivals], np.float64)
    between = end[:, None] != start[None, :]
    times = seconds[between]
    order = np.argsort(times, kind="stable")
    times, ends = times[order], np.broadcast_to(end[:, None], between.shape)[between][order]
    starts = np.broadcast_to(start[None, :], between.shape)[between][order]
    # The ranks of each node's own transfers, in ascending order, node by node.
    both = np.concatenate((starts, ends))
    ranks = np.concatenate((np.arange(times.size),) * 2)
    by_node = np.lexsort((ranks, both))
    bounds = np.searchsorted(both[by_node], np.arange(len(numbers) + 1))
    slow = {}
    for node in dict.fromkeys(node for node, _ in arrivals):
        low, high = bounds[numbers[node]], bounds[numbers[node] + 1]
        own = ranks[by_node[low:high]]
        others = times.size - own.size
        if own.size and others:
            shifts = own - np.arange(own.size)  # transfers of others before each
            middle = np.array([(others - 1) // 2, others // 2])
            usual = float(times[middle + np.searchsorted(shifts, middle, side="right")].mean())
            bound = max(SLOW_FACTOR * usual, usual + longer)
            slow[node] = bool(times[own[0]] > bound)
    return slow


def _length(slots: Collection[Slot]) -> int:
    return max(sum(slot.span[1] - slot.span[0] for slot in slots), 1)


def _pays(
    slow: str,
    sources: Sequence[str],
    slots: Collection[Slot],
    node: Callable[[Slot], str],
    workers: Collection[str],
) -> bool:
    """Return whether steps are faster if the servers behind a slow link are left out.

    They are not if a step waits for all workers, and so for that node's. Without a server there,
    the link carries a whole result, and after it a whole model. With a part f of the model there,
    among n nodes, it carries the larger of 1 - f and (n - 1) f of both, since it sends and receives
    at the same time. Copies of the optimizer's state take up what that saves.
    """
    copies = any(isinstance(state, Kept) for slot in slots for state in slot.states.values())
    if copies or slow not in sources or not {*workers} <= {*sources}:
        return True
    part = _length([slot for slot in slots if node(slot) == slow]) / _length(slots)
    return max(1 - part, (len({*sources}) - 1) * part) > STAYS


class Links:
    """Counts steps with slow links, and decides which server is left out or taken back."""

    def __init__(self) -> None:
        self.left_out: dict[str, LeftOut] = {}

    def watch(
        self,
        step: Step,
        slots: Collection[Slot],
        node: Callable[[Slot], str],
        workers: Collection[str],
    ) -> str | None:
        """Count for each server the steps in a row in which its node's link was slow.

        workers: the nodes that have any.
        Return a server whose link made this step seconds longer, if there is one.
        A result has arrived at a server with its last slice. The times of a server with fewer
        values are scaled to those of the one with most.
        """
        sources = [result.node for result in step.results]
        by_server: dict[str, list[Slot]] = {}
        for slot in slots:
            by_server.setdefault(slot.server, []).append(slot)
        longest = max(_length(mine) for mine in by_server.values())
        arrivals = []
        for mine in by_server.values():
            seconds = [step.done[slot.index] for slot in mine]
            if all(len(each) == len(sources) for each in seconds):
                scale = longest / _length(mine)
                last = [scale * max(each) for each in zip(*seconds, strict=True)]
                arrivals.append((node(mine[0]), last))
        slow = slow_nodes(sources, arrivals)
        slow = {
            n: is_slow and _pays(n, sources, slots, node, workers) for n, is_slow in slow.items()
        }
        severe = slow_nodes(sources, arrivals, SEVERE_SECONDS) if any(slow.values()) else {}
        for slot in slots:
            if (is_slow := slow.get(node(slot))) is not None:
                count = SLOW_STEPS if severe.get(node(slot)) else 1
                slot.slow = slot.slow + count if is_slow else 0
        at_once = (s.server for s in slots if slow.get(node(s)) and severe.get(node(s)))
        return next(at_once, None)

    def slow(self, slots: Collection[Slot]) -> Slot | None:
        """Return the first server whose link has been slow for too long."""
        return next((slot for slot in slots if slot.slow >= SLOW_STEPS), None)

    def leave_out(self, server: str, node: str, now: float, since: int) -> None:
        known = self.left_out.get(server)
        interval = min(2 * known.interval, LONGEST_INTERVAL) if known else PROBE_SECONDS
        self.left_out[server] = LeftOut(node, since, now + interval, interval)

    def is_on_its_way(self, result: Result) -> bool:
        """Return whether a result left a node before the server there was left out."""
        outs = self.left_out.values()
        return any(result.node == o.node and result.model.number <= o.since for o in outs)

    def without_server(self, fleet: Fleet) -> list[str]:
        """Return the nodes whose servers are left out now."""
        return [out.node for server, out in self.left_out.items() if not fleet.has(server)]

    def forget(self, nodes: Collection[str], fleet: Fleet) -> list[str]:
        """Forget the servers that are left out on nodes that will be taken away; return them."""
        out = [s for s, out in self.left_out.items() if out.node in nodes and not fleet.has(s)]
        for server in out:
            del self.left_out[server]
        return out

    def take_back(self) -> str | None:
        """Return a left-out server whose link is good again, and begin to count anew."""
        for server, out in self.left_out.items():
            if out.good >= GOOD_PROBES:
                out.good = 0
                return server
        return None

    def probe(self, fleet: Fleet, size: int) -> Probe | None:
        """Return a probe of a left-out server's node against another node, if one is due.

        size: bytes of a slice.
        """
        for server, out in self.left_out.items():
            others = [node for node in fleet.worker_nodes() if node != out.node]
            if fleet.has(server) or fleet.now < out.probe_at or len(others) < 2:
                continue
            out.probe_at = fleet.now + out.interval
            low, high = PROBE_BYTES
            probed = min(max(size, low), high)
            seconds = SLOW_SECONDS * min(probed / max(size, 1), 1.0)  # for fewer bytes, less
            ways = [(out.node, others[0]), (others[1], others[0])]
            return Probe("left out", ways, probed, out, seconds)
        return None

    def probed(self, call: Probe, found: Mapping[Way, float]) -> None:
        """Count good probes in a row."""
        assert call.out is not None
        mine, usual = (found.get(way, inf) for way in call.ways)
        limit = max((1 + SLOW_FACTOR) / 2 * usual, usual + call.seconds / 2)
        call.out.good = call.out.good + 1 if mine <= limit < inf else 0
