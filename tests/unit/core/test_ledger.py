"""The books: what may follow what, who is idle, what is lost, and where the data stream stands."""

from __future__ import annotations

from math import inf, nan

import pytest

from paceline.core.books import MAX_ATTEMPTS
from paceline.core.errors import PolicyError
from paceline.core.ledger import Ledger
from paceline.core.protocol import (
    Assign,
    Cancel,
    Command,
    Discard,
    Evaluated,
    Finished,
    Interrupted,
    Joined,
    Left,
    Peer,
    Received,
    Result,
    Send,
    SetTimer,
    Start,
    Step,
    Stepped,
    Stop,
    Task,
    TaskId,
    TimerFired,
    Work,
)
from paceline.core.schema import save_state
from paceline.testing import check_books


def books(*workers: str, batch: int = 8) -> Ledger:
    """Open the books with these workers present."""
    ledger = Ledger(batch)
    for worker in workers:
        assert ledger.record(0.0, Joined(worker))
    return ledger


def assign(ledger: Ledger, worker: str, work: Work = Work(), redo: TaskId | None = None) -> Task:
    command = ledger.apply(Assign(worker, work, redo))
    assert isinstance(command, Start)
    check_books(ledger)
    return command.task


def finish(ledger: Ledger, *tasks: Task, samples: int = 8) -> None:
    for task in tasks:
        assert ledger.record(ledger.now, Finished(task.id, samples))
        check_books(ledger)


# --- what is refused -----------------------------------------------------------------------------

REFUSED: list[tuple[Command, str]] = [
    (Assign("w9"), "no such worker; present are w0, w1"),
    (Assign("gone"), "no such worker; present are w0, w1"),
    (Assign("w0", redo=7), "no such task is lost or running"),
    (
        Assign("w0", redo=0),
        "a running task without parts can be redone, by a worker that has no task",
    ),
    (Assign("w0", Work(samples=0)), "a task needs at least one sample, step and share"),
    (Assign("w0", Work(samples=-1)), "a task needs at least one sample, step and share"),
    (Assign("w0", Work(steps=0)), "a task needs at least one sample, step and share"),
    (Cancel(1), "this task is not running"),
    (Cancel(9), "this task is not running"),
    (Discard(0), "no result of this task is held"),
    (Discard(9), "no result of this task is held"),
    (Step({}), "the step uses no result"),
    (Step({1: 0.5, 0: 0.25, 9: 0.25}), "results not held: [0, 9]"),
    (Step({2: 0.5, 1: 0.5}), "results without samples: [2]; discard them"),
    (Step({1: 1.0}, mix={"w0": 0.5, "w1": 0.5}), "no copy of the models of ['w1']"),
    (Step({1: nan}), "a weight is not finite"),
    (Step({1: -inf}), "a weight is not finite"),
    (SetTimer("late", 2.0), "the time is already 2"),
    (SetTimer("late", 1.0), "the time is already 2"),
    (Start(Task(5, "w0", Work(), 0, 0.0, 1, 0)), "only the ledger makes it; use Assign"),
]


@pytest.mark.parametrize(("command", "why"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_is_refused_and_changes_nothing(command: Command, why: str) -> None:
    ledger = books("w0", "w1", "gone")
    running = assign(ledger, "w0")
    held = assign(ledger, "w1")
    finish(ledger, held)
    empty = assign(ledger, "w1")
    finish(ledger, empty, samples=0)
    ledger.record(1.0, Left("gone"))
    ledger.record(2.0, Received("w0"))
    assert (running.id, held.id, empty.id) == (0, 1, 2)
    before = save_state(ledger)
    with pytest.raises(PolicyError) as refusal:
        ledger.apply(command)
    assert str(refusal.value) == f"{command} at t=2: {why}"
    assert save_state(ledger) == before


@pytest.mark.parametrize(
    ("count", "told"),
    [
        (0, "none"),
        (8, "w0, w1, w2, w3, w4, w5, w6, w7"),
        (9, "w0, w1, w2, w3, w4, w5, w6, w7, …"),
    ],
)
def test_of_many_workers_only_some_are_told(count: int, told: str) -> None:
    ledger = books(*(f"w{i}" for i in range(count)))
    with pytest.raises(PolicyError, match=f"present are {told}$"):
        ledger.apply(Assign("x"))


def test_time_does_not_go_back() -> None:
    ledger = books("w0")
    ledger.record(2.0, Stepped(1))
    ledger.record(2.0, Stepped(2))  # at the same time is well
    with pytest.raises(ValueError, match=r"time went backwards: Left\(worker='w0'\) at 1.5"):
        ledger.record(1.5, Left("w0"))


def test_nobody_joins_twice() -> None:
    ledger = books("w0")
    with pytest.raises(ValueError, match=r"w0 joined twice; report Left\('w0'\) in between"):
        ledger.record(1.0, Joined("w0"))
    ledger.record(1.0, Left("w0"))
    assert ledger.record(1.0, Joined("w0"))
    assert list(ledger.free) == ["w0"]


# --- what is news --------------------------------------------------------------------------------


def test_a_late_result_is_no_news() -> None:
    ledger = books("w0", "w1")
    cancelled, lost = assign(ledger, "w0"), assign(ledger, "w1")
    ledger.apply(Cancel(cancelled.id))
    ledger.record(1.0, Left("w1"))
    done = assign(ledger, "w0")
    finish(ledger, done)
    before = save_state(ledger)
    for id in (cancelled.id, lost.id, done.id, 99):
        assert not ledger.record(1.0, Finished(id, 8))
    assert save_state(ledger) == before


def test_the_departure_of_a_stranger_is_no_news() -> None:
    ledger = books("w0")
    assert not ledger.record(1.0, Left("w9"))
    assert ledger.record(1.0, Left("w0"))
    assert not ledger.record(1.0, Left("w0"))


def test_steps_interruptions_and_copies_are_news() -> None:
    ledger = books("w0")
    assert ledger.record(0.0, Stepped(1))
    assert ledger.record(0.0, Interrupted("enough"))
    assert ledger.record(0.0, Received("w7"))
    assert list(ledger.copies) == ["w7"]
    assert not ledger.record(0.0, Evaluated(1, {"loss": 0.5}))
    assert ledger.stopped is None  # the coordinator stops, not the books


# --- tasks and results ---------------------------------------------------------------------------


def test_a_task_is_stamped() -> None:
    ledger = books("w0", "w1")
    finish(ledger, assign(ledger, "w0"))
    ledger.apply(Step({0: 1.0}))
    ledger.record(3.0, Stepped(1))
    work = Work(samples=5, steps=2, budget=9.0, tag=("row", 1))
    task = assign(ledger, "w1", work)
    assert task == Task(1, "w1", work, version=1, since=3.0, samples=5, offset=8, attempt=1)
    assert ledger.running == {1: task}


def test_a_result_is_held_with_what_was_told_of_it() -> None:
    ledger = books("w0")
    task = assign(ledger, "w0")
    ledger.record(4.0, Finished(task.id, 6, 1.5, {"loss": 2.0}))
    assert ledger.held == {0: Result(task, 4.0, 6, 1.5, {"loss": 2.0})}
    assert not ledger.running


def test_the_draws_are_consecutive() -> None:
    ledger = books("w0", "w1", batch=8)
    works = [Work(), Work(samples=3), Work(samples=3, steps=4), Work(steps=2), Work(samples=1)]
    draws = [assign(ledger, "w0", work).offset for work in works]
    assert draws == [0, 8, 11, 23, 39]
    assert assign(ledger, "w1").offset == 40


def test_a_part_is_drawn_from_alike_by_all_at_one_version() -> None:
    """Seven samples in three parts: 2 + 2 + 3, from where the version's batch begins."""
    ledger = books("w0", "w1")
    work = Work(parts={2: 1.0, 0: (0.5, 1.0)}, n_parts=3, samples=7)
    first = [assign(ledger, worker, work) for worker in ("w0", "w1")]
    assert [task.offset for task in first] == [0, 0]
    assert [first[0].part(index) for index in range(3)] == [(0, 2), (2, 2), (4, 3)]
    assert first[0].computed == 2 + 3
    finish(ledger, *first)
    ledger.apply(Step({0: 1.0, 1: (0.5, 0.5)}))
    assert ledger.samples == 2 + 3  # those of a part that two have computed count once
    assert assign(ledger, "w0", work).offset == 8
    assert assign(ledger, "w0").offset == 0  # the shared stream has not moved


def test_a_step_uses_results_once_and_counts_their_samples() -> None:
    ledger = books("w0", "w1")
    tasks = [assign(ledger, "w0"), assign(ledger, "w1")]
    finish(ledger, *tasks, samples=5)
    step = Step({0: 0.5})
    assert ledger.apply(step) == step
    assert (ledger.version, ledger.samples, list(ledger.held)) == (1, 5, [1])
    with pytest.raises(PolicyError, match=r"results not held: \[0\]"):
        ledger.apply(step)


def test_a_step_may_keep_its_results() -> None:
    ledger = books("w0", "w1")
    tasks = [assign(ledger, "w0"), assign(ledger, "w1")]
    finish(ledger, *tasks, samples=5)
    ledger.apply(Step({0: 0.5, 1: 0.5}, keep=True))
    assert list(ledger.held) == [0, 1]
    assert not ledger.free
    assert ledger.samples == 0
    ledger.apply(Step({0: 1.0}))
    assert (ledger.version, ledger.samples, list(ledger.held)) == (2, 5, [1])  # each counts once
    assert list(ledger.free) == ["w0"]


def test_a_step_may_be_a_mixture_alone() -> None:
    ledger = peer("w0", "w1")
    ledger.apply(Step({}, mix={"w1": 0.5, "w0": -0.25}))
    assert (ledger.version, ledger.samples) == (1, 0)


def peer(name: str, *neighbors: str) -> Ledger:
    ledger = Ledger(peer=Peer(name, neighbors, (2, 3)))
    ledger.record(0.0, Joined(name))
    return ledger


def test_a_peer_begins_with_copies_of_its_neighbors_and_of_itself() -> None:
    ledger = peer("w0", "w1", "w5")
    assert (ledger.node, ledger.tensors) == ("w0", (2, 3))
    assert ledger.copies == {"w0": 0, "w1": 0, "w5": 0}
    assert ledger.record(1.0, Received("w5", 7)) and ledger.copies["w5"] == 7
    with pytest.raises(PolicyError, match=r"no copy of the models of \['w2'\]"):
        ledger.apply(Step({}, mix={"w2": 0.5}))
    with pytest.raises(PolicyError, match="weight of a copy is not finite"):
        ledger.apply(Step({}, mix={"w1": float("inf")}))


def test_peers_come_and_go_without_being_workers() -> None:
    ledger = peer("w0", "w1")
    assert ledger.record(1.0, Left("w1")) and ledger.record(1.0, Left("w7"))
    assert list(ledger.workers) == ["w0"] and ledger.copies == {"w0": 0}
    assert ledger.record(2.0, Joined("w1")) and list(ledger.workers) == ["w0"]
    assert ledger.record(3.0, Left("w0")) and not ledger.workers


def test_a_message_moves_the_copy_that_others_have() -> None:
    ledger = peer("w0", "w1")
    ledger.apply(Step({}, mix={"w1": 0.5}))
    assert ledger.apply(Send(("w1",), (0,))) == Send(("w1",), (0,))
    assert ledger.copies == {"w0": 1, "w1": 0}
    for wrong in (Send(("w0",)), Send(())):
        with pytest.raises(
            PolicyError, match="only a node of a decentralized run sends, and only to other nodes"
        ):
            ledger.apply(wrong)
    with pytest.raises(PolicyError, match="only a node of a decentralized run sends"):
        books("w0").apply(Send(("w1",)))


def test_delays_count_versions() -> None:
    ledger = books("w0", "w1")
    old = assign(ledger, "w0")
    for _ in range(3):
        task = assign(ledger, "w1")
        finish(ledger, task)
        ledger.apply(Step({task.id: 1.0}))
    assert ledger.staleness(old) == 3
    finish(ledger, old)
    assert ledger.staleness(ledger.held[old.id]) == 3
    assert ledger.staleness(assign(ledger, "w1")) == 0


def test_outstanding_counts_what_is_young_enough() -> None:
    ledger = books("w0", "w1")
    tasks = []
    for count in (3, 1, 2):  # tasks begun at versions 0, 1, 2
        tasks.append([assign(ledger, "w0") for _ in range(count)])
        task = assign(ledger, "w1")
        finish(ledger, task)
        ledger.apply(Step({task.id: 1.0}))
    assert [ledger.outstanding(delay) for delay in (0, 1, 2, 3, inf)] == [0, 2, 3, 6, 6]
    ledger.apply(Cancel(tasks[0][0].id))
    finish(ledger, tasks[1][0])
    assert [ledger.outstanding(delay) for delay in (0, 1, 2, 3, inf)] == [0, 2, 2, 4, 4]


# --- who is idle ---------------------------------------------------------------------------------


def test_the_longest_idle_comes_first() -> None:
    ledger = books("w0", "w1", "w2")
    assert list(ledger.idle) == list(ledger.free) == ["w0", "w1", "w2"]
    task = assign(ledger, "w0")
    assert list(ledger.idle) == list(ledger.free) == ["w1", "w2"]
    finish(ledger, task)
    assert list(ledger.idle) == ["w1", "w2", "w0"]
    assert list(ledger.free) == ["w1", "w2"]  # of w0 a result is held
    ledger.apply(Cancel(assign(ledger, "w1").id))
    assert list(ledger.idle) == ["w2", "w0", "w1"]
    assert list(ledger.free) == ["w2", "w1"]
    ledger.apply(Discard(task.id))
    assert list(ledger.idle) == ["w2", "w0", "w1"]
    assert list(ledger.free) == ["w2", "w1", "w0"]


def test_idle_is_who_has_no_task_left() -> None:
    ledger = books("w0")
    first, second = assign(ledger, "w0"), assign(ledger, "w0")
    finish(ledger, first)
    assert not ledger.idle
    finish(ledger, second)
    assert list(ledger.idle) == ["w0"]
    ledger.apply(Discard(first.id))
    assert not ledger.free
    ledger.apply(Step({second.id: 1.0}))
    assert list(ledger.free) == ["w0"]


def test_a_result_outlives_its_worker() -> None:
    ledger = books("w0", "w1")
    task = assign(ledger, "w0")
    finish(ledger, task)
    ledger.record(1.0, Left("w0"))
    check_books(ledger)
    assert list(ledger.held) == [task.id]
    assert not ledger.lost
    ledger.record(2.0, Joined("w0"))
    assert list(ledger.idle) == ["w1", "w0"]
    assert list(ledger.free) == ["w1"]
    ledger.apply(Step({task.id: 1.0}))
    check_books(ledger)
    assert list(ledger.free) == ["w1", "w0"]


def test_the_result_of_one_who_stayed_away_is_used_without_calling_him_back() -> None:
    ledger = books("w0", "w1")
    task = assign(ledger, "w0")
    finish(ledger, task)
    ledger.record(1.0, Left("w0"))
    ledger.apply(Step({task.id: 1.0}))
    check_books(ledger)
    assert list(ledger.workers) == list(ledger.idle) == list(ledger.free) == ["w1"]


# --- tiles ---------------------------------------------------------------------------------------


def test_each_tile_has_a_stream_of_its_own() -> None:
    ledger = books("w0", "w1")
    first = assign(ledger, "w0", Work(tiles={3: 2, 5: 4}, steps=2))
    assert (first.samples, first.tile_offsets) == (6, (0, 0))
    assert list(first.stretches()) == [(3, 0, 4), (5, 0, 8)]
    second = assign(ledger, "w1", Work(tiles={5: 1, 4: 1}))
    assert second.tile_offsets == (8, 0)
    assert assign(ledger, "w1").offset == 0  # the stream of all data is another


def test_unused_samples_of_a_tile_are_drawn_again() -> None:
    ledger = books("w0", "w1")
    cancelled = assign(ledger, "w0", Work(tiles={0: 4}))
    ledger.apply(Cancel(cancelled.id))
    discarded = assign(ledger, "w0", Work(tiles={0: 3}))
    assert discarded.tile_offsets == (0,)
    ledger.record(1.0, Finished(discarded.id, 3))
    ledger.apply(Discard(discarded.id))
    overtaken, last = (assign(ledger, "w0", Work(tiles={0: 2})) for _ in range(2))
    assert (overtaken.tile_offsets, last.tile_offsets) == ((0,), (2,))
    ledger.apply(Cancel(overtaken.id))  # behind it others have been drawn: it is done again
    assert assign(ledger, "w0", Work(tiles={0: 1})).tile_offsets == (4,)
    again = assign(ledger, "w1", redo=overtaken.id)
    assert (again.tile_offsets, again.attempt) == ((0,), 1)


def test_samples_that_were_not_computed_in_time_are_drawn_again() -> None:
    ledger = books("w0", "w1")
    half = assign(ledger, "w0", Work(tiles={0: 4, 1: 8}, budget=1.0))
    assert half.drawn(6) == {0: 2, 1: 4} and half.drawn(0) == {0: 0, 1: 0}
    ledger.record(1.0, Finished(half.id, 6))
    rest = assign(ledger, "w0", Work(tiles={0: 4, 1: 8}))
    assert rest.tile_offsets == (2, 4)
    ledger.record(1.0, Finished(rest.id, 0))
    ledger.apply(Discard(rest.id))
    assert not ledger.lost
    ledger.apply(Discard(half.id))  # nothing was drawn behind it
    assert assign(ledger, "w0", Work(tiles={0: 1, 1: 1})).tile_offsets == (0, 0)


def test_a_tiles_samples_that_are_lost_are_done_again() -> None:
    ledger = books("w0", "w1")
    assign(ledger, "w0", Work(tiles={0: 4}))
    lost = assign(ledger, "w0", Work(tiles={0: 4, 1: 2}))
    ledger.record(1.0, Left("w0"))
    again = assign(ledger, "w1", redo=lost.id)
    assert (again.tile_offsets, again.work.tiles, again.samples) == ((4, 0), {0: 4, 1: 2}, 6)


@pytest.mark.parametrize("work", [Work(tiles={}), Work(tiles={0: 0}), Work({0: 1.0}, tiles={0: 1})])
def test_a_tile_gives_samples_and_no_parts(work: Work) -> None:
    with pytest.raises(PolicyError, match="each data shard in tiles= needs at least one sample"):
        books("w0").apply(Assign("w0", work))


# --- what is lost --------------------------------------------------------------------------------


def test_what_was_lost_with_a_worker_is_done_again_on_the_same_samples() -> None:
    ledger = books("w0", "w1", "w2")
    work = Work(samples=3, steps=2, tag="mine")
    lost = [assign(ledger, "w0", work), assign(ledger, "w0")]
    other = assign(ledger, "w1")
    ledger.record(1.0, Left("w0"))
    check_books(ledger)
    assert list(ledger.workers) == ["w1", "w2"]
    assert dict(ledger.lost) == {task.id: task for task in lost}
    finish(ledger, other)
    ledger.apply(Step({other.id: 1.0}))
    ledger.record(2.0, Stepped(1))
    again = assign(ledger, "w2", Work(samples=99), redo=lost[0].id)
    assert again == Task(3, "w2", work, version=1, since=2.0, samples=3, offset=0, attempt=2)
    assert list(ledger.lost) == [lost[1].id]
    assert assign(ledger, "w1").offset == 3 * 2 + 8 + 8  # a redo draws nothing new
    with pytest.raises(PolicyError, match="no such task is lost"):
        ledger.apply(Assign("w1", redo=lost[0].id))


def test_a_task_that_takes_too_many_workers_with_it_is_dropped() -> None:
    ledger = books(*(f"w{i}" for i in range(MAX_ATTEMPTS + 1)))
    task = assign(ledger, "w0")
    for attempt in range(1, MAX_ATTEMPTS):
        ledger.record(float(attempt), Left(task.worker))
        assert list(ledger.lost) == [task.id]
        task = assign(ledger, f"w{attempt}", redo=task.id)
        assert (task.attempt, task.offset) == (attempt + 1, 0)
    ledger.record(9.0, Left(task.worker))
    check_books(ledger)
    assert not ledger.lost
    assert not ledger.running


def test_abandon_counts_all_unused_work_as_lost() -> None:
    ledger = books("w0", "w1", "w2", "w3")
    gone = assign(ledger, "w3")
    tasks = [assign(ledger, worker) for worker in ("w0", "w1", "w0", "w2")]
    finish(ledger, tasks[3], tasks[1])
    ledger.apply(Step({tasks[3].id: 1.0}))
    ledger.apply(SetTimer("t", 9.0))
    ledger.record(1.0, Received("w1"))
    ledger.record(2.0, Left("w3"))
    ledger.abandon()
    check_books(ledger)
    assert list(ledger.lost) == [gone.id, tasks[0].id, tasks[1].id, tasks[2].id]
    for book in (ledger.workers, ledger.idle, ledger.free, ledger.running, ledger.held):
        assert not book
    assert not ledger.timers
    assert not ledger.copies
    assert (ledger.now, ledger.version, ledger.samples) == (2.0, 1, 8)
    ledger.record(2.0, Joined("w1"))
    assert list(ledger.free) == ["w1"]  # what it had delivered is forgotten
    assert assign(ledger, "w1", redo=tasks[1].id).offset == tasks[1].offset
    fresh = assign(ledger, "w1")
    assert (fresh.id, fresh.offset) == (6, 5 * 8)
    assert ledger.outstanding(0) == 2


def test_to_be_abandoned_is_not_a_failed_attempt() -> None:
    ledger = books("w0")
    task = assign(ledger, "w0")
    for _ in range(2 * MAX_ATTEMPTS):
        ledger.abandon()
        ledger.record(0.0, Joined("w0"))
        task = assign(ledger, "w0", redo=task.id)
        assert (task.offset, task.attempt) == (0, 1)


# --- timers --------------------------------------------------------------------------------------


def test_a_timer_fires_once_and_not_early() -> None:
    ledger = books()
    ledger.apply(SetTimer("a", 2.0))
    ledger.apply(SetTimer("b", 3.0))
    assert not ledger.record(1.9, TimerFired("a"))
    assert ledger.record(2.0, TimerFired("a"))
    assert ledger.timers == {"b": 3.0}
    assert not ledger.record(2.0, TimerFired("a"))
    assert not ledger.record(2.0, TimerFired("never set"))
    assert ledger.record(3.5, TimerFired("b"))


def test_a_timer_is_moved_and_cleared() -> None:
    ledger = books()
    ledger.apply(SetTimer("later", 2.0))
    ledger.apply(SetTimer("later", 5.0))
    ledger.apply(SetTimer("earlier", 4.0))
    ledger.apply(SetTimer("earlier", 1.0))
    ledger.apply(SetTimer("cleared", 3.0))
    ledger.apply(SetTimer("cleared", inf))
    ledger.apply(SetTimer("never set", inf))
    assert ledger.timers == {"later": 5.0, "earlier": 1.0}
    fired = [(1.0, "earlier"), (2.0, "later"), (3.0, "cleared"), (4.0, "earlier"), (5.0, "later")]
    news = [bool(ledger.record(at, TimerFired(name))) for at, name in fired]
    assert news == [True, False, False, False, True]


def test_a_stop_has_its_reason() -> None:
    ledger = books()
    assert ledger.stopped is None
    ledger.apply(Stop("done"))
    assert ledger.stopped == "done"
