"""An engine that plays a script of events, to test a policy without a real engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.core.coordinator import Coordinator
from paceline.core.journal import Entry
from paceline.core.policy import Policy
from paceline.core.protocol import (
    MAIN,
    Command,
    Event,
    Finished,
    Start,
    Stats,
    Step,
    Stepped,
    Task,
    WorkerId,
)


@dataclass(frozen=True)
class Done:
    """A script item: the worker finishes its oldest task."""

    worker: WorkerId
    samples: int | None = None  # None: all samples of the task
    stats: Stats = field(default_factory=dict)


class ScriptedEngine:
    """Reports the events of a script at their times, and records the commands that it gets.

    After each `Step` it reports `Stepped`, as every engine does.
    """

    def __init__(self, script: Iterable[tuple[float, Event | Done]]) -> None:
        self._script = deque(script)
        self._tasks: dict[WorkerId, deque[Task]] = {}
        self._stepped: deque[Event] = deque()
        self._now = 0.0
        self._version = 0
        self.commands: list[Command] = []

    def execute(self, node: WorkerId, command: Command) -> None:
        self.commands.append(command)
        if isinstance(command, Start):
            self._tasks.setdefault(command.task.worker, deque()).append(command.task)
        elif isinstance(command, Step):
            self._version += 1
            self._stepped.append(Stepped(self._version))

    def next_event(self) -> tuple[float, WorkerId, Event] | None:
        if self._stepped:
            return self._now, MAIN, self._stepped.popleft()
        if not self._script:
            return None
        self._now, item = self._script.popleft()
        return self._now, MAIN, self._finish(item) if isinstance(item, Done) else item

    def _finish(self, done: Done) -> Finished:
        tasks = self._tasks.get(done.worker)
        if not tasks:
            raise ValueError(f"{done} at t={self._now:g}: {done.worker} was given no task")
        task = tasks.popleft()
        samples = task.samples * task.work.steps if done.samples is None else done.samples
        return Finished(task.id, samples, self._now - task.since, done.stats)


def transcript(
    policy: Policy, script: Iterable[tuple[float, Event | Done]], batch: int = 1
) -> list[Entry]:
    """Play a script to a policy; return each event with the commands of the policy."""
    engine = ScriptedEngine(script)
    coordinator = Coordinator(policy, batch)
    entries = []
    while (occurred := engine.next_event()) is not None:
        now, node, event = occurred
        entry = coordinator.handle(now, event)
        for command in entry.commands:
            engine.execute(node, command)
        entries.append(entry)
    return entries
