"""Random legal histories of events, to find one that a policy does not handle.

Needs hypothesis: pip install "paceline[testing]".
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf
from typing import Literal, TypeAlias

from hypothesis import strategies as st

from paceline.core.coordinator import Coordinator
from paceline.core.copies import samples_of
from paceline.core.ledger import Ledger
from paceline.core.policy import Policy
from paceline.core.protocol import (
    Draining,
    Event,
    Finished,
    Joined,
    Left,
    Start,
    Stats,
    Step,
    Stepped,
    Task,
    TimerFired,
    WorkerId,
)

Kind: TypeAlias = Literal["join", "leave", "drain", "finish", "late", "step", "timer"]
_KINDS: tuple[Kind, ...] = ("join", "leave", "drain", "finish", "late", "step", "timer")
_OFTEN: tuple[Kind, ...] = ("join", "finish", "finish", "finish", "step")


@dataclass(frozen=True)
class Move:
    """A possible next event: its kind, the index of its worker or task, and the time until it."""

    kind: Kind
    which: int
    seconds: float


@dataclass(frozen=True)
class History:
    """A sequence of moves; those that are not possible when they are played are left out."""

    moves: tuple[Move, ...]

    def play(self, policy: Policy, batch: int = 8) -> Coordinator:
        """Play the moves to a new copy of the policy, and check the ledger after each event.

        Impossible moves are left out, such as a result without a running task. A late move repeats
        a result, or brings the result of a task that was cancelled or lost.
        """
        coordinator = Coordinator(policy, batch)
        ledger, past = coordinator.ledger, list[Task]()
        stepped: deque[int] = deque()
        now = 0.0
        for move in self.moves:
            now += move.seconds
            if move.kind == "timer" and ledger.timers:
                now = max(now, min(ledger.timers.values()))
            event = self._event(move, ledger, past, stepped)
            if event is None:
                continue
            for command in coordinator.handle(now, event).commands:
                match command:
                    case Start(task):
                        past.append(task)
                    case Step():
                        stepped.append(ledger.version)
            check_books(ledger)
        return coordinator

    @staticmethod
    def _event(move: Move, ledger: Ledger, past: list[Task], stepped: deque[int]) -> Event | None:
        which, name = move.which, f"w{move.which}"
        match move.kind:
            case "join" if name not in {*ledger.workers, *_late(ledger)}:
                return Joined(name)
            case "leave" if there := [*ledger.workers, *_late(ledger)]:
                return Left(there[which % len(there)])
            case "drain" if ledger.workers:
                return Draining(list(ledger.workers)[which % len(ledger.workers)])
            case "finish" if ledger.running:
                task = list(ledger.running.values())[which % len(ledger.running)]
                samples = task.samples * task.work.steps
                if task.work.budget < inf and which == 0:
                    samples = 0  # the budget was too short for a sample
                return Finished(task.id, samples, move.seconds, _stats(which))
            case "late" if past:
                task = past[which % len(past)]
                if task.id not in ledger.running:
                    return Finished(task.id, task.samples, move.seconds, _stats(which))
            case "step" if stepped:
                return Stepped(stepped.popleft(), _stats(which))
            case "timer" if ledger.timers:
                return TimerFired(min(ledger.timers, key=lambda name: ledger.timers[name]))
        return None


def legal_histories(max_workers: int = 10, max_size: int = 80) -> st.SearchStrategy[History]:
    """Return a strategy of histories: joins, departures, results, late results, steps, timers."""
    joins = st.integers(1, max_workers).map(lambda n: tuple(Move("join", i, 0.0) for i in range(n)))
    move = st.builds(
        Move,
        st.sampled_from(_KINDS + _OFTEN),
        st.integers(0, max_workers - 1),
        st.floats(0, 2, allow_nan=False),
    )
    rest = st.lists(move, max_size=max_size).map(tuple)
    return st.builds(lambda first, then: History(first + then), joins, rest)


def check_books(ledger: Ledger) -> None:
    """Check every index of the ledger against the entries that it indexes."""
    tasks = dict.fromkeys(ledger.workers, 0)
    for task in ledger.running.values():
        tasks[task.worker] += 1
    results = [result.task.worker for result in ledger.held.values()]
    assert tasks == ledger.workers
    drained = set(ledger.draining)
    assert set(ledger.idle) == {w for w, count in tasks.items() if not count} - drained
    assert set(ledger.free) == set(ledger.idle) - set(results)
    assert not ledger.held.keys() & ledger.running.keys()
    assert not ledger.lost.keys() & (ledger.held.keys() | ledger.running.keys())
    assert ledger.held_shares == sum(result.task.work.shares for result in ledger.held.values())
    assert not ledger.late.keys() & ledger.running.keys()
    assert not set(_late(ledger)) & set(ledger.workers)
    used = [samples_of(r.task) for r in ledger.held.values() if r.samples and not r.task.work.parts]
    assert len(set(used)) == len(used)
    running = list(ledger.running.values())
    assert not set(used) & {samples_of(task) for task in running}
    versions = [task.version for task in running]
    assert versions == sorted(versions)
    for delay in (0, 1, 3, inf):
        fresh = {
            task.id if task.work.parts else samples_of(task): task.work.shares
            for task in running
            if ledger.staleness(task) <= delay
        }
        assert ledger.outstanding(delay) == sum(fresh.values())


def _late(ledger: Ledger) -> list[WorkerId]:
    return [task.worker for task in ledger.late.values()]


def _stats(number: int) -> Stats:
    return {"loss": float(number), "dot": float(number - 5), "norm": 1.0}
