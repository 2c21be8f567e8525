"""Local steps that begin before their model has arrived: `local_sgd(…, overlap=True)`."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.core.protocol import Finished, Joined, Left, Start, Task, Work
from paceline.data.sampling import Samples, Stream
from paceline.delays import Fixed, Link
from paceline.learners.base import Array
from tests.conftest import flat, make_learner
from tests.ragged import steps_of

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(3))
Y = (X[:, :2].sum(1) > 0).long()
STEPS, ROUNDS, WORKERS, SEED, LR = 4, 5, 2, 5, 0.2
OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
AVERAGE = partial(torch.optim.SGD, lr=1.0)


def network(*layers: nn.Module) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(6, 8), *layers, nn.Tanh(), nn.Linear(8, 2))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def learner(**changes: Any) -> pl.TorchLearner:
    settings: dict[str, Any] = {
        "model": network(),
        "loss": loss,
        "optimizer": partial(torch.optim.SGD, lr=LR),
        "outer": OUTER,
        "dataset": TensorDataset(X, Y),
        "batch_size": 16,
    }
    return pl.TorchLearner(**{**settings, **changes})


def link(recipe: pl.TorchLearner, up: float, down: float) -> Link:
    """Return a link on which a result and a model take so many seconds."""
    return Link(up=recipe.message_bytes / up, down=recipe.message_bytes / down)


def train(recipe: pl.TorchLearner, engine: pl.Simulator, overlap: bool = True) -> pl.Run:
    policy = pl.local_sgd(STEPS, overlap=overlap)
    return pl.Trainer(recipe, policy, engine, seed=SEED, progress=False).fit(steps=ROUNDS)


def simulator(recipe: pl.TorchLearner, up: float, down: float, **more: Any) -> pl.Simulator:
    """A local step of a worker takes a second."""
    return pl.Simulator(WORKERS, Fixed(1.0), link(recipe, up, down), unit=16 / WORKERS, **more)


def by_hand(run: pl.Run, alone: int, outer: Any) -> nn.Module:
    """Repeat a run: the model of a round arrives after `alone` steps from the worker's own."""
    shared, samples = network(), Samples(Stream(len(X), SEED), SEED)
    optimizer = outer(shared.parameters())
    own: dict[str, nn.Module] = {}

    def step(model: nn.Module, task: Task, number: int) -> None:
        chosen = samples.of(task, number)
        model.zero_grad()
        loss(model, [X[chosen], Y[chosen]]).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=LR)

    for number, round in enumerate(steps_of(run)):
        changes = []
        for task, _ in round:
            model = copy.deepcopy(shared)
            early = alone if number else 0
            if early:
                before = own[task.worker]
                now = copy.deepcopy(before)
                for index in range(early):
                    step(now, task, index)
                triples = zip(*(m.parameters() for m in (model, now, before)), strict=True)
                with torch.no_grad():
                    for parameter, new, old in triples:
                        parameter.add_(new - old)
            for index in range(early, STEPS):
                step(model, task, index)
            own[task.worker] = model
            pairs = zip(shared.parameters(), model.parameters(), strict=True)
            changes.append([(old - new).detach() for old, new in pairs])
        for parameter, *each in zip(shared.parameters(), *changes, strict=True):
            parameter.grad = torch.stack(each).mean(0)
        optimizer.step()
    return shared


@pytest.mark.parametrize("outer", [OUTER, AVERAGE])
@pytest.mark.parametrize(("up", "down", "alone"), [(0.5, 1.5, 2), (0.5, 0.5, 1), (4.0, 4.0, 4)])
def test_the_published_rule(outer: Any, up: float, down: float, alone: int) -> None:
    """Local steps count from where the worker was; the model takes the place of that start."""
    recipe = learner(outer=outer)
    run = train(recipe, simulator(recipe, up, down))
    assert torch.allclose(flat(run.model), flat(by_hand(run, alone, outer)), atol=1e-6)
    assert not torch.allclose(flat(run.model), flat(by_hand(run, 0, outer)), atol=1e-4)


@pytest.mark.parametrize(("up", "down"), [(0.5, 1.5), (3.0, 4.0), (0.25, 0.25)])
def test_messages_travel_while_workers_compute(up: float, down: float) -> None:
    """The first model has no computing beside it. The run ends with the last answer."""
    recipe = learner()
    engine = simulator(recipe, up, down)
    plain = train(recipe, engine, overlap=False).seconds
    assert plain == pytest.approx(ROUNDS * (down + STEPS + up))
    least = down + STEPS + (ROUNDS - 1) * max(STEPS, up + down)
    assert train(recipe, engine).seconds == pytest.approx(least)


def test_without_messages_nothing_changes() -> None:
    engine = pl.Simulator(WORKERS, pl.delays.Exponential(1.0))
    one, two = (train(learner(), engine, overlap) for overlap in (False, True))
    assert one.seconds == two.seconds
    assert torch.equal(flat(one.model), flat(two.model))


def test_a_round_begins_when_the_last_worker_has_computed() -> None:
    recipe = learner()
    delays = [Fixed(1.0), Fixed(3.0)]
    engine = pl.Simulator(WORKERS, delays, link(recipe, 1.0, 2.0), unit=16 / WORKERS)
    slowest = 3 * STEPS
    assert train(recipe, engine).seconds == pytest.approx(2.0 + ROUNDS * slowest)


def test_buffers_have_the_change_of_all_steps() -> None:
    """Also of the steps before the model came, whose buffers it replaces."""
    recipe = learner(model=network(nn.BatchNorm1d(8)), outer=AVERAGE)
    run = train(recipe, simulator(recipe, 1.0, 1.0))
    assert int(run.model[1].num_batches_tracked) == ROUNDS * STEPS


def test_a_worker_that_returns_waits_for_the_model() -> None:
    recipe = learner()
    schedule = [(6.0, Left("w1")), (6.5, Joined("w1"))]
    run = train(recipe, simulator(recipe, 1.0, 1.0, schedule=schedule))
    assert run.steps == ROUNDS and np.isfinite(run.metrics["loss"]).all()
    assert pl.protocol.replay(run.driven_policy, run.journal) == run.journal


class Late:
    """A model that is there once a worker has computed some samples."""

    def __init__(self, model: Array, after: int) -> None:
        self._model, self._after, self.taken = model, after, 0

    def here(self, done: int) -> bool:
        return done >= self._after

    def __iter__(self) -> Any:
        self.taken += 1
        yield self._model


def compute(replica: Any, model: Any, version: int, worker: str = "w0") -> Any:
    work = Work(steps=STEPS, overlap=True)
    task = Task(version, worker, work, version, 0.0, 8, version * 8 * STEPS)
    return replica.compute(model, task, lambda done: True)


def test_only_a_worker_of_the_step_before_begins_early() -> None:
    recipe = learner()
    model = recipe.server().vector.astype(np.float32)
    first, skipped = recipe.replica(SEED), recipe.replica(SEED)
    compute(first, [model], 0)
    compute(skipped, [model], 0)
    early = compute(first, Late(model, 16), 1).vector.copy()
    late = compute(skipped, Late(model, 16), 2).vector.copy()
    fresh = recipe.replica(SEED)
    assert not np.array_equal(early, compute(fresh, [model], 1).vector)
    fresh = recipe.replica(SEED)
    assert np.array_equal(late, compute(fresh, [model], 2).vector)


def test_a_model_that_never_comes_in_time_is_waited_for_once() -> None:
    recipe = learner()
    model = recipe.server().vector.astype(np.float32)
    replica = recipe.replica(SEED)
    compute(replica, [model], 0)
    late = Late(model, 10**9)
    assert compute(replica, late, 1).samples == 8 * STEPS
    assert late.taken == 1


def test_a_result_that_is_not_finite_is_no_start() -> None:
    recipe = learner()
    model = recipe.server().vector.astype(np.float32)
    replica = recipe.replica(SEED)
    compute(replica, [np.full_like(model, np.nan)], 0)
    found = compute(replica, Late(model, 16), 1).vector
    assert np.array_equal(found, compute(recipe.replica(SEED), [model], 1).vector)


def test_what_cannot_overlap_is_refused() -> None:
    policy = pl.local_sgd(1, overlap=True)
    with pytest.raises(ValueError, match="outer"):
        pl.Trainer(make_learner(), policy, pl.Simulator(2), progress=False)
    with pytest.raises(ValueError, match="TorchLearner"):
        pl.Trainer(pl.learners.Quadratic(), policy, pl.Simulator(2), progress=False)


def test_time_alone_can_be_simulated() -> None:
    timing = pl.learners.TimingOnly(batch_size=2, message_bytes=10)
    engine = pl.Simulator(2, Fixed(1.0), Link(up=10.0, down=10.0))
    policies = pl.local_sgd(4), pl.local_sgd(4, overlap=True)
    plain, early = (
        pl.Trainer(timing, policy, engine, progress=False).fit(steps=10).seconds
        for policy in policies
    )
    assert plain == pytest.approx(60.0) and early == pytest.approx(41.0)


def test_a_resumed_simulation_takes_as_long(tmp_path: Path) -> None:
    """The tasks under way when it was saved began before their model had arrived."""
    recipe = learner(inner="fresh")

    def trainer() -> pl.Trainer:
        checkpoints = pl.Checkpoints(tmp_path, every=3, keep=99)
        policy, engine = pl.local_sgd(STEPS, overlap=True), simulator(recipe, 1.0, 1.5)
        return pl.Trainer(recipe, policy, engine, seed=SEED, checkpoints=checkpoints,
                          progress=False)  # fmt: skip

    whole = trainer().fit(steps=ROUNDS)
    rest = trainer().resume(tmp_path / "step-00000003").fit(steps=ROUNDS)
    assert rest.steps == whole.steps and rest.seconds == pytest.approx(whole.seconds)


def test_shares_by_speed_do_not_take_a_slow_link_for_a_slow_worker() -> None:
    """A result on its way keeps no worker waiting, and the seconds of a task are its own."""
    recipe = learner(batch_size=80)
    links = [link(recipe, 2.0, 0.1), *[link(recipe, 0.1, 0.1)] * 3]
    engine = pl.Simulator(4, Fixed(1.0), links)
    policy = pl.local_sgd(STEPS, overlap=True)
    plain, shared = (
        pl.Trainer(recipe, policy, engine, placement=placement, progress=False).fit(steps=20)
        for placement in (None, pl.BySpeed())
    )
    assert shared.seconds == pytest.approx(plain.seconds, rel=0.01)
    since: dict[int, float] = {}
    for entry in shared.journal:
        if isinstance(entry.event, Finished):
            assert entry.event.seconds <= entry.now - since[entry.event.task] + 1e-9
        since |= {c.task.id: c.task.since for c in entry.commands if isinstance(c, Start)}
    assert len(since) >= 80


def test_what_is_not_known_of_it_is_said(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    recipe = learner(inner="fresh")
    engine = simulator(recipe, 1.0, 1.0)
    policy = pl.local_sgd(STEPS, overlap=True)
    checkpoints = pl.Checkpoints(tmp_path, every=2)
    trainer = pl.Trainer(recipe, policy, engine, checkpoints=checkpoints, progress=False)
    run = trainer.fit(steps=4)
    found = pl.planner.profile_of(run.journal)
    assert any("overlap=True" in note for note in found.notes)
    surface = pl.planner.measure_loss_surface(pl.learners.Quadratic())
    told = pl.forecast(policy, replace(found, surface=surface), learning_rate=0.1, target=0.5)
    assert "overlap=True" in told.unknown and told.per_step["seconds"] > 0
    pl.Trainer(recipe, policy, engine, progress=False).resume(tmp_path)
    assert "another trajectory" in caplog.text
