"""The waits of steps for workers, and the price of waiting for cancelled tasks instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.core.protocol import WorkerId
from paceline.report.html.timeline import Floats, Ints
from paceline.report.workers import Tally

STALE = 0.01
"""A run with a larger share of results from earlier models counts as asynchronous: its workers
continue during a step, and no step waits for a worker."""
REFILLED = 0.1
"""Workers count as refilled if in a larger share of steps a worker has several results. In some
such steps, a worker only repeats the task of a lost worker."""
LITTLE = 0.01, 0.2
"""Workers do not wait if they are idle for less than this share of their time; the second share is
for refilled workers, since a step of more tasks than workers is waited for at its end."""
_TIE = 1e-9  # seconds; no step waits between results this close together


@dataclass(frozen=True)
class Price:
    """The seconds that waiting for a worker's cancelled tasks would have added."""

    seconds: float
    least: bool  # a lower bound: more tasks were cancelled than results came
    tasks: int  # cancelled tasks


@dataclass
class Waits:
    """Sums of the waits of steps and of the cancelled tasks.

    Waited: between the last two results of a step, the step waited for one worker, which is charged
    with that time. A step of one result waits for no worker, and neither does a step whose last
    results arrive together. If workers are refilled until the step is taken, no step waits.
    Not waited: a task was cancelled after some seconds of work. Had its step waited for it, the
    step would have lasted longer by the rest of the worker's usual time for a task. The usual time
    is the mean over its results, late ones included. If more tasks were cancelled than results
    came, it is a lower bound, since cancelled tasks are the longer ones. Without any result, it is
    the longest time of a cancelled task, again a lower bound.
    Discarded: such a result had arrived, so waiting for it would have added nothing.
    """

    steps: int = 0
    several: int = 0  # steps of several results
    refilled: int = 0  # steps in which a worker had several
    _waited: dict[int, float] = field(default_factory=dict)
    _times: dict[int, int] = field(default_factory=dict)
    _rows: list[Ints] = field(default_factory=list)
    _spent: list[Floats] = field(default_factory=list)

    def used(self, rows: Ints, arrived: Floats, steps: Ints) -> None:
        """Count the used results of some steps; all results of a step come in one call."""
        if not len(rows):
            return
        order = np.lexsort((arrived, steps))
        rows, arrived, steps = rows[order], arrived[order], steps[order]
        last = np.flatnonzero(np.append(steps[1:] != steps[:-1], True))
        self.steps += len(last)
        last = last[last > 0]
        last = last[steps[last - 1] == steps[last]]  # only steps with several results
        self.several += len(last)
        by_worker = np.lexsort((rows, steps))
        mine, those = rows[by_worker], steps[by_worker]
        again = (mine[1:] == mine[:-1]) & (those[1:] == those[:-1])
        self.refilled += len(np.unique(those[1:][again]))
        gaps = arrived[last] - arrived[last - 1]
        last, gaps = last[gaps > _TIE], gaps[gaps > _TIE]
        for row, seconds in zip(rows[last].tolist(), gaps.tolist(), strict=True):
            self._waited[row] = self._waited.get(row, 0.0) + seconds
            self._times[row] = self._times.get(row, 0) + 1

    def is_refilling(self, waiting: float) -> bool:
        """Return whether workers that finish early get another task of the same step.

        waiting: the share of their time in which workers had nothing to do.
        """
        if not self.several:
            return False
        alone, refilled = LITTLE
        return waiting < (refilled if self.refilled > REFILLED * self.several else alone)

    def cancelled(self, rows: Ints, spent: Floats) -> None:
        """Count tasks that were cancelled after so many seconds."""
        if len(rows):
            self._rows.append(rows)
            self._spent.append(spent)

    def waited(self, row: int) -> tuple[float, int]:
        """Return the seconds for which steps waited for a worker, and the number of these steps."""
        return self._waited.get(row, 0.0), self._times.get(row, 0)

    def prices(
        self, workers: Sequence[WorkerId], tallies: Mapping[WorkerId, Tally]
    ) -> dict[WorkerId, Price]:
        """Return the price of waiting for each worker that had cancelled tasks."""
        if not self._rows:
            return {}
        rows, spent = np.concatenate(self._rows), np.concatenate(self._spent)
        order = np.argsort(rows, kind="stable")
        found: dict[WorkerId, Price] = {}
        places, starts = np.unique(rows[order], return_index=True)
        for row, mine in zip(places.tolist(), np.split(spent[order], starts[1:]), strict=True):
            tally = tallies[workers[row]]
            came = tally.finished + tally.late
            usual = (tally.finished_seconds + tally.late_seconds) / came if came else mine.max()
            added = float(np.maximum(usual - mine, 0.0).sum())
            found[workers[row]] = Price(added, len(mine) > came, len(mine))
        return found
