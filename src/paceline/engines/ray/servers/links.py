"""Nodes with slow links: how they are found, left out, and taken back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from math import inf
from statistics import median, median_low

import numpy as np
from numpy.typing import NDArray

from paceline.engines.ray.servers.events import Probe, Way
from paceline.engines.ray.servers.fleet import Fleet
from paceline.engines.ray.servers.slices import Kept, LeftOut, Result, Slot, Step

# The link of a node is slow if every transfer from it and to it takes three times as long as the
# median transfer between other nodes, and a quarter of a second longer. If shares adapt, results
# come at different times, so that transfers to a slow node may have its link for themselves. Then
# it is enough if most transfers to several other nodes are slow, or most of those from several.
SLOW_FACTOR, SLOW_SECONDS = 3.0, 0.25
SUSPECT_FACTOR = 2.0  # of short transfers before the first step, in which calls take a part too
SLOW_STEPS = 2
"""Steps in a row with a slow link, after which a server is left out. One step is enough if every
transfer took longer by SEVERE_SECONDS, which is about what it costs to cut the model anew."""
SEVERE_SECONDS = 2.0
TRIAL_STEPS = 2
"""Steps until a server that was left out before the first one may return: first tasks load code."""
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
    one_way: bool = False,
) -> dict[str, bool]:
    """Return whether the link of each server's node is slow, for nodes that can be compared.

    sources: the node of each result.
    arrivals: for each server its node, and the seconds until each result was there.
    longer: seconds by which a slow transfer takes longer than the median.
    one_way: whether it is enough that most transfers in one direction are slow.

    One sort of all transfers; each node's medians are then found by rank, its own and that of the
    others.
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
    out, into = _ranks_by_node(starts, len(numbers)), _ranks_by_node(ends, len(numbers))
    slow = {}
    for node in dict.fromkeys(node for node, _ in arrivals):
        ways = out[numbers[node]], into[numbers[node]]
        own = np.sort(np.concatenate(ways))
        others = times.size - own.size
        if own.size and others:
            shifts = own - np.arange(own.size)  # transfers of others before each
            middle = np.array([(others - 1) // 2, others // 2])
            usual = float(times[middle + np.searchsorted(shifts, middle, side="right")].mean())
            bound = max(SLOW_FACTOR * usual, usual + longer)
            ends_of = (
                np.unique(far[ranks]).size for far, ranks in zip((ends, starts), ways, strict=True)
            )
            most = [
                ranks[(ranks.size - 1) // 2]
                for ranks, count in zip(ways, ends_of, strict=True)
                if one_way and count > 1
            ]
            slow[node] = any(bool(times[rank] > bound) for rank in (own[0], *most))
    return slow


def _ranks_by_node(nodes: NDArray[np.int64], count: int) -> list[NDArray[np.int64]]:
    """Return for each node the ranks of its transfers, in ascending order."""
    by_node = np.argsort(nodes, kind="stable")
    return np.split(by_node, np.searchsorted(nodes[by_node], np.arange(1, count)))


def _probed_bytes(size: int) -> int:
    return min(max(size, PROBE_BYTES[0]), PROBE_BYTES[1])


def _length(slots: Collection[Slot]) -> int:
    return max(sum(slot.span[1] - slot.span[0] for slot in slots), 1)


def _pays(
    slow: str,
    step: Step,
    slots: Collection[Slot],
    node: Callable[[Slot], str],
    workers: Collection[str],
    adapts: bool,
) -> bool:
    """Return whether steps are faster if the servers behind a slow link are left out.

    They are not if a step waits for all workers, and so for that node's. Without a server there,
    the link carries a whole result, and after it a whole model: L seconds each. With a part f of
    the model there, among n nodes, it carries the larger of 1 - f and (n - 1) f of both, since it
    sends and receives at the same time. Copies of the optimizer's state take up what that saves.

    If shares adapt, the worker there computes less for all that time, and the others more: a step
    of C seconds of computing takes C + 2 L / n in all, and 2 L at least. With the server there all
    workers wait for its slice, and shares cannot help: C + 2 (1 - f) L.
    """
    sources = [result.node for result in step.results]
    copies = any(isinstance(state, Kept) for slot in slots for state in slot.states.values())
    if copies or slow not in sources or not {*workers} <= {*sources}:
        return True
    part = _length([slot for slot in slots if node(slot) == slow]) / _length(slots)
    if max(1 - part, (len({*sources}) - 1) * part) > STAYS:
        return True
    if not adapts:
        return False
    return _saves(part, _sent(slow, step, slots, node) / (1 - part), step)


def _saves(part: float, whole: float, step: Step) -> bool:
    """Return whether a step is faster without a part of the model behind a slow link, where shares
    adapt: see `_pays`.

    whole: seconds that a whole result needs on that link.
    """
    return 2 * part * whole < median(result.seconds for result in step.results)


def _sent(source: str, step: Step, slots: Collection[Slot], node: Callable[[Slot], str]) -> float:
    """Return the seconds until a result of a node had arrived on all others; 0 if not known."""
    mine = [index for index, result in enumerate(step.results) if result.node == source]
    away = [step.done[slot.index] for slot in slots if node(slot) != source]
    known = [each for each in away if len(each) == len(step.results)]
    return max((each[index] for each in known for index in mine), default=0.0)


class Links:
    """Counts steps with slow links, and decides which server is left out or taken back.

    adapts: whether a worker behind a slow link gets fewer samples.
    """

    def __init__(self, adapts: bool = False) -> None:
        self._adapts = adapts
        self._sent: dict[str, float] = {}  # by node: seconds of its result in the last step
        self._suspects: set[str] = set()  # nodes whose ways took longer before the first step
        self._slow_before: set[str] = set()  # those whose links are slow for a whole result
        self.left_out: dict[str, LeftOut] = {}
        self._unneeded: list[str] = []  # trials that made no step faster

    def suspect(self, found: Mapping[Way, float], size: int) -> Probe | None:
        """Note the nodes whose ways took longer than those of others, in a probe of all ways.

        Short transfers prove little. But for these nodes a single slow step is enough. If shares
        adapt, return a probe that shows whether these links are slow.

        size: bytes of a result.
        """
        nodes = sorted({*chain(*found)})
        for node in nodes:
            own = [seconds for way, seconds in found.items() if node in way]
            others = [seconds for way, seconds in found.items() if node not in way]
            if others and median_low(own) > SUSPECT_FACTOR * median(others):
                self._suspects.add(node)
        usual = [node for node in nodes if node not in self._suspects]
        if not self._adapts or not self._suspects or len(usual) < 2:
            return None
        end = usual[0]
        ways = [way for node in sorted(self._suspects) for way in ((end, node), (node, end))]
        return Probe("suspects", [*ways, (usual[1], end)], _probed_bytes(size))

    def examined(self, call: Probe, found: Mapping[Way, float]) -> None:
        """Note the suspects for which both ways took so long that their links count as slow."""
        *ways, other = call.ways
        usual = found.get(other, inf)
        bound = max(SLOW_FACTOR * usual, usual + SLOW_SECONDS)
        for node in self._suspects:
            if min(found.get(way, 0.0) for way in ways if node in way) > bound:
                self._slow_before.add(node)

    def slow_before(self, slots: Collection[Slot], node: Callable[[Slot], str]) -> Slot | None:
        """Return the first server behind a link that was slow before the first step, if there are
        others: a step in which shares adapt is mostly faster without it."""
        if len({slot.server for slot in slots}) == 1:
            return None
        return next((slot for slot in slots if node(slot) in self._slow_before), None)

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
        self._sent = {source: _sent(source, step, slots, node) for source in {*sources}}
        self._reconsider(step, 1 + len(by_server))
        slow = slow_nodes(sources, arrivals, one_way=self._adapts)
        slow = {
            n: is_slow and _pays(n, step, slots, node, workers, self._adapts)
            for n, is_slow in slow.items()
        }
        severe = {}
        if any(slow.values()):
            severe = slow_nodes(sources, arrivals, SEVERE_SECONDS, one_way=self._adapts)
        for slot in slots:
            if (is_slow := slow.get(node(slot))) is not None:
                at_once = severe.get(node(slot)) or node(slot) in self._suspects
                count = SLOW_STEPS if at_once else 1
                slot.slow = slot.slow + count if is_slow else 0
        self._suspects.clear()
        overtaken = (s.server for s in slots if slow.get(node(s)) and severe.get(node(s)))
        return next(overtaken, None)

    def _reconsider(self, step: Step, servers: int) -> None:
        """Decide whether a server stays left out that was so before the first step.

        servers: with it.
        """
        for server, out in self.left_out.items():
            if out.trial and (whole := self._sent.get(out.node)):
                out.trial -= 1
                if not out.trial and not _saves(1 / servers, whole, step):
                    self._unneeded.append(server)

    def slow(self, slots: Collection[Slot]) -> Slot | None:
        """Return the first server whose link has been slow for too long, if there are others."""
        if len({slot.server for slot in slots}) == 1:
            return None
        return next((slot for slot in slots if slot.slow >= SLOW_STEPS), None)

    def sending(self, node: str) -> float:
        """Return the seconds of a node's result in the last step; `inf` if they are not known."""
        return self._sent.get(node) or inf

    def leave_out(self, server: str, node: str, now: float, since: int, sending: float) -> None:
        """Note that a server is left out since a version; -1: before the first step, on trial.

        sending: see `LeftOut`.
        """
        known = self.left_out.get(server)
        interval = min(2 * known.interval, LONGEST_INTERVAL) if known else PROBE_SECONDS
        out = LeftOut(node, since, now + interval, interval, sending)
        out.trial = TRIAL_STEPS if since < 0 else 0
        self.left_out[server] = out

    def is_computed_sooner(self, result: Result) -> bool:
        """Return whether another worker computes a result in less time than its way takes.

        The result left its node before the server there was left out.
        """
        return any(
            result.node == out.node
            and result.model.number <= out.since
            and result.seconds < out.sending
            for out in self.left_out.values()
        )

    def without_server(self, fleet: Fleet) -> list[str]:
        """Return the nodes whose servers are left out now."""
        return [out.node for server, out in self.left_out.items() if not fleet.has(server)]

    def forget(self, nodes: Collection[str], fleet: Fleet) -> list[str]:
        """Forget the servers that are left out on nodes that will be taken away; return them."""
        out = [s for s, out in self.left_out.items() if out.node in nodes and not fleet.has(s)]
        for server in out:
            del self.left_out[server]
        return out

    def take_back(self, fleet: Fleet) -> str | None:
        """Return a left-out server that is to get a slice again, and begin to count anew."""
        while self._unneeded:
            server = self._unneeded.pop(0)
            if self.left_out.pop(server, None) is not None and not fleet.has(server):
                return server
        for server, out in self.left_out.items():
            if out.good >= GOOD_PROBES and not fleet.has(server):
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
            probed = _probed_bytes(size)
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
