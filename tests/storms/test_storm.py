"""Storms: nothing lost, nothing counted twice, no end to nothing; and bugs put in are found."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline as pl
from paceline.core.protocol import Draining, Start, Task, Work
from paceline.engines.checks import FAR, NOT_FINITE, ResultCheck, norm_of
from paceline.engines.ray.reclaimed import Notice
from paceline.engines.ray.servers.events import ServerLost
from paceline.engines.ray.servers.slices import Kept
from tests.storms.planted import BUGS, found, planted
from tests.storms.rolling import Rolling
from tests.storms.serial import serial
from tests.storms.simulated import SimulatedRay
from tests.storms.storm import play
from tests.storms.weather import Process, Weather, World

CASES = (
    *("sync", "k_sync", "k_async", "asynchronous", "bounded", "rennala", "ringmaster", "loose"),
    *("bandit", "ata", "local_sgd", "by speed", "growing", "deadline", "among", "placed", "coded"),
    *("verified", "estimated", "encoded", "lazy", "public copy", "robust", "servers"),
    "ringleader",
)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("first", [0, pytest.param(3, marks=pytest.mark.long)])
def test_what_was_promised_holds_in_a_storm(case: str, first: int, tmp_path: Path) -> None:
    faults = 0
    for seed in range(first, first + 3):
        outcome = play(seed, tmp_path / str(seed), case)
        assert outcome.case.name == case
        faults += outcome.faults.total()
    assert faults > 15  # in half of the six seeds, half of the faults


def test_a_draining_worker_that_waits_for_a_lost_result_computes_it(tmp_path: Path) -> None:
    """It is the only worker. Its own task waits for a step, and the step for the result."""
    outcome = play(1977, tmp_path, "servers")
    assert outcome.faults["drain"] and outcome.weather.gone == outcome.case.workers - 1


def test_the_same_seed_is_the_same_storm(tmp_path: Path) -> None:
    for seed in (3, 8):
        first, second = (play(seed, tmp_path / f"{seed}{name}") for name in "ab")
        assert first.faults == second.faults and first.seconds == second.seconds
        journals = [sorted((tmp_path / f"{seed}{name}").glob("*.jsonl")) for name in "ab"]
        assert journals[0] and len(journals[0]) == len(journals[1])
        for one, other in zip(*journals, strict=True):
            assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_put_in_is_found(bug: str, tmp_path: Path) -> None:
    with planted(bug):
        seed, told = found(play, bug, tmp_path)
    assert f"chaos.py --seed {seed}" in told


# Such that none of 240 tasks takes three workers with it: then it is dropped, and that is seen.
STORMY = Weather(lost=0.01, crash=0.01, wrong=0.01, twice=0.4, unknown=0.01)


def test_bad_weather_does_not_change_what_sync_learns_from() -> None:
    """Whoever is lost, his samples are computed by another, for the same step."""
    learner = pl.learners.Quadratic((1.0, 0.2), noise=0.5, batch_size=12)
    steps = []
    for weather in (Weather(), STORMY):
        engine = SimulatedRay(4, World(5, weather, 4, 20.0), respawns=1000)
        run = pl.Trainer(learner, pl.sync(), engine, progress=False).fit(steps=60)
        entries, server = list(run.journal), learner.server()
        done = serial(run.journal.header, entries, learner, server, seed=0)
        assert np.array_equal(done.models[60], run.model)
        steps.append(done.used)
    assert engine.world.faults.total() > 60
    assert steps[0] == steps[1]


# --- servers -------------------------------------------------------------------------------------


class AtStep(pl.Callback):
    def __init__(self, step: int, action: Callable[[], None]) -> None:
        self._step, self._action = step, action

    def stepped(self, progress: pl.Progress) -> None:
        if progress.step == self._step:
            self._action()


@pytest.mark.parametrize("totals", [False, True])
def test_a_node_lost_while_its_server_is_idle_is_noticed(totals: bool) -> None:
    """Workers that come up find a slice of the model gone, and no call to its server can fail."""
    learner = Rolling((1.0, 0.3, 0.1), noise=0.1, lr=0.04, batch_size=12, totals=totals)
    world = World(1, Weather(), 3, 20.0, nodes=3)
    world.most = 20_000

    def lose() -> None:
        for actor in [a for a in world.actors if a.name in ("w0", "w1")]:
            actor.die()
        world.lose_node("n1")

    engine = SimulatedRay(3, world, servers=3, start_timeout=5.0)
    watch = [AtStep(5, lambda: world.after(0.5, lose))]  # when the servers are done with it
    run = pl.Trainer(learner, pl.sync(shares=3), engine, callbacks=watch, progress=False).fit(
        steps=12
    )
    done = serial(run.journal.header, list(run.journal), learner, learner.server(), seed=0)
    assert run.steps == 12 and np.array_equal(done.models[12], run.model)


@pytest.mark.parametrize(
    ("policy", "exact"), [(pl.sync(shares=4), True), (pl.coded(1), False)], ids=["sync", "coded"]
)
def test_results_that_are_lost_with_a_node_are_computed_again(
    policy: pl.policies.Gather | pl.policies.Coded, exact: bool, caplog: pytest.LogCaptureFixture
) -> None:
    learner = Rolling((1.0, 0.3, 0.1), noise=0.1, lr=0.04, batch_size=12)
    caplog.set_level("WARNING")
    for seed in range(4):
        world = World(seed, Weather(), 4, 20.0, nodes=2)
        engine = SimulatedRay(4, world, servers=2, start_timeout=5.0)
        watch = [AtStep(5, lambda world=world: world.lose_node("n1"))]  # type: ignore[misc]
        run = pl.Trainer(learner, policy, engine, callbacks=watch, progress=False).fit(steps=9)
        done = serial(run.journal.header, list(run.journal), learner, learner.server(), seed=0)
        assert np.allclose(done.models[9], run.model, rtol=0.0 if exact else 1e-9, atol=0.0)
    assert "is computed again" in caplog.text


@pytest.mark.parametrize("totals", [False, True])
@pytest.mark.parametrize("direct", [False, True])
def test_machines_taken_away_after_a_notice_cost_no_task(
    totals: bool, direct: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Slices and workers leave before their machine, and come back where there is another."""
    caplog.set_level("WARNING")
    learner = Rolling((1.0, 0.3, 0.1, 0.2, 0.5), noise=0.1, lr=0.04, batch_size=12, totals=totals)
    world = World(1, Weather(), 4, 20.0, nodes=4, direct=direct)
    engine = SimulatedRay(4, world, servers=4, start_timeout=5.0)
    counts: list[tuple[int, int]] = []  # of servers, and of machines with workers

    def look(engine: Any = engine) -> None:
        servers = engine._open.reducer.machine.steps.slots
        counts.append((len(servers), len(engine._pool.nodes())))

    watch = [AtStep(step, partial(world.drain_node, 30.0)) for step in range(20, 400, 60)]
    watch += [AtStep(step, look) for step in (19, 24, 79, 440)]
    given: dict[str, Any] = {"callbacks": watch, "progress": False, "backups": False}
    run = pl.Trainer(learner, pl.sync(shares=4), engine, **given).fit(steps=440)
    assert world.faults["notice"] == 7 and len(world.dead) == 7
    assert counts[0] == (4, 4) and counts[1][0] == 3
    assert all(servers == machines for servers, machines in counts[2:])
    started = [c.task for e in run.journal for c in e.commands if isinstance(c, Start)]
    assert not any(task.attempt > 1 or task.copy_of is not None for task in started)
    assert not [r for r in caplog.records if "lost" in r.message or "again" in r.message]
    done = serial(run.journal.header, list(run.journal), learner, learner.server(), seed=0)
    assert np.array_equal(done.models[440], run.model)


def test_a_machine_may_have_notice_before_the_first_step() -> None:
    learner = Rolling((1.0, 0.3, 0.1, 0.2, 0.5), noise=0.1, lr=0.04, batch_size=12)
    world = World(3, Weather(), 4, 20.0, nodes=4)
    world.notices["w0"] = Notice("its cloud takes it back", machine=True)
    engine = SimulatedRay(4, world, servers=4, start_timeout=5.0)
    run = pl.Trainer(learner, pl.sync(shares=4), engine, progress=False, backups=False).fit(
        steps=20
    )
    assert run.steps == 20 and Draining("w0") in [entry.event for entry in run.journal]
    started = [c.task for e in run.journal for c in e.commands if isinstance(c, Start)]
    assert not any(task.attempt > 1 for task in started)


def test_a_worker_that_recomputes_a_lost_result_may_drain() -> None:
    """The ledger knows nothing of that task, and lets the worker go at once."""
    learner = Rolling((1.0, 0.3, 0.1, 0.2, 0.5), noise=0.1, lr=0.04, batch_size=12)
    drained = 0
    for seed in range(8):
        world = World(seed, Weather(), 6, 20.0, nodes=3)
        world.most = 20_000
        engine = SimulatedRay(6, world, servers=3, start_timeout=5.0)

        def look(engine: Any = engine, world: World = world) -> None:
            nonlocal drained
            job = engine._open
            again = job.reducer.machine.results.again
            busy = [m for m in engine._pool.members.values() if m.busy and m.busy.task in again]
            drained += len(busy)
            job.drains.drain([member.name for member in busy])
            if not busy and world.now < 60:
                world.after(0.05, look)

        def lose(world: World = world, look: Any = look) -> None:
            world.lose_node("n1")
            world.after(0.05, look)

        given: dict[str, Any] = {"callbacks": [AtStep(5, lose)], "progress": False}
        run = pl.Trainer(learner, pl.bandit(2), engine, backups=False, **given).fit(steps=12)
        assert run.steps == 12
    assert drained


def test_a_lost_result_is_not_left_with_one_who_waits_for_the_step_that_needs_it(
    tmp_path: Path,
) -> None:
    play(5191, tmp_path, "servers")  # the storm that found it: it had no end


def test_a_model_that_stayed_on_a_node_is_known_to_be_lost_with_it(tmp_path: Path) -> None:
    play(200907, tmp_path)  # the storm that found it: its server had left before


def test_what_a_lost_server_says_that_it_keeps_is_not_relied_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may answer while it is being ended."""
    learner = Rolling((1.0, 0.3, 0.1), noise=0.1, lr=0.04, batch_size=12)
    keepers: list[bool] = []
    for seed in range(8):
        world = World(seed, Weather(), 6, 20.0, nodes=3)
        engine = SimulatedRay(6, world, servers=3, start_timeout=5.0)
        end = partial(_end_after, world)
        monkeypatch.setattr("tests.storms.simulated.SimulatedCluster.kill", end)

        def look(engine: Any = engine) -> None:
            members = engine._server_pool.members
            slots = engine._open.reducer.machine.steps.slots
            kept = [each for slot in slots for each in slot.states.values()]
            lives = {Kept(name, member.incarnation) for name, member in members.items()}
            keepers.extend(each in lives for each in kept if isinstance(each, Kept))

        def lose(engine: Any = engine, world: World = world, look: Any = look) -> None:
            engine._open.reducer.machine.handle(ServerLost("s2", "it was slow"))
            world.after(0.5, look)

        watch = [AtStep(5, partial(world.after, 0.2, lose))]  # while the state is on its way
        pl.Trainer(learner, pl.sync(shares=6), engine, callbacks=watch, progress=False).fit(steps=9)
    assert keepers and all(keepers)


def _end_after(world: World, actor: Process) -> None:
    world.after(1.0, actor.die)


def test_a_server_may_be_lost_again_and_again_while_a_checkpoint_waits(tmp_path: Path) -> None:
    world = World(1, Weather(), 3, 20.0)
    world.most = 20_000

    def lose() -> None:
        world.gone.add("s1")  # it dies at every start, for longer than a step and a start may take
        next(actor for actor in world.actors if actor.name == "s1").die()
        world.after(40.0, world.gone.clear)

    engine = SimulatedRay(3, world, servers=2, start_timeout=5.0, respawns=1000)
    run = pl.Trainer(
        Rolling((1.0, 0.3), lr=0.04, batch_size=12),
        pl.sync(shares=3),
        engine,
        callbacks=[AtStep(5, lose)],
        checkpoints=pl.Checkpoints(tmp_path, every=5),
        progress=False,
    ).fit(steps=8)
    assert run.steps == 8 and run.seconds > 40


# --- checking results ----------------------------------------------------------------------------

TASK = Task(0, "w0", Work(), 0, 0.0, 8, 0)


def test_the_door_lets_in_what_is_right_and_nothing_else() -> None:
    check = ResultCheck(3, np.float64)
    good = np.array([1.0, 2.0, 2.0])
    for _ in range(4):
        assert check.fault(TASK, good, 8, {"loss": 1.0}) is None
    assert check.fault(TASK, None, 0, {}) is None  # given up
    assert check.fault(TASK, 0.9 * FAR * good, 8, {}) is None  # large, and still possible
    for bad, samples, stats, told in (
        (good[:2], 8, {}, "shape (2,) instead of (3,)"),
        (good.astype(np.float32), 8, {}, "float32 instead of float64"),
        (good.reshape(1, 3), 8, {}, "shape (1, 3)"),
        ([1.0, 2.0, 2.0], 8, {}, "shape list"),
        (np.array([1.0, np.nan, 2.0]), 8, {}, NOT_FINITE),
        (np.array([1.0, np.inf, 2.0]), 8, {}, NOT_FINITE),
        (1e6 * good, 8, {}, "norm is 3e+06, and the median of other results is 3"),
        (good, 9, {}, "reports 9 samples, and its task has 8"),
        (good, -1, {}, "reports -1 samples, and its task has 8"),
        (good, True, {}, "reports True samples"),
        (good, 8, {"loss": "low"}, "statistics are not numbers"),
        (good, 8, None, "statistics are not numbers"),
    ):
        fault = check.fault(TASK, bad, samples, stats)  # type: ignore[arg-type]
        assert fault is not None and told in fault
    assert check.fault(TASK, None, 8, {}, norm=np.inf) == NOT_FINITE  # as its worker says


def test_a_norm_is_finite_exactly_if_all_values_are() -> None:
    assert norm_of(np.array([3.0, 4.0], np.float32)) == 5.0
    huge = np.array([1e38, 1e38], np.float32)  # whose squares are not finite
    assert norm_of(huge) == pytest.approx(2**0.5 * 1e38, rel=1e-6)
    for bad in (np.nan, np.inf, -np.inf):
        assert not np.isfinite(norm_of(np.array([1.0, bad], np.float32)))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # which is the point
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_model_that_is_not_finite_anywhere_ends_the_run_and_says_so() -> None:
    learner = pl.learners.Quadratic((1.0,), lr=1e300, batch_size=4)  # overflows after two steps
    engine = SimulatedRay(3, World(1, Weather(), 3, 20.0), respawns=1000)
    run = pl.Trainer(learner, pl.sync(), engine, progress=False).fit(steps=50)
    assert "not because of a worker" in run.reason or "the loss is" in run.reason
    assert run.steps < 5


def test_whoever_keeps_failing_is_started_less_and_less_often() -> None:
    world = World(1, Weather(gone=1), 3, 20.0)
    engine = SimulatedRay(3, world, respawns=10**6)
    run = pl.Trainer(
        pl.learners.Quadratic(batch_size=4), pl.k_sync(2), engine, min_workers=2, progress=False
    ).fit(steps=200)
    (name,) = world.gone
    starts = sum(actor.name == name for actor in world.actors)
    assert run.seconds > 150 and 5 <= starts < 8 + run.seconds / 30


def test_of_a_coded_batch_all_may_fail_each_for_itself() -> None:
    check, bad = ResultCheck(2, np.float64), np.array([np.nan, 1.0])
    tasks = [Task(i, f"w{i}", Work({i: 1.0}, n_parts=5), 3, 0.0, 8, 24) for i in range(5)]
    assert [check.is_again(task) for task in tasks] == [False] * 5
    assert check.is_again(tasks[2])  # the same parts of the same samples
    assert check.fault(tasks[0], bad, 1, {}) == NOT_FINITE


def test_samples_of_other_tiles_are_others() -> None:
    check = ResultCheck(2, np.float64)
    one, other = (
        Task(i, f"w{i}", Work(tiles={i: 8}), 3, 0.0, 8, 0, tile_offsets=(16,)) for i in range(2)
    )
    assert [check.is_again(task) for task in (one, other, one)] == [False, False, True]


@pytest.mark.parametrize("workers", [5, 100])
def test_samples_that_are_not_finite_are_found_out_however_many_workers(workers: int) -> None:
    check = ResultCheck(2, np.float64)
    tasks = [Task(i, f"w{i}", Work(), 3, 0.0, 8, 8 * i) for i in range(workers)]
    assert not any(check.is_again(task) for task in tasks)
    assert check.is_again(tasks[0])


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_coded_run_whose_model_is_not_finite_ends_and_says_so() -> None:
    learner = pl.learners.Quadratic((1.0,), lr=1e300, batch_size=12)
    engine = SimulatedRay(4, World(1, Weather(), 4, 20.0), respawns=1000)
    run = pl.Trainer(learner, pl.coded(1), engine, progress=False).fit(steps=50)
    assert "not because of a worker" in run.reason or "the loss is" in run.reason
    assert run.steps < 5
