"""A journal as a trace that ui.perfetto.dev and chrome://tracing open: Trace Event JSON.

Each journal is a process, and each of its workers a thread. Each task is a slice, named after its
fate. Times are the seconds of the run, converted to microseconds as the format requires.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, TextIO, TypeAlias

from paceline.core.journal import Entry, Header, Journal, read_entries, read_header
from paceline.core.protocol import (
    Cancel,
    Finished,
    Joined,
    Left,
    Start,
    Stop,
    Task,
    TaskId,
    WorkerId,
)
from paceline.report.atomic import whole
from paceline.report.metrics import Meter
from paceline.report.workers import Span, in_order

Source: TypeAlias = Journal | Path | str
Event: TypeAlias = dict[str, Any]
MakeMeter: TypeAlias = Callable[[Header], Meter]

_STEPS = 0  # the thread of steps; workers come after it
# Names of colors that chrome://tracing has; Perfetto picks its own.
_COLORS = {
    "used": "good",
    "cancelled": "grey",
    "discarded": "bad",
    "lost": "terrible",
    "unfinished": "yellow",
}


def write(
    journals: Source | Sequence[Source], path: Path | str, meter: MakeMeter = Meter.begin
) -> int:
    """Write a trace of one or several journals; return the number of its events.

    Journals are read once and never held in memory. A path that ends with .gz is compressed.

    meter: makes the meter of a journal; nodes of a decentralized run need one of their own.
    """
    several = [journals] if isinstance(journals, Journal | Path | str) else list(journals)
    compress, count = Path(path).suffix == ".gz", 0
    with whole(path) as partial, _open(partial, compress) as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        for count, event in enumerate(_all(several, meter), 1):
            file.write("\n" if count == 1 else ",\n")
            file.write(json.dumps(event, separators=(",", ":"), allow_nan=False))
        file.write("\n]}\n")
    return count


def events(
    header: Header,
    entries: Iterable[Entry],
    process: int = 1,
    meter: MakeMeter = Meter.begin,
) -> Iterator[Event]:
    """Yield the events of one journal, in the order in which they are known."""
    track = _Track(header, process, meter(header))
    yield from track.begin()
    for entry in entries:
        yield from track.observe(entry)
    yield from track.end()


def _all(journals: Sequence[Source], meter: MakeMeter) -> Iterator[Event]:
    for process, source in enumerate(journals, 1):
        if isinstance(source, Journal):
            yield from events(source.header, source, process, meter)
        else:
            yield from events(read_header(source), read_entries(source), process, meter)


def _open(path: Path, compress: bool) -> TextIO:
    if compress:
        return gzip.open(path, "wt", encoding="utf-8")
    return open(path, "w", encoding="utf-8")


@dataclass
class _Track:
    """Turns the entries of a journal into events."""

    header: Header
    process: int
    meter: Meter
    _spans: list[Span] = field(default_factory=list)
    _threads: dict[tuple[WorkerId, int], int] = field(default_factory=dict)
    # Slices of a thread must not overlap, so each concurrent task of a worker has its own lane.
    _lanes: dict[TaskId, tuple[WorkerId, int]] = field(default_factory=dict)  # until drawn
    _taken: dict[WorkerId, dict[int, TaskId]] = field(default_factory=dict)  # until over
    _stepped: float = 0.0

    def begin(self) -> Iterator[Event]:
        self.meter.listener = self._spans.append
        self._stepped = self.meter.began
        for span in self.meter.unsettled():  # tasks of the resumed run
            self._take(span.task)
            if span.samples:
                self._free(span.task.id)
        name = self._name()
        yield self._about("process_name", _STEPS, name=name)
        yield self._about("process_sort_index", _STEPS, sort_index=self.process)
        yield self._about("thread_name", _STEPS, name="steps")
        yield self._about("thread_sort_index", _STEPS, sort_index=_STEPS)

    def observe(self, entry: Entry) -> Iterator[Event]:
        now, rows = entry.now, len(self.meter.columns["step"])
        match entry.event:
            case Finished(id):
                self._free(id)
            case Joined(worker):
                yield self._instant("joined", worker, now)
            case Left(worker):
                for id in list(self._taken.get(worker, {}).values()):
                    self._free(id)
                yield self._instant("lost", worker, now)
        for command in entry.commands:  # in order: a cancelled task frees its lane for the next
            match command:
                case Cancel(id):
                    self._free(id)
                case Start(task):
                    self._take(task)
        self.meter.observe(entry)
        for span in self._spans:
            yield from self._slice(span)
        self._spans.clear()
        for row in range(rows, len(self.meter.columns["step"])):
            yield from self._step(row)
        for command in entry.commands:
            if isinstance(command, Stop):
                named = {"ph": "i", "name": f"ended: {command.reason}", "s": "p"}
                yield {**named, **self._at(_STEPS, now)}

    def end(self) -> Iterator[Event]:
        for span in self.meter.unsettled():
            yield from self._slice(span)
        order = sorted(self._threads, key=lambda place: (in_order(place[0]), place[1]))
        for index, (worker, lane) in enumerate(order, 1):
            thread = self._threads[worker, lane]
            name = worker if not lane else f"{worker} ({lane + 1})"
            yield self._about("thread_name", thread, name=name)
            yield self._about("thread_sort_index", thread, sort_index=index)

    # --- the kinds of events ----------------------------------------------------------------------

    def _slice(self, span: Span) -> Iterator[Event]:
        task = span.task
        place = self._lanes.pop(task.id, None)
        if place is None:  # steps may use a result again; it is drawn once
            return
        args = {"task": task.id, "version": task.version, "samples": span.samples or task.computed}
        if span.fate == "used":
            args |= {"step": span.step, "staleness": span.staleness}
        if task.attempt > 1:
            args["attempt"] = task.attempt
        yield {
            "ph": "X",
            "name": span.fate,
            "cat": "task",
            **self._at(self._thread(*place), task.since),
            "dur": _microseconds(span.end) - _microseconds(task.since),
            "cname": _COLORS.get(span.fate, "grey"),
            "args": args,
        }

    def _step(self, row: int) -> Iterator[Event]:
        columns = self.meter.columns
        step, now, loss = (columns[name][row] for name in ("step", "seconds", "loss"))
        results, staleness = int(columns["results"][row]), columns["staleness"][row]
        args = {"results": results, "staleness": staleness, "samples": int(columns["samples"][row])}
        if isfinite(loss):
            args["loss"] = loss
        yield {
            "ph": "X",
            "name": f"step {step:.0f}",
            "cat": "step",
            **self._at(_STEPS, self._stepped),
            "dur": _microseconds(now) - _microseconds(self._stepped),
            "args": args,
        }
        self._stepped = now
        counts = {"results": results, "waiting": self.meter.waiting, "staleness": staleness}
        present = sum(tally.present for tally in self.meter.workers.values())
        for name, value in {**counts, "workers": present, "loss": args.get("loss")}.items():
            if value is not None:
                yield {"ph": "C", "name": name, **self._at(_STEPS, now), "args": {name: value}}

    def _instant(self, name: str, worker: WorkerId, now: float) -> Event:
        peer = self.header.peer
        if peer is not None and worker != peer.name:  # a neighbor
            return {"ph": "i", "name": f"{worker} {name}", "s": "t", **self._at(_STEPS, now)}
        return {"ph": "i", "name": name, "s": "t", **self._at(self._thread(worker, 0), now)}

    def _about(self, kind: str, thread: int, **args: str | int) -> Event:
        return {"ph": "M", "name": kind, **self._at(thread, 0.0), "args": args}

    def _at(self, thread: int, now: float) -> Event:
        return {"pid": self.process, "tid": thread, "ts": _microseconds(now)}

    # --- threads and lanes ------------------------------------------------------------------------

    def _name(self) -> str:
        policy = self.header.written or "run"
        return policy if self.header.peer is None else f"{self.header.peer.name}: {policy}"

    def _thread(self, worker: WorkerId, lane: int) -> int:
        return self._threads.setdefault((worker, lane), len(self._threads) + 1)

    def _take(self, task: Task) -> None:
        taken = self._taken.setdefault(task.worker, {})
        lane = next(lane for lane in range(len(taken) + 1) if lane not in taken)
        taken[lane] = task.id
        self._lanes[task.id] = task.worker, lane

    def _free(self, id: TaskId) -> None:
        if (place := self._lanes.get(id)) is not None:
            worker, lane = place
            taken = self._taken[worker]
            if taken.get(lane) == id:
                del taken[lane]


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)  # to nanoseconds, the resolution of the viewers
