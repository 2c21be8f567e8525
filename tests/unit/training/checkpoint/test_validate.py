"""What is right is not refused: states of many optimizers and schedules come back bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import paceline as pl
from tests.conftest import cross_entropy, flat, make_learner

OPTIMIZERS = {
    name: partial(getattr(torch.optim, name), lr=1e-3)
    for name in (
        *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax"),
        *("Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Adafactor"),
    )
}
OPTIMIZERS["AMSGrad"] = partial(torch.optim.Adam, lr=1e-3, amsgrad=True)
OPTIMIZERS["centered"] = partial(torch.optim.RMSprop, lr=1e-3, centered=True, momentum=0.9)


def in_turn(optimizer: torch.optim.Optimizer) -> lr_scheduler.SequentialLR:
    parts: list[Any] = [
        lr_scheduler.ConstantLR(optimizer),
        lr_scheduler.ExponentialLR(optimizer, 0.9),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[4])


def shrinking(optimizer: torch.optim.Optimizer) -> lr_scheduler.LambdaLR:
    return lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)


SCHEDULES: dict[str, Callable[..., Any]] = {
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=20),
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=10),
    "restarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=4),
    "milestones": partial(lr_scheduler.MultiStepLR, milestones=[3, 7]),
    "in turn": in_turn,
    "function": shrinking,
}


def same_after_a_resume(folder: Path, optimizer: Any, scheduler: Any = None) -> bool:
    plain = make_learner(hidden=4)

    def make(**more: Any) -> pl.Trainer:
        learner = pl.TorchLearner(
            plain.model, cross_entropy, optimizer, plain.dataset, 64, scheduler=scheduler
        )
        return pl.Trainer(learner, pl.k_sync(2), pl.Simulator(3), progress=False, **more)

    whole = make(checkpoints=pl.Checkpoints(folder, every=3, keep=9)).fit(steps=7)
    for step in (3, 6):
        again = make().resume(folder / f"step-{step:08d}").fit(steps=7)
        if not torch.equal(flat(again.model), flat(whole.model)):
            return False
    return True


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_an_optimizer_comes_back(name: str, tmp_path: Path) -> None:
    assert same_after_a_resume(tmp_path, OPTIMIZERS[name])


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_state_of_a_schedule_comes_back(name: str, tmp_path: Path) -> None:
    assert same_after_a_resume(tmp_path, OPTIMIZERS["Adam"], SCHEDULES[name])


def test_before_the_first_step_there_is_no_state(tmp_path: Path) -> None:
    def make(**more: Any) -> pl.Trainer:
        return pl.Trainer(
            make_learner(hidden=4), pl.sync(), pl.Simulator(2), progress=False, **more
        )

    make(checkpoints=pl.Checkpoints(tmp_path)).fit(steps=0)
    again, whole = make().resume(tmp_path / "step-00000000").fit(steps=3), make().fit(steps=3)
    assert torch.equal(flat(again.model), flat(whole.model))
