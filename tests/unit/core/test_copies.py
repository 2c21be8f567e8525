"""Overdue tasks that are redone: the first result counts, and each sample once."""

from __future__ import annotations

import pytest

from paceline.core.coordinator import Coordinator
from paceline.core.errors import PolicyError
from paceline.core.ledger import Ledger
from paceline.core.policy import Policy
from paceline.core.protocol import (
    Assign,
    Cancel,
    Discard,
    Event,
    Finished,
    Joined,
    Left,
    Start,
    Step,
    Task,
    Work,
)
from paceline.core.schema import save_state
from tests.unit.core.test_ledger import assign, books, finish


def redo(ledger: Ledger, worker: str, task: Task) -> Task:
    started = ledger.apply(Assign(worker, redo=task.id))
    assert isinstance(started, Start)
    return started.task


def test_a_copy_computes_the_same_samples_and_counts_once() -> None:
    ledger = books("w0", "w1", "w2")
    first = assign(ledger, "w0", Work(samples=6, shares=2))
    other = assign(ledger, "w2", Work(samples=3))
    copy = redo(ledger, "w1", first)
    assert (copy.offset, copy.samples, copy.work, copy.attempt) == (0, 6, first.work, 1)
    assert copy.copy_of == first.id
    assert ledger.outstanding(0) == 3  # two shares of the first, one of the other
    assert ledger.next_offset == other.offset + 3


def test_the_worker_of_an_overtaken_task_is_away_until_it_answers() -> None:
    ledger = books("w0", "w1")
    first = assign(ledger, "w0")
    copy = redo(ledger, "w1", first)
    assert ledger.record(1.0, Finished(copy.id, copy.samples)) == (
        Finished(copy.id, copy.samples),
        Left("w0"),
    )
    assert list(ledger.workers) == ["w1"] and not ledger.running and not ledger.lost
    assert list(ledger.held) == [copy.id]
    assert ledger.record(2.0, Finished(first.id, first.samples)) == (Joined("w0"),)
    assert list(ledger.held) == [copy.id] and "w0" in ledger.free


def test_a_copy_is_cancelled_if_the_first_answers() -> None:
    ledger = books("w0", "w1")
    first = assign(ledger, "w0")
    copy = redo(ledger, "w1", first)
    done = Finished(first.id, first.samples)
    assert ledger.record(1.0, done) == (Cancel(copy.id), done)
    assert "w1" in ledger.free and not ledger.late
    assert ledger.record(2.0, Finished(copy.id, copy.samples)) == ()


def test_a_copy_of_a_copy_leaves_two_workers_behind() -> None:
    ledger = books("w0", "w1", "w2")
    first = assign(ledger, "w0")
    second = redo(ledger, "w1", first)
    third = redo(ledger, "w2", second)
    assert ledger.outstanding(0) == 1
    done = Finished(third.id, third.samples)
    assert ledger.record(1.0, done) == (done, Left("w0"), Left("w1"))
    assert list(ledger.workers) == ["w2"]


def test_a_task_is_lost_with_the_last_of_its_workers() -> None:
    ledger = books("w0", "w1")
    first = assign(ledger, "w0")
    copy = redo(ledger, "w1", first)
    ledger.record(1.0, Left("w0"))
    assert not ledger.lost and ledger.outstanding(0) == 1
    ledger.record(1.0, Left("w1"))
    assert list(ledger.lost) == [copy.id]


def test_an_overtaken_worker_may_leave_and_join() -> None:
    ledger = books("w0", "w1")
    first = assign(ledger, "w0")
    finish(ledger, redo(ledger, "w1", first))
    with pytest.raises(ValueError, match="w0 joined twice"):
        ledger.record(1.0, Joined("w0"))
    assert ledger.record(1.0, Left("w0")) == ()  # the policy knows
    assert ledger.record(2.0, Joined("w0")) == (Joined("w0"),)
    assert ledger.record(3.0, Finished(first.id, first.samples)) == ()
    assert "w0" in ledger.free and not ledger.late


def test_a_result_without_samples_overtakes_no_task() -> None:
    ledger = books("w0", "w1")
    first = assign(ledger, "w0", Work(tiles={0: 4}))
    copy = redo(ledger, "w1", first)
    finish(ledger, copy, samples=0)
    assert list(ledger.running) == [first.id]
    assert assign(ledger, "w1", Work(tiles={0: 4})).tile_offsets == (4,)


def test_samples_return_to_their_shard_with_the_last_task_on_them() -> None:
    ledger = books("w0", "w1", "w2")
    first = assign(ledger, "w0", Work(tiles={0: 4}))
    copy = redo(ledger, "w1", first)
    ledger.apply(Cancel(first.id))
    assert assign(ledger, "w2", Work(tiles={0: 4})).tile_offsets == (4,)
    ledger.apply(Cancel(copy.id))
    assert list(ledger.lost) == [copy.id]  # later samples are drawn already


def test_after_a_restart_each_task_is_redone_once() -> None:
    ledger = books("w0", "w1", "w2")
    first, other = assign(ledger, "w0"), assign(ledger, "w2")
    redo(ledger, "w1", first)
    ledger.abandon()
    assert sorted(ledger.lost) == [first.id, other.id]


def test_copies_survive_saving() -> None:
    ledger = books("w0", "w1", "w2", "w3")
    first, second = assign(ledger, "w0"), assign(ledger, "w2")
    copy = redo(ledger, "w1", first)
    finish(ledger, redo(ledger, "w3", second))
    again = Ledger()
    again.restore(save_state(ledger))
    assert save_state(again) == save_state(ledger)
    assert again.outstanding(0) == 1
    done = Finished(copy.id, copy.samples)
    assert again.record(1.0, done) == (done, Left("w0"))
    assert again.record(1.0, Finished(second.id, 1)) == (Joined("w2"),)


def test_tasks_of_codes_and_busy_workers_are_refused() -> None:
    ledger = books("w0", "w1", "w2")
    coded = assign(ledger, "w0", Work(parts={0: 1.0}, n_parts=2))
    plain = assign(ledger, "w1")
    for worker, task in (("w2", coded), ("w1", plain)):
        with pytest.raises(PolicyError, match="a running task without parts"):
            ledger.apply(Assign(worker, redo=task.id))


class Repeats(Policy):
    """Has w1 redo the task of w0, and steps with each result."""

    def react(self, view, event: Event):  # type: ignore[no-untyped-def]
        self.seen = [*getattr(self, "seen", []), event]
        if isinstance(event, Finished):
            yield Step({event.task: 1.0})
        elif event == Joined("w1"):
            yield Assign("w1", redo=0)
        elif event == Joined("w0") and not view.version:
            yield Assign("w0", Work(samples=1))


def test_the_policy_is_told_and_the_engine_drops_the_late_result() -> None:
    coordinator = Coordinator(Repeats())
    for event in (Joined("w0"), Joined("w1")):
        coordinator.handle(0.0, event)
    assert coordinator.handle(1.0, Finished(1, 1)).commands == (Step({1: 1.0}),)
    assert coordinator.handle(2.0, Finished(0, 1)).commands == (Discard(0),)
    policy = coordinator.policy
    assert isinstance(policy, Repeats)
    assert policy.seen[2:] == [Finished(1, 1), Left("w0"), Joined("w0")]
    assert coordinator.ledger.samples == 1
