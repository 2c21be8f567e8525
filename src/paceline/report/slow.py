"""Who the steps waited for, and what it would have taken to wait for those that they did not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.core.protocol import WorkerId
from paceline.report.timeline import Floats, Ints
from paceline.report.workers import Tally

STALE = 0.01
"""The share of results from earlier models above which a run counts as asynchronous: then workers
go on while a step is taken, and nobody waits for anybody."""


@dataclass(frozen=True)
class Price:
    """What waiting for the other tasks of a worker would have added, in seconds."""

    seconds: float
    least: bool  # it never finished a task, so that nobody knows how long one takes
    tasks: int  # that were cancelled


@dataclass
class Waits:
    """Adds up as steps are taken and tasks are cancelled.

    Waited: of the results of a step the last came some time after the last but one; all that time
    the step waited for one worker, to whom it is charged. A step of one result waits for nobody.
    Not waited: a task was cancelled after some seconds of work. Had its step waited, it would
    have taken the worker's usual time for a task, so at least the rest of it longer. If it has
    never finished one, the usual time is at least the longest that it was seen at work.
    A result that was discarded had come; waiting for it would have added nothing.
    """

    steps: int = 0
    _waited: dict[int, float] = field(default_factory=dict)
    _times: dict[int, int] = field(default_factory=dict)
    _rows: list[Ints] = field(default_factory=list)
    _spent: list[Floats] = field(default_factory=list)

    def used(self, rows: Ints, arrived: Floats, steps: Ints) -> None:
        """Take the used results of some steps, all those of a step at once."""
        if not len(rows):
            return
        order = np.lexsort((arrived, steps))
        rows, arrived, steps = rows[order], arrived[order], steps[order]
        last = np.flatnonzero(np.append(steps[1:] != steps[:-1], True))
        self.steps += len(last)
        last = last[last > 0]
        last = last[steps[last - 1] == steps[last]]  # of steps with several results
        for row, seconds in zip(
            rows[last].tolist(), (arrived[last] - arrived[last - 1]).tolist(), strict=True
        ):
            self._waited[row] = self._waited.get(row, 0.0) + seconds
            self._times[row] = self._times.get(row, 0) + 1

    def cancelled(self, rows: Ints, spent: Floats) -> None:
        """Take tasks that were given up after so many seconds."""
        if len(rows):
            self._rows.append(rows)
            self._spent.append(spent)

    def waited(self, row: int) -> tuple[float, int]:
        """Return for how many seconds a worker was waited for, and in how many steps."""
        return self._waited.get(row, 0.0), self._times.get(row, 0)

    def prices(
        self, workers: Sequence[WorkerId], tallies: Mapping[WorkerId, Tally]
    ) -> dict[WorkerId, Price]:
        """Return for each worker that had tasks cancelled what waiting would have added."""
        if not self._rows:
            return {}
        rows, spent = np.concatenate(self._rows), np.concatenate(self._spent)
        order = np.argsort(rows, kind="stable")
        found: dict[WorkerId, Price] = {}
        places, starts = np.unique(rows[order], return_index=True)
        for row, mine in zip(places.tolist(), np.split(spent[order], starts[1:]), strict=True):
            tally = tallies[workers[row]]
            usual = tally.finished_seconds / tally.finished if tally.finished else mine.max()
            added = float(np.maximum(usual - mine, 0.0).sum())
            found[workers[row]] = Price(added, not tally.finished, len(mine))
        return found
