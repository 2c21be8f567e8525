"""Each method by its name: a transcript, and what its paper says of it, on the simulator."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

import pytest

import paceline as pl
from paceline.core.policy import Policy
from paceline.core.protocol import (
    Cancel,
    Coefficients,
    Command,
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
from paceline.core.state import describe
from paceline.testing import Done, transcript

UNEQUAL = [
    pl.delays.Exponential(0.2),
    pl.delays.Exponential(1.0),
    pl.delays.Exponential(1.0),
    pl.delays.Exponential(6.0),
]


def start(
    id: int, worker: str, offset: int, samples: int, version: int = 0, since: float = 0.0
) -> Start:
    return Start(Task(id, worker, Work(samples=samples), version, since, samples, offset))


def play(policy: Policy, *dones: str, batch: int = 4) -> list[tuple[Command, ...]]:
    """Let w0, w1 and w2 join and then finish in this order, a second apart; return the answers."""
    script: list[tuple[float, Event | Done]] = [(0.0, Joined(f"w{i}")) for i in range(3)]
    script += [(1.0 + i, Done(worker)) for i, worker in enumerate(dones)]
    entries = transcript(pl.policies.MinWorkers(3, policy), script, batch)
    return [entry.commands for entry in entries[2:] if entry.commands]


def train(
    policy: Policy, learner: pl.learners.Quadratic | None = None, steps: int = 200, **engine: object
) -> pl.Run:
    learner = learner or pl.learners.Quadratic(noise=0.1, batch_size=8)
    simulator = pl.Simulator(4, UNEQUAL, **engine)  # type: ignore[arg-type]
    return pl.Trainer(learner, policy, simulator, seed=3, progress=False).fit(steps=steps)


@dataclass
class Taken:
    """A step, the tasks it used, the version it was taken at, and what went with it."""

    version: int
    tasks: list[Task]
    weights: list[Coefficients]
    cancelled: list[int]
    discarded: list[int]


def steps_of(run: pl.Run) -> Iterator[Taken]:
    tasks: dict[int, Task] = {}
    version = 0
    for entry in run.journal:
        for command in entry.commands:
            if isinstance(command, Start):
                tasks[command.task.id] = command.task
        for command in entry.commands:
            if isinstance(command, Step):
                yield Taken(
                    version,
                    [tasks[id] for id in command.weights],
                    list(command.weights.values()),
                    [c.task for c in entry.commands if isinstance(c, Cancel)],
                    [c.task for c in entry.commands if isinstance(c, Discard)],
                )
                version += 1


# --- transcripts ---------------------------------------------------------------------------------


def test_sync_waits_for_everyone() -> None:
    assert play(pl.sync(), "w1", "w0", "w2", batch=6) == [
        (start(0, "w0", 0, 2), start(1, "w1", 2, 2), start(2, "w2", 4, 2)),
        (
            Step({0: 1 / 3, 1: 1 / 3, 2: 1 / 3}),
            start(3, "w0", 6, 2, 1, 3.0),
            start(4, "w1", 8, 2, 1, 3.0),
            start(5, "w2", 10, 2, 1, 3.0),
        ),
    ]


def test_sync_of_n_cuts_the_batch_into_n_shares() -> None:
    """With fewer workers than shares, one who waits does another share."""
    script: list[tuple[float, Event | Done]] = [(0.0, Joined("w0")), (0.0, Joined("w1"))]
    script += [(1.0, Done("w0")), (2.0, Done("w1")), (3.0, Done("w0"))]
    entries = transcript(pl.policies.MinWorkers(2, pl.sync(shares=3)), script, batch=6)
    assert [entry.commands for entry in entries[1:5]] == [
        (start(0, "w0", 0, 2), start(1, "w1", 2, 2)),
        (start(2, "w0", 4, 2, since=1.0),),
        (),
        (
            Step({0: 1 / 3, 1: 1 / 3, 2: 1 / 3}),
            start(3, "w1", 6, 2, 1, 3.0),
            start(4, "w0", 8, 2, 1, 3.0),
        ),
    ]


def test_k_sync_steps_on_the_first_k_and_cancels_the_rest() -> None:
    assert play(pl.k_sync(2), "w2", "w0") == [
        (start(0, "w0", 0, 2), start(1, "w1", 2, 2), start(2, "w2", 4, 2)),
        (
            Step({0: 0.5, 2: 0.5}),
            Cancel(1),
            start(3, "w0", 6, 2, 1, 2.0),
            start(4, "w2", 8, 2, 1, 2.0),
            start(5, "w1", 10, 2, 1, 2.0),
        ),
    ]


def test_k_async_lets_the_others_run_on() -> None:
    assert play(pl.k_async(2), "w2", "w0", "w2", "w1") == [
        (start(0, "w0", 0, 2), start(1, "w1", 2, 2), start(2, "w2", 4, 2)),
        (Step({0: 0.5, 2: 0.5}), start(3, "w0", 6, 2, 1, 2.0), start(4, "w2", 8, 2, 1, 2.0)),
        (Step({1: 0.5, 4: 0.5}), start(5, "w1", 10, 2, 2, 4.0), start(6, "w2", 12, 2, 2, 4.0)),
    ]


def test_asynchronous_steps_on_every_arrival() -> None:
    assert play(pl.asynchronous(), "w2", "w0", "w2") == [
        (start(0, "w0", 0, 4), start(1, "w1", 4, 4), start(2, "w2", 8, 4)),
        (Step({2: 1.0}), start(3, "w2", 12, 4, 1, 1.0)),
        (Step({0: 1 / 2}), start(4, "w0", 16, 4, 2, 2.0)),
        (Step({3: 1 / 2}), start(5, "w2", 20, 4, 3, 3.0)),
    ]


def test_asynchronous_with_a_bound_throws_older_results_away() -> None:
    assert play(pl.asynchronous(1), "w2", "w0", "w1", "w2") == [
        (start(0, "w0", 0, 4), start(1, "w1", 4, 4), start(2, "w2", 8, 4)),
        (Step({2: 1.0}), start(3, "w2", 12, 4, 1, 1.0)),
        (Step({0: 1 / 2}), start(4, "w0", 16, 4, 2, 2.0)),
        (Discard(1), start(5, "w1", 20, 4, 2, 3.0)),
        (Step({3: 1 / 2}), start(6, "w2", 24, 4, 3, 4.0)),
    ]


def test_rennala_collects_a_batch_at_one_model() -> None:
    assert play(pl.rennala(2), "w2", "w2") == [
        (start(0, "w0", 0, 2), start(1, "w1", 2, 2), start(2, "w2", 4, 2)),
        (start(3, "w2", 6, 2, 0, 1.0),),
        (
            Step({2: 0.5, 3: 0.5}),
            Cancel(0),
            Cancel(1),
            start(4, "w2", 8, 2, 1, 2.0),
            start(5, "w0", 10, 2, 1, 2.0),
            start(6, "w1", 12, 2, 1, 2.0),
        ),
    ]


def test_ringmaster_stops_what_has_grown_too_old() -> None:
    assert play(pl.ringmaster(2), "w2", "w0") == [
        (start(0, "w0", 0, 4), start(1, "w1", 4, 4), start(2, "w2", 8, 4)),
        (Step({2: 1.0}), start(3, "w2", 12, 4, 1, 1.0)),
        (
            Step({0: 1.0}),
            Cancel(1),
            start(4, "w0", 16, 4, 2, 2.0),
            start(5, "w1", 20, 4, 2, 2.0),
        ),
    ]


def test_ringmaster_without_stops_throws_it_away_on_arrival() -> None:
    assert play(pl.ringmaster(2, stops=False), "w2", "w0", "w1") == [
        (start(0, "w0", 0, 4), start(1, "w1", 4, 4), start(2, "w2", 8, 4)),
        (Step({2: 1.0}), start(3, "w2", 12, 4, 1, 1.0)),
        (Step({0: 1.0}), start(4, "w0", 16, 4, 2, 2.0)),
        (Discard(1), start(5, "w1", 20, 4, 2, 3.0)),
    ]


def test_local_sgd_asks_for_local_steps() -> None:
    work = Work(samples=2, steps=3)
    first, second = play(pl.local_sgd(3), "w0", "w1", "w2", batch=6)
    assert first == tuple(Start(Task(i, f"w{i}", work, 0, 0.0, 2, 6 * i)) for i in range(3))
    assert second[0] == Step({0: 1 / 3, 1: 1 / 3, 2: 1 / 3})
    assert second[1] == Start(Task(3, "w0", work, 1, 3.0, 2, 18))
    assert pl.local_sgd(3, k=2) == pl.policies.Gather(2, work=Work(steps=3))


def test_ringmaster_needs_a_threshold() -> None:
    with pytest.raises(ValueError, match=r"^threshold=0: no result could be used; use threshold"):
        pl.ringmaster(0)


# --- what the papers say -------------------------------------------------------------------------


def test_rennala_uses_one_version_and_several_results_of_the_quick() -> None:
    taken = list(steps_of(train(pl.rennala(6))))
    assert len(taken) == 200
    for step in taken:
        assert len(step.tasks) == 6
        assert {task.version for task in step.tasks} == {step.version}
    workers = [[task.worker for task in step.tasks] for step in taken]
    assert sum(names.count("w0") > 1 for names in workers) > 100
    assert sum(names.count("w3") for names in workers) > 0


@pytest.mark.parametrize("threshold", [1, 2, 5])
@pytest.mark.parametrize("stops", [True, False])
def test_ringmaster_never_applies_what_is_too_old(threshold: int, stops: bool) -> None:
    run = train(pl.ringmaster(threshold, stops))
    delays = [step.version - task.version for step in steps_of(run) for task in step.tasks]
    assert max(delays) == threshold - 1  # and it goes to the limit
    if stops:
        assert (run.meter.cancelled > 0, run.meter.discarded) == (True, 0)
    else:
        assert (run.meter.cancelled, run.meter.discarded > 0) == (0, True)


def test_ringmaster_with_stops_gives_the_freed_worker_a_new_task_at_once() -> None:
    run = train(pl.ringmaster(2))
    for entry in run.journal:
        cancelled = [c.task for c in entry.commands if isinstance(c, Cancel)]
        started = [c for c in entry.commands if isinstance(c, Start)]
        if cancelled:
            assert len(started) == len(cancelled) + 1  # and the one that delivered


def test_k_sync_uses_exactly_k_and_cancels_the_rest() -> None:
    for step in steps_of(train(pl.k_sync(3))):
        assert len(step.tasks) == 3
        assert len({task.worker for task in step.tasks}) == 3
        assert {task.version for task in step.tasks} == {step.version}
        assert len(step.cancelled) == 1


def test_k_async_uses_exactly_k_and_never_cancels() -> None:
    run = train(pl.k_async(2))
    taken = list(steps_of(run))
    assert all(len(step.tasks) == 2 for step in taken)
    assert run.meter.cancelled == run.meter.discarded == 0
    assert max(step.version - task.version for step in taken for task in step.tasks) > 5


def test_asynchronous_damps_by_the_delay_and_nobody_waits() -> None:
    run = train(pl.asynchronous())
    seen = set()
    for step in steps_of(run):
        (task,), (weight,) = step.tasks, step.weights
        delay = step.version - task.version
        assert weight == 1 / (1 + delay)
        seen.add(delay)
    assert {0, 1, 2, 3} < seen
    assert run.meter.waiting == 0.0


def test_asynchronous_respects_its_bound() -> None:
    run = train(pl.asynchronous(max_staleness=3))
    delays = {step.version - task.version for step in steps_of(run) for task in step.tasks}
    assert delays == {0, 1, 2, 3}
    assert run.meter.discarded > 0


def test_sync_of_equal_workers_does_not_depend_on_who_is_quick() -> None:
    """Sums are taken in the order of the data, so speeds change times and not one bit else."""
    slow = [
        pl.delays.Exponential(6.0),
        pl.delays.Exponential(0.1),
        pl.delays.Exponential(1.0),
        pl.delays.Exponential(0.5),
    ]
    learner = pl.learners.Quadratic(noise=0.1, batch_size=8)
    models = []
    for delays in (UNEQUAL, slow):
        trainer = pl.Trainer(learner, pl.sync(), pl.Simulator(4, delays), progress=False)
        models.append(trainer.fit(steps=20).model)
    assert models[0] == models[1]


def test_local_sgd_of_one_worker_is_plain_sgd() -> None:
    plain = pl.learners.Quadratic((1.0, 0.3), noise=0.1, lr=0.1, batch_size=2)
    engine = pl.Simulator(1)
    local = pl.Trainer(plain, pl.local_sgd(5), engine, progress=False).fit(steps=4)
    every = pl.Trainer(plain, pl.sync(), engine, progress=False).fit(steps=20)
    assert local.model == pytest.approx(every.model, rel=1e-12)
    assert local.metrics["samples"].tolist() == [10.0] * 4


# --- samples -------------------------------------------------------------------------------------


def test_every_sample_of_the_stream_is_used_once_though_workers_leave_in_mid_round() -> None:
    schedule: list[tuple[float, Joined | Left]] = [
        (2.5, Left("w1")),
        (3.1, Left("w3")),
        (9.0, Joined("w1")),
        (12.2, Left("w0")),
    ]
    learner = pl.learners.TimingOnly(batch_size=11)
    engine = pl.Simulator(4, [pl.delays.Exponential(1.0)], schedule=schedule)
    run = pl.Trainer(learner, pl.sync(), engine, progress=False).fit(steps=30)
    assert run.meter.lost == run.meter.redone > 0
    assert run.metrics["samples"].tolist() == [11.0] * 30
    stretches = [stretch for stretch in run.samples() if stretch.fate != "unfinished"]
    assert {stretch.fate for stretch in stretches} == {"used"}
    place = 0
    for stretch in stretches:
        assert stretch.offset == place
        place += stretch.samples
    assert place == 30 * 11


@pytest.mark.parametrize("policy", [pl.k_sync(3), pl.rennala(3), pl.k_async(3)], ids=describe)
def test_shares_are_off_by_fewer_than_k_samples(policy: pl.policies.Gather) -> None:
    learner = pl.learners.TimingOnly(batch_size=11)
    run = pl.Trainer(learner, policy, pl.Simulator(4), progress=False).fit(steps=50)
    assert set(run.metrics["samples"]) <= {9.0, 10.0, 11.0, 12.0, 13.0}
    assert run.metrics["results"].tolist() == [3.0] * 50


def test_a_late_result_reaches_no_step() -> None:
    """Where work cannot be interrupted, what was cancelled still arrives, and is thrown away."""
    run = train(pl.k_sync(2), interruptible=False)
    cancelled: set[int] = set()
    late = 0
    for entry in run.journal:
        if isinstance(entry.event, Finished) and entry.event.task in cancelled:
            assert entry.commands == (Discard(entry.event.task),)
            late += 1
        cancelled |= {c.task for c in entry.commands if isinstance(c, Cancel)}
    assert late > 50


def test_names_are_settings_of_gather() -> None:
    assert pl.sync() == pl.policies.Gather()
    assert pl.sync(shares=4) == pl.policies.Gather(4, spares=False)
    assert pl.k_sync(4) == pl.policies.Gather(4)
    assert pl.k_async(2) == pl.policies.Gather(2, max_staleness=inf, preempt=False)
    assert pl.rennala(5) == pl.policies.Gather(5, refill=True)
    assert pl.ringmaster(3) == pl.policies.Gather(1, max_staleness=2, refill=True)


def test_a_number_given_to_sync_must_be_named() -> None:
    """`sync(3)` reads like "wait for three", which is `k_sync(3)`."""
    told = r"got 3; use pl\.sync\(shares=3\) .*, or pl\.k_sync\(3\) to wait for the fastest 3"
    with pytest.raises(TypeError, match=told):
        pl.sync(3)  # type: ignore[call-arg]
    assert str(inspect.signature(pl.sync)) == "(*, shares: 'int | None' = None) -> 'Gather'"
