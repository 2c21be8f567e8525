"""What each worker did: a tally that is kept as a run goes, and its tasks one by one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from paceline.core.protocol import Task, TaskId, WorkerId

Fate: TypeAlias = Literal["used", "cancelled", "discarded", "lost", "unfinished", "cut short"]


def in_order(worker: WorkerId) -> tuple[str, int, str]:
    """Return what workers are sorted by, so that w2 comes before w10.

    >>> sorted(["w10", "w2", "gpu"], key=in_order)
    ['gpu', 'w2', 'w10']
    """
    stem = worker.rstrip("0123456789")
    number = worker[len(stem) :]
    return stem, int(number) if number else -1, worker


class Span(NamedTuple):
    """A worker's time on a task, from its start to its result, cancellation or loss.

    A tuple, so that thousands are turned into columns at once.
    """

    task: Task
    end: float
    fate: Fate
    samples: int = 0  # that the result is of
    delay: int = 0  # versions that its model was behind when it was used
    step: int = 0  # that used it, counted as versions are; 0: none


@dataclass(slots=True)
class Tally:
    """Figures of one worker, all since the run was (re)started."""

    present: bool = False
    joined: float = 0.0  # when it came, last
    seen: float = 0.0  # when it was heard of, last
    running: int = 0  # tasks that it has
    began: float = 0.0  # when it became busy, last
    version: int = 0  # of the model that its newest task is on
    losses: int = 0  # how often it was lost
    started: int = 0
    used: int = 0
    cancelled: int = 0
    discarded: int = 0
    lost: int = 0
    samples: int = 0  # used
    delay: int = 0  # versions, summed over what was used
    finished: int = 0  # results, whatever became of them
    finished_samples: int = 0
    finished_seconds: float = 0.0  # from the start of their tasks until they came
    given_up_seconds: float = 0.0  # spent on tasks that were cancelled or lost before
    latest: float = 0.0  # samples a second of the last of them
    compute_seconds: float = 0.0  # measured by the worker itself
    used_seconds: float = 0.0  # spent on what was used
    down_bytes: int = 0
    up_bytes: int = 0
    price: tuple[float, float] | None = None  # of a second, and of a byte, once it is asked for
    model_bytes: int | None = None  # of the last model that it was sent, if that is known
    tasks: set[TaskId] = field(default_factory=set)  # that it has
    _busy: float = 0.0  # until it was idle last
    _there: float = 0.0  # until it was lost last
    _starts: float = 0.0  # of the tasks that it has, summed

    @property
    def wasted(self) -> int:
        """The tasks whose result was not used and never will be."""
        return self.cancelled + self.discarded + self.lost

    @property
    def mean_delay(self) -> float:
        """How many versions its results were behind when they were used."""
        return self.delay / self.used if self.used else 0.0

    def speed(self, now: float) -> float:
        """Return the samples of its results over the seconds of all its tasks; 0.0 if none came.

        Time on tasks that were cancelled or lost, or that go on, counts although nothing came of
        it: whoever is cancelled when slow would look quick by the tasks that it finished. This is
        the rate of greatest likelihood where the ends of some tasks were not seen.
        """
        running = max(self.running * now - self._starts, 0.0) if self.running else 0.0
        seconds = self.finished_seconds + self.given_up_seconds + running
        return self.finished_samples / seconds if seconds > 0 else 0.0

    def busy_seconds(self, now: float) -> float:
        """Return for how long it had a task."""
        return self._busy + (now - self.began if self.running else 0.0)

    def there_seconds(self, now: float) -> float:
        """Return for how long it was there."""
        return self._there + (now - self.joined if self.present else 0.0)

    def share_used(self, now: float) -> float:
        """Return the share of its busy time that went into results which were used."""
        busy = self.busy_seconds(now)
        return self.used_seconds / busy if busy else 0.0

    # --- kept by the meter ------------------------------------------------------------------

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
        self.version = task.version

    def end(self, task: Task, now: float) -> None:
        self.running -= 1
        self._starts -= task.since
        if not self.running:
            self._starts = 0.0  # and rounding leaves nothing behind
            self._busy += now - self.began

    def give_up(self, task: Task, now: float) -> None:
        """Count a task that ended without a result."""
        self.given_up_seconds += max(now - task.since, 0.0)

    def finish(self, now: float, task: Task, samples: int, seconds: float) -> None:
        """Count a result that somebody waited for."""
        took = now - task.since
        self.seen = now
        self.finished += 1
        self.finished_samples += samples
        self.finished_seconds += took
        self.compute_seconds += seconds
        self.latest = samples / took if took > 0 else 0.0

    def use(self, samples: int, delay: int, seconds: float) -> None:
        """Count a result that a step used, and the seconds that it took."""
        self.used += 1
        self.samples += samples
        self.delay += delay
        if seconds > 0.0:
            self.used_seconds += seconds
