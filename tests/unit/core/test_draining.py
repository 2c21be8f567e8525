"""Workers that will be taken away: they finish their tasks, get no other, and leave."""

from __future__ import annotations

import pytest

import paceline as pl
from paceline.core.coordinator import Coordinator
from paceline.core.errors import PolicyError
from paceline.core.ledger import Ledger
from paceline.core.protocol import (
    Cancel,
    Command,
    Draining,
    Finished,
    Joined,
    Left,
    Release,
    Start,
    Step,
)
from paceline.core.schema import save_state
from tests.unit.core.test_ledger import assign, books


def test_an_idle_worker_leaves_at_once() -> None:
    ledger = books("w0", "w1")
    assert ledger.record(1.0, Draining("w0")) == (Release("w0"), Left("w0"))
    assert list(ledger.workers) == list(ledger.free) == ["w1"]
    assert ledger.record(2.0, Left("w0")) == ()  # its node is gone: that is known
    assert ledger.record(3.0, Joined("w0")) == (Joined("w0"),)
    assert "w0" in ledger.free


def test_a_busy_worker_leaves_with_the_result_of_its_task() -> None:
    ledger = books("w0", "w1")
    task = assign(ledger, "w0")
    assert ledger.record(1.0, Draining("w0")) == ()
    done = Finished(task.id, task.samples)
    assert ledger.record(2.0, done) == (done, Release("w0"), Left("w0"))
    assert list(ledger.held) == [task.id] and not ledger.lost


def test_one_that_is_lost_on_the_way_loses_its_task() -> None:
    ledger = books("w0", "w1")
    task = assign(ledger, "w0")
    ledger.record(1.0, Draining("w0"))
    assert ledger.record(2.0, Left("w0")) == (Left("w0"),)
    assert list(ledger.lost) == [task.id] and not ledger.draining
    ledger.record(3.0, Joined("w0"))
    assert "w0" in ledger.idle


def test_a_cancelled_task_frees_no_worker_that_drains() -> None:
    ledger = books("w0", "w1")
    task = assign(ledger, "w0")
    ledger.record(1.0, Draining("w0"))
    ledger.apply(Cancel(task.id))
    assert list(ledger.idle) == ["w1"]
    other = assign(ledger, "w1")
    done = Finished(other.id, other.samples)
    assert ledger.record(2.0, done) == (done, Release("w0"), Left("w0"))


def test_draining_survives_saving() -> None:
    ledger, again = books("w0", "w1"), Ledger()
    task = assign(ledger, "w0")
    ledger.record(1.0, Draining("w0"))
    again.restore(save_state(ledger))
    done = Finished(task.id, task.samples)
    assert again.record(2.0, done) == (done, Release("w0"), Left("w0"))


def test_only_the_ledger_lets_workers_go() -> None:
    with pytest.raises(PolicyError, match="only the ledger makes it"):
        books("w0").apply(Release("w0"))


def test_sync_goes_on_without_it_and_redoes_nothing() -> None:
    coordinator = Coordinator(pl.policies.MinWorkers(3, pl.sync()), batch=6)
    started: list[Command] = []
    for worker in ("w0", "w1", "w2"):
        started += coordinator.handle(0.0, Joined(worker)).commands
    tasks = [command.task for command in started if isinstance(command, Start)]
    assert coordinator.handle(1.0, Draining("w2")).commands == ()
    last: tuple[object, ...] = ()
    for task in reversed(tasks):  # that of w2 is the first
        last = coordinator.handle(2.0, Finished(task.id, task.samples)).commands
    assert sum(isinstance(command, Step) for command in last) == 1
    new = [command.task for command in last if isinstance(command, Start)]
    assert [(task.worker, task.samples, task.attempt) for task in new] == [
        ("w0", 3, 1),
        ("w1", 3, 1),
    ]
