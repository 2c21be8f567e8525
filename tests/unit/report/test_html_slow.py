"""Who was waited for, and when each did what, on cases made by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline as pl
from paceline.core.journal import Header, Journal, read_entries, read_header
from paceline.core.protocol import Finished
from paceline.policies.wrappers import MinWorkers
from paceline.report.html.collect import Record, collected
from paceline.report.html.page import page, record_of
from paceline.report.html.slow import Price, Waits
from paceline.report.html.timeline import COUNT, EXACT, Bins, Timeline
from paceline.report.workers import Tally


def told(policy: pl.protocol.Policy, workers: int, results: list[tuple[float, str]]) -> Record:
    """Let all join at once, and then finish what they have in the order given."""
    journal = Journal(Header(batch=6))
    coordinator = pl.protocol.Coordinator(MinWorkers(workers, policy), 6, journal=journal)
    for i in range(workers):
        coordinator.handle(0.0, pl.protocol.Joined(f"w{i}"))
    for now, worker in results:
        name, _, late = worker.partition(" ")
        (task,) = (id for id, t in coordinator.ledger.running.items() if t.worker == name)
        waited = float(late or 0)
        coordinator.handle(now, Finished(task, 2, stats={"loss": 1.0}, waited=waited))
    return record_of({"main": journal})


def test_the_last_result_of_a_step_was_waited_for() -> None:
    results = [(1.0, "w0"), (2.0, "w1"), (6.0, "w2"), (7.0, "w2"), (7.25, "w1"), (7.75, "w0")]
    record = told(pl.sync(), 3, results)
    assert not record.is_asynchronous and record.waits.steps == 2
    waited = {name: record.waits.waited(record.row(name)) for name in record.workers}
    assert waited == {"w0": (0.5, 1), "w1": (0.0, 0), "w2": (4.0, 1)}
    assert record.steps_used == {"w0": 2, "w1": 2, "w2": 2}


def test_a_result_counts_from_when_it_arrived_not_when_it_was_looked_at() -> None:
    record = told(pl.sync(), 2, [(1.0, "w0"), (6.0, "w1 3.0")])
    assert record.waits.waited(record.row("w1")) == (2.0, 1)


def test_what_waiting_for_cancelled_tasks_would_have_added() -> None:
    # Step 1 at 2 s cancels w2 after 2 s of work. Step 2 at 12 s uses w2, which took 10 s, and
    # cancels w1 after 10 s. Step 3 at 14 s cancels w2 after 2 s.
    results = [(1.0, "w0"), (2.0, "w1"), (3.0, "w0"), (12.0, "w2"), (13.0, "w0"), (14.0, "w1")]
    record = told(pl.k_sync(2), 3, results)
    names = sorted(record.workers, key=record.row)
    prices = record.waits.prices(names, record.workers)
    # w2 finished a task in 10 s: twice it would have needed 8 s more, or longer, since most of its
    # tasks were cancelled. w1 finished two in 2 s each, and had 10 s for the other.
    assert prices == {"w2": Price(16.0, True, 2), "w1": Price(0.0, False, 1)}
    assert record.waits.waited(record.row("w2")) == (9.0, 1)


def test_of_who_never_finished_only_a_bound_is_known() -> None:
    waits = Waits()
    waits.cancelled(np.array([0, 0, 0]), np.array([3.0, 5.0, 1.0]))
    assert waits.prices(["w0"], {"w0": Tally()}) == {"w0": Price(6.0, True, 3)}
    assert Waits().prices(["w0"], {"w0": Tally()}) == {}


def test_a_few_lucky_tasks_give_no_more_than_a_bound() -> None:
    quick = pl.delays.Fixed(0.1)
    slow = pl.delays.Mixture((quick, pl.delays.Fixed(100.0)), (0.1, 0.9))
    engine = pl.Simulator(3, [pl.delays.Fixed(0.1), pl.delays.Fixed(0.12), slow])
    learner = pl.learners.Quadratic((1.0,), batch_size=6)
    run = pl.Trainer(learner, pl.k_sync(2), engine, progress=False).fit(steps=100)
    record, w2 = record_of(run.journals), run.meter.workers["w2"]
    price = record.waits.prices(sorted(record.workers, key=record.row), record.workers)["w2"]
    assert w2.finished and price.least and price.tasks == w2.cancelled > w2.finished
    assert w2.is_bound and price.seconds <= 100.0 * w2.cancelled


def golden(name: str) -> Record:
    path = Path(__file__).parents[2] / "golden" / f"{name}.jsonl"
    return collected({"main": read_header(path)}, {"main": read_entries(path)})


def test_who_is_done_and_goes_on_waits_for_nobody() -> None:
    record = golden("rennala")
    assert record.is_refilling and not record.is_asynchronous
    text = page(record)
    assert "a worker that is done gets another task of the same step" in text
    assert "waited for it" not in text and "waiting for<br>" not in text
    for name in ("sync", "k_sync", "deadline", "k_sync_of_tiles", "sync_of_n"):
        assert not golden(name).is_refilling, name


def test_steps_of_which_a_worker_has_several_results_are_refilled() -> None:
    waits = Waits()
    waits.used(
        np.array([0, 1, 0, 0, 1, 0, 1]),
        np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]),
        np.array([1, 1, 1, 2, 2, 3, 4]),
    )
    assert (waits.steps, waits.several, waits.refilled) == (4, 2, 1)
    assert waits.is_refilling(0.1) and not waits.is_refilling(0.5)
    once = Waits()
    once.used(np.array([0, 1]), np.array([1.0, 2.0]), np.array([1, 1]))
    assert not once.is_refilling(0.1) and once.is_refilling(0.0)
    assert not Waits().is_refilling(0.0)  # steps of one result: k_sync(1) cancels the others


def test_results_that_came_at_once_were_not_waited_for() -> None:
    waits = Waits()
    waits.used(np.array([0, 1, 0, 1]), np.array([1.0, 1.0, 2.0, 3.0]), np.array([1, 1, 2, 2]))
    assert waits.waited(0) == (0.0, 0) and waits.waited(1) == (1.0, 1)
    record = golden("deadline")
    assert record.waits.waited(record.row("w1")) == (0.0, 0)


def test_steps_of_one_result_wait_for_nobody() -> None:
    waits = Waits()
    waits.used(np.array([0, 1, 1]), np.array([1.0, 5.0, 9.0]), np.array([1, 2, 3]))
    assert waits.steps == 3 and waits.waited(1) == (0.0, 0)


def test_asynchronous_runs_wait_for_nobody() -> None:
    engine = pl.Simulator(3, [pl.delays.Fixed(1.0), pl.delays.Fixed(1.3), pl.delays.Fixed(5.0)])
    learner = pl.learners.Quadratic((1.0,), batch_size=6)
    run = pl.Trainer(learner, pl.k_async(2), engine, progress=False).fit(steps=20)
    assert record_of(run.journals).is_asynchronous


def test_shares_of_steps_are_exact_however_many_results_a_worker_gave() -> None:
    engine = pl.Simulator(3, [pl.delays.Fixed(1.0), pl.delays.Fixed(1.3), pl.delays.Fixed(5.0)])
    learner = pl.learners.Quadratic((1.0,), batch_size=6)
    run = pl.Trainer(learner, pl.rennala(6), engine, progress=False).fit(steps=20)
    record = record_of(run.journals)
    assert record.steps_used["w0"] == 20 > record.steps_used.get("w2", 0)
    edges = np.array([0.0, run.seconds + 1.0])
    chosen = record.timeline.chosen.over(3, edges)[:, 0]
    assert {name: round(chosen[record.row(name)]) for name in record.steps_used} == (
        record.steps_used
    )


# --- stretches of time --------------------------------------------------------------------------

SPANS = st.lists(
    st.tuples(st.integers(0, 40), st.floats(0, 1e4), st.floats(0, 1e4)), min_size=1, max_size=30
)


@given(SPANS, st.floats(0.5, 1e4))
def test_no_second_is_lost_when_stretches_double(
    spans: list[tuple[int, float, float]], cut: float
) -> None:
    bins = Bins()
    expected = np.zeros(41)
    for row, a, b in spans:
        begin, end = sorted((a, b))
        expected[row] += end - begin
        bins.spread(np.array([row]), np.array([begin]), np.array([end]))
    last = max(max(a, b) for _, a, b in spans) + 1.0
    found = bins.over(41, np.array([0.0, 2 * last]))
    assert found[:, 0] == pytest.approx(expected, abs=1e-6)
    halves = bins.over(41, np.array([0.0, min(cut, last), 2 * last]))
    assert halves.sum(axis=1) == pytest.approx(expected, abs=1e-6)
    assert (halves >= -1e-9).all()


def test_a_stretch_has_its_part_of_a_long_task() -> None:
    bins = Bins()
    bins.spread(np.array([0, 1]), np.array([0.0, 4.0]), np.array([8.0, 6.0]))
    edges = np.arange(0.0, 9.0, 2.0)
    width = 8.0 / COUNT * 2
    assert bins.over(2, edges) == pytest.approx(np.array([[2.0, 2, 2, 2], [0, 0, 2, 0]]), abs=width)


def test_short_runs_keep_their_tasks_and_long_ones_do_not() -> None:
    timeline = Timeline()
    one = np.array([0]), np.array([0.0]), np.array([1.0]), np.array([True])
    timeline.add(*one)
    assert timeline.exact == [(0, 0.0, 1.0, True)]
    many = [np.repeat(each, EXACT) for each in one]
    timeline.add(*many)
    assert timeline.exact is None
    assert timeline.used.over(1, np.array([0.0, 1.5]))[0, 0] == pytest.approx(EXACT + 1)


def test_who_left_and_came_back() -> None:
    timeline = Timeline()
    timeline.join("w0", 0.0)
    timeline.leave("w0", 4.0)
    timeline.leave("w0", 5.0)  # told by another node
    timeline.join("w0", 7.0)
    edges = np.array([0.0, 2.0, 6.0, 10.0])
    assert timeline.there(["w0", "w1"], edges).tolist() == [[2.0, 2.0, 3.0], [0.0, 0.0, 0.0]]


def test_time_on_the_page_is_the_time_of_the_books() -> None:
    delays = [pl.delays.ShiftedExponential(0.1, 0.02)] * 3 + [pl.delays.Fixed(1.0)]
    engine = pl.Simulator(
        4, delays, schedule=[(3.0, pl.protocol.Left("w1")), (6.0, pl.protocol.Joined("w1"))]
    )
    learner = pl.learners.Quadratic((1.0,), batch_size=16)
    run = pl.Trainer(learner, pl.k_sync(3), engine, progress=False).fit(steps=80)
    record = record_of(run.journals)
    edges = np.array([0.0, record.end])
    rows = [record.row(name) for name in record.workers]
    used, wasted = (
        bins.over(4, edges)[rows, 0] for bins in (record.timeline.used, record.timeline.wasted)
    )
    there = record.timeline.there(list(record.workers), edges)[:, 0]
    for i, tally in enumerate(record.workers.values()):
        assert used[i] == pytest.approx(tally.used_seconds, rel=1e-3)
        assert used[i] + wasted[i] == pytest.approx(tally.busy_seconds(record.end), rel=1e-3)
        assert there[i] == pytest.approx(tally.there_seconds(record.end))
