"""Every policy, over random possible histories: no illegal command, and replays are exact."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import pytest
from hypothesis import HealthCheck, given, settings

import paceline as pl
from paceline.codes.approximate import Replicated
from paceline.codes.generators import repetition
from paceline.codes.groups import Grouped
from paceline.core.books import MAX_ATTEMPTS
from paceline.core.coordinator import Coordinator
from paceline.core.journal import Entry, Journal, dump_entry, parse_entry
from paceline.core.policy import Policy
from paceline.core.protocol import Start, Step, Task
from paceline.data.partition.base import Partition
from paceline.testing import History, legal_histories
from paceline.testing.histories import Move

TILES = Partition([tile for tile in range(20) for _ in range(5)])
OWNERS = {f"w{i}": (2 * i, 2 * i + 1) for i in range(10)}

POLICIES: dict[str, Policy] = {
    "sync": pl.sync(),
    "sync(4)": pl.sync(shares=4),
    "k_sync(2)": pl.k_sync(2),
    "k_async(3)": pl.k_async(3),
    "asynchronous": pl.asynchronous(),
    "asynchronous(2)": pl.asynchronous(2, damping=False),
    "rennala(5)": pl.rennala(5),
    "ringmaster(3)": pl.ringmaster(3),
    "ringmaster(2) without stops": pl.ringmaster(2, stops=False),
    "ringleader": pl.policies.ringleader(),
    "ringleader of tiles": pl.policies.ringleader(most=1).placed(
        pl.policies.Placed(TILES, move=False, owners=OWNERS)
    ),
    "ringleader, moving": pl.policies.ringleader(2).placed(pl.policies.Placed(TILES, every=1)),
    "local_sgd": pl.local_sgd(3),
    "deadline": pl.deadline(1.0),
    "MinWorkers": pl.policies.MinWorkers(3, pl.sync()),
    "Until": pl.policies.Until(pl.k_sync(2), steps=5, seconds=20.0),
    "loose k-sync": pl.policies.Gather(3, max_staleness=1, preempt=False),
    "growing k": pl.k_sync(pl.policies.Schedule({0: 1, 2: 3, 5: 4}), samples=2),
    "k by sign": pl.k_sync(pl.policies.GrowWhenStationary(1, 4, threshold=1, burn_in=1), samples=2),
    "k by noise": pl.bandit(pl.policies.GrowOnNoise(1, 4, memory=2), samples=2),
    "bandit(2)": pl.bandit(2),
    "hedged": pl.bandit(2, hedge=2, index=pl.selection.Thompson()),
    "discounted": pl.bandit(3, hedge=1, discount=0.8),
    "windowed": pl.bandit(1, window=4, index=pl.selection.Thompson(shape=2.0)),
    "bounded": pl.bandit(2, index=pl.selection.Bounded(2.0)),
    "finite variance": pl.bandit(2, index=pl.selection.FiniteVariance(1.0)),
    "asynchronous bandit": pl.policies.Gather(
        2, max_staleness=3, refill=True, select=pl.selection.Bandit(), hedge=2
    ),
    "ata(5)": pl.ata(5),
    "coded(1, 1)": pl.coded(1, 1),
    "coded(2, 2)": pl.coded(2, 2),
    "code of a fixed size": pl.policies.Coded(Grouped(4, repetition(2))),
    "approximate code": pl.policies.Coded(Replicated(4, 2, 1), wait=3),
    "ata, discounted": pl.ata(8, discount=0.9, index=pl.selection.LCB()),
    "sync by speed": pl.policies.Gather(placement=pl.BySpeed()),
    "k_sync by speed": pl.policies.Gather(3, placement=pl.BySpeed(max_samples=5)),
    "bandit by speed": pl.policies.Gather(2, select=pl.selection.Bandit(), placement=pl.BySpeed()),
    "asynchronous by speed": pl.policies.Gather(
        1, inf, refill=True, preempt=False, placement=pl.BySpeed()
    ),
    "tiles": pl.policies.Gather(placement=pl.policies.Placed(TILES, every=1)),
    "k_sync of tiles": pl.policies.Gather(2, placement=pl.policies.Placed(TILES, bound=1.0)),
    "bandit of tiles": pl.policies.Gather(
        2, select=pl.selection.Bandit(), hedge=1, placement=pl.policies.Placed(TILES)
    ),
    "tiles without a guard": pl.policies.Gather(2, placement=pl.policies.Placed(TILES, bound=None)),
    "tiles that stay": pl.policies.Gather(
        2, placement=pl.policies.Placed(TILES, move=False, owners=OWNERS)
    ),
    "late tiles": pl.policies.Gather(
        3, max_staleness=2, refill=True, placement=pl.policies.Placed(TILES, bound=0.5)
    ),
    "deadline of tiles": pl.policies.Deadline(
        1.0, placement=pl.policies.Placed(TILES, move=False, owners=OWNERS)
    ),
}
# Tasks are soon overdue, so that most histories have tasks that are redone.
POLICIES |= {
    f"{name}, redone": pl.policies.Backups(POLICIES[name], factor=1.0, floor=0.1)
    for name in (
        *("sync", "sync(4)", "k_sync(2)", "rennala(5)", "local_sgd", "deadline", "MinWorkers"),
        *("loose k-sync", "hedged", "ata(5)", "sync by speed", "tiles", "k_sync of tiles"),
        *("tiles that stay", "coded(1, 1)", "ringleader"),
    )
}
MAX_DELAY = {
    "sync": 0,
    "sync(4)": 0,
    "k_sync(2)": 0,
    "asynchronous(2)": 2,
    "rennala(5)": 0,
    "ringmaster(3)": 2,
    "ringmaster(2) without stops": 1,
    "loose k-sync": 1,
    "growing k": 0,
    "bandit(2)": 0,
    "hedged": 0,
    "ata(5)": 0,
    "asynchronous bandit": 3,
    "sync by speed": 0,
    "tiles": 0,
    "tiles that stay": 0,
    "late tiles": 2,
}


EXACT = (
    "bandit(2)",
    "hedged",
    "ata(5)",
    "ata, discounted",
    "bandit by speed",
)  # each step uses the batch


def test_a_lost_task_keeps_its_shares_though_they_have_a_sample_more() -> None:
    """Three shares of five had six of eight samples, and counted as four when they were redone."""
    moves = [Move("join", 0, 0.0), Move("join", 1, 0.0), Move("finish", 0, 0.5)]
    moves += [Move("finish", 1, 1.0), Move("join", 2, 0.5), Move("finish", 0, 0.0)]
    moves += [Move("finish", 0, 1.0), Move("finish", 0, 0.0), Move("leave", 0, 0.0)]
    moves += [Move("finish", 0, 0.0), Move("finish", 1, 0.0), Move("finish", 0, 0.0)]
    journal = History(tuple(moves)).play(POLICIES["ata(5)"]).journal
    redone = [task for _, _, tasks in steps_and_tasks(journal) for task in tasks.values()]
    assert any(task.attempt == 2 for task in redone)
    for _, step, tasks in steps_and_tasks(journal):
        assert sum(tasks[id].samples for id in step.weights) == 8


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(history=legal_histories())
def test_any_history(name: str, history: History) -> None:
    coordinator = history.play(POLICIES[name])  # raises PolicyError on an illegal command
    journal = coordinator.journal
    assert pl.protocol.replay(POLICIES[name], journal) == journal
    assert [parse_entry(dump_entry(entry)) for entry in journal] == list(journal)
    check_every_result_is_used_once(journal)
    known = MAX_DELAY.get(name.removesuffix(", redone"), inf)
    assert all(delay <= known for delay in delays(journal))
    if name in EXACT:
        for _, step, tasks in steps_and_tasks(journal):
            if any(task.attempt == MAX_ATTEMPTS for task in tasks.values()):
                break  # one may have been dropped, and what comes for it be smaller by one
            assert sum(tasks[id].samples for id in step.weights) == 8


def test_a_deadline_may_pass_with_nobody_there() -> None:
    moves = [("join", 0), ("join", 1), ("finish", 1), ("leave", 1), ("leave", 0)]
    history = History(tuple(Move(kind, which, 0.0) for kind, which in moves))  # type: ignore[arg-type]
    history.play(POLICIES["deadline of tiles"])


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(history=legal_histories())
def test_saved_halfway_it_goes_on_the_same(name: str, history: History) -> None:
    journal = history.play(POLICIES[name]).journal
    entries = list(journal)
    half = len(entries) // 2
    first = Coordinator(POLICIES[name], batch=8)
    for entry in entries[:half]:
        first.handle(entry.now, entry.event)
    second = Coordinator(POLICIES[name], batch=8)
    second.load(first.state())
    for entry in entries[half:]:
        second.handle(entry.now, entry.event)
    assert list(second.journal) == entries[half:]


def test_a_bandit_knows_that_a_drained_worker_is_gone_with_its_result() -> None:
    """It found too few workers in the round that this result began, unless it was restored."""
    joins = tuple(Move("join", which, 0.0) for which in range(6))
    done, late = Move("finish", 0, 0.0), Move("finish", 0, 1.0)
    history = History((*joins, done, done, Move("leave", 0, 0.0), Move("drain", 1, 0.0), late))
    entries = list(history.play(POLICIES["discounted"]).journal)
    assert [type(c).__name__ for c in entries[-1].commands] == [
        "Step", "Cancel", "Start", "Start", "Start", "Start", "Release",
    ]  # fmt: skip


def steps_and_tasks(journal: Journal) -> Iterator[tuple[Entry, Step, dict[int, Task]]]:
    tasks: dict[int, Task] = {}
    for entry in journal:
        for command in entry.commands:
            if isinstance(command, Start):
                tasks[command.task.id] = command.task
            elif isinstance(command, Step):
                yield entry, command, tasks


def check_every_result_is_used_once(journal: Journal) -> None:
    """A step that keeps its results lets later ones use them again."""
    gone: set[int] = set()
    for _, step, _ in steps_and_tasks(journal):
        assert gone.isdisjoint(step.weights)
        if not step.keep:
            gone.update(step.weights)


def delays(journal: Journal) -> list[int]:
    return [
        version - tasks[id].version
        for version, (_, step, tasks) in enumerate(steps_and_tasks(journal))
        for id in step.weights
    ]
