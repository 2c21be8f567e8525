"""The inner optimizers of local steps: a state that workers keep, as in DiLoCo, or a new one."""

from __future__ import annotations

import copy
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.core.protocol import Finished, Joined, Left, Task, Work
from paceline.data.sampling import Samples, Stream
from tests.ragged import steps_of

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(3))
Y = (X[:, :2].sum(1) > 0).long()
STEPS, ROUNDS, WORKERS, SEED = 3, 4, 2, 5
INNER = partial(AdamW, lr=0.02, weight_decay=0.1)
OUTER = partial(SGD, lr=0.7, momentum=0.9, nesterov=True)


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def learner(**changes: Any) -> pl.TorchLearner:
    settings: dict[str, Any] = {
        "model": network(),
        "loss": loss,
        "optimizer": INNER,
        "outer": OUTER,
        "dataset": TensorDataset(X, Y),
        "batch_size": 16,
    }
    return pl.TorchLearner(**{**settings, **changes})


def train(recipe: pl.TorchLearner, rounds: int = ROUNDS, **more: Any) -> pl.Run:
    engine = more.pop("engine", None) or pl.Simulator(WORKERS, pl.delays.Fixed(1.0))
    policy = more.pop("policy", pl.local_sgd(STEPS))
    given = {"seed": SEED, "progress": False, **more}
    return pl.Trainer(recipe, policy, engine, **given).fit(steps=rounds)


def by_hand(run: pl.Run, kept: bool, decay: float = 1.0) -> nn.Module:
    """Repeat a run by the published rule, with an inner optimizer for each worker."""
    shared, samples = network(), Samples(Stream(len(X), SEED), SEED)
    outer = OUTER(shared.parameters())
    models: dict[str, nn.Module] = {}
    inner: dict[str, Optimizer] = {}
    for number, tasks in enumerate(rounds_of(run)):
        changes = []
        for task in tasks:
            mine = models.setdefault(task.worker, copy.deepcopy(shared))
            mine.load_state_dict(shared.state_dict())
            if not kept or task.worker not in inner:
                inner[task.worker] = INNER(mine.parameters())
            optimizer = inner[task.worker]
            for step in range(STEPS):
                for group in optimizer.param_groups:
                    group["lr"] = 0.02 * decay ** (number * STEPS + step)
                chosen = samples.of(task, step)
                optimizer.zero_grad()
                loss(mine, [X[chosen], Y[chosen]]).backward()
                optimizer.step()
            pairs = zip(shared.parameters(), mine.parameters(), strict=True)
            changes.append([(old - new).detach() for old, new in pairs])
        outer.zero_grad()
        for parameter, *each in zip(shared.parameters(), *changes, strict=True):
            parameter.grad = torch.stack(each).mean(0)
        outer.step()
    return shared


def rounds_of(run: pl.Run) -> list[list[Task]]:
    """Return the tasks of each step."""
    return [[task for task, _ in step] for step in steps_of(run)]


def error(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.parametrize("inner", ["kept", "fresh", None])
def test_the_published_rule(inner: Any) -> None:
    run = train(learner(inner=inner))
    assert len(rounds_of(run)) == ROUNDS and all(len(t) == WORKERS for t in rounds_of(run))
    kept = inner != "fresh"
    assert error(run.model, by_hand(run, kept)) < 1e-6
    assert error(run.model, by_hand(run, not kept)) > 1e-3
    assert run.meter.states_lost == 0


def test_the_inner_schedule_goes_on() -> None:
    recipe = learner(inner_scheduler=partial(StepLR, step_size=1, gamma=0.9))
    run = train(recipe)
    assert error(run.model, by_hand(run, True, decay=0.9)) < 1e-6


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (partial(Adam, lr=0.1), True),
        (INNER, True),
        (partial(torch.optim.RMSprop, lr=0.1), True),
        (partial(SGD, lr=0.1), False),
        (partial(SGD, lr=0.1, momentum=0.9), False),
    ],
)
def test_the_default_depends_on_the_optimizer(make: Any, kept: bool) -> None:
    assert learner(optimizer=make).keeps_inner_state is kept
    assert learner(optimizer=make).about()["inner"] == ("kept" if kept else None)
    assert learner(optimizer=make, inner="fresh").keeps_inner_state is False
    assert learner(optimizer=make, inner="kept").keeps_inner_state is True
    assert learner(optimizer=make, outer=None).keeps_inner_state is False


@pytest.mark.parametrize(
    ("changes", "told"),
    [({"inner": "lost"}, "kept"), ({"outer": None, "inner": "kept"}, "leave it out")],
)
def test_settings_that_cannot_be(changes: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        learner(**changes)


@pytest.mark.parametrize("inner", ["kept", "fresh"])
def test_a_worker_that_returns_has_lost_its_state(inner: Any) -> None:
    """With a new state at each task, nothing depends on workers' deaths."""
    schedule: list[tuple[float, Joined | Left]] = [(3.5, Left("w1")), (4.2, Joined("w1"))]
    engine = pl.Simulator(WORKERS, pl.delays.Fixed(1.0), schedule=schedule)
    run = train(
        learner(inner=inner), 5, engine=engine, policy=pl.policies.Gather(2, work=Work(steps=STEPS))
    )
    calm = train(learner(inner=inner), 5, policy=pl.policies.Gather(2, work=Work(steps=STEPS)))
    lost = [
        entry.event
        for entry in run.journal
        if isinstance(entry.event, Finished) and "new_state" in entry.event.stats
    ]
    assert (error(run.model, calm.model) < 1e-7) is (inner == "fresh")
    assert run.meter.states_lost == len(lost) == (inner == "kept")
    assert ("restarted 1 inner" in run.summary()) is (inner == "kept")


def test_a_state_that_is_not_finite_is_dropped() -> None:
    """A gradient of one task must not ruin the moments of all later ones."""
    calls: list[int] = []

    def fails_once(model: nn.Module, batch: Any) -> Tensor:
        calls.append(0)
        return loss(model, batch) * (float("nan") if len(calls) == 8 else 1.0)

    recipe = learner(loss=fails_once)
    run = train(recipe, 5, on_not_finite="skip", policy=pl.policies.Gather(2, work=Work(steps=3)))
    assert run.steps == 5 and run.meter.samples_skipped > 0 and run.meter.states_lost == 1
    assert all(bool(p.isfinite().all()) for p in run.model.parameters())


def test_a_resumed_run_begins_with_new_states(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saves = pl.Checkpoints(tmp_path, every=2)
    train(learner(), 2, checkpoints=saves)
    given: dict[str, Any] = {"seed": SEED, "progress": False, "checkpoints": saves}
    engine = pl.Simulator(WORKERS, pl.delays.Fixed(1.0))
    with caplog.at_level(logging.WARNING):
        trainer = pl.Trainer(learner(), pl.local_sgd(STEPS), engine, **given)
        trainer.resume(tmp_path)
    assert "no state of the workers' inner optimizers" in caplog.text
    assert trainer.fit(steps=4).meter.states_lost == WORKERS
