"""Two kinds of machine on the simulated Ray: workers that come and go keep what is theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import pytest

pytest.importorskip("ray")

import paceline as pl
from paceline.core.errors import WorkersLost
from paceline.core.protocol import Cancel, Event, Finished, Joined, Left, Start, View
from paceline.engines.kinds import Fleet
from paceline.engines.ray.pool import Cluster
from paceline.engines.ray.worker import Worker
from tests.storms.processes import WorkerProcess
from tests.storms.simulated import SimulatedCluster, SimulatedRay
from tests.storms.weather import Weather, World

FAST = pl.Kind("fast", count=2, max_samples=64, price=7.2)
SLOW = pl.Kind("slow", count=(0, 2), max_samples=5, price=0.36)
PROBLEM = pl.learners.Quadratic((1.0, 0.2), noise=0.5, batch_size=24)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")


class Hosts(SimulatedCluster):
    """A host for each worker, called like the worker; a worker waits while its host is away."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.waiting: dict[str, WorkerProcess] = {}
        self.made: list[str] = []

    def make_workers(
        self, fleet: Fleet, gpus: Mapping[str, float], fixed: bool, actor: type = Worker
    ) -> Callable[[str], Any]:
        def make(name: str) -> WorkerProcess:
            self.made.append(name)
            here = name in self._world.nodes
            process = WorkerProcess(self._world, name, name if here else "")
            if not here:
                self.waiting[name] = process
            return process

        return make

    def come_back(self, host: str) -> None:
        self._world.dead.discard(host)
        self._world.nodes.append(host)
        if host in self.waiting:
            self.waiting.pop(host).be_placed(host)


class Kinds(SimulatedRay):
    hosts: Hosts

    def _make_cluster(self) -> Cluster:
        self.hosts = Hosts(self.world)
        return self.hosts


def engine(*kinds: pl.Kind, seed: int = 0, **options: Any) -> Kinds:
    names = Fleet.of(kinds).workers
    world = World(seed, Weather(), len(names), 20.0, names=names)
    world.nodes[:] = names
    for name in names:
        world.pace[name] = 0.5 if name.startswith("fast") else 4.0
    return Kinds(None, world, fleet=kinds, **options)


def stays(run: pl.Run, worker: str) -> list[tuple[float, type]]:
    """Return when a worker joined and left."""
    met = [(e.now, e.event) for e in run.journal if isinstance(e.event, Joined | Left)]
    return [(now, type(event)) for now, event in met if event.worker == worker]


class Watched(pl.BySpeed):
    """Notes all speeds after each event."""

    seen: ClassVar[list[dict[str, float]]] = []

    def learn(self, view: View, news: Event | Cancel) -> None:
        super().learn(view, news)
        self.seen.append(self.speeds())


class Rounds(pl.Callback):
    """Kills a worker every fourth step, each in turn: its process, or its whole host."""

    def __init__(self, on: Kinds) -> None:
        self._on, self.killed = on, 0

    def stepped(self, progress: pl.Progress) -> None:
        if progress.step % 4 or self.killed == 20:
            return
        name, on = self._on.workers[self.killed % 4], self._on
        self.killed += 1
        if self.killed % 3:
            next(a for a in on.world.actors[::-1] if a.name == name).die()
        elif name in on.world.nodes:
            on.world.lose_node(name)
            on.world.after(30.0, partial(on.hosts.come_back, name))


def dollars(run: pl.Run, per_hour: Mapping[str, float]) -> float:
    """Return the costs by the journal: each kind's price for the seconds with a task."""
    total, before, running = 0.0, 0.0, dict[int, str]()
    for entry in run.journal:
        busy = {*running.values()}
        total += (entry.now - before) * sum(per_hour[w.split("-")[0]] for w in busy) / 3600
        before = entry.now
        if isinstance(entry.event, Finished):
            running.pop(entry.event.task, None)
        elif isinstance(entry.event, Left):
            running = {id: w for id, w in running.items() if w != entry.event.worker}
        for command in entry.commands:
            if isinstance(command, Start):
                running[command.task.id] = command.task.worker
            elif isinstance(command, Cancel):
                running.pop(command.task, None)
    return total


def test_limits_prices_and_speeds_stay_with_their_kind() -> None:
    on, placement = engine(FAST, SLOW), Watched()
    kills, Watched.seen = Rounds(on), []
    run = pl.Trainer(
        PROBLEM, pl.sync(), on, placement=placement, callbacks=[kills], progress=False
    ).fit(steps=100)
    left = [e.event.worker for e in run.journal if isinstance(e.event, Left)]
    assert kills.killed == 20 and len(left) >= 16 and {*left} == {*on.workers}
    tasks = [c.task for e in run.journal for c in e.commands if isinstance(c, Start)]
    assert max(t.samples for t in tasks if t.worker.startswith("slow")) == 5  # redone ones too
    assert max(t.samples for t in tasks if t.worker.startswith("fast")) > 12
    assert any(t.attempt > 1 and t.samples > 5 for t in tasks)
    for speeds in Watched.seen:
        slow, fast = ([v for w, v in speeds.items() if w.startswith(k)] for k in ("slow", "fast"))
        assert not slow or not fast or max(slow) < min(fast), speeds
    assert {w for speeds in Watched.seen for w in speeds} == {*on.workers}
    assert run.meter.dollars == pytest.approx(dollars(run, {"fast": 7.2, "slow": 0.36}), rel=1e-9)


@pytest.mark.parametrize("respawns", [0, 1])
def test_a_host_that_was_away_works_within_seconds_of_its_return(respawns: int) -> None:
    """It is lost three times, at last for 15 minutes; no respawn is needed for that."""
    kinds = pl.Kind("fast", count=2), pl.Kind("slow", count=(0, 2))
    on = engine(*kinds, respawns=respawns, start_timeout=60.0)
    for at in (100.0, 160.0, 220.0):
        on.world.after(at, partial(on.world.lose_node, "slow-1"))
        back = at + 30.0 if at < 200 else 1120.0
        on.world.after(back, partial(on.hosts.come_back, "slow-1"))
    run = pl.Trainer(PROBLEM, pl.asynchronous(), on, min_workers=4, progress=False).fit(
        seconds=1200
    )
    began = on._origin
    met = stays(run, "slow-1")
    assert [kind for _, kind in met] == [Joined, Left] * 3 + [Joined]
    returns = [now + began for now, kind in met if kind is Joined][1:]
    late = [at - due for at, due in zip(returns, (130.0, 190.0, 1120.0), strict=True)]
    assert min(late) > 0 and max(late) < 10
    done = {e.event.task for e in run.journal if isinstance(e.event, Finished)}
    tasks = [c.task for e in run.journal for c in e.commands if isinstance(c, Start)]
    works = [t.since + began for t in tasks if t.worker == "slow-1" and t.id in done]
    assert 1120 < min(at for at in works if at > 1100) < 1130
    assert on.hosts.made.count("slow-1") == 4  # it waited without being started again and again


def test_a_process_that_fails_uses_its_respawns_up() -> None:
    on = engine(pl.Kind("fast", count=1), respawns=1)
    on.world.gone = {"fast-0"}
    with pytest.raises(WorkersLost, match="respawns=1 is used up"):
        pl.Trainer(PROBLEM, pl.sync(), on, progress=False).fit(steps=1)


def test_training_begins_with_the_least_of_each_kind() -> None:
    """Three slow hosts are up, and the fast one that must be joins after ten minutes."""
    on = engine(pl.Kind("fast", count=1), pl.Kind("slow", count=(1, 3)), start_timeout=60.0)
    on.world.nodes.remove("fast-0")
    on.world.after(600.0, partial(on.hosts.come_back, "fast-0"))
    run = pl.Trainer(PROBLEM, pl.sync(), on, progress=False).fit(steps=5)
    assert 600 < on._origin < 610  # the run's second 0
    assert {e.event.worker for e in run.journal if isinstance(e.event, Joined)} == {*on.workers}


def test_absent_machines_cost_nothing_and_are_not_waited_for() -> None:
    on = engine(FAST, SLOW)
    on.world.nodes[:] = FAST.workers
    run = pl.Trainer(PROBLEM, pl.sync(), on, placement=pl.BySpeed(), progress=False).fit(steps=50)
    tasks = [c.task for e in run.journal for c in e.commands if isinstance(c, Start)]
    assert {t.worker for t in tasks} == {*FAST.workers}
    assert run.meter.samples_used == 50 * 24  # the batch is the same
    assert {*run.meter.workers} == {*FAST.workers}
