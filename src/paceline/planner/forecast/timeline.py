"""The steps of a policy on profiled workers: their times, the models they use, and their cost.

A policy that uses no statistics decides the same whatever the model learns. So it is simulated
without arithmetic, once for all learning rates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import inf

from paceline.core.coordinator import Coordinator, drive
from paceline.core.errors import StalledError
from paceline.core.journal import Entry, Header, Journal
from paceline.core.policy import Policy
from paceline.core.protocol import (
    MAIN,
    Cancel,
    Discard,
    Finished,
    Start,
    Step,
    Task,
    TaskId,
    magnitude,
)
from paceline.engines.base import Job
from paceline.learners.arrays import TimingOnly
from paceline.planner.forecast.quadratic import Read, Reads
from paceline.planner.measure.profile import Profile
from paceline.policies.wrappers import MinWorkers, Until
from paceline.report.metrics import Meter

_IDLE = 1000  # limit of events for each worker without a step


class Timeline:
    """The steps of a policy on the workers of a profile, simulated as far as `reach` asks.

    shrunk: the size of an encoded result relative to an unencoded one.
    """

    def __init__(self, policy: Policy, profile: Profile, seed: int = 0, shrunk: float = 1.0):
        if policy.wants:
            wants = ", ".join(sorted(map(str, policy.wants)))
            raise ValueError(
                f"this policy adapts to {wants} of the steps, so its time cannot be simulated "
                "without gradients; use a fixed k"
            )
        policy.check([*profile.workers], profile.batch_size)
        self._batch, self._size = profile.batch_size, profile.size
        self._sent = round(profile.message_bytes * shrunk) if shrunk < 1 else None
        self.reads: list[Reads] = []
        self.delays: list[tuple[float, float]] = []  # seconds since a read, and its weight
        self._versions = [0.0]  # the time of each version
        self._tasks: dict[TaskId, Task] = {}
        self._samples: dict[TaskId, int] = {}
        header = Header("", self._batch, None, None, profile.message_bytes, profile.prices)
        self._meter = Meter.begin(header)
        engine = profile.engine(seed, shrunk)
        learner = TimingOnly(self._batch, profile.message_bytes)
        held = Until(MinWorkers(engine.size, policy))
        coordinator = Coordinator(held, self._batch, Journal(header, keep=False))
        engine.open(
            Job(learner=learner, server=learner.server(), seed=seed, min_workers=engine.size)
        )
        self._entries = drive({MAIN: coordinator}, engine)

    def __len__(self) -> int:
        return len(self.reads)

    def reach(self, steps: int, seconds: float = inf) -> None:
        """Simulate until `steps` steps are taken, or `seconds` have passed."""
        idle = 0
        while len(self.reads) < steps and self.seconds < seconds:
            known, found = len(self.reads), next(self._entries, None)
            if found is None:
                raise ValueError("this policy stops by itself; forecast the policy inside Until")
            self._take(found[1])
            idle = 0 if len(self.reads) > known else idle + 1
            if idle > _IDLE * self._size:
                raise StalledError(
                    f"there was no step in {idle} events; does the policy give workers too little "
                    "time?"
                )

    def _take(self, entry: Entry) -> None:
        event = entry.event
        if isinstance(event, Finished):
            self._samples[event.task] = event.samples
            if self._sent is not None:
                entry = Entry(entry.now, replace(event, sent=self._sent), entry.commands)
        self._meter.observe(entry)
        for command in entry.commands:
            match command:
                case Start(task):
                    self._tasks[task.id] = task
                case Cancel(id) | Discard(id):
                    self._tasks.pop(id, None)
                    self._samples.pop(id, None)
                case Step():
                    self._step(command, entry.now)

    def _step(self, step: Step, now: float) -> None:
        version = len(self.reads)
        if any(self._tasks[id].work.parts is not None for id in step.weights):
            self.reads.append((Read(0, 1.0, 1 / self._batch),))  # decoded: the whole batch
        else:
            merged: dict[tuple[int, int], list[float]] = {}
            for id, weight in step.weights.items():
                task, share = self._tasks[id], magnitude(weight)
                of_each = max(self._samples[id] / task.work.steps, 1.0)
                found = merged.setdefault(
                    (version - task.version, task.work.steps), [0.0, 0.0, 0.0]
                )
                found[0] += share
                found[1] += share**2 / of_each
                found[2] += share / of_each
                self.delays.append((now - self._versions[task.version], share))
            self.reads.append(
                tuple(
                    Read(age, weight, square / weight**2, steps, alone / weight)
                    for (age, steps), (weight, square, alone) in sorted(merged.items())
                )
            )
        self._versions.append(now)
        if not step.keep:
            for id in step.weights:
                del self._tasks[id], self._samples[id]

    # --- costs -----------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """The time of the last step."""
        return self._versions[-1]

    @property
    def each(self) -> list[float]:
        """The seconds of each step."""
        return [later - now for now, later in pairwise(self._versions)]

    def at(self, step: int) -> tuple[float, float, float]:
        """Return the seconds, dollars and bytes up to a step; after the last, steps repeat."""
        rounds, place = divmod(step, len(self.reads))
        here, last = self._figures(place), self._figures(len(self.reads) - 1)
        seconds, dollars, size = (a + rounds * b for a, b in zip(here, last, strict=True))
        return seconds, dollars, size

    def _figures(self, step: int) -> tuple[float, float, float]:
        columns = self._meter.columns
        size = columns["down_bytes"][step] + columns["up_bytes"][step]
        return columns["seconds"][step], columns["dollars"][step], size

    def repeated(self, steps: int) -> Iterator[Reads]:
        """Yield the reads of `steps` steps; after the last they repeat from the beginning."""
        for step in range(steps):
            yield self.reads[step % len(self.reads)]

    @property
    def staleness(self) -> float:
        """The mean staleness of the results of all steps, in versions."""
        pairs = [(read.age, read.weight) for reads in self.reads for read in reads]
        return sum(a * w for a, w in pairs) / sum(w for _, w in pairs)
