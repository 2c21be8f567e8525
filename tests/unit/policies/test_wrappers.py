"""When to begin and when to end."""

from __future__ import annotations

from math import inf

import pytest

import paceline as pl
from paceline.core.policy import Policy
from paceline.core.protocol import Event, Joined, Left, SetTimer, Start, Step, Stop, TimerFired
from paceline.core.state import describe
from paceline.testing import Done, transcript

DELAYS = pl.delays.Fixed(1.0)


def kinds(
    policy: Policy, script: list[tuple[float, Event | Done]], batch: int = 4
) -> list[list[str]]:
    entries = transcript(policy, script, batch)
    return [[type(command).__name__ for command in entry.commands] for entry in entries]


def test_min_workers_holds_back_until_enough_have_joined() -> None:
    script: list[tuple[float, Event | Done]] = [(float(i), Joined(f"w{i}")) for i in range(4)]
    assert kinds(pl.policies.MinWorkers(3, pl.k_sync(1)), script) == [
        [],
        [],
        ["Start"] * 3,
        ["Start"],
    ]


def test_min_workers_counts_who_is_present() -> None:
    script: list[tuple[float, Event | Done]] = [
        (0.0, Joined("w0")),
        (0.0, Left("w0")),
        (0.0, Joined("w1")),
        (1.0, Joined("w2")),
    ]
    assert kinds(pl.policies.MinWorkers(2, pl.k_sync(1)), script) == [[], [], [], ["Start"] * 2]


def test_min_workers_lets_be_once_it_has_begun() -> None:
    script: list[tuple[float, Event | Done]] = [
        (0.0, Joined("w0")),
        (0.0, Joined("w1")),
        (1.0, Left("w0")),
        (2.0, Done("w1")),
    ]
    assert kinds(pl.policies.MinWorkers(2, pl.k_sync(1)), script)[3] == ["Step", "Start"]


def test_wrappers_want_what_the_inner_policy_wants() -> None:
    class Curious(pl.policies.Gather):
        wants = frozenset({"dot"})

    assert pl.policies.Until(pl.policies.MinWorkers(1, Curious())).wants == {"dot"}


# --- Until ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [pl.sync(), pl.k_sync(2), pl.asynchronous(), pl.rennala(3), pl.ringmaster(2), pl.deadline(1.0)],
    ids=describe,
)
@pytest.mark.parametrize("steps", [1, 7])
def test_exactly_so_many_steps_are_taken(policy: pl.policies.Gather, steps: int) -> None:
    engine = pl.Simulator(3)
    run = pl.Trainer(pl.learners.TimingOnly(batch_size=6), policy, engine, progress=False).fit(
        steps=steps
    )
    taken = [c for entry in run.journal for c in entry.commands if isinstance(c, Step)]
    assert len(taken) == run.steps == steps
    assert run.reason == f"{steps} steps taken"


def test_the_stop_comes_after_the_whole_reaction() -> None:
    """New work is still handed out, so that the run can be taken up as if it never ended."""
    script: list[tuple[float, Event | Done]] = [(0.0, Joined("w0")), (1.0, Done("w0"))]
    entry = transcript(pl.policies.Until(pl.k_sync(1), steps=1), script)[1]
    step, start, stop = entry.commands
    assert isinstance(step, Step)
    assert isinstance(start, Start)
    assert stop == Stop("1 steps taken")


def test_seconds_end_a_run_in_which_nothing_happens() -> None:
    script: list[tuple[float, Event | Done]] = [
        (0.0, Joined("w0")),
        (5.0, TimerFired("until 5")),
        (6.0, Done("w0")),
    ]
    entries = transcript(pl.policies.Until(pl.k_sync(1), seconds=5.0), script)
    assert entries[0].commands[0] == SetTimer("until 5", 5.0)
    assert entries[1].commands == (Stop("5 seconds passed"),)
    assert entries[2].commands == ()


def test_the_timer_of_seconds_is_set_once() -> None:
    script: list[tuple[float, Event | Done]] = [
        (0.0, Joined("w0")),
        (1.0, Joined("w1")),
        (2.0, Done("w0")),
    ]
    entries = transcript(pl.policies.Until(pl.k_sync(1), seconds=5.0), script)
    timers = [c for entry in entries for c in entry.commands if isinstance(c, SetTimer)]
    assert timers == [SetTimer("until 5", 5.0)]
    endless = transcript(pl.policies.Until(pl.k_sync(1), steps=3), script)
    assert not any(isinstance(c, SetTimer) for entry in endless for c in entry.commands)


def test_seconds_end_a_run_on_the_simulator_to_the_point() -> None:
    engine = pl.Simulator(2, pl.delays.Fixed(1e6))
    trainer = pl.Trainer(pl.learners.TimingOnly(2), pl.sync(), engine, progress=False)
    run = trainer.fit(seconds=7.5)
    assert run.reason == "7.5 seconds passed"
    assert list(run.journal)[-1].now == 7.5
    assert run.steps == 0


def test_steps_before_the_last_second_are_taken() -> None:
    trainer = pl.Trainer(
        pl.learners.TimingOnly(2), pl.sync(), pl.Simulator(2, DELAYS), progress=False
    )
    assert trainer.fit(seconds=3.5).steps == 3


def test_samples_end_a_run_at_the_step_that_reaches_them() -> None:
    script: list[tuple[float, Event | Done]] = [
        (0.0, Joined("w0")),
        *((float(i), Done("w0")) for i in range(1, 4)),
    ]
    entries = transcript(pl.policies.Until(pl.k_sync(1), samples=9), script, batch=4)
    stops = [(entry.now, c) for entry in entries for c in entry.commands if isinstance(c, Stop)]
    assert stops == [(3.0, Stop("12 samples used"))]
    exact = transcript(pl.policies.Until(pl.k_sync(1), samples=8), script, batch=4)
    stops = [(entry.now, c) for entry in exact for c in entry.commands if isinstance(c, Stop)]
    assert stops == [(2.0, Stop("8 samples used"))]


def test_an_end_that_is_already_reached_is_told_at_the_first_event() -> None:
    ended = [["Start", "Stop"]]  # the inner policy is shown every event
    assert kinds(pl.policies.Until(pl.k_sync(1), steps=0), [(0.0, Joined("w0"))]) == ended
    assert kinds(pl.policies.Until(pl.k_sync(1), seconds=1.0), [(2.0, Joined("w0"))]) == ended
    assert kinds(pl.policies.Until(pl.k_sync(1), samples=inf), [(2.0, Joined("w0"))]) == [["Start"]]


# --- OnlyWorkers ----------------------------------------------------------------------------------


def test_among_lets_others_do_nothing() -> None:
    engine = pl.Simulator(4, pl.delays.Fixed(1.0))
    for policy in (pl.sync(), pl.k_sync(1), pl.bandit(1), pl.asynchronous(), pl.rennala(3)):
        only = pl.policies.OnlyWorkers(["w1", "w3"], policy)
        run = pl.Trainer(pl.learners.TimingOnly(batch_size=6), only, engine, progress=False).fit(
            steps=5
        )
        tasks = [c.task for entry in run.journal for c in entry.commands if isinstance(c, Start)]
        assert {task.worker for task in tasks} == {"w1", "w3"}, policy
        assert run.steps == 5


def test_among_shares_the_whole_batch() -> None:
    script: list[tuple[float, Event | Done]] = [(0.0, Joined(f"w{i}")) for i in range(3)]
    entries = transcript(
        pl.policies.MinWorkers(3, pl.policies.OnlyWorkers(["w0", "w1"], pl.sync())), script, 6
    )
    started = [c.task for entry in entries for c in entry.commands if isinstance(c, Start)]
    assert [(task.worker, task.samples) for task in started] == [("w0", 3), ("w1", 3)]


def test_among_begins_though_another_joins_last_and_hears_of_others_no_more() -> None:
    script: list[tuple[float, Event | Done]] = [
        *((0.0, Joined(worker)) for worker in ("w0", "w2")),
        (1.0, Joined("w1")),
        (2.0, Left("w1")),
        (3.0, Done("w0")),
    ]
    assert kinds(pl.policies.MinWorkers(3, pl.policies.OnlyWorkers(["w0"], pl.sync())), script) == [
        *[[], [], ["Start"], [], ["Step", "Start"], []]
    ]


def test_among_counts_its_own_workers_only() -> None:
    two = pl.policies.OnlyWorkers(["w0", "w1"], pl.sync())
    run = pl.Trainer(
        pl.learners.TimingOnly(batch_size=2), two, pl.Simulator(4), progress=False
    ).fit(steps=3)
    assert run.steps == 3


def test_among_refuses_who_is_not_there() -> None:
    engine = pl.Simulator(2)
    with pytest.raises(
        ValueError, match="OnlyWorkers names w5; this engine has the 2 workers w0 to w1"
    ):
        pl.Trainer(
            pl.learners.TimingOnly(4), pl.policies.OnlyWorkers(["w0", "w5"], pl.sync()), engine
        )
    with pytest.raises(ValueError, match="k=2"):
        pl.Trainer(pl.learners.TimingOnly(4), pl.policies.OnlyWorkers(["w0"], pl.k_sync(2)), engine)
    for names in ([], ["w0", "w0"]):
        with pytest.raises(ValueError, match="name at least one, and each of them once"):
            pl.policies.OnlyWorkers(names, pl.sync())
