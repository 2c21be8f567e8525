"""Figures against entries written by hand."""

from __future__ import annotations

from collections.abc import Iterable
from math import isnan

import pytest

import paceline as pl
from paceline.core.coordinator import Coordinator
from paceline.core.journal import Entry, Header, Journal
from paceline.core.protocol import (
    Cancel,
    Discard,
    Finished,
    Joined,
    Left,
    SetTimer,
    Start,
    Step,
    Stepped,
    Task,
    Work,
)
from paceline.policies.wrappers import MinWorkers
from paceline.report.metrics import Meter
from paceline.report.samples import Stretch, sample_fates
from paceline.report.text import summary, throughput


def task(
    id: int,
    worker: str,
    offset: int,
    samples: int = 4,
    *,
    steps: int = 1,
    version: int = 0,
    attempt: int = 1,
) -> Task:
    work = Work(samples=samples, steps=steps)
    return Task(id, worker, work, version, 0.0, samples, offset, attempt)


ENTRIES = [
    Entry(0.0, Joined("w0"), ()),
    Entry(0.0, Joined("w1"), (Start(task(0, "w0", 0)), Start(task(1, "w1", 4)))),
    Entry(1.0, Joined("w2"), (Start(task(2, "w2", 8)), SetTimer("t", 9.0))),
    Entry(2.0, Finished(0, 4, 1.5, {"loss": 1.0}), ()),
    # w0 waits from 2 to 3
    Entry(
        3.0,
        Finished(1, 2, 2.5, {"loss": 4.0}),
        (Step({0: 0.75, 1: 0.25}), Start(task(3, "w0", 12, version=1))),
    ),
    Entry(3.0, Stepped(1), ()),
    # w1 waits from 3 on; w2 leaves with its task
    Entry(4.0, Left("w2"), (Start(task(4, "w1", 8, version=1, attempt=2)),)),
    Entry(
        5.0,
        Finished(3, 4, 1.0, {"loss": 3.0}),
        (Discard(3), Start(task(5, "w0", 16, version=1))),
    ),
    Entry(
        6.0,
        Finished(4, 4, 1.0),
        (Step({4: 1.0}), Cancel(5), Start(task(6, "w0", 20, version=2))),
    ),
    Entry(7.0, Finished(5, 4, 2.0), (Discard(5),)),  # too late
]


def observed(entries: Iterable[Entry]) -> Meter:
    meter = Meter()
    for entry in entries:
        meter.observe(entry)
    return meter


def test_what_became_of_the_tasks() -> None:
    meter = observed(ENTRIES)
    assert (meter.started, meter.used, meter.cancelled) == (7, 3, 1)
    assert (meter.discarded, meter.lost, meter.redone) == (1, 1, 1)
    assert meter.version == 2
    assert meter.samples_used == 4 + 2 + 4
    assert meter.samples_started == 6 * 4  # what is redone is not counted twice


def test_time_is_divided_into_work_and_waiting() -> None:
    meter = observed(ENTRIES)
    # present: w0 and w1 for 7 seconds, w2 from 1 to 4
    assert meter.worker_seconds == 7 + 7 + 3
    # busy: w0 0-2, 3-7; w1 0-3, 4-6; w2 1-4
    assert meter.busy_seconds == 2 + 4 + 3 + 2 + 3
    assert meter.waiting == pytest.approx(3 / 17)
    assert meter.compute_seconds == 1.5 + 2.5 + 1 + 1 + 2


def test_a_worker_with_two_tasks_is_busy_once() -> None:
    meter = observed(
        [
            Entry(0.0, Joined("w0"), (Start(task(0, "w0", 0)), Start(task(1, "w0", 4)))),
            Entry(1.0, Finished(0, 4), ()),
            Entry(3.0, Finished(1, 4), ()),
            Entry(4.0, Stepped(1), ()),
        ]
    )
    assert (meter.busy_seconds, meter.worker_seconds) == (3.0, 4.0)


def test_one_value_per_step() -> None:
    arrays = observed(ENTRIES).arrays()
    assert arrays["step"].tolist() == [1.0, 2.0]
    assert arrays["seconds"].tolist() == [3.0, 6.0]
    assert arrays["samples"].tolist() == [6.0, 4.0]
    assert arrays["results"].tolist() == [2.0, 1.0]
    assert arrays["staleness"].tolist() == [0.0, 0.0]
    assert arrays["loss"][0] == 0.75 * 1 + 0.25 * 4
    assert isnan(arrays["loss"][1])  # w1 told none


def test_delays_are_averaged_over_the_results_of_a_step() -> None:
    meter = observed(
        [
            Entry(0.0, Joined("w0"), tuple(Start(task(i, "w0", 4 * i)) for i in range(3))),
            Entry(1.0, Finished(0, 4), (Step({0: 1.0}),)),
            Entry(2.0, Finished(1, 4), (Step({1: 1.0}), Start(task(3, "w0", 12, version=2)))),
            Entry(3.0, Finished(2, 4), ()),
            Entry(4.0, Finished(3, 4), (Step({2: 0.5, 3: 0.5}),)),
        ]
    )
    assert meter.columns["staleness"] == [0.0, 1.0, 1.0]  # (2 + 0) / 2


def test_kept_results_can_be_used_again() -> None:
    meter = observed(
        [
            Entry(0.0, Joined("w0"), (Start(task(0, "w0", 0)),)),
            Entry(1.0, Finished(0, 4), (Step({0: 1.0}, keep=True), Step({0: 1.0}))),
        ]
    )
    assert (meter.used, meter.samples_used) == (1, 4)  # by the last step that uses it
    assert not meter._held


def test_nobody_there_nobody_waits() -> None:
    assert Meter().waiting == 0.0
    assert throughput(Meter()) == 0.0


# --- a run that was resumed ----------------------------------------------------------------------


def resumed() -> Header:
    """The header of a run resumed with a result held, a task running and a task lost."""
    coordinator = Coordinator(pl.policies.MinWorkers(3, pl.sync()), 12)
    for worker in ("w0", "w1", "w2"):
        coordinator.handle(0.0, Joined(worker))
    for id in (0, 1, 2):
        coordinator.handle(2.0, Finished(id, 4, 1.0, {"loss": 1.0}))
    coordinator.handle(3.0, Finished(3, 4, 1.0, {"loss": 2.0}))
    coordinator.handle(4.0, Left("w2"))
    assert coordinator.ledger.running.keys() == {4, 6}  # 6 is the lost one, done again by w0
    return Header("", 12, None, coordinator.state())


def test_a_resumed_run_is_metered_from_where_it_was() -> None:
    meter = Meter.begin(resumed())
    assert (meter.version, meter.samples_used) == (1, 12)
    assert (meter.started, meter.used, list(meter.columns["step"])) == (0, 0, [])
    meter.observe(Entry(5.0, Finished(4, 4, 1.0, {"loss": 4.0}), ()))
    meter.observe(
        Entry(7.0, Finished(6, 4, 1.0, {"loss": 6.0}), (Step({3: 0.25, 4: 0.25, 6: 0.5}),))
    )
    assert meter.columns["step"] == [2]
    assert meter.columns["loss"] == [0.25 * 2 + 0.25 * 4 + 0.5 * 6]
    assert meter.columns["staleness"] == [0.0]
    assert (meter.version, meter.samples_used, meter.used) == (2, 24, 3)
    # from 4 on: w0 busy until 7, w1 until 5, both present until 7
    assert (meter.busy_seconds, meter.worker_seconds) == (3 + 1, 6)


def test_a_fresh_run_begins_at_nothing() -> None:
    assert Meter.begin(Header()) == Meter()


def test_the_fates_of_a_resumed_run_include_what_it_took_over() -> None:
    journal = Journal(resumed())
    assert sample_fates(journal) == [
        Stretch(3, 12, 4, "unfinished"),
        Stretch(4, 16, 4, "unfinished"),
        Stretch(6, 20, 4, "unfinished"),
    ]
    journal.append(Entry(5.0, Finished(4, 4), ()))
    journal.append(Entry(6.0, Left("w0"), (Discard(4),)))
    journal.append(Entry(7.0, Stepped(1), (Step({3: 1.0}),)))
    assert sample_fates(journal) == [
        Stretch(3, 12, 4, "used"),
        Stretch(4, 16, 4, "discarded"),
        Stretch(6, 20, 4, "lost"),
    ]


# --- what became of the samples ------------------------------------------------------------------


def test_every_stretch_has_its_fate() -> None:
    journal = Journal()
    for entry in ENTRIES:
        journal.append(entry)
    assert sample_fates(journal) == [
        Stretch(0, 0, 4, "used"),
        Stretch(1, 4, 2, "used"),
        Stretch(1, 6, 2, "cut short"),
        Stretch(4, 8, 4, "used"),  # lost with w2, done again by w1
        Stretch(3, 12, 4, "discarded"),
        Stretch(5, 16, 4, "cancelled"),  # and its result came too late
        Stretch(6, 20, 4, "unfinished"),
    ]


def test_what_is_lost_and_not_redone_stays_lost() -> None:
    journal = Journal()
    held, running = Start(task(0, "w0", 0)), Start(task(1, "w0", 4, steps=3))
    journal.append(Entry(0.0, Joined("w0"), (held, running)))
    journal.append(Entry(1.0, Finished(0, 4), ()))
    journal.append(Entry(2.0, Left("w0"), ()))
    assert sample_fates(journal) == [Stretch(0, 0, 4, "unfinished"), Stretch(1, 4, 12, "lost")]


# --- in words ------------------------------------------------------------------------------------


def test_a_summary_says_it_all() -> None:
    assert summary(observed(ENTRIES), "2 steps taken", 8).splitlines() == [
        "2 steps in 6 s, loss 1.75 -> 1.75 (ended: 2 steps taken)",
        "  samples   10 used, 5 a step (batch_size 8), 1.667 a second",
        "  tasks     7 started, 3 used, 3 wasted (1 cancelled, 1 discarded, 1 lost of which "
        "1 done again)",
        "  waiting   18% of the workers' time; mean staleness 0 versions",
        "  cost      14 busy worker-seconds of 17",
    ]


def test_a_summary_of_nothing() -> None:
    assert summary(Meter(), "interrupted", 8).splitlines()[:2] == [
        "0 steps in 0 s (ended: interrupted)",
        "  samples   0 used, 0 a step (batch_size 8), 0 a second",
    ]


def test_a_summary_of_a_resumed_run_is_of_what_it_did_itself() -> None:
    engine = pl.Simulator(2, pl.delays.Fixed(1.0))
    trainer = pl.Trainer(pl.learners.Quadratic(batch_size=4), pl.sync(), engine, progress=False)
    trainer.fit(steps=10)
    run = trainer.fit(steps=15)
    first, samples, tasks, _, messages, cost = run.summary().splitlines()
    assert first.startswith("5 steps in 5 s, ")
    assert samples == "  samples   20 used, 4 a step (batch_size 4), 4 a second"
    assert tasks.startswith("  tasks     10 started, 10 used, 0 wasted ")
    size = run.meter.message_bytes
    assert size > 0
    assert messages == f"  messages  {10 * size} B down, {10 * size} B up"
    assert cost == "  cost      10 busy worker-seconds of 10"
    assert (run.steps, run.seconds) == (15, 15.0)  # these count from the very start


def test_the_mean_staleness_is_over_the_steps() -> None:
    entries = [
        Entry(0.0, Joined("w0"), tuple(Start(task(i, "w0", 4 * i)) for i in range(3))),
        *(Entry(1.0 + i, Finished(i, 4), (Step({i: 1.0}),)) for i in range(3)),
    ]
    assert summary(observed(entries), "", 4).splitlines()[3].endswith("mean staleness 1 versions")


def test_a_result_that_waits_for_the_driver_is_not_computed_on() -> None:
    """Steps of 1 s of work, each followed by 9 s in which the driver evaluates."""
    journal = Journal(Header(batch=4))
    coordinator = Coordinator(MinWorkers(2, pl.sync()), 4, journal=journal)
    for worker in ("w0", "w1"):
        coordinator.handle(0.0, Joined(worker))
    for step in range(1, 6):
        for task in list(coordinator.ledger.running):
            coordinator.handle(10.0 * step, Finished(task, 2, 1.0, {"loss": 1.0}, waited=9.0))
    meter = Meter.begin(journal.header)
    for entry in journal:
        meter.observe(entry)
    assert (meter.busy_seconds, meter.driver_seconds, meter.worker_seconds) == (10.0, 90.0, 100.0)
    assert meter.waiting == pytest.approx(0.9)
    assert [t.busy_seconds(meter.now) for t in meter.workers.values()] == [5.0, 5.0]
    told = summary(meter, "", 4)
    assert "waiting   90% of the workers' time, 90% for the driver and its callbacks" in told
