"""Collects the content of a report in one pass over the journals of a run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from heapq import merge
from itertools import repeat
from typing import Protocol

import numpy as np

from paceline.core.journal import Entry, Header
from paceline.core.protocol import MAIN, Joined, Left, Stop, WorkerId
from paceline.report.html.slow import STALE, Waits
from paceline.report.html.timeline import Timeline
from paceline.report.metrics import Meter
from paceline.report.workers import Span, Tally, in_order

UNFINISHED = "not yet, or the journal is cut off"
_AT_ONCE = 8192  # tasks that are counted together, which is faster than one by one


class Meters(Protocol):
    """The metrics of a run: those of each coordinator, and of all together."""

    @property
    def nodes(self) -> Mapping[WorkerId, Meter]:
        """The meter of each coordinator."""

    @property
    def total(self) -> Meter:
        """The metrics of all coordinators together."""

    @property
    def messages(self) -> int:
        """The messages between nodes; 0 with a central coordinator."""

    def observer(self, node: WorkerId) -> Callable[[Entry], object]:
        """Return the function that counts the entries of a coordinator."""

    def lines(self) -> str:
        """Return lines for the summary; "": none."""


class OneMeter:
    """The meters of a single journal."""

    messages = 0

    def __init__(self, node: WorkerId, meter: Meter) -> None:
        self.nodes, self.total = {node: meter}, meter

    def observer(self, node: WorkerId) -> Callable[[Entry], object]:
        return self.total.observe

    def lines(self) -> str:
        return ""


class Record:
    """The data of a report. It counts entries and tasks without keeping them.

    metrics: counts the entries; several journals need the meters of a decentralized run.
    """

    def __init__(self, headers: Mapping[WorkerId, Header], metrics: Meters | None = None) -> None:
        self.headers = dict(headers)
        self.header = next(iter(self.headers.values()))
        self.reason = UNFINISHED
        if metrics is None:
            (node,) = self.headers
            metrics = OneMeter(node, Meter.begin(self.header))
        self.metrics = metrics
        self.meters, self.meter = metrics.nodes, metrics.total
        self.timeline = Timeline(self.meter.began)
        self.waits = Waits()
        self.steps_used: dict[WorkerId, int] = {}  # the number of steps that used each worker
        self.stale = 0  # results of an earlier model that were used
        self._base = {node: meter.version for node, meter in self.meters.items()}
        self._rows: dict[WorkerId, int] = {}
        self._spans: dict[WorkerId, list[Span]] = {node: [] for node in self.meters}
        for node, meter in self.meters.items():
            meter.listener = self._spans[node].append
            for worker, tally in meter.workers.items():  # present in a resumed run
                if tally.present:
                    self.timeline.join(worker, meter.began)

    @property
    def is_decentralized(self) -> bool:
        """Whether each node has a coordinator of its own."""
        return self.header.peer is not None

    @property
    def is_asynchronous(self) -> bool:
        """Whether workers continue during steps, so that no step waits for a worker."""
        return self.is_decentralized or self.stale > STALE * self.meter.used

    @property
    def is_refilling(self) -> bool:
        """Whether workers that finish early get another task until the step is taken."""
        return not self.is_asynchronous and self.waits.is_refilling(self.meter.waiting)

    @property
    def end(self) -> float:
        """The seconds at which the last entry was written."""
        return max(meter.now for meter in self.meters.values())

    @property
    def workers(self) -> dict[WorkerId, Tally]:
        """The metrics of each worker, in the order of their names."""
        if not self.is_decentralized:
            found = self.meter.workers
        else:  # every node is its own worker
            found = {node: meter.workers.get(node, Tally()) for node, meter in self.meters.items()}
        return dict(sorted(found.items(), key=lambda item: in_order(item[0])))

    def row(self, worker: WorkerId) -> int:
        """Return the row of a worker in the counted arrays."""
        return self._rows.setdefault(worker, len(self._rows))

    def observe(self, node: WorkerId, entries: Iterable[Entry]) -> None:
        """Count the entries of one node."""
        observe, spans = self.metrics.observer(node), self._spans[node]
        for entry in entries:
            observe(entry)
            now, event, commands = entry
            if isinstance(event, Joined):
                self.timeline.join(event.worker, now)
            elif isinstance(event, Left):
                self.timeline.leave(event.worker, now)
            if commands and isinstance(commands[-1], Stop):
                self.reason = commands[-1].reason
            if len(spans) >= _AT_ONCE:
                self._count(node)

    def close(self) -> None:
        """Count the remaining tasks, and those whose fate is not known."""
        for node, meter in self.meters.items():
            self._count(node)
            self._spans[node].extend(meter.unsettled())
            self._count(node)

    def _count(self, node: WorkerId) -> None:
        spans = self._spans[node]
        if not spans:
            return
        tasks, ends, fates, _, delays, taken = zip(*spans, strict=True)
        workers = [task.worker for task in tasks]
        for worker in dict.fromkeys(workers):
            self.row(worker)
        rows = np.array([*map(self._rows.__getitem__, workers)])
        since = np.array([task.since for task in tasks], dtype=float)
        end = np.array(ends, dtype=float)
        steps = np.array(taken)
        used = steps > 0
        self.timeline.add(rows, since, end, used)
        self.stale += len(delays) - delays.count(0)
        if not self.is_decentralized:
            self.waits.used(rows[used], end[used], steps[used])
            given_up = np.array([fate == "cancelled" for fate in fates])
            self.waits.cancelled(rows[given_up], (end - since)[given_up])
            self._count_steps(node, rows[used], steps[used])
        spans.clear()

    def _count_steps(self, node: WorkerId, rows: np.ndarray, steps: np.ndarray) -> None:
        """Count the steps that used each worker, once per step for any number of results."""
        if not len(rows):
            return
        first = int(steps[0])
        pairs = np.unique((steps - first) * len(self._rows) + rows)
        steps, rows = np.divmod(pairs, len(self._rows))
        place = first - 1 - self._base[node]
        last = place + int(steps[-1]) + 1
        seconds = np.array(self.meters[node].columns["seconds"][place:last])
        self.timeline.chosen.count(rows, seconds[steps])
        names = list(self._rows)
        for row, times in zip(*np.unique(rows, return_counts=True), strict=True):
            name = names[row]
            self.steps_used[name] = self.steps_used.get(name, 0) + int(times)


def collected(
    headers: Mapping[WorkerId, Header],
    entries: Mapping[WorkerId, Iterable[Entry]],
    reason: str | None = None,
    metrics: Meters | None = None,
) -> Record:
    """Read the journals of a run, one per coordinator, entry by entry.

    reason: why the run ended, if the caller knows it.
    """
    record = Record(headers, metrics)
    with _no_cycles():
        if len(headers) == 1:
            (node,) = headers
            record.observe(node, entries[node])
        else:
            for _, node, entry in merge(
                *(_timed(node, entries[node]) for node in headers), key=lambda each: each[0]
            ):
                record.observe(node, (entry,))
        record.close()
    if reason is not None:
        record.reason = reason
    return record


@contextmanager
def _no_cycles() -> Iterator[None]:
    """Pause the search for cycles: entries have none, and it took a twentieth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _timed(node: WorkerId, entries: Iterable[Entry]) -> Iterator[tuple[float, WorkerId, Entry]]:
    for entry, name in zip(entries, repeat(node), strict=False):
        yield entry.now, name, entry


def named(headers: Mapping[str, Header]) -> dict[WorkerId, str]:
    """Return the journal name of each node; refuse journals of different runs."""
    if len(headers) == 1:
        (name, header), *_ = headers.items()
        return {MAIN if header.peer is None else header.peer.name: name}
    found: dict[WorkerId, str] = {}
    (first, common), *_ = headers.items()
    for name, header in headers.items():
        if header.peer is None:
            raise ValueError(
                f"{name} is of a run with a central coordinator, which has one journal; several "
                "are the nodes of one run under Gossip: report one journal at a time, or use "
                "`paceline compare` for several runs"
            )
        if header.peer.name in found:
            raise ValueError(
                f"{found[header.peer.name]} and {name} are both of node {header.peer.name}; give "
                "one journal of each node of one run"
            )
        if told := _differing(common, header):
            raise ValueError(
                f"{first} and {name} are not of one run: {told}; give the journals of one run, "
                "or use `paceline compare` for several"
            )
        found[header.peer.name] = name
    return found


def missing(headers: Mapping[WorkerId, Header]) -> list[WorkerId]:
    """Return the nodes that others name as neighbors and whose journal is missing."""
    known = {header.peer.name for header in headers.values() if header.peer is not None}
    neighbors = {
        node for header in headers.values() if header.peer for node in header.peer.neighbors
    }
    return sorted(neighbors - known, key=in_order)


def _differing(mine: Header, theirs: Header) -> str:
    """Return the differences of two journals in settings that all nodes of a run share."""
    pairs = {
        "batch_size": (mine.batch, theirs.batch),
        "policy": (mine.policy, theirs.policy),
        "size of a model": (mine.message_bytes, theirs.message_bytes),
        "tiles": (mine.tiles, theirs.tiles),
    }
    about, other = mine.about or {}, theirs.about or {}
    pairs |= {name: (about.get(name), other.get(name)) for name in {**about, **other}}
    return "; ".join(f"{name} is {a!r} and {b!r}" for name, (a, b) in pairs.items() if a != b)
