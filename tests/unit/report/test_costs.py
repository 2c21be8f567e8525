"""What a run costs: a transcript worked out by hand, an identity, and counting it all again."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import paceline as pl
from paceline.core.coordinator import Coordinator
from paceline.core.journal import Entry, Header, Journal
from paceline.core.policy import Policy
from paceline.core.protocol import (
    Cancel,
    Discard,
    Event,
    Finished,
    Interrupted,
    Joined,
    Left,
    Start,
    Step,
    Stepped,
    Task,
)
from paceline.report.metrics import TOTALS, Meter
from paceline.report.text import in_bytes, in_dollars, summary
from tests.policies import POLICIES

BY_WORKER = pl.Prices(
    {"w0": 3600.0, "w1": 7200.0, "w2": 10800.0},  # 1, 2 and 3 dollars a second
    {"w0": 1e7, "w1": 2e7, "w2": 4e7},  # 10, 20 and 40 dollars a message of 1000 bytes
)
EVENTS: list[tuple[float, Event]] = [
    *((0.0, Joined(worker)) for worker in ("w0", "w1", "w2")),  # tasks 0, 1, 2
    (1.0, Finished(0, 2)),
    (3.0, Finished(1, 2)),  # a step; 2 is cancelled; tasks 3, 4, 5
    (3.0, Stepped(1)),
    (4.0, Finished(2, 2)),  # too late
    (5.0, Left("w1")),  # with 4
    (6.0, Finished(3, 2)),
    (8.0, Finished(5, 2)),  # a step; w0 does 4 again as 6, w2 begins 7
    (9.0, Interrupted("enough")),
]


def played(prices: pl.Prices, message_bytes: int = 1000) -> Journal:
    """Return the transcript of k_sync(2) with three workers."""
    journal = Journal(Header("", 4, message_bytes=message_bytes, prices=prices))
    coordinator = Coordinator(pl.policies.MinWorkers(3, pl.k_sync(2)), 4, journal)
    for now, event in EVENTS:
        coordinator.handle(now, event)
    return journal


def metered(journal: Journal) -> Meter:
    meter = Meter.begin(journal.header)
    for entry in journal:
        meter.observe(entry)
    return meter


def totals(meter: Meter) -> dict[str, float]:
    return {name: getattr(meter, name) for name in TOTALS}


# --- the transcript ------------------------------------------------------------------------------


def test_the_transcript_is_the_one_worked_out() -> None:
    happened = [
        (entry.now, [c.task.worker for c in entry.commands if isinstance(c, Start)])
        for entry in played(BY_WORKER)
        if any(isinstance(c, Start) for c in entry.commands)
    ]
    assert happened == [(0.0, ["w0", "w1", "w2"]), (3.0, ["w0", "w1", "w2"]), (8.0, ["w0", "w2"])]
    cancelled = [c for entry in played(BY_WORKER) for c in entry.commands if isinstance(c, Cancel)]
    assert cancelled == [Cancel(2)]


def test_exact_figures_with_prices_by_worker() -> None:
    meter = metered(played(BY_WORKER))
    assert (meter.started, meter.used, meter.wasted) == (8, 4, 2)
    assert (meter.cancelled, meter.discarded, meter.lost) == (1, 0, 1)
    assert (meter.down_bytes, meter.up_bytes) == (8000, 4000)  # the late one is nobody's
    w0, w1, w2 = 1 + 3 + 1, 3 + 2, 3 + 5 + 1  # busy seconds
    assert meter.busy_seconds == w0 + w1 + w2
    assert meter.worker_seconds == 9 + 5 + 9
    down = 3 * 10 + 2 * 20 + 3 * 40
    up = (10 + 20) + (10 + 40)
    assert meter.dollars == pytest.approx(1 * w0 + 2 * w1 + 3 * w2 + down + up, rel=1e-12)


def test_exact_figures_at_each_step() -> None:
    arrays = metered(played(BY_WORKER)).arrays()
    assert arrays["started"].tolist() == [3, 6]
    assert arrays["wasted"].tolist() == [0, 2]  # what the first step cancels comes after it
    assert arrays["busy_seconds"].tolist() == [7.0, 17.0]
    assert arrays["down_bytes"].tolist() == [3000, 6000]
    assert arrays["up_bytes"].tolist() == [2000, 4000]
    first = 70 + 30 + (1 + 6 + 9)
    second = first + 70 + 50 + (3 + 4 + 15)
    assert arrays["dollars"].tolist() == pytest.approx([first, second], rel=1e-12)


def test_machines_that_stay_rented_are_paid_while_they_are_there() -> None:
    meter = metered(played(replace(BY_WORKER, idle=True)))
    assert meter.dollars == pytest.approx(9 * 1 + 5 * 2 + 9 * 3 + 190 + 80, rel=1e-12)
    assert meter.busy_seconds == 19  # which is no matter of prices


def test_one_price_for_all() -> None:
    meter = metered(played(pl.Prices(per_hour=7200.0)))
    assert meter.dollars == pytest.approx(2 * 19)
    meter = metered(played(pl.Prices(per_gigabyte=1e7)))
    assert meter.dollars == pytest.approx(10 * (8 + 4))
    meter = metered(played(pl.Prices(per_gigabyte=1e7), message_bytes=0))
    assert (meter.dollars, meter.down_bytes, meter.up_bytes, meter.started) == (0, 0, 0, 8)
    assert metered(played(pl.Prices())).dollars == 0


def test_a_worker_with_two_tasks_is_paid_once() -> None:
    tasks = [Task(i, "w0", pl.protocol.Work(samples=4), 0, 0.0, 4, 4 * i) for i in range(2)]
    meter = Meter(prices=pl.Prices(per_hour=3600.0))
    meter.observe(Entry(0.0, Joined("w0"), tuple(map(Start, tasks))))
    meter.observe(Entry(1.0, Finished(0, 4), ()))
    meter.observe(Entry(3.0, Finished(1, 4), ()))
    meter.observe(Entry(4.0, Stepped(1), ()))
    assert meter.dollars == 3.0


def test_a_departure_is_paid_for_until_then_and_once() -> None:
    meter = Meter(prices=pl.Prices(per_hour=3600.0, idle=True))
    meter.observe(Entry(0.0, Joined("w0"), ()))
    meter.observe(Entry(0.0, Joined("w1"), ()))
    meter.observe(Entry(2.0, Left("w0"), ()))
    meter.observe(Entry(3.0, Left("w0"), ()))  # told again, as an engine may
    meter.observe(Entry(5.0, Joined("w0"), ()))
    meter.observe(Entry(6.0, Interrupted("enough"), ()))
    assert meter.dollars == 2 * 2 + 3 * 1 + 1 * 2


@pytest.mark.parametrize(("one", "other"), [(360.0, 720.0), (72.0, 36.0)])
def test_rounding_leaves_nobody_paid_who_is_gone(one: float, other: float) -> None:
    """0.1 + 0.2 - 0.1 - 0.2 is above 0, and 0.02 + 0.01 - 0.02 - 0.01 below."""
    meter = Meter(prices=pl.Prices({"w0": one, "w1": other, "w2": 0.0}, idle=True))
    for event in (Joined("w0"), Joined("w1"), Joined("w2"), Left("w0"), Left("w1")):
        meter.observe(Entry(0.0, event, ()))
    meter.observe(Entry(1.0, Stepped(1), ()))
    assert 0 <= meter.dollars < 1e-15
    meter.observe(Entry(1.0, Left("w2"), ()))
    meter.observe(Entry(1e12, Interrupted("enough"), ()))
    assert meter.dollars < 1e-15


def test_a_result_that_outlives_its_worker_is_not_charged() -> None:
    meter = Meter(1000, pl.Prices(0.0, BY_WORKER.per_gigabyte))
    task = Task(0, "w1", pl.protocol.Work(samples=4), 0, 0.0, 4, 0)
    meter.observe(Entry(0.0, Joined("w1"), (Start(task),)))
    meter.observe(Entry(1.0, Left("w1"), ()))
    meter.observe(Entry(2.0, Finished(0, 4), (Discard(0),)))
    assert (meter.lost, meter.discarded, meter.up_bytes) == (1, 0, 0)
    assert meter.dollars == pytest.approx(20)


# --- after a resume ------------------------------------------------------------------------------


def resumed(prices: pl.Prices) -> Meter:
    """Meter the transcript from a resume at second 3, when 2 was cancelled and 3, 4, 5 run."""
    coordinator = Coordinator(pl.policies.MinWorkers(3, pl.k_sync(2)), 4)
    entries = [coordinator.handle(now, event) for now, event in EVENTS[:6]]
    assert entries[-1].event == Stepped(1)
    state = coordinator.state()
    meter = Meter.begin(Header("", 4, None, state, 1000, prices))
    assert totals(meter) == dict.fromkeys(TOTALS, 0)
    for now, event in EVENTS[6:]:
        meter.observe(coordinator.handle(now, event))
    return meter


def test_what_is_in_flight_at_a_resume_is_paid_from_then_on() -> None:
    meter = resumed(pl.Prices(BY_WORKER.per_hour, per_gigabyte=1e7))
    assert (meter.started, meter.wasted) == (2, 1)
    assert (meter.down_bytes, meter.up_bytes) == (2000, 2000)
    w0, w1, w2 = 3 + 1, 2, 5 + 1
    assert meter.busy_seconds == w0 + w1 + w2
    assert meter.dollars == pytest.approx(w0 + 2 * w1 + 3 * w2 + 10 * (2 + 2), rel=1e-12)
    assert resumed(pl.Prices(3600.0, idle=True)).dollars == pytest.approx(6 + 2 + 6)


# --- whole runs ----------------------------------------------------------------------------------

FOUR = pl.Prices(
    {f"w{i}": 3600.0 * (i + 1) for i in range(4)}, {f"w{i}": 1e6 * i for i in range(4)}
)


def fitted(
    policy: Policy, prices: pl.Prices = FOUR, journal: Path | None = None, interrupts: bool = False
) -> pl.Run:
    schedule: list[tuple[float, pl.protocol.Joined | pl.protocol.Left]] = [
        (2.0, pl.protocol.Left("w1")),
        (5.0, pl.protocol.Joined("w1")),
        (6.0, pl.protocol.Left("w3")),
    ]
    engine = pl.Simulator(
        4,
        pl.delays.Exponential(1.0),
        pl.delays.Link(0.01),
        schedule=schedule,
        interruptible=interrupts,
    )
    learner = pl.learners.Quadratic(batch_size=20, lr=0.01)
    return pl.Trainer(
        learner, policy, engine, seed=5, progress=False, prices=prices, journal=journal
    ).fit(steps=40)


def recounted(journal: Journal, second: Mapping[str, float], message: Mapping[str, float]) -> float:
    """Add up the dollars of a run task by task; each worker has one at a time."""
    tasks: dict[int, Task] = {}
    ends: dict[int, float] = {}
    dollars = now = 0.0
    for entry in journal:
        now = entry.now
        if isinstance(entry.event, Finished):
            if entry.event.task not in ends:
                dollars += message[tasks[entry.event.task].worker]
            ends.setdefault(entry.event.task, now)
        if isinstance(entry.event, Left):
            for id in [id for id, task in tasks.items() if task.worker == entry.event.worker]:
                ends.setdefault(id, now)
        for command in entry.commands:
            if isinstance(command, Start):
                tasks[command.task.id] = command.task
                dollars += message[command.task.worker]
            if isinstance(command, Cancel):
                ends[command.task] = now
    return dollars + sum(
        second[task.worker] * (ends.get(id, now) - task.since) for id, task in tasks.items()
    )


@pytest.mark.parametrize("interrupts", [True, False])
@pytest.mark.parametrize("name", POLICIES)
def test_counted_again_task_by_task_it_is_the_same(name: str, interrupts: bool) -> None:
    run = fitted(POLICIES[name](), interrupts=interrupts)
    meter, size = run.meter, run.meter.message_bytes
    assert size > 0 and meter.lost > 0
    workers = [f"w{i}" for i in range(4)]
    message = {worker: size * 1e-3 * i for i, worker in enumerate(workers)}
    second = {worker: i + 1.0 for i, worker in enumerate(workers)}
    free, each = dict.fromkeys(workers, 0.0), dict.fromkeys(workers, 1.0)
    assert meter.dollars == pytest.approx(recounted(run.journal, second, message))
    assert meter.busy_seconds == pytest.approx(recounted(run.journal, each, free))
    messages = (meter.down_bytes + meter.up_bytes) / size
    assert messages == recounted(run.journal, free, each)
    assert meter.down_bytes == meter.started * size
    assert meter.up_bytes == (meter.used + len(meter._held) + meter.discarded) * size


@pytest.mark.parametrize("name", POLICIES)
def test_a_row_has_the_totals_at_the_moment_of_its_step(name: str) -> None:
    run = fitted(POLICIES[name]())
    rows: list[dict[str, float]] = []
    meter = Meter.begin(run.journal.header)
    for entry in run.journal:
        for i, command in enumerate(entry.commands):
            if isinstance(command, Step):
                until_then = copy.deepcopy(meter)
                until_then.observe(entry._replace(commands=entry.commands[: i + 1]))
                rows.append(totals(until_then))
        meter.observe(entry)
    for column in TOTALS:
        values = run.metrics[column]
        assert values.tolist() == [row[column] for row in rows], column
        assert np.all(np.diff(values) >= 0), column
        assert column == "wasted" or values[0] > 0, column
        assert values[-1] <= getattr(run.meter, column)
    for column in ("busy_seconds", "up_bytes"):  # nothing of these comes after the last step
        assert run.metrics[column][-1] == getattr(run.meter, column)


@pytest.mark.parametrize("idle", [True, False])
def test_metered_from_a_file_it_is_the_same(idle: bool, tmp_path: Path) -> None:
    live = fitted(pl.k_sync(2), replace(FOUR, idle=idle))
    live.journal.save(tmp_path / "saved.jsonl")
    fitted(pl.k_sync(2), replace(FOUR, idle=idle), tmp_path / "written.jsonl")
    assert live.meter.dollars > 0
    for name in ("saved", "written"):
        loaded = metered(Journal.load(tmp_path / f"{name}.jsonl"))
        assert totals(loaded) == totals(live.meter)
        assert loaded.columns == live.meter.columns
        assert loaded.prices == live.meter.prices
        assert summary(loaded, live.reason, 20) == live.summary()


@pytest.mark.parametrize(("n", "k"), [(4, 2), (20, 2), (10, 7), (5, 5), (40, 4)])
def test_k_sync_costs_k_means_a_step_however_many_take_part(n: int, k: int) -> None:
    """Total time on test: n exponential times, each cut at the k-th smallest, add up to k means."""
    mean, steps = 0.7, 2000
    engine = pl.Simulator(n, pl.delays.Exponential(mean), unit=6)
    trainer = pl.Trainer(
        pl.learners.TimingOnly(6 * k), pl.k_sync(k), engine, seed=n, progress=False
    )
    run = trainer.fit(steps=steps)
    assert run.metrics["busy_seconds"][-1] / steps == pytest.approx(
        k * mean, rel=4 / (k * steps) ** 0.5
    )
    assert run.metrics["started"][-1] == n * steps
    assert run.metrics["wasted"][-1] == (n - k) * (steps - 1)


# --- in words ------------------------------------------------------------------------------------


def test_a_summary_tells_bytes_and_dollars() -> None:
    assert summary(metered(played(BY_WORKER)), "enough", 4).splitlines()[4:] == [
        "  messages  8 kB down, 4 kB up",
        "  cost      19 busy worker-seconds of 23; $312.00",
    ]
    rented = metered(played(replace(BY_WORKER, idle=True)))
    assert summary(rented, "enough", 4).endswith(" of 23; $316.00, idle time included")


def test_a_summary_leaves_out_what_there_is_not() -> None:
    free = summary(metered(played(pl.Prices(0.0, {f"w{i}": 0.0 for i in range(3)}))), "enough", 4)
    assert free.splitlines()[4:] == [
        "  messages  8 kB down, 4 kB up",
        "  cost      19 busy worker-seconds of 23",
    ]
    timing = summary(metered(played(pl.Prices(3600.0), message_bytes=0)), "enough", 4)
    assert timing.splitlines()[4:] == ["  cost      19 busy worker-seconds of 23; $19.00"]


def test_the_lines_of_a_summary_are_aligned() -> None:
    for line in summary(metered(played(BY_WORKER)), "enough", 4).splitlines()[1:]:
        assert line[:2] == "  " and line[2:11].rstrip().isalpha() and line[11] == " "
        assert line[12] != " "


@pytest.mark.parametrize(
    ("count", "told"),
    [
        *((0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1499, "1.5 kB"), (999_499, "999 kB")),
        *((999_500, "1 MB"), (12_345_678, "12.3 MB"), (3.2e9, "3.2 GB"), (5e12, "5 TB")),
        *((7e15, "7 PB"), (2e19, "2e+04 PB")),
    ],
)
def test_bytes_in_readable_units(count: float, told: str) -> None:
    assert in_bytes(count) == told


@pytest.mark.parametrize(
    ("amount", "told"),
    [
        (0.0, "$0.00"),
        (3.409, "$3.41"),
        (12345.6, "$12345.60"),
        (0.1, "$0.10"),
        (0.00123, "$0.0012"),
    ],
)
def test_dollars_in_readable_amounts(amount: float, told: str) -> None:
    assert in_dollars(amount) == told
