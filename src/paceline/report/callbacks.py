"""Callbacks that observe a run, and the progress that they receive after each step."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from math import isfinite, nan
from typing import Any, TextIO

from paceline.core.journal import Header
from paceline.core.protocol import Evaluated, LrScaled, WorkerId
from paceline.report.evaluations import Metrics, Mode
from paceline.report.metrics import Meter
from paceline.report.text import throughput
from paceline.report.workers import Tally, in_order

_LOOK = 0.5  # seconds between two looks at a starting engine
_PATIENCE = 2.0  # timeout in seconds to finish the current line when training begins

FAILED = "failed"
"""The reason that callbacks receive if an error ended the run."""


@dataclass(frozen=True)
class Progress:
    """A run after a step."""

    step: int
    seconds: float
    loss: float  # the mean over the samples of this step, before it was taken
    samples: int
    epoch: float  # nan if the learner has no epochs
    waiting: float  # the share of the workers' time in which they had nothing to do
    throughput: float  # samples used per second
    workers: int
    results: int  # that this step used
    staleness: float  # of these results in versions, the mean
    started: int  # tasks so far
    wasted: int  # started tasks whose result was not used and never will be
    down_bytes: int
    up_bytes: int
    dollars: float  # 0.0 without prices
    _model: Callable[[], Any]
    _stop: Callable[[str], None]
    _record: Callable[[Evaluated | LrScaled], None] = lambda event: None

    def model(self) -> Any:
        """Return a copy of the model as it is now, for evaluation."""
        return self._model()

    def stop(self, reason: str) -> None:
        """End the run after this step."""
        self._stop(reason)

    def evaluated(self, metrics: Metrics, step: int | None = None, mode: Mode = "min") -> None:
        """Record metrics of the model in the journal, from which summary and report have them.

        step: the step whose model was evaluated; None: this one.
        mode: whether the smallest or the largest value of the first metric is best.
        """
        plain = {str(name): float(value) for name, value in metrics.items()}
        if not plain:
            raise ValueError("evaluated() was given no metric; give at least one number by name")
        self._record(Evaluated(self.step if step is None else step, plain, mode))

    def scale_lr(self, scale: float, reason: str = "") -> None:
        """From the next step on, multiply the learning rate of the learner's schedule by a scale.

        The journal and the next checkpoint have it. A later call replaces it.
        """
        if not (isfinite(scale) and scale > 0):
            raise ValueError(f"scale={scale}: use a finite number above 0")
        self._record(LrScaled(float(scale), reason))


@dataclass(frozen=True)
class Live:
    """A run in progress: its header and its metrics, which may be read at any time."""

    header: Header  # policy, batch, seed, versions, forecast
    meters: Mapping[WorkerId, Meter]  # one per coordinator, "main" if it is the only one
    total: Meter  # of all coordinators together
    now: Callable[[], float]  # the seconds of the run, also between two events
    starting: Callable[[], str] = lambda: ""  # the event that a starting engine waits for

    def workers(self) -> dict[WorkerId, Tally]:
        """Return the metrics of each worker, in the order of the numbers in their names."""
        if len(self.meters) == 1:
            found = dict(self.total.workers)
        else:  # every node is its own worker
            found = {
                node: tally
                for node, meter in self.meters.items()
                if (tally := meter.workers.get(node)) is not None  # None: it has not joined yet
            }
        return dict(sorted(found.items(), key=lambda item: in_order(item[0])))


@dataclass(frozen=True)
class State:
    """The state of a callback, as a checkpoint has it.

    data: numbers, texts, lists and dictionaries of them.
    tensors: by name, all of torch or all of numpy. They are written later: give copies.
    """

    data: Mapping[str, Any]
    tensors: Mapping[str, Any] = field(default_factory=dict)


class Callback:
    """Receives the beginning, steps and end of a run; override the methods that you need."""

    @property
    def scales_lr(self) -> bool:
        """Whether it may call `progress.scale_lr`, which some runs refuse before they begin."""
        return False

    def started(self, live: Live) -> None: ...

    def stepped(self, progress: Progress) -> None: ...

    def ending(self, progress: Progress) -> None:
        """Called after the last step, before the last checkpoint, unless an error ends the run."""

    def ended(self, reason: str) -> None: ...

    def state(self) -> State | None:
        """Return the state that a checkpoint saves; None if there is none."""
        return None

    def restore(self, state: State, model: Callable[[], Any]) -> None:
        """Continue from a saved state. It is called after `started`, in a run that continues.

        model: returns a copy of the model as the run continues from it.
        """


class ProgressLine(Callback):
    """Keeps one line current on a terminal; elsewhere prints a line every ten seconds."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        self._stream, self._clock = stream or sys.stderr, clock
        self._live = self._stream.isatty()
        self._every = 0.2 if self._live else 10.0
        self._shown = -self._every
        self._last = ""
        self._begun = threading.Event()
        self._waiting: threading.Thread | None = None

    def started(self, live: Live) -> None:
        self._begun.clear()
        if live.starting():
            self._waiting = threading.Thread(target=self._wait, args=(live,), daemon=True)
            self._waiting.start()

    def _wait(self, live: Live) -> None:
        """Show the event that the engine waits for, until it has begun."""
        line = StageLine(self._stream, self._clock)
        while (what := live.starting()) and not self._begun.is_set():
            line(what)
            self._begun.wait(_LOOK)
        line.close()

    def _begin(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._begun.set()
            waiting.join(_PATIENCE)

    def stepped(self, progress: Progress) -> None:
        self._begin()
        self._last = (
            f"step {progress.step}  loss {progress.loss:.4f}  waiting {progress.waiting:.0%}  "
            f"{progress.throughput:.0f} samples/s  {progress.workers} workers  "
            f"{progress.seconds:.1f} s"
        )
        if self._clock() - self._shown >= self._every:
            self._show()

    def ended(self, reason: str) -> None:
        self._begin()
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


class StageLine:
    """Shows the current stage before training and its progress; call it as often as you like.

    On a terminal it keeps one line current. Elsewhere it prints a line for each stage, and one
    every ten seconds.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        self._stream, self._clock = stream or sys.stderr, clock
        self._live = self._stream.isatty()
        self._every = 0.2 if self._live else 10.0
        self._what, self._began, self._shown = "", clock(), clock()

    def __call__(self, what: str, share: float | None = None) -> None:
        now = self._clock()
        if what == self._what and now - self._shown < self._every:
            return
        self._what, self._shown = what, now
        part = "" if share is None else f", {share:.0%}"
        line = f"{what}{part} ({now - self._began:.0f} s)"
        self._stream.write(f"\r\033[K{line}" if self._live else f"{line}\n")
        self._stream.flush()

    def close(self) -> None:
        """Clear the line of a terminal."""
        if self._live and self._what:
            self._stream.write("\r\033[K")
            self._stream.flush()


def progress_of(
    meter: Meter,
    examples: int | None,
    workers: int,
    model: Callable[[], Any],
    stop: Callable[[str], None],
    record: Callable[[Evaluated | LrScaled], None],
) -> Progress:
    """Return the progress after the newest step."""
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
        staleness=columns["staleness"][-1],
        started=meter.started,
        wasted=meter.wasted,
        down_bytes=meter.down_bytes,
        up_bytes=meter.up_bytes,
        dollars=meter.dollars,
        _model=model,
        _stop=stop,
        _record=record,
    )


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Refuse callbacks whose `started` takes no argument."""
    for callback in callbacks:
        try:
            signature(callback.started).bind(None)
        except TypeError:
            raise ValueError(
                f"{type(callback).__name__}.started takes no Live: write started(self, live)"
            ) from None
