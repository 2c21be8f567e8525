"""The metrics of each worker, counted during a run, and the time spans of its tasks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from paceline.core.protocol import Task, TaskId, WorkerId

Fate: TypeAlias = Literal[
    "used", "cancelled", "discarded", "skipped", "lost", "unfinished", "cut short"
]


def in_order(worker: WorkerId) -> tuple[str, int, str]:
    """Return the sort key of a worker, so that w2 comes before w10.

    >>> sorted(["w10", "w2", "gpu"], key=in_order)
    ['gpu', 'w2', 'w10']
    """
    stem = worker.rstrip("0123456789")
    number = worker[len(stem) :]
    return stem, int(number) if number else -1, worker


class Span(NamedTuple):
    """A worker's time on a task, from its start to its result, cancellation or loss.

    It is a tuple, so that `zip` turns thousands into columns at once.
    """

    task: Task
    end: float
    fate: Fate
    samples: int = 0  # in the result
    staleness: int = 0  # in versions, when a step used the result
    step: int = 0  # the version that the step made with it; 0: not used


@dataclass(slots=True)
class Tally:
    """The metrics of one worker, all since the run was (re)started."""

    present: bool = False
    joined: float = 0.0  # when it last joined
    seen: float = 0.0  # when it last joined or sent a result
    running: int = 0  # tasks that it has now
    began: float = 0.0  # when it last became busy
    version: int = 0  # the model version of its newest task
    losses: int = 0  # the number of times that it was lost
    started: int = 0
    used: int = 0
    cancelled: int = 0
    discarded: int = 0
    lost: int = 0
    samples: int = 0  # in used results
    staleness: int = 0  # versions, summed over used results
    finished: int = 0  # results of tasks that were not cancelled, used or not
    finished_samples: int = 0
    finished_seconds: float = 0.0  # from the start of their tasks until they arrived
    late: int = 0  # results of tasks that had been cancelled
    late_samples: int = 0
    late_seconds: float = 0.0  # computing time, measured by the worker itself
    given_up: int = 0  # tasks that were cancelled or lost before their result arrived
    given_up_samples: int = 0
    given_up_seconds: float = 0.0  # their time so far, or their usual time if that is longer
    longest: float = 0.0  # the longest time on such a task
    latest: float = 0.0  # samples a second of the last finished result
    compute_seconds: float = 0.0  # measured by the worker itself
    used_seconds: float = 0.0  # time spent on used results
    down_bytes: int = 0
    up_bytes: int = 0
    price: tuple[float, float] | None = None  # per second, and per byte; None until it is needed
    model_bytes: int | None = None  # the size of the last model that it got, if known
    tasks: set[TaskId] = field(default_factory=set)  # that it has now
    _busy: float = 0.0  # seconds, until it was last idle
    _there: float = 0.0  # seconds, until it was last lost
    _starts: float = 0.0  # the start times of its tasks, summed
    _samples: int = 0  # the samples of its tasks, summed

    @property
    def wasted(self) -> int:
        """The tasks whose result was not used and never will be."""
        return self.cancelled + self.discarded + self.lost

    @property
    def mean_staleness(self) -> float:
        """The mean staleness of its used results, in versions."""
        return self.staleness / self.used if self.used else 0.0

    def speed(self, now: float) -> float:
        """Return the samples a second of its tasks; 0.0 if no result ever arrived.

        A task that was cancelled or lost is right-censored: its full time is only known to exceed
        its time so far. It counts with its time so far, or with the usual time of its samples if
        that is longer. Running tasks count once they take longer than usual. Nothing is
        extrapolated beyond the observed times: see `is_bound`.
        """
        if not self.finished + self.late:
            return 0.0
        samples = self.finished_samples + self.late_samples + self.given_up_samples
        seconds = self.finished_seconds + self.late_seconds + self.given_up_seconds
        running = self.running * now - self._starts
        if running > self._samples * self._usual():
            samples, seconds = samples + self._samples, seconds + running
        return samples / seconds if seconds > 0 else 0.0

    @property
    def is_bound(self) -> bool:
        """Whether `speed` is only an upper bound, since most tasks were cancelled or lost."""
        return self.given_up > self.finished + self.late

    def _usual(self) -> float:
        """Return the seconds per sample of its results, 0.0 without results."""
        samples = self.finished_samples + self.late_samples
        return (self.finished_seconds + self.late_seconds) / samples if samples else 0.0

    def busy_seconds(self, now: float) -> float:
        """Return the seconds in which it had a task."""
        return self._busy + (now - self.began if self.running else 0.0)

    def there_seconds(self, now: float) -> float:
        """Return the seconds in which it was connected."""
        return self._there + (now - self.joined if self.present else 0.0)

    def share_used(self, now: float) -> float:
        """Return the share of its busy time that it spent on used results."""
        busy = self.busy_seconds(now)
        return self.used_seconds / busy if busy else 0.0

    # --- called by the meter ------------------------------------------------------------------

    def join(self, now: float) -> None:
        self.present, self.joined, self.seen = True, now, now

    def leave(self, now: float) -> None:
        if self.present:
            self._there += now - self.joined
            self.present = False
            self.losses += 1

    def start(self, task: Task, now: float) -> None:
        if not self.running:
            self.began = now
        self.running += 1
        self._starts += task.since
        self._samples += task.computed
        self.version = task.version

    def end(self, task: Task, now: float) -> None:
        self.running -= 1
        self._starts -= task.since
        self._samples -= task.computed
        if not self.running:
            self._starts = 0.0  # removes rounding errors
            self._busy += now - self.began

    def give_up(self, task: Task, now: float) -> None:
        """Count a task that ended without a result."""
        spent = max(now - task.since, 0.0)
        self.given_up += 1
        self.given_up_samples += task.computed
        self.given_up_seconds += max(spent, self._usual() * task.computed)
        self.longest = max(self.longest, spent)

    def finish_late(self, samples: int, seconds: float) -> None:
        """Count the result of a task that had been cancelled."""
        if samples > 0 and seconds > 0:
            self.late += 1
            self.late_samples += samples
            self.late_seconds += seconds

    def finish(self, now: float, task: Task, samples: int, seconds: float) -> None:
        """Count the result of a task that was not cancelled."""
        took = now - task.since
        self.seen = now
        self.finished += 1
        self.finished_samples += samples
        self.finished_seconds += took
        self.compute_seconds += seconds
        self.latest = samples / took if took > 0 else 0.0

    def use(self, samples: int, staleness: int, seconds: float) -> None:
        """Count a used result, and the seconds that it took."""
        self.used += 1
        self.samples += samples
        self.staleness += staleness
        if seconds > 0.0:
            self.used_seconds += seconds
