"""The speed of a worker whose tasks are cancelled is not known, only bounded."""

from __future__ import annotations

import pytest

import paceline as pl
from paceline.core.journal import Header, Journal
from paceline.core.protocol import Finished
from paceline.policies.wrappers import MinWorkers
from paceline.report.glance import rows_of
from paceline.report.html.collect import Record
from paceline.report.html.page import record_of
from paceline.report.html.sentences import slowest, three
from paceline.report.html.tables import workers_table

DELAYS = [pl.delays.Fixed(1.0)] * 3 + [pl.delays.Fixed(2.8)]
LEARNER = pl.learners.Quadratic((1.0,), batch_size=12)


def simulated(interruptible: bool) -> Record:
    engine = pl.Simulator(4, DELAYS, interruptible=interruptible)
    run = pl.Trainer(LEARNER, pl.k_sync(3), engine, progress=False).fit(steps=60)
    return record_of(run.journals)


def row(record: Record, worker: str) -> dict[str, str]:
    rows: list[dict[str, str]] = workers_table(record)["rows"]
    return next(each for each in rows if each["worker"] == worker)


def once_finished(first: float) -> Record:
    """Return a run whose first step has a result of w3; it is then cancelled 60 times after 1 s."""
    journal = Journal(Header(batch=12))
    coordinator = pl.protocol.Coordinator(MinWorkers(4, pl.k_sync(3)), 12, journal=journal)
    for i in range(4):
        coordinator.handle(0.0, pl.protocol.Joined(f"w{i}"))
    now = first
    for i in range(61):
        if i:
            now += 1.0
        running = {task.worker: id for id, task in coordinator.ledger.running.items()}
        for worker in ("w0", "w1", "w3" if not i else "w2"):
            coordinator.handle(now, Finished(running[worker], 4, now, {"loss": 1.0}))
    return record_of({"main": journal})


def test_without_any_result_only_a_bound_is_told() -> None:
    record = simulated(interruptible=True)
    assert record.workers["w3"].is_bound
    assert three(record)[1].endswith("w3 never finished a task (it takes at least 1.33 s).")
    assert row(record, "w3")["speed"] == "≤ 3"  # 4 samples in 1.33 s, as the others


def test_results_of_cancelled_tasks_tell_the_speed() -> None:
    """Where work cannot be interrupted its result comes late, with the seconds it took."""
    record = simulated(interruptible=False)
    found = slowest(record)
    assert found is not None and found[0] == "w3"
    assert found[2] == pytest.approx(1 / 2.8, rel=0.1)
    assert "w3 was the slowest" in three(record)[1]


def test_one_result_and_many_cancelled_tasks_are_no_reason_to_extrapolate() -> None:
    record = once_finished(2.8)
    found = slowest(record)
    assert found is not None and found[0] == "w3"
    assert found[2] == pytest.approx(1 / 2.8, rel=0.05)  # 2 % before
    price = record.waits.prices(sorted(record.workers, key=record.row), record.workers)["w3"]
    assert price.seconds == pytest.approx(60 * 1.8)  # 65 minutes before
    assert price.least
    assert row(record, "w3")["speed"].startswith("≤ ")
    assert "w3 was the slowest, with at most 1.429 samples a second, 37%" in three(record)[1]
    w3 = next(each for each in rows_of(record.workers, record.end) if each.cells["worker"] == "w3")
    assert w3.cells["speed"] == "≤1.4"
    assert w3.part == pytest.approx(1 / 2.8, rel=0.05)


def test_a_worker_that_became_slow_is_at_least_as_slow_as_it_was_seen() -> None:
    record = once_finished(0.5)
    w3, w0 = record.workers["w3"], record.workers["w0"]
    assert w3.is_bound
    assert w3.speed(record.end) == pytest.approx(w0.speed(record.end), rel=0.05)  # not 2 %
    assert "of w3’s tasks 98% were cancelled, the most of all, after up to 1 s" in three(record)[1]
