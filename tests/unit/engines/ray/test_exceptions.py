"""An exception in one worker is a lost worker; the user's own bug reaches the user."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import ray

import paceline as pl
from paceline.core.protocol import Joined, Task, Work
from paceline.data.partition.base import Partition
from paceline.engines.ray.failures import Raised, reason_of
from paceline.learners.arrays import ArrayReplica
from paceline.learners.base import Array, Outcome, Proceed
from tests.storms.processes import WorkerProcess
from tests.storms.rolling import Rolling
from tests.storms.simulated import SimulatedRay
from tests.storms.weather import Weather, World

PROBLEM = Rolling((1.0, 0.3, 0.1), noise=0.1, lr=0.04, batch_size=12)


@dataclass(frozen=True)
class Failing(Rolling):
    """Calls a function before it computes a task, which may raise."""

    before: Callable[[Task], None] = field(default=lambda task: None, compare=False)

    def replica(self, seed: int, tiles: Partition | None = None) -> ArrayReplica:
        return _Before(self, seed, tiles)


class _Before(ArrayReplica):
    def __init__(self, problem: Failing, seed: int, tiles: Partition | None) -> None:
        super().__init__(problem, seed, tiles)
        self._before = problem.before

    def compute(self, model: Iterable[Array], task: Task, proceed: Proceed) -> Outcome:
        self._before(task)
        return super().compute(model, task, proceed)


def failing(before: Callable[[Task], None]) -> Failing:
    return Failing(PROBLEM.curvature, noise=0.1, lr=0.04, batch_size=12, before=before)


def engine(workers: int = 4, nodes: int = 1, servers: Any = "driver", **options: Any) -> Any:
    world = World(3, Weather(), workers, 20.0, nodes)
    world.most = 20_000
    return SimulatedRay(workers, world, servers, start_timeout=5.0, **options)


def fit(learner: Rolling, on: SimulatedRay, steps: int = 20, **options: Any) -> pl.Run:
    return pl.Trainer(learner, pl.sync(), on, progress=False, **options).fit(steps=steps)


@pytest.mark.parametrize("servers", ["driver", 2])
def test_one_exception_is_a_lost_worker_and_its_samples_are_computed_elsewhere(
    servers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    raised: list[str] = []

    def once(task: Task) -> None:
        if task.version == 5 and not raised:
            raised.append(task.worker)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    run = fit(failing(once), engine(servers=servers))
    calm = fit(PROBLEM, engine(servers=servers))
    assert run.steps == 20 and raised
    assert np.array_equal(run.model, calm.model)
    assert f"{raised[0]} is lost: it raised RuntimeError: CUDA error" in caplog.text


def test_a_worker_whose_every_task_raises_is_given_up_and_the_others_go_on() -> None:
    def broken(task: Task) -> None:
        if task.worker == "w2":
            raise OSError("no such mount")

    on = engine(respawns=2)
    run = fit(failing(broken), on)
    assert run.steps == 20
    assert run.meter.workers["w2"].losses == 3  # and it was not started a fourth time


def test_samples_that_raise_on_a_second_worker_reach_the_user_with_the_traceback() -> None:
    tried: list[str] = []

    def poisoned(task: Task) -> None:
        if task.offset <= 100 < task.offset + task.samples:
            tried.append(task.worker)
            raise ValueError("sample 100 cannot be decoded")

    with pytest.raises(ValueError, match="sample 100 cannot be decoded") as found:
        fit(failing(poisoned), engine())
    assert len(tried) == 2 and tried[0] != tried[1]
    assert isinstance(found.value, ray.exceptions.RayTaskError)
    assert "in poisoned" in str(found.value)


def test_with_one_worker_its_next_process_is_the_second() -> None:
    tried: list[str] = []

    def poisoned(task: Task) -> None:
        if task.version == 3:
            tried.append(task.worker)
            raise ValueError("of no use")

    with pytest.raises(ValueError, match="of no use"):
        fit(failing(poisoned), engine(workers=1))
    assert tried == ["w0", "w0"]


@pytest.mark.parametrize(
    ("before", "now", "nodes", "proven"),
    [
        (("w0", "A"), ("w1", "B"), 2, True),
        (("w0", "A"), ("w1", "A"), 2, False),  # the node may be to blame
        (("w0", "A"), ("w1", "A"), 1, True),
        (("w0", "A"), ("w0", "A"), 1, False),
        (("w0", "A"), ("w0", "B"), 2, True),
        (("w0", "A"), ("w0", "B"), 1, True),  # the worker moved, and the first node is gone
    ],
)
def test_a_second_node_is_proof_also_if_it_is_the_only_one_left(
    before: tuple[str, str], now: tuple[str, str], nodes: int, proven: bool
) -> None:
    raised, task = Raised(), Task(0, "w0", Work(), 0, 0.0, 8, 0)
    assert not raised.in_task(task, *before, nodes, alone=False)
    assert raised.in_task(task, *now, nodes, alone=False) == proven


def test_one_bad_node_does_not_end_a_run() -> None:
    on = engine(workers=4, nodes=2)
    places = {"w0": "n0", "w1": "n1", "w2": "n0", "w3": "n1"}

    def bad_node(task: Task) -> None:
        if places[task.worker] == "n1" and task.version < 4:
            raise OSError("no such mount")

    run = fit(failing(bad_node), on, steps=12)
    assert run.steps == 12


def test_set_up_that_raises_on_every_worker_reaches_the_user() -> None:
    class Unopened(Rolling):
        def replica(self, seed: int, tiles: Any = None) -> Any:
            raise FileNotFoundError("no data at this place")

    learner = Unopened(PROBLEM.curvature, noise=0.1, lr=0.04, batch_size=12)
    on = engine()
    with pytest.raises(FileNotFoundError, match="no data at this place"):
        fit(learner, on)
    assert on.world.now < 60


def test_set_up_that_raises_on_one_worker_is_tried_again() -> None:
    tries: list[int] = []

    class Hiccup(Rolling):
        def replica(self, seed: int, tiles: Partition | None = None) -> ArrayReplica:
            tries.append(1)
            if len(tries) == 2:
                raise OSError("stale file handle")
            return super().replica(seed, tiles)

    learner = Hiccup(PROBLEM.curvature, noise=0.1, lr=0.04, batch_size=12)
    run = fit(learner, engine())
    assert run.steps == 20 and len(tries) == 5


# --- workers that cannot be placed ---------------------------------------------------------------


@pytest.mark.parametrize("minutes", [20, 60])
def test_a_node_that_joins_late_is_used_at_once(minutes: int) -> None:
    world = World(3, Weather(), 4, 20.0)
    world.unplaced = {"w3"}
    on = SimulatedRay(4, world)  # with its default settings
    waiting: list[WorkerProcess] = []

    def wait(process: WorkerProcess) -> None:
        waiting.append(process)

    world.wait_for_a_node = wait  # type: ignore[method-assign,assignment]
    joins = minutes * 60.0

    def join() -> None:
        world._add_nodes(1)
        world.unplaced.clear()
        waiting[-1].be_placed(world.nodes[-1])

    world.after(joins, join)
    trainer = pl.Trainer(PROBLEM, pl.k_sync(3), on, min_workers=3, progress=False)
    run = trainer.fit(seconds=joins + 60)
    (joined,) = [e.now for e in run.journal if e.event == Joined("w3")]
    assert len(waiting) == 1 and abs(joined - joins) < 10  # starting up is not counted


def test_respawns_count_failures_in_a_row() -> None:
    """A worker that delivers between its failures is started again for ever."""
    failures: list[int] = []

    def every_third(task: Task) -> None:
        if task.worker == "w1" and task.version % 3 == 2 and task.version not in failures:
            failures.append(task.version)
            raise RuntimeError("out of memory")

    run = fit(failing(every_third), engine(respawns=3), steps=60)
    assert run.steps == 60
    assert run.meter.workers["w1"].losses > 6


# --- what is said --------------------------------------------------------------------------------


def test_reasons_are_told_in_words() -> None:
    died = ray.exceptions.ActorDiedError()
    assert reason_of(died) == "its process died (killed, out of memory, or crashed)"
    lost = ray.exceptions.ActorUnavailableError("lost contact", None)
    assert reason_of(lost) == "the connection to its process was lost"
    gone = ray.exceptions.ObjectLostError("00", None, "here")
    assert reason_of(gone) == "an object that its task needed or returned was lost with a node"
    long = ray.exceptions.RayTaskError("compute", "", ValueError("x\n" * 1000), "", 0, "")
    assert len(reason_of(long)) == 300 and "\n" not in reason_of(long)
