"""Stepping after a fixed time: transcripts, weights by samples, and the time a step takes."""

from __future__ import annotations

from math import inf

import pytest

import paceline as pl
from paceline.core.protocol import (
    Cancel,
    Command,
    Discard,
    Event,
    Joined,
    Left,
    SetTimer,
    Start,
    Step,
    Task,
    TimerFired,
    Work,
)
from paceline.testing import Done, transcript

WORK = Work(budget=1.6)


def start(id: int, worker: str, offset: int, version: int, since: float, attempt: int = 1) -> Start:
    return Start(Task(id, worker, WORK, version, since, 10, offset, attempt))


def play(*script: tuple[float, Event | Done]) -> list[tuple[Command, ...]]:
    joins = [(0.0, Joined("w0")), (0.0, Joined("w1"))]
    entries = transcript(pl.deadline(2.0), [*joins, *script], batch=10)
    return [entry.commands for entry in entries]


def test_a_round_begins_with_the_first_worker() -> None:
    assert play() == [
        (SetTimer("deadline", 2.0), start(0, "w0", 0, 0, 0.0)),
        (start(1, "w1", 10, 0, 0.0),),
    ]


def test_when_all_have_reported_the_step_is_early() -> None:
    assert play((1.5, Done("w1", samples=1)), (1.75, Done("w0", samples=3)))[2:4] == [
        (),
        (
            Step({0: 0.75, 1: 0.25}),  # by samples
            SetTimer("deadline", 3.75),
            start(2, "w0", 20, 1, 1.75),
            start(3, "w1", 30, 1, 1.75),
        ),
    ]


def test_when_it_is_due_the_step_is_taken_and_the_rest_cancelled() -> None:
    assert play((1.5, Done("w1", samples=4)), (2.0, TimerFired("deadline")))[3] == (
        Step({1: 1.0}),
        Cancel(0),
        SetTimer("deadline", 4.0),
        start(2, "w1", 20, 1, 2.0),
        start(3, "w0", 30, 1, 2.0),
    )


def test_when_nothing_is_done_the_wait_goes_on() -> None:
    assert play((2.0, TimerFired("deadline")), (3.0, Done("w0")))[2:4] == [
        (SetTimer("deadline", 4.0),),
        (),
    ]


def test_a_timer_of_the_round_before_does_nothing() -> None:
    early = [(1.0, Done("w0")), (1.0, Done("w1"))]
    answers = play(*early, (2.0, TimerFired("deadline")), (3.0, TimerFired("deadline")))
    assert answers[5] == ()
    assert answers[6] == (SetTimer("deadline", 5.0),)


def test_an_empty_result_is_discarded() -> None:
    assert play((1.6, Done("w0", samples=0)), (1.6, Done("w1", samples=2)))[2:4] == [
        (Discard(0), start(2, "w0", 20, 0, 1.6)),
        (),
    ]


def test_if_all_results_are_empty_a_new_round_begins_without_a_step() -> None:
    entries = transcript(
        pl.deadline(2.0), [(0.0, Joined("w0")), (1.6, Done("w0", samples=0))], batch=10
    )
    assert entries[1].commands == (
        Discard(0),
        SetTimer("deadline", 3.6),
        start(1, "w0", 10, 0, 1.6),
    )


def test_lost_work_is_handed_out_first() -> None:
    assert play((0.5, Left("w0")), (1.0, Done("w1")))[2:4] == [
        (),
        (Step({1: 1.0}), SetTimer("deadline", 3.0), start(2, "w1", 0, 1, 1.0, attempt=2)),
    ]


def test_when_all_are_gone_what_is_held_is_used() -> None:
    assert play((0.5, Done("w0", samples=5)), (1.0, Left("w0")), (1.5, Left("w1")))[3:5] == [
        (),
        (Step({0: 1.0}),),
    ]


@pytest.mark.parametrize(
    ("period", "budget", "told"),
    [
        (1.0, 2.0, "budget=2 of period=1 seconds: use 0 < budget <= period"),
        (1.0, 0.0, "budget=0.0: use a number of seconds above 0"),
        (-1.0, None, "period=-1.0: use a number of seconds above 0"),
    ],
)
def test_budgets_that_cannot_work_are_refused(
    period: float, budget: float | None, told: str
) -> None:
    with pytest.raises(ValueError) as refusal:
        pl.deadline(period, budget)
    assert str(refusal.value) == told


def test_the_budget_is_four_fifths_of_the_period_unless_said() -> None:
    assert pl.deadline(5.0).work == Work(budget=4.0)
    assert pl.deadline(5.0, 5.0).work == Work(budget=5.0)
    assert pl.deadline(inf).work == Work()


# --- on the simulator ----------------------------------------------------------------------------


def test_a_step_takes_the_budget_and_uses_what_each_has_done() -> None:
    """Speeds of 10, 5 and 1 samples a second, 2 seconds: 20 + 10 + 2 samples."""
    engine = pl.Simulator(
        3, [pl.delays.Fixed(0.1), pl.delays.Fixed(0.2), pl.delays.Fixed(1.0)], unit=1
    )
    policy = pl.deadline(2.5, 2.0)
    run = pl.Trainer(pl.learners.TimingOnly(batch_size=100), policy, engine, progress=False).fit(
        steps=4
    )
    assert run.metrics["seconds"] == pytest.approx([2.0, 4.0, 6.0, 8.0])
    assert run.metrics["samples"].tolist() == [32.0] * 4
    steps = [c for entry in run.journal for c in entry.commands if isinstance(c, Step)]
    for step in steps:
        assert sorted(step.weights.values()) == [2 / 32, 10 / 32, 20 / 32]


def test_the_step_comes_at_the_latest_after_the_period() -> None:
    """The slow link makes one result late, always: it is cancelled each time."""
    links = [pl.delays.Link(), pl.delays.Link(latency=1.0)]
    engine = pl.Simulator(2, [pl.delays.Fixed(0.1)], links, unit=1)
    policy = pl.deadline(2.0, 1.0)
    run = pl.Trainer(pl.learners.TimingOnly(batch_size=100), policy, engine, progress=False).fit(
        steps=3
    )
    assert run.metrics["seconds"].tolist() == [2.0, 4.0, 6.0]
    assert run.metrics["samples"].tolist() == [10.0] * 3
    assert run.meter.cancelled == 3


def test_no_worker_does_more_than_the_batch() -> None:
    engine = pl.Simulator(2, [pl.delays.Fixed(0.01)], unit=1)
    learner = pl.learners.TimingOnly(batch_size=10)
    run = pl.Trainer(learner, pl.deadline(2.0), engine, progress=False).fit(steps=3)
    assert run.metrics["samples"].tolist() == [20.0] * 3
    assert run.metrics["seconds"] == pytest.approx([0.1, 0.2, 0.3])
