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
REFILLED = 0.1
"""The share of steps in which a worker has several results above which workers count as refilled.
Some such steps are of tasks that were done again for who was lost."""
LITTLE = 0.01, 0.2
"""The share of their time with nothing to do below which workers wait for nobody, and below which
they do not if they are refilled: a step of more tasks than workers is waited for in its end."""
_TIE = 1e-9  # seconds: who ended together was not waited for


@dataclass(frozen=True)
class Price:
    """What waiting for the other tasks of a worker would have added, in seconds."""

    seconds: float
    least: bool  # it finished too few tasks to tell how long one takes
    tasks: int  # that were cancelled


@dataclass
class Waits:
    """Adds up as steps are taken and tasks are cancelled.

    Waited: of the results of a step the last came some time after the last but one; all that time
    the step waited for one worker, to whom it is charged. A step of one result waits for nobody,
    and neither does one whose last results came at once. Where workers go on with another task
    until the step is taken, the last result is only the last of many, and nobody waits.
    Not waited: a task was cancelled after some seconds of work. Had its step waited, it would
    have taken the worker's usual time for a task, so at least the rest of it longer. The usual
    time is that of all its tasks over the number of those that it finished: the mean of those
    alone would be that of the lucky ones. If it has never finished one, the usual time is at least
    the longest that it was seen at work.
    A result that was discarded had come; waiting for it would have added nothing.
    """

    steps: int = 0
    several: int = 0  # steps of several results
    refilled: int = 0  # those in which a worker had several
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
        """Tell whether workers that are done go on with another task of the same step.

        waiting: the share of their time in which workers had nothing to do.
        """
        if not self.several:
            return False
        alone, refilled = LITTLE
        return waiting < (refilled if self.refilled > REFILLED * self.several else alone)

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
            known = tally.finished_seconds + tally.given_up_seconds
            usual = known / tally.finished if tally.finished else mine.max()
            added = float(np.maximum(usual - mine, 0.0).sum())
            found[workers[row]] = Price(added, len(mine) > tally.finished, len(mine))
        return found
