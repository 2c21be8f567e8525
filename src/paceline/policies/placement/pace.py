"""How long the tasks of each worker take: measured, without outliers, smoothed.

A task with a share of n samples takes about fixed + n * own seconds. The worker reports its own
seconds. The rest is fixed: messages, and the wait for the step before. The way of a result to the
servers of the model is a part of it (`Stepped.sending`).

A worker's first task may load code and data. If it took more than twice as long as the second one,
it no longer counts. Tasks enter as the median of the last three, so a task that took long for once
changes nothing. From the fourth on, medians are smoothed as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median, median_low

from paceline.core.protocol import (
    Cancel,
    Event,
    Finished,
    Joined,
    Left,
    Result,
    Stepped,
    View,
    WorkerId,
)
from paceline.core.schema import Schema
from paceline.policies.selection.arms import response

_LEAST = 1e-12  # seconds a sample: a lower bound, so that no speed is infinite
_CUT_SHORT = 2.0  # assumed full time of a cancelled task, as a multiple of the time it ran
_LAST = 3  # tasks whose median counts
_LOADING = 2.0  # times as long as the second task, a first one does not count
_NOISE = 0.05
"""Of the time of a task: smaller differences between the fixed seconds of workers do not count."""


class Pace:
    """The speed of each worker in samples a second, and its fixed seconds beside.

    A worker that returns has the speed that it had: it is on a machine of the same kind.

    steady: whether every task has the same weight from the first one on, as suits placements that
        change seldom. Medians and new first tasks follow faster, and move more at the start.
    """

    schema = Schema(
        "pace",
        2,
        {
            "known": "_known", "away": "_away", "recent": "_recent", "sending": "_sending",
            "sent": "_sent", "new": "_new", "total": "_total", "seen": "_seen",
        },
    )  # fmt: skip

    def __init__(self, smoothing: float, steady: bool = False) -> None:
        self._smoothing, self._steady = smoothing, steady
        # By worker: seconds per sample; its own seconds per sample of a share, which a task uses
        # in each of its local steps; and fixed seconds.
        self._known: dict[WorkerId, list[float]] = {}
        self._away: dict[WorkerId, list[float]] = {}  # the same, of workers that left
        self._recent: dict[WorkerId, list[list[float]]] = {}  # the same, of the last tasks
        self._sending: dict[WorkerId, list[float]] = {}  # seconds of a result to the servers
        self._sent: dict[WorkerId, list[list[float]]] = {}  # the same, of the last results
        self._new: dict[WorkerId, bool] = {}  # workers without a task since they joined
        self._total = 0.0  # sum of the speeds of the connected workers
        self._seen = 0.0  # when the last result arrived

    def learn(self, view: View, news: Event | Cancel) -> None:
        if (seen := response(view, news, self._seen)) is not None:
            worker, seconds, _ = seen
            match news:
                case Finished(id):
                    self._finished(worker, seconds, view.held[id])
                case Cancel(id):
                    self._cut_short(worker, seconds, view.running[id].work.steps)
        match news:
            case Finished(id):
                self._seen = view.held[id].at
            case Stepped(sending=sending):
                for worker, seconds in sending.items():
                    last, before = self._sent.setdefault(worker, []), self._sending.get(worker)
                    self._sending[worker] = self._smoothed(last, [seconds], before)
            case Left(worker) if worker in self._known:
                self._away[worker] = self._known.pop(worker)
                self._total -= 1 / self._away[worker][0]
            case Joined(worker):
                self._new[worker] = True
                if worker in self._away:
                    self._known[worker] = self._away.pop(worker)
                    self._total += 1 / self._known[worker][0]

    def _finished(self, worker: WorkerId, seconds: float, result: Result) -> None:
        """Learn from a task: its seconds per sample, and the part that it computed."""
        own = result.seconds / result.samples if result.seconds > 0 else seconds
        own = min(own, seconds)  # by the clock of another machine it may be more
        fixed = (seconds - own) * result.samples
        self._observe(worker, [seconds, own * result.task.work.steps, fixed])

    def _cut_short(self, worker: WorkerId, seconds: float, steps: int) -> None:
        """Learn from a cancelled task: it would have taken longer."""
        seconds *= _CUT_SHORT
        self._new.pop(worker, None)
        if (before := self._known.get(worker)) is None:
            seconds = max(seconds, _LEAST)
            self._set(worker, [seconds, seconds * steps, 0.0])
        elif seconds > before[0]:  # otherwise no information: it was expected to take longer
            slower = 1 + self._smoothing * (seconds / before[0] - 1)
            self._set(worker, [before[0] * slower, before[1] * slower, before[2]])

    def _observe(self, worker: WorkerId, task: list[float]) -> None:
        task[:2] = (max(each, _LEAST) for each in task[:2])
        before = self._known.get(worker)
        if self._new.pop(worker, False) and not self._steady:
            if before is not None:
                return
            recent = self._recent[worker] = []
        else:
            recent = self._recent.setdefault(worker, [])
            if len(recent) == 1 and recent[0][0] > _LOADING * task[0] and not self._steady:
                recent.clear()
        self._set(worker, self._smoothed(recent, task, before))

    def _set(self, worker: WorkerId, seconds: list[float]) -> None:
        if (before := self._known.get(worker)) is not None:
            self._total -= 1 / before[0]
        self._known[worker] = seconds
        self._total += 1 / seconds[0]

    def _smoothed(
        self, recent: list[list[float]], new: list[float], before: Sequence[float] | None
    ) -> list[float]:
        """Return numbers after another observation; `recent` has the last ones, and gets this."""
        filled = len(recent) == _LAST or self._steady
        if self._steady:
            recent.clear()
        recent.append(new)
        del recent[:-_LAST]
        middle = [median(each) for each in zip(*recent, strict=True)]
        if before is None or not filled:
            return middle
        part = self._smoothing
        return [old + part * (now - old) for old, now in zip(before, middle, strict=True)]

    @property
    def mean(self) -> float:
        """The mean of all known speeds; 1 if no speed is known."""
        return self._total / len(self._known) if self._known else 1.0

    def of(self, workers: Iterable[WorkerId]) -> list[float]:
        """Return the speeds of workers; an unknown speed is set to the mean."""
        known, mean = self._known, self.mean
        return [1 / known[w][0] if w in known else mean for w in workers]

    def parts(self, workers: Sequence[WorkerId], each: float) -> tuple[list[float], list[float]]:
        """Return the speeds of workers without their fixed seconds, and these as far as they are
        more than usual.

        each: the samples of a share, on the average.
        """
        known, none = self._known, [0.0]
        own = {worker: known[worker][1] for worker in workers if worker in known}
        speeds = {worker: 1 / seconds for worker, seconds in own.items()}
        mean = sum(speeds.values()) / len(speeds) if speeds else 1.0
        fixed = [known.get(w, none)[-1] + self._sending.get(w, none)[0] for w in workers]
        usual = median_low(fixed)
        if own:
            usual += _NOISE * (usual + each * median(own.values()))
        return [speeds.get(w, mean) for w in workers], [max(a - usual, 0.0) for a in fixed]

    def known(self) -> dict[WorkerId, float]:
        """Return the speed of each worker that was measured."""
        return {worker: 1 / seconds[0] for worker, seconds in self._known.items()}
