"""Servers under faults: where they go, what they refuse, and nodes that cannot reach each other."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import paceline as pl
from paceline.codecs.base import Codec
from paceline.core.errors import SlicesLost
from paceline.engines.ray.servers.links import Links
from paceline.engines.ray.servers.machine import Machine
from paceline.engines.ray.servers.recovery import NoRoute, Recovery
from paceline.engines.ray.servers.slices import Slot, Step
from tests.storms.cases import Case
from tests.storms.planted import SERVER_BUGS, found, planted
from tests.storms.processes import Reference, ServerProcess, WorkerProcess
from tests.storms.rolling import Rolling, RollingServer
from tests.storms.serial import serial
from tests.storms.simulated import SimulatedDirect, SimulatedRay
from tests.storms.storm import play
from tests.storms.weather import Weather, World

LEARNER = Rolling((1.0, 0.3, 0.1, 0.5), noise=0.1, lr=0.04, batch_size=12)
LONGER = replace(LEARNER, curvature=3 * LEARNER.curvature)


class AtSteps(pl.Callback):
    def __init__(self, actions: dict[int, Callable[[], None]]) -> None:
        self._actions = actions

    def stepped(self, progress: pl.Progress) -> None:
        self._actions.get(progress.step, lambda: None)()


def train(
    engine: SimulatedRay,
    steps: int,
    actions: dict[int, Callable[[], None]] | None = None,
    learner: Rolling = LEARNER,
    down: Codec | None = None,
    placement: pl.BySpeed | None = None,
) -> pl.Run:
    """Train, and check that the journal leads to the same model."""
    engine.world.most = 60_000
    run = pl.Trainer(
        *(learner, pl.sync(), engine),
        placement=placement,
        callbacks=[AtSteps(actions or {})],
        progress=False,
        model_codec=down,
    ).fit(steps=steps)
    entries = list(run.journal)
    done = serial(run.journal.header, entries, learner, learner.server(), seed=0, down=down)
    assert run.steps == steps and np.array_equal(done.models[steps], run.model)
    return run


def places(world: World) -> Counter[str]:
    """Return how many servers each machine has."""
    return Counter(a.node for a in world.actors if isinstance(a, ServerProcess) and a.alive)


def test_servers_stay_spread_as_machines_are_replaced() -> None:
    world = World(3, Weather(), 8, 20.0, nodes=8)
    engine = SimulatedRay(8, world, servers=4, start_timeout=5.0, respawns=1000)
    spread: list[Counter[str]] = []
    actions: dict[int, Callable[[], None]] = {60: lambda: spread.append(places(world))}
    for i in range(4):
        actions[5 + 12 * i] = lambda i=i: world.lose_node(f"n{i}")  # type: ignore[misc]
    pl.Trainer(LEARNER, pl.sync(), engine, callbacks=[AtSteps(actions)], progress=False).fit(
        steps=61
    )
    assert not {"n0", "n1", "n2", "n3"} & set(spread[0]) and max(spread[0].values()) == 1


def test_a_left_out_server_returns_when_its_link_is_good_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(2, Weather(), 4, 20.0, nodes=4)
    engine = SimulatedRay(4, world, servers=4, start_timeout=5.0)
    slots: dict[int, int] = {}

    def look(step: int) -> None:
        slots[step] = len(engine._open.reducer.machine.steps.slots)  # type: ignore[union-attr]

    def quicken() -> None:
        look(80)
        world.slow.discard("n1")

    actions: dict[int, Callable[[], None]] = {
        5: lambda: world.slow.add("n1"),
        80: quicken,
        239: lambda: look(239),
    }
    train(engine, 240, actions)
    assert slots == {80: 3, 239: 4}
    assert max(places(world).values(), default=1) == 1
    assert "is good again" in caplog.text


@pytest.mark.parametrize("placement", [None, pl.BySpeed()])
def test_under_shares_by_speed_a_slow_link_has_no_server_from_the_first_step_on(
    placement: pl.BySpeed | None,
) -> None:
    world = World(2, Weather(), 4, 20.0, nodes=4)
    world.slow.add("n1")
    engine = SimulatedRay(4, world, servers=4, start_timeout=5.0)
    slots: list[int] = []

    def look() -> None:
        slots.append(len(engine._open.reducer.machine.steps.slots))  # type: ignore[union-attr]

    train(engine, 30, {1: look}, placement=placement)
    assert slots == [4 if placement is None else 3]


def test_all_workers_are_asked_at_once_for_a_lost_slice() -> None:
    """Workers that do not answer cost one deadline, however many they are."""
    waits = []
    for silent in (1, 3):
        world = World(1, Weather(), 8, 60.0, nodes=2)
        engine = SimulatedRay(8, world, servers=2, start_timeout=5.0)
        asked: list[float] = []

        def lose(world: World = world, silent: int = silent, asked: Any = asked) -> None:
            deaf = [a for a in world.actors if a.node == "n0" and isinstance(a, WorkerProcess)]
            for actor in deaf[:silent]:
                actor.receive = _but_holds(actor.receive)  # type: ignore[assignment, method-assign]
            world.lose_node("n1")
            asked.append(world.now)

        def back(world: World = world, asked: Any = asked) -> None:
            asked.append(world.now)

        train(engine, 12, {5: lose, 7: back})
        waits.append(asked[1] - asked[0])
    assert waits[1] < waits[0] + 10


def _but_holds(receive: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda call: None if call.name == "holds" else receive(call)


# --- what no other machine has -------------------------------------------------------------------


class Told(pl.Callback):
    def __init__(self) -> None:
        self.starts = 0

    def started(self, live: Any) -> None:
        self.starts += 1


def lose_under_asynchronous(seed: int, saves: pl.Checkpoints | None) -> tuple[pl.Run, int]:
    """Train, and lose a machine; each version of the model is on one worker's machine alone."""
    world, told = World(seed, Weather(), 4, 20.0, nodes=4), Told()
    world.after(10.0, partial(world.lose_node, "n1"))
    engine = SimulatedRay(4, world, servers=4, start_timeout=5.0, respawns=1000)
    watch = [told, AtSteps({})]
    trainer = pl.Trainer(
        LONGER, pl.asynchronous(), engine, callbacks=watch, checkpoints=saves, progress=False
    )
    run = trainer.fit(steps=60)
    engine.close()
    return run, told.starts


def test_a_run_with_checkpoints_goes_on_if_a_result_and_its_model_are_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lost = 0
    for seed in range(12):
        try:
            lose_under_asynchronous(seed, None)
        except SlicesLost as error:
            assert "Resume from a checkpoint" in str(error)
            caplog.clear()
            saves = pl.Checkpoints(tmp_path / str(seed), every=2)
            run, starts = lose_under_asynchronous(seed, saves)
            assert run.steps == 60 and starts == 2 and run.metrics["step"][-1] == 60
            assert "the run goes on from step" in caplog.text
            lost += 1
    assert lost


# --- servers that keep all others waiting --------------------------------------------------------


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("totals", [False, True])
def test_a_stopped_server_costs_seconds_and_no_timeout(totals: bool, chunks: int) -> None:
    world = World(4, Weather(), 4, 600.0, nodes=4, chunks=chunks)
    engine = SimulatedRay(4, world, servers=4, start_timeout=5.0)
    times: list[float] = []
    slots: dict[int, int] = {}

    def look(step: int) -> None:
        slots[step] = len(engine._open.reducer.machine.steps.slots)  # type: ignore[union-attr]

    def stop() -> None:
        times.append(world.now)
        for actor in world.actors:
            if isinstance(actor, ServerProcess) and actor.name == "s2":
                actor.receive = lambda call: None  # type: ignore[method-assign]

    actions: dict[int, Callable[[], None]] = {
        2: lambda: times.append(world.now),
        4: lambda: look(4),
        5: stop,
        8: lambda: times.append(world.now),
        12: lambda: look(12),
    }
    train(engine, 12, actions, replace(LONGER, totals=totals))
    before, after = times[1] - times[0], times[2] - times[1]  # of three steps each
    assert after < before + 10
    assert slots == {4: 4 * chunks, 12: 3 * chunks}


# Seeds at which slices of several chunks were once lost or forgotten.
ONCE = {"late": (50055,), "slow link": (50000, 50086, 2063)}


@pytest.mark.parametrize(
    ("because", "seeds"),
    [
        ("late", (*range(3), *ONCE["late"])),
        ("slow link", (0, *ONCE["slow link"])),
        pytest.param("late", range(3, 8), marks=pytest.mark.long),
        pytest.param("slow link", range(1, 8), marks=pytest.mark.long),
    ],
)
def test_runs_hold_in_storms_in_which_slices_are_often_taken_over(
    because: str, seeds: Sequence[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = Counter[bool]()
    overtake = Recovery.overtake

    def counted(self: Recovery, late: str, why: str) -> bool:
        done = overtake(self, late, why)
        taken[done] += 1
        return done

    def often(self: Links, step: Step, slots: Sequence[Slot], *given: Any) -> str | None:
        rng = random.Random(step.version)
        return rng.choice(slots).server if rng.random() < 0.3 else None

    monkeypatch.setattr(Recovery, "overtake", counted)
    if because == "late":
        monkeypatch.setattr("paceline.engines.ray.servers.late._SECONDS", 0.3)
        monkeypatch.setattr("paceline.engines.ray.servers.late._FACTOR", 1.5)
        monkeypatch.setattr("paceline.engines.ray.servers.late._FIRST_SECONDS", 0.3)
    else:
        monkeypatch.setattr(Links, "watch", often)
    for seed in seeds:
        policy = (pl.sync(), pl.k_sync(3), pl.k_async(2), pl.coded(1))[seed % 4]
        needs, staleness = ((1, 0.0), (3, 0.0), (1, inf), (4, 0.0))[seed % 4]
        down = pl.codecs.BFloat16() if seed % 3 == 0 and seed % 4 != 3 else None
        learner = replace(LONGER, totals=seed % 5 == 0)
        servers = 4 if seed < 8 else 3 + seed % 2
        more: dict[str, Any] = {"down": down, "learner": learner, "servers": servers}
        play(
            seed,
            tmp_path / str(seed),
            Case("servers", policy, 5, needs, staleness, nodes=3, **more),
        )
    assert taken[True] > 5


RARE = "leave servers on nodes without a route"  # needs the most seeds


@pytest.mark.parametrize(
    "bug",
    [pytest.param(bug, marks=[pytest.mark.long] * (bug == RARE)) for bug in SERVER_BUGS],
)
def test_a_bug_put_in_is_found(bug: str, tmp_path: Path) -> None:
    with planted(bug, SERVER_BUGS):
        seed, told = found(partial(play, only="servers"), bug, tmp_path)
    assert f"chaos.py --seed {seed}" in told


# --- exceptions in servers -----------------------------------------------------------------------


def test_an_exception_in_a_server_replaces_it_on_another_machine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(1, Weather(server_raises=0.03), 3, 20.0, nodes=3)
    run = train(SimulatedRay(3, world, servers=3, start_timeout=5.0, respawns=1000), 60)
    assert run.steps == 60 and world.faults["server_raises"] > 2
    assert "it raised RuntimeError: CUDA error: an illegal memory access" in caplog.text


class Broken(Rolling):
    """Its optimizer fails at every attempt to take the sixth step."""

    def server(self) -> BrokenServer:
        return BrokenServer(np.full(len(self.curvature), self.start), self.lr, self.totals)


class BrokenServer(RollingServer):
    steps = 0

    def recipe(self, span: tuple[int, int]) -> Any:
        lr = self._lr
        return lambda: BrokenServer(np.zeros(span[1] - span[0]), lr, False)

    def apply(self, totals: Any, lr_scale: float = 1.0) -> None:
        self.steps += 1
        if self.steps == 6:
            raise ZeroDivisionError("an optimizer's own fault")
        super().apply(totals, lr_scale)

    def save(self) -> Any:
        saved = super().save()
        return type(saved)(saved.arrays, {**saved.data, "steps": self.steps})

    def load(self, saved: Any) -> None:
        super().load(saved)
        self.steps = saved.data["steps"]


@pytest.mark.parametrize("servers", [1, 2])
def test_the_optimizers_own_exception_reaches_the_user(servers: int) -> None:
    learner = Broken((1.0, 0.3), lr=0.04, batch_size=12)
    world = World(1, Weather(), 3, 20.0, nodes=2)
    engine = SimulatedRay(3, world, servers=servers, start_timeout=5.0)
    with pytest.raises(ray.exceptions.RayTaskError, match="an optimizer's own fault") as error:
        train(engine, 9, learner=learner)
    assert isinstance(error.value.cause, ZeroDivisionError)
    failed = Counter(a.name for a in world.actors if isinstance(a, ServerProcess))
    assert max(failed.values()) == 2  # processes of one server


# --- slices --------------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", [1, 3])
def test_a_bad_slice_under_a_good_norm_is_refused_and_computed_again(
    servers: int, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(1, Weather(slices=0.05), 4, 20.0, nodes=2)
    run = train(SimulatedRay(4, world, servers=servers, start_timeout=5.0, respawns=1000), 60)
    assert np.isfinite(run.model).all() and world.faults["slices"] > 5
    assert "its result was refused: it is not finite" in caplog.text
    assert "its result was refused: one of its slices has the shape" in caplog.text


# --- pairs of machines without a route -----------------------------------------------------------


@pytest.mark.parametrize("step", [None, 5])
@pytest.mark.parametrize("totals", [False, True])
def test_servers_move_to_a_machine_that_reaches_all_others(
    step: int | None, totals: bool, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(1, Weather(), 6, 20.0, nodes=3)
    learner = Rolling(LEARNER.curvature, noise=0.1, lr=0.04, batch_size=12, totals=totals)

    def cut() -> None:
        world.no_routes.add(frozenset(("n0", "n1")))

    if step is None:
        cut()
    found: list[Counter[str]] = []
    actions = {11: lambda: found.append(places(world))} | ({step: cut} if step else {})
    engine = SimulatedRay(6, world, servers=3, start_timeout=5.0)
    run = train(engine, 12, actions, learner)
    assert found == [Counter({"n2": 3})]
    assert "nodes that cannot fetch objects from each other: n0 and n1" in caplog.text
    calm = SimulatedRay(6, World(1, Weather(), 6, 20.0, nodes=3), servers=3)
    assert run.seconds < 2 * train(calm, 12, {}, learner).seconds + (60 if step else 0)


@pytest.mark.parametrize("step", [None, 5])
def test_two_machines_that_cannot_reach_each_other_are_named(step: int | None) -> None:
    world = World(1, Weather(), 4, 20.0, nodes=2)

    def cut() -> None:
        world.no_routes.add(frozenset(("n0", "n1")))

    if step is None:
        cut()
    engine = SimulatedRay(4, world, servers=2, start_timeout=5.0)
    with pytest.raises(NoRoute, match=r"from each other: n0 and n1, so no node"):
        train(engine, 12, {step: cut} if step else {})
    assert world.now < 120


# --- models that travel rounded ------------------------------------------------------------------


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("totals", [False, True])
def test_a_rounded_model_has_the_same_bits_after_a_lost_server_and_a_lost_node(
    direct: bool, totals: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers have rounded values only, and the next server must not start from these."""
    rescued, rescue = [], Recovery._rescue

    def noted(self: Recovery, slot: Slot) -> None:
        rescued.append(slot.index)
        rescue(self, slot)

    monkeypatch.setattr(Recovery, "_rescue", noted)
    monkeypatch.setattr("paceline.engines.ray.servers.late._SECONDS", 60.0)  # none is late
    learner = Rolling((1.0, 0.3, 0.1, 0.5), noise=0.1, lr=0.04, batch_size=12, totals=totals)
    for seed in range(6):
        world = World(seed, Weather(late=0.3), 4, 20.0, nodes=4, direct=direct)
        engine = SimulatedRay(4, world, servers=4, start_timeout=5.0, respawns=1000)

        def kill(name: str, world: World = world) -> None:
            next(a for a in world.actors if a.name == name and a.alive).die()

        def lose(node: str, world: World = world, wait: float = 0.05 * seed) -> None:
            world.after(wait, partial(world.lose_node, node))  # in the middle of a step

        actions: dict[int, Callable[[], None]] = {
            8: partial(kill, "s1"),
            16: partial(lose, "n2"),
            30: partial(kill, "s3"),
        }
        rescued.clear()
        train(engine, 40, actions, learner, down=pl.codecs.BFloat16())
        assert 2 in rescued  # the slice of s2, on whichever server


def test_rounded_models_hold_in_storms(tmp_path: Path) -> None:
    faults = Counter[str]()
    for seed in range(8):
        policy = (pl.sync(), pl.k_sync(3), pl.k_async(2), pl.asynchronous(2))[seed % 4]
        needs, staleness = (3, 0.0) if seed % 4 == 1 else (1, inf if seed % 4 > 1 else 0.0)
        codec = pl.codecs.BFloat16()
        case = Case("rounded", policy, 5, needs, staleness, down=codec, servers=3, nodes=3)
        faults += play(seed, tmp_path / str(seed), case).faults
    assert faults.total() > 40


# --- memory --------------------------------------------------------------------------------------


def test_the_slices_of_a_model_are_freed_with_the_run() -> None:
    """Without a search for circles: a large model must not stay until Python makes one."""
    world = World(1, Weather(), 3, 20.0, nodes=3)
    engine = SimulatedRay(3, world, servers=3, start_timeout=5.0)
    machines: list[weakref.ref[Machine]] = []

    def look() -> None:
        machines.append(weakref.ref(engine._open.reducer.machine))  # type: ignore[union-attr]

    gc.collect()
    gc.disable()
    try:
        train(engine, 6, {5: look})
        assert [machine() for machine in machines] == [None]
    finally:
        gc.enable()


# --- direct transport: results are in the process of their worker ---------------------------------


def test_a_result_that_is_lost_with_its_worker_is_computed_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(2, Weather(crash=0.05), 4, 20.0, nodes=4, direct=True)
    engine = SimulatedRay(4, world, servers=4, start_timeout=5.0, respawns=1000)
    train(engine, 200)
    assert world.faults["crash"] > 20 and "is computed again" in caplog.text


def test_slices_go_by_the_stores_if_a_worker_cannot_reach_a_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(2, Weather(), 3, 20.0, nodes=3, direct=True)

    def unreachable(self: Any, workers: Any, servers: Any) -> list[Reference]:
        answers = [Reference(world), Reference(world)]
        for answer, reason in zip(answers, (None, "10.0.0.1 cannot reach 10.0.0.2"), strict=True):
            answer.answer(reason)
        return answers

    monkeypatch.setattr(SimulatedDirect, "unreachable", unreachable)
    engine = SimulatedRay(3, world, servers=3, start_timeout=5.0)
    transports = []
    train(engine, 5, {3: lambda: transports.append(engine._open.reducer._processes.transport)})  # type: ignore[union-attr]
    assert not transports[0].direct and transports[0].__class__.__name__ == "Stores"
    assert "10.0.0.1 cannot reach 10.0.0.2; open all ports" in caplog.text
