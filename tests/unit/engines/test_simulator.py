"""The simulator against arithmetic done by hand: times, departures, budgets, repeats and saves."""

from __future__ import annotations

import json
from dataclasses import replace
from math import sqrt
from typing import Any

import numpy as np
import pytest

import paceline as pl
from paceline.core.coordinator import Coordinator, drive
from paceline.core.errors import StalledError
from paceline.core.journal import Entry
from paceline.core.policy import Policy
from paceline.core.protocol import (
    MAIN,
    Assign,
    Cancel,
    Discard,
    Finished,
    Interrupted,
    Joined,
    Left,
    Send,
    SetTimer,
    Start,
    Step,
    Stepped,
    Stop,
    Task,
    TimerFired,
    Work,
)
from paceline.delays.models import Delay
from paceline.engines.base import Job
from paceline.learners.base import Learner, Saved
from tests.conftest import vector_of
from tests.policies import POLICIES


def train(learner: Learner, policy: Policy, engine: pl.Simulator, **ends: Any) -> pl.Run:
    seed = ends.pop("seed", 0)
    return pl.Trainer(learner, policy, engine, seed=seed, progress=False).fit(**ends)


def opened(engine: pl.Simulator, learner: Learner | None = None, **job: Any) -> pl.Simulator:
    """Open an engine and let its workers join."""
    learner = learner or pl.learners.TimingOnly()
    engine.open(Job(learner=learner, server=learner.server(), **job))
    for index in range(engine.size):
        assert engine.next_event() == (job.get("began", 0.0), MAIN, Joined(f"w{index}"))
    return engine


def task(id: int, worker: str = "w0", samples: int = 1, **more: Any) -> Task:
    work = more.pop("work", Work(samples=samples))
    return Task(id, worker, work, more.pop("version", 0), 0.0, samples, more.pop("offset", 0))


def execute(engine: pl.Simulator, *commands: Any) -> None:
    for command in commands:
        engine.execute(MAIN, command)


# --- oracles -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "k"), [(1, 1), (4, 2), (8, 5), (8, 8), (20, 3)])
def test_the_kth_of_n_exponential_times(n: int, k: int) -> None:
    """E = H_n - H_(n-k), the sum of 1/i over i = n-k+1 … n, with the sum of 1/i^2 as variance."""
    steps = 800
    policy = pl.policies.Gather(k, work=Work(samples=1))
    run = train(
        pl.learners.TimingOnly(),
        policy,
        pl.Simulator(n, pl.delays.Exponential(1.0), unit=1),
        steps=steps,
    )
    orders = np.arange(n - k + 1, n + 1)
    error = run.seconds / steps - np.sum(1 / orders)
    assert abs(error) <= 4 * sqrt(np.sum(1 / orders**2) / steps)


def test_a_step_of_sync_is_down_compute_up() -> None:
    """Latency 1/4 each way, 1000 bytes at 4000 down and 2000 up, 1 second: 0.25+0.25+1+0.25+0.5."""
    link = pl.delays.Link(latency=0.25, down=4000, up=2000)
    engine = pl.Simulator(4, pl.delays.Fixed(1.0), link)
    run = train(
        pl.learners.TimingOnly(batch_size=8, message_bytes=1000), pl.sync(), engine, steps=5
    )
    assert run.metrics["seconds"].tolist() == [2.25, 4.5, 6.75, 9.0, 11.25]


def test_the_slowest_link_sets_the_pace_of_sync() -> None:
    links = [pl.delays.Link(), pl.delays.Link(latency=0.5), pl.delays.Link(up=1000)]
    engine = pl.Simulator(
        3, [pl.delays.Fixed(1.0), pl.delays.Fixed(0.5), pl.delays.Fixed(0.25)], links
    )
    run = train(
        pl.learners.TimingOnly(batch_size=3, message_bytes=2000), pl.sync(), engine, steps=3
    )
    assert run.metrics["seconds"].tolist() == [2.25, 4.5, 6.75]  # 1, 1.5 and 2.25


def test_the_throughput_of_asynchronous_is_the_sum_of_the_rates() -> None:
    """Tasks of 1/2, 1, 2 and 4 seconds: in 40 seconds 80 + 40 + 20 + 10 arrive."""
    delays = [
        pl.delays.Fixed(0.5),
        pl.delays.Fixed(1.0),
        pl.delays.Fixed(2.0),
        pl.delays.Fixed(4.0),
    ]
    policy = pl.policies.Gather(1, float("inf"), True, False, work=Work(samples=3))
    run = train(pl.learners.TimingOnly(3), policy, pl.Simulator(4, delays, unit=3), seconds=40.001)
    assert run.steps == 150
    workers = [c.task.worker for entry in run.journal for c in entry.commands if type(c) is Start]
    started = {worker: workers.count(worker) - 1 for worker in sorted(set(workers))}
    assert started == {"w0": 80, "w1": 40, "w2": 20, "w3": 10}
    assert run.meter.samples_used == 450


def test_a_unit_is_an_equal_share_unless_said() -> None:
    learner = pl.learners.TimingOnly(batch_size=12)
    for unit, seconds in ((None, 1.0), (3, 1.0), (1, 3.0), (6, 0.5)):
        engine = pl.Simulator(4, pl.delays.Fixed(1.0), unit=unit)
        assert train(learner, pl.sync(), engine, steps=1).seconds == seconds


def test_local_steps_take_their_time() -> None:
    engine = pl.Simulator(4, pl.delays.Fixed(1.0))
    assert train(pl.learners.TimingOnly(8), pl.local_sgd(5), engine, steps=2).seconds == 10.0


def test_the_time_of_a_step_on_the_server_is_charged() -> None:
    engine = pl.Simulator(3, pl.delays.Fixed(1.0), update=0.25)
    run = train(pl.learners.TimingOnly(3), pl.sync(), engine, steps=4)
    assert run.metrics["seconds"].tolist() == [1.0, 2.25, 3.5, 4.75]
    stepped = [entry.now for entry in run.journal if isinstance(entry.event, Stepped)]
    assert stepped == [1.25, 2.5, 3.75]


def test_delays_by_name_and_by_turns() -> None:
    by_name = pl.Simulator(2, {"w0": pl.delays.Fixed(1.0), "w1": pl.delays.Fixed(3.0)})
    assert train(pl.learners.TimingOnly(2), pl.sync(), by_name, steps=1).seconds == 3.0
    by_turns = pl.Simulator(4, [pl.delays.Fixed(1.0), pl.delays.Fixed(2.0)])
    run = train(pl.learners.TimingOnly(4), pl.sync(), by_turns, steps=1)
    finished = [entry.now for entry in run.journal if isinstance(entry.event, Finished)]
    assert finished == [1.0, 1.0, 2.0, 2.0]


# --- one task after the other --------------------------------------------------------------------


def test_a_result_tells_the_samples_and_the_seconds_of_computing() -> None:
    engine = opened(pl.Simulator(1, pl.delays.Fixed(2.0), pl.delays.Link(latency=1.0), unit=4))
    execute(engine, Start(task(0, samples=6)))
    assert engine.next_event() == (1 + 3 + 1, MAIN, Finished(0, 6, 3.0))
    assert engine.now() == 5.0
    assert engine.next_event() is None


def test_a_budget_cuts_the_samples() -> None:
    engine = opened(pl.Simulator(1, pl.delays.Fixed(0.5), unit=1))
    for id, (budget, samples, seconds) in enumerate(
        [(1.75, 3, 1.75), (0.4, 0, 0.4), (5.0, 10, 5.0), (6.0, 10, 5.0)]
    ):
        before = engine.now()
        execute(engine, Start(task(id, samples=10, work=Work(samples=10, budget=budget))))
        assert engine.next_event() == (before + seconds, MAIN, Finished(id, samples, seconds))


def test_a_budget_cuts_the_gradient_too() -> None:
    """With 4 samples of 10 the gradient is the one over the first 4."""
    rng = np.random.default_rng(1)
    learner = pl.learners.Logistic(
        rng.normal(size=(40, 3)), rng.choice([-1.0, 1.0], 40), batch_size=10
    )
    engine = pl.Simulator(1, pl.delays.Fixed(1.0), unit=1)
    server = learner.server()
    engine.open(Job(learner=learner, server=server, seed=5))
    engine.next_event()
    execute(engine, Start(task(0, samples=10, work=Work(samples=10, budget=4.5))))
    occurred = engine.next_event()
    assert occurred is not None
    assert isinstance(occurred[2], Finished)
    assert occurred[2].samples == 4
    expected = learner.replica(5).compute([np.zeros(3)], task(1, samples=4), lambda done: True)
    execute(engine, Step({0: 1.0}))
    assert server.vector == pytest.approx(-learner.lr * vector_of(expected), rel=1e-12)


def test_tasks_of_one_worker_are_done_one_after_the_other() -> None:
    engine = opened(pl.Simulator(1, pl.delays.Fixed(1.0), unit=1))
    execute(engine, Start(task(0)), Start(task(1)), Start(task(2, samples=2)))
    assert [engine.next_event() for _ in range(4)] == [
        (1.0, MAIN, Finished(0, 1, 1.0)),
        (2.0, MAIN, Finished(1, 1, 1.0)),
        (4.0, MAIN, Finished(2, 2, 2.0)),
        None,
    ]


def test_cancelled_work_ends_at_once() -> None:
    engine = opened(pl.Simulator(1, pl.delays.Fixed(1.0), unit=1))
    execute(engine, Start(task(0, samples=8)), Start(task(1)), Start(task(2)))
    execute(engine, Cancel(1))  # still waiting
    execute(engine, SetTimer("t", 3.0))
    assert engine.next_event() == (3.0, MAIN, TimerFired("t"))
    execute(engine, Cancel(0))  # running
    assert engine.next_event() == (4.0, MAIN, Finished(2, 1, 1.0))
    assert engine.next_event() is None


def test_what_cannot_be_interrupted_blocks_its_worker() -> None:
    engine = opened(pl.Simulator(1, pl.delays.Fixed(1.0), unit=1, interruptible=False))
    execute(engine, Start(task(0, samples=8)), SetTimer("t", 3.0))
    engine.next_event()
    execute(engine, Cancel(0), Start(task(1)), Start(task(2)), Cancel(1))
    assert engine.next_event() == (8.0, MAIN, Finished(0, 8, 8.0))  # for the coordinator to discard
    execute(engine, Discard(0))
    assert engine.next_event() == (9.0, MAIN, Finished(2, 1, 1.0))
    assert engine.next_event() is None


def test_without_interruption_k_sync_waits_for_the_blocked() -> None:
    """w0 makes a step a second; w1 needs 2.5, and what it brings is of a version long gone."""
    delays = [pl.delays.Fixed(1.0), pl.delays.Fixed(2.5)]
    engine = pl.Simulator(2, delays, unit=1, interruptible=False)
    run = train(pl.learners.TimingOnly(1), pl.k_sync(1), engine, steps=6)
    assert run.metrics["seconds"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    late = [(entry.now, c) for entry in run.journal for c in entry.commands if type(c) is Discard]
    assert late == [(2.5, Discard(1)), (5.0, Discard(5))]  # begun at versions 0 and 2


def test_timers_and_ties_come_in_the_order_they_were_set() -> None:
    engine = opened(pl.Simulator(1))
    execute(engine, SetTimer("b", 2.0), SetTimer("a", 2.0), SetTimer("c", 1.0))
    execute(engine, SetTimer("never", float("inf")))
    fired = [engine.next_event() for _ in range(4)]
    assert fired[:3] == [
        (1.0, MAIN, TimerFired("c")),
        (2.0, MAIN, TimerFired("b")),
        (2.0, MAIN, TimerFired("a")),
    ]
    assert fired[3] is None


def test_an_interruption_comes_first_and_once() -> None:
    engine = opened(pl.Simulator(1, pl.delays.Fixed(1.0), unit=1))
    execute(engine, Start(task(0)), Start(task(1)))
    engine.next_event()
    engine.interrupt("enough")
    assert engine.next_event() == (1.0, MAIN, Interrupted("enough"))
    assert engine.next_event() == (2.0, MAIN, Finished(1, 1, 1.0))
    engine.interrupt("too late")
    opened(engine)  # a new job knows nothing of it


def test_commands_without_an_effect_here() -> None:
    engine = opened(pl.Simulator(1))
    execute(engine, Stop("enough"), Assign("w0"))
    assert engine.next_event() is None
    with pytest.raises(NotImplementedError, match="only nodes of a decentralized run send"):
        execute(engine, Send(("w1",)))


def test_a_result_that_is_missing_at_a_step_is_not_passed_over() -> None:
    engine = opened(pl.Simulator(1), pl.learners.Quadratic())
    with pytest.raises(RuntimeError, match=r"results of tasks \[3\] are missing"):
        execute(engine, Step({3: 1.0}))


def test_kept_results_can_be_used_again() -> None:
    learner = pl.learners.Quadratic(lr=0.5, batch_size=1)
    server = learner.server()
    engine = pl.Simulator(1)
    engine.open(Job(learner=learner, server=server))
    engine.next_event()
    execute(engine, Start(task(0)))
    engine.next_event()
    execute(engine, Step({0: 1.0}, keep=True), Step({0: 0.5}))
    assert server.vector.tolist() == [1 - 0.5 - 0.25]
    with pytest.raises(RuntimeError, match="are missing"):
        execute(engine, Step({0: 1.0}))


def test_the_statistics_of_a_step() -> None:
    learner = pl.learners.Quadratic((1.0, 1.0), start=3.0, lr=0.5, batch_size=1)
    engine = opened(pl.Simulator(1), learner, wants=frozenset({"norm", "dot"}))
    execute(engine, Start(task(0)), Start(task(1)))
    engine.next_event()
    engine.next_event()
    execute(engine, Step({0: 1.0}), Step({1: 0.5}))
    first, second = engine.next_event(), engine.next_event()
    assert first is not None
    assert second is not None
    assert isinstance(first[2], Stepped)
    assert isinstance(second[2], Stepped)
    assert first[2].stats == {"loss": 9.0, "norm": pytest.approx(sqrt(18)), "dot": 0.0}
    assert second[2].stats == {"loss": 9.0, "norm": pytest.approx(sqrt(4.5)), "dot": 9.0}


# --- departures ----------------------------------------------------------------------------------


def test_a_departure_and_a_return() -> None:
    """w1 is away from 1.5 to 4.25: its share is done by w0, and later again by itself."""
    schedule: list[tuple[float, Joined | Left]] = [(4.25, Joined("w1")), (1.5, Left("w1"))]
    engine = pl.Simulator(2, pl.delays.Fixed(1.0), schedule=schedule)
    run = train(pl.learners.TimingOnly(batch_size=8), pl.sync(), engine, steps=4)
    # 1: both. 3: w0 does its own share, then w1's. 5: w0 alone does all 8. 6: both again.
    assert run.metrics["seconds"].tolist() == [1.0, 3.0, 5.0, 6.0]
    assert run.metrics["results"].tolist() == [2.0, 2.0, 1.0, 2.0]
    assert run.metrics["samples"].tolist() == [8.0] * 4
    assert (run.meter.lost, run.meter.redone) == (1, 1)


def test_one_who_left_delivers_nothing() -> None:
    engine = opened(pl.Simulator(1, pl.delays.Fixed(1.0), unit=1, schedule=[(0.5, Left("w0"))]))
    execute(engine, Start(task(0)), Start(task(1)))
    assert engine.next_event() == (0.5, MAIN, Left("w0"))
    assert engine.next_event() is None


def test_one_who_left_while_blocked_returns_unblocked() -> None:
    schedule: list[tuple[float, Joined | Left]] = [(1.0, Left("w0")), (2.0, Joined("w0"))]
    engine = opened(
        pl.Simulator(1, pl.delays.Fixed(1.0), unit=1, schedule=schedule, interruptible=False),
        pl.learners.Quadratic(),
    )
    execute(engine, Start(task(0, samples=9)), Cancel(0), Start(task(1)))
    assert engine.next_event() == (1.0, MAIN, Left("w0"))
    assert engine.next_event() == (2.0, MAIN, Joined("w0"))
    execute(engine, Start(task(2)))
    occurred = engine.next_event()
    assert occurred is not None
    assert (occurred[0], occurred[2].task) == (3.0, 2)  # type: ignore[union-attr]
    assert engine.next_event() is None


def test_all_gone_is_a_stall_that_tells_its_books() -> None:
    engine = pl.Simulator(2, pl.delays.Fixed(1.0), schedule=[(1.5, Left("w0")), (1.75, Left("w1"))])
    with pytest.raises(StalledError, match=r"version 1 at t=1.75: 0 workers \(0 idle\).*2 tasks l"):
        train(pl.learners.TimingOnly(2), pl.sync(), engine, steps=5)


def test_a_schedule_before_the_beginning_is_past() -> None:
    schedule: list[tuple[float, Joined | Left]] = [
        (1.0, Left("w0")),
        (2.0, Joined("w0")),
        (7.0, Left("w0")),
    ]
    engine = opened(pl.Simulator(1, schedule=schedule), began=5.0, steps=3)
    assert engine.next_event() == (7.0, MAIN, Left("w0"))
    assert engine.next_event() is None


# --- what is refused -----------------------------------------------------------------------------


def test_engines_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="workers=0: use at least 1"):
        pl.Simulator(0)
    for link in ({"latency": -1.0}, {"down": 0.0}, {"up": -2.0}):
        with pytest.raises(ValueError, match=r"Link\(.*use latency >= 0 and bandwidths > 0 bytes"):
            pl.delays.Link(**link)
    with pytest.raises(ValueError, match="schedule names w2; the workers are w0 to w1"):
        opened(pl.Simulator(2, schedule=[(1.0, Left("w2"))]))


# --- repeats and saves ---------------------------------------------------------------------------

RNG = np.random.default_rng(0)
LOGISTIC = pl.learners.Logistic(
    RNG.normal(size=(50, 4)), RNG.choice([-1.0, 1.0], 50), batch_size=12
)
LEARNERS: dict[str, Learner] = {
    "Quadratic": pl.learners.Quadratic((1.0, 0.2), noise=0.5, batch_size=12),
    "Logistic": LOGISTIC,
    "Timing": pl.learners.TimingOnly(batch_size=12, message_bytes=100),
}


def lively(interrupt: bool = True) -> pl.Simulator:
    """An engine with everything: bursts, slow links, departures."""
    burst = pl.delays.Bursts(pl.delays.Exponential(0.5), pl.delays.Exponential(5.0), 3.0, 2.0)
    delays: list[Delay] = [
        burst,
        pl.delays.Trace([0.5, 1.5, 0.25]),
        pl.delays.LogNormal(1.0, 0.5),
        pl.delays.Exponential(1.0),
    ]
    schedule: list[tuple[float, Joined | Left]] = [
        (2.0, Left("w1")),
        (5.0, Joined("w1")),
        (6.0, Left("w3")),
    ]
    links = [pl.delays.Link(0.01, 1e5, 1e4), pl.delays.Link()]
    return pl.Simulator(4, delays, links, update=0.01, schedule=schedule, interruptible=interrupt)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("learner", LEARNERS)
def test_the_same_seed_gives_the_same_bits(learner: str, policy: str) -> None:
    runs = [
        train(LEARNERS[learner], POLICIES[policy](), lively(), steps=30, seed=seed)
        for seed in (7, 7, 8)
    ]
    assert list(runs[0].journal) == list(runs[1].journal)
    assert np.array_equal(runs[0].model, runs[1].model) or learner == "Timing"
    assert list(runs[0].journal) != list(runs[2].journal)


def test_cancelled_work_costs_no_arithmetic() -> None:
    calls = []

    class Counting(pl.learners.Quadratic):
        def gradient(self, x: Any, samples: int, rng: Any) -> Any:
            calls.append(samples)
            return super().gradient(x, samples, rng)

    run = train(Counting(), pl.k_sync(2), pl.Simulator(6), steps=20)
    assert len(calls) == run.meter.used == 40


def play(engine: pl.Simulator, coordinator: Coordinator, entries: int) -> list[Entry]:
    driven = drive({MAIN: coordinator}, engine)
    return [next(driven)[1] for _ in range(entries)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("learner", LEARNERS)
@pytest.mark.parametrize("interrupt", [True, False])
def test_saved_in_the_middle_it_goes_on_the_same(
    learner: str, policy: str, interrupt: bool
) -> None:
    recipe = LEARNERS[learner]
    engine, server = lively(interrupt), recipe.server()
    engine.open(Job(learner=recipe, server=server, seed=3))
    coordinator = Coordinator(POLICIES[policy](), recipe.batch_size)
    play(engine, coordinator, 37)
    saved, state, middle = engine.save(), coordinator.state(), server.save().copy()
    arrays = {name: array.copy() for name, array in saved.arrays.items()}
    expected = play(engine, coordinator, 60)

    other, server_again = lively(interrupt), recipe.server()
    server_again.load(middle)
    data = json.loads(json.dumps(saved.data, allow_nan=False))
    version = coordinator.ledger.version
    resumed = Coordinator(POLICIES[policy](), recipe.batch_size)
    resumed.load(json.loads(json.dumps(state)))
    job = Job(
        learner=recipe,
        server=server_again,
        seed=3,
        began=resumed.ledger.now,
        steps=resumed.ledger.version,
    )
    other.open(job, Saved(arrays, data))
    again = other.save()
    assert json.dumps(again.data) == json.dumps(saved.data)
    assert again.arrays.keys() == arrays.keys()
    assert all(np.array_equal(again.arrays[name], arrays[name]) for name in arrays)
    assert play(other, resumed, 60) == expected
    assert resumed.ledger.version == version
    assert np.array_equal(server_again.vector, server.vector)


@pytest.mark.parametrize("policy", POLICIES)
def test_models_that_nobody_needs_are_freed(policy: str) -> None:
    """At most one model per task in flight is kept, however long the run."""
    engine, learner = lively(), LEARNERS["Quadratic"]
    engine.open(Job(learner=learner, server=learner.server()))
    coordinator = Coordinator(POLICIES[policy](), 12)
    most = 0
    for _ in range(150):
        play(engine, coordinator, 1)
        versions = {task.version for task in coordinator.ledger.running.values()}
        assert set(engine._models) == set(engine._users) == versions
        assert len(engine._results._held) == len(coordinator.ledger.held)
        assert set(engine._tasks) == set(coordinator.ledger.running)
        most = max(most, len(engine._models))
    assert coordinator.ledger.version > 10
    assert 1 <= most <= 4


def test_a_timing_run_keeps_nothing() -> None:
    engine, learner = lively(), pl.learners.TimingOnly(batch_size=12)
    engine.open(Job(learner=learner, server=learner.server()))
    coordinator = Coordinator(pl.rennala(5), 12)
    play(engine, coordinator, 200)
    assert not engine._models
    assert set(engine._results._held) == set(coordinator.ledger.held)
    assert all(held.vector is None for held in engine._results._held.values())
    assert set(engine._tasks) == set(coordinator.ledger.running)


def test_a_closed_engine_reports_nothing_and_can_be_opened_again() -> None:
    engine = opened(pl.Simulator(2))
    execute(engine, Start(task(0)))
    engine.close()
    assert engine.next_event() is None
    opened(engine)


def test_an_engine_is_told_as_its_user_would_write_it() -> None:
    told = (
        "Simulator(workers=2, delays=Fixed(seconds=1.0), link=Link(latency=0.0, down=inf, up=inf))"
    )
    assert repr(pl.Simulator(2, pl.delays.Fixed(1.0))) == told


def test_time_and_version_go_on_from_where_a_job_begins() -> None:
    engine = opened(pl.Simulator(1, pl.delays.Fixed(1.0), unit=1), began=10.0, steps=4)
    execute(engine, Start(replace(task(0), version=4)))
    assert engine.next_event() == (11.0, MAIN, Finished(0, 1, 1.0))
    execute(engine, Step({0: 1.0}))
    assert engine.next_event() == (11.0, MAIN, Stepped(5))


def test_workers_have_the_names_that_are_given() -> None:
    names = ["a100-0", "cpu-0", "cpu-1"]
    engine = pl.Simulator(3, {"a100-0": pl.delays.Fixed(1.0), "cpu-0": pl.delays.Fixed(4.0),
                              "cpu-1": pl.delays.Fixed(4.0)}, names=names)  # fmt: skip
    learner = pl.learners.TimingOnly(12)
    policy = pl.policies.OnlyWorkers(["cpu-1", "a100-0"], pl.sync())
    run = pl.Trainer(learner, policy, engine, progress=False).fit(steps=3)
    assert {w for w, each in run.meter.workers.items() if each.samples} == {"cpu-1", "a100-0"}
    with pytest.raises(ValueError, match="this engine has the 3 workers a100-0, cpu-0 to cpu-1"):
        pl.Trainer(learner, pl.policies.OnlyWorkers(["w0"], pl.sync()), engine, progress=False)
    with pytest.raises(ValueError, match="give 2 different names, one for each worker"):
        pl.Simulator(2, names=["a", "a"])
