"""Backup tasks: an idle worker redoes a task that is overdue, and the first result counts."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING, cast

from paceline.core.checks import check_seconds
from paceline.core.logs import logger_of
from paceline.core.policy import Policy, Wrapper
from paceline.core.protocol import (
    Assign,
    Command,
    Event,
    Finished,
    Joined,
    SetTimer,
    Task,
    TaskId,
    TimerFired,
    View,
    Work,
    WorkerId,
)
from paceline.core.schema import Schema

if TYPE_CHECKING:
    from collections import OrderedDict

logger = logger_of(__name__)

_TIMER = "overdue"
_KNOWN = 8  # response times that must be known
_SOON = 1e-3  # seconds: a timer must be in the future
_LATE = 5.0  # how many times the patience an answer counts at most that came too late
_WINDOW = 128  # response times that are remembered: of one worker, and of all together


@dataclass
class Backups(Wrapper):
    """Has idle workers redo overdue tasks of the inner policy, on the same samples.

    A task is overdue after `factor` times the 99th percentile of its worker's response times, and
    after at least `floor` seconds. Until eight results of a worker are known, those of all workers
    count too; until eight of all, no task is overdue. A time grows with the samples of a task. The
    first result counts. A worker that was overtaken gets no task until it answers.

    Known as backup tasks (MapReduce) and speculative execution (Spark).

    >>> from paceline.policies.named import k_sync
    >>> Backups(k_sync(8)).factor
    2.0
    """

    inner: Policy
    factor: float = 2.0
    floor: float = 1.0
    _times: dict[WorkerId, list[list[float]]] = field(default_factory=dict, init=False, repr=False)
    _all: list[list[float]] = field(default_factory=list, init=False, repr=False)
    _new: list[WorkerId] = field(default_factory=list, init=False, repr=False)
    _due: list[list[float]] = field(default_factory=list, init=False, repr=False)  # a heap
    _overdue: list[TaskId] = field(default_factory=list, init=False, repr=False)
    # The tasks that were redone, by worker: when they began, their samples, and what was too long.
    _given_up: dict[WorkerId, list[float]] = field(default_factory=dict, init=False, repr=False)
    _seen: int = field(default=-1, init=False, repr=False)  # the newest task in the heap
    _timer: float = field(default=-1.0, init=False, repr=False)  # at which time; past: none
    schema = Schema(
        "backups",
        1,
        {
            "response_times": "_times",
            "response_times_of_all": "_all",
            "without_result": "_new",
            "due": "_due",
            "overdue": "_overdue",
            "given_up": "_given_up",
            "seen": "_seen",
            "timer": "_timer",
        },
        {"inner": "inner"},
    )

    def __post_init__(self) -> None:
        check_seconds("floor", self.floor)
        if not self.factor >= 1:
            raise ValueError(f"factor={self.factor}: use 1 or more, such as 2")

    def react(self, view: View, event: Event) -> Iterator[Command]:
        if isinstance(event, Finished):
            self._learn(view, event)
        elif isinstance(event, Joined):
            self._welcome(event.worker, view.now)
        if event == TimerFired(_TIMER):
            self._expire(view)
        else:
            yield from self.inner.react(view, event)
        self._note(view)
        if self._overdue:
            yield from self._redo(view)
        if self._due and not view.now < self._timer <= self._due[0][0]:
            self._timer = max(self._due[0][0], view.now + _SOON)
            yield SetTimer(_TIMER, self._timer)

    def _learn(self, view: View, event: Finished) -> None:
        """Note the response time of a result, except for the first after a worker joined."""
        result = view.held[event.task]
        task = result.task
        self._given_up.pop(task.worker, None)
        if task.worker in self._new:
            self._new.remove(task.worker)  # it may have compiled its model
            return
        time = [result.at - task.since, float(task.computed)]
        _remember(self._times.setdefault(task.worker, []), time)
        _remember(self._all, time)

    def _welcome(self, worker: WorkerId, now: float) -> None:
        """Note that a worker joined, perhaps since it answered a task that was redone."""
        given_up = self._given_up.pop(worker, None)
        if given_up is not None:
            since, samples, patience = given_up
            # It may also have been replaced, after a long silence.
            time = min(now - since, _LATE * patience)
            _remember(self._times.setdefault(worker, []), [time, samples])
        elif worker not in self._new:
            self._new.append(worker)

    def _note(self, view: View) -> None:
        """Compute when the new tasks are overdue."""
        if len(self._all) < _KNOWN:
            return
        running = cast("OrderedDict[TaskId, Task]", view.running)
        new = []
        for id in reversed(running):
            if id <= self._seen:
                break
            new.append(running[id])
        for task in reversed(new):
            self._seen = task.id
            if task.work.parts is None:  # parts of a batch are coded against stragglers
                heapq.heappush(self._due, [task.since + self.patience(task), float(task.id)])

    def patience(self, task: Task) -> float:
        """Return the seconds after which a task is overdue."""
        own, samples = self._times.get(task.worker, []), task.computed
        found = _quantile(own, samples)
        if len(own) < _KNOWN:
            found = max(found, _quantile(self._all, samples))
        return max(self.factor * found, self.floor)

    def _expire(self, view: View) -> None:
        """Find the tasks that are overdue now."""
        while self._due and self._due[0][0] <= view.now:
            id = int(heapq.heappop(self._due)[1])
            if id in view.running:
                self._overdue.append(id)
        while self._due and int(self._due[0][1]) not in view.running:
            heapq.heappop(self._due)

    def _redo(self, view: View) -> Iterator[Command]:
        """Give overdue tasks to idle workers; the others stay overdue."""
        self._overdue = [id for id in self._overdue if id in view.running]
        for id in list(self._overdue):
            task = view.running[id]
            worker = next((w for w in view.idle if self.may_redo(w, task)), None)
            if worker is None:
                continue
            self._overdue.remove(id)
            given_up = [task.since, float(task.computed), view.now - task.since]
            self._given_up[task.worker] = given_up
            logger.info(
                "task %d of worker %s is overdue after %.3g s; %s computes it too",
                id, task.worker, view.now - task.since, worker,
            )  # fmt: skip
            yield Assign(worker, Work(shares=task.work.shares), redo=id)
            self._note(view)


def _remember(times: list[list[float]], time: list[float]) -> None:
    times.append(time)
    del times[:-_WINDOW]


def _quantile(times: list[list[float]], samples: int) -> float:
    """Return the 99th percentile of response times, for a task with so many samples."""
    found = sorted(seconds * max(1.0, samples / before) for seconds, before in times)
    return found[ceil(0.99 * len(found)) - 1] if found else 0.0
