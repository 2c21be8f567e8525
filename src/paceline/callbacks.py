"""Looking on while a run goes: what is known after each step, and who is told."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import nan
from typing import Any, TextIO

from paceline.core.journal import Header
from paceline.core.protocol import WorkerId
from paceline.report.metrics import Meter
from paceline.report.text import throughput
from paceline.report.workers import Tally, in_order

FAILED = "failed"
"""The reason that callbacks are told of a run that an error ended."""


@dataclass(frozen=True)
class Progress:
    """A run after a step."""

    step: int
    seconds: float
    loss: float  # the mean over the samples of this step, before it was taken
    samples: int
    epoch: float  # nan where there is no such thing
    waiting: float  # the share of the workers' time in which they had nothing to do
    throughput: float  # samples used per second
    workers: int
    results: int  # that this step was made of
    delay: float  # the mean of how many versions they were behind
    started: int  # tasks so far, and of these
    wasted: int  # those whose result was not used and never will be
    down_bytes: int
    up_bytes: int
    dollars: float  # 0.0 without prices
    _model: Callable[[], Any]
    _stop: Callable[[str], None]

    def model(self) -> Any:
        """Return a copy of the model as it is now, for evaluation."""
        return self._model()

    def stop(self, reason: str) -> None:
        """End the run after this step."""
        self._stop(reason)


@dataclass(frozen=True)
class Live:
    """A run while it goes on: what it is of, and its figures, which may be read at any time."""

    header: Header  # policy, batch, seed, versions, forecast
    meters: Mapping[WorkerId, Meter]  # of each node that decides, "main" if there is but one
    total: Meter  # of all of them
    now: Callable[[], float]  # the seconds of the run, also between two events

    def workers(self) -> dict[WorkerId, Tally]:
        """Return the figures of each worker, in the order of their names' numbers."""
        if len(self.meters) == 1:
            found = dict(self.total.workers)
        else:  # every node is its own worker
            found = {
                node: tally
                for node, meter in self.meters.items()
                if (tally := meter.workers.get(node)) is not None  # it has not joined yet
            }
        return dict(sorted(found.items(), key=lambda item: in_order(item[0])))


class Callback:
    """Told of a run's beginning, steps and end. Override what is of interest."""

    def started(self, live: Live) -> None: ...

    def stepped(self, progress: Progress) -> None: ...

    def ended(self, reason: str) -> None: ...


class ProgressLine(Callback):
    """Keeps one line current on a terminal; elsewhere prints a line now and then."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        self._stream, self._clock = stream or sys.stderr, clock
        self._live = self._stream.isatty()
        self._every = 0.2 if self._live else 10.0
        self._shown = -self._every
        self._last = ""

    def stepped(self, progress: Progress) -> None:
        self._last = (
            f"step {progress.step}  loss {progress.loss:.4f}  waiting {progress.waiting:.0%}  "
            f"{progress.throughput:.0f} samples/s  {progress.workers} workers  "
            f"{progress.seconds:.1f} s"
        )
        if self._clock() - self._shown >= self._every:
            self._show()

    def ended(self, reason: str) -> None:
        if self._last:
            self._show()
        if self._live:
            self._stream.write("\n")
        self._stream.write(f"ended: {reason}\n")
        self._stream.flush()

    def _show(self) -> None:
        self._stream.write(f"\r\033[K{self._last}" if self._live else f"{self._last}\n")
        self._stream.flush()
        self._shown = self._clock()
        self._last = ""


def progress_of(
    meter: Meter,
    examples: int | None,
    workers: int,
    model: Callable[[], Any],
    stop: Callable[[str], None],
) -> Progress:
    """Return what is known after the newest step."""
    columns = meter.columns
    return Progress(
        step=int(columns["step"][-1]),
        seconds=columns["seconds"][-1],
        loss=columns["loss"][-1],
        samples=meter.samples_used,
        epoch=meter.samples_used / examples if examples else nan,
        waiting=meter.waiting,
        throughput=throughput(meter),
        workers=workers,
        results=int(columns["results"][-1]),
        delay=columns["delay"][-1],
        started=meter.started,
        wasted=meter.wasted,
        down_bytes=meter.down_bytes,
        up_bytes=meter.up_bytes,
        dollars=meter.dollars,
        _model=model,
        _stop=stop,
    )
