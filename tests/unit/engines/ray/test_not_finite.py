"""Results that are not finite: by default they end the run, on request they are skipped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.data.partition.base import Partition
from paceline.engines.ray.worker import Worker, unpack
from tests.storms.simulated import SimulatedRay
from tests.storms.weather import Weather, World

BAD = {40, 41, 97}  # rows of the dataset that hold a NaN


def learner(bad: set[int] = BAD, **options: Any) -> pl.TorchLearner:
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(120, 4, generator=draw)
    targets = features.sum(1, keepdim=True)
    for row in bad:
        features[row] = torch.nan
    torch.manual_seed(0)
    return pl.TorchLearner(
        nn.Linear(4, 1),
        lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        TensorDataset(features, targets),
        batch_size=8,
        **options,
    )


def engine(name: str) -> Any:
    if name == "simulator":
        return pl.Simulator(4, pl.delays.Fixed(1.0))
    world = World(3, Weather(), 4, 20.0)
    world.most = 20_000
    return SimulatedRay(4, world, 2 if name == "servers" else "driver", start_timeout=5.0)


ENGINES = pytest.mark.parametrize("name", ["simulator", "driver", "servers"])


@ENGINES
@pytest.mark.parametrize(
    "codec", [None, pl.codecs.Feedback(pl.codecs.TopK(0.5))], ids=["plain", "encoded"]
)
def test_skipped_samples_are_listed_and_the_model_stays_finite(name: str, codec: Any) -> None:
    trainer = pl.Trainer(
        learner(), pl.sync(), engine(name), codec=codec, on_not_finite="skip", progress=False
    )
    run = trainer.fit(epochs=3)
    assert all(torch.isfinite(p).all() for p in run.model.parameters())
    skipped = [each for each in run.samples() if each.fate == "skipped"]
    # Each epoch has three bad rows, and a task has two samples: so two or three tasks.
    assert 6 <= len(skipped) <= 9 and all(each.samples == 2 for each in skipped)
    assert run.meter.samples_skipped == 2 * len(skipped)
    assert f"skipped   {run.meter.samples_skipped} samples" in run.summary()
    used = sum(each.samples for each in run.samples() if each.fate == "used")
    assert used == 8 * run.steps  # others took their place
    assert run.meter.lost == 0  # and no worker was ended for it


@ENGINES
def test_by_default_the_run_ends_and_says_why(name: str) -> None:
    run = pl.Trainer(learner(), pl.sync(), engine(name), progress=False).fit(epochs=3)
    assert "not finite" in run.reason or "the loss is nan" in run.reason


@ENGINES
def test_too_many_in_a_row_end_the_run(name: str) -> None:
    trainer = pl.Trainer(
        learner(set(range(120))), pl.sync(), engine(name),
        on_not_finite="skip", skip_limit=6, progress=False,
    )  # fmt: skip
    run = trainer.fit(epochs=3)
    assert run.steps == 0 and "results in a row are not finite" in run.reason
    assert "skip_limit=6" in run.reason


def test_placed_samples_are_not_drawn_again() -> None:
    tiles = Partition(np.arange(120) % 16)
    given = learner()
    trainer = pl.Trainer(
        given, pl.sync(), engine("simulator"), placement=pl.policies.Placed(tiles),
        on_not_finite="skip", progress=False,
    )  # fmt: skip
    run = trainer.fit(epochs=2)
    assert run.steps == 30 and 2 <= sum(s.fate == "skipped" for s in run.samples()) <= 30


def test_a_worker_that_makes_nothing_else_is_replaced() -> None:
    on = engine("driver")
    # A worker's own memory is broken: its process makes NaN of everything until it is replaced.
    whole = Worker.compute

    def compute(self: Any, order: Any, *given: Any) -> Any:
        reply = whole(self, order, *given)
        token = unpack(order)[0]
        bad = token.worker == "w1" and token.incarnation == first
        return (reply[0], reply[1] * np.nan, *reply[2:]) if bad else reply

    first = 1  # the second process of the pool, which is w1's
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "compute", compute)
        trainer = pl.Trainer(learner(set()), pl.sync(), on, on_not_finite="skip", progress=False)
        run = trainer.fit(steps=30)
    assert run.steps == 30 and run.meter.workers["w1"].losses == 1
    assert run.meter.samples_skipped == 3 * 2


def test_what_cannot_be_skipped_is_refused() -> None:
    sim = pl.Simulator(4, pl.delays.Fixed(1.0))
    with pytest.raises(ValueError, match="cannot do without the results of skipped samples"):
        pl.Trainer(learner(), pl.coded(1), sim, on_not_finite="skip")
    with pytest.raises(ValueError, match='use "stop" to end the run, or "skip"'):
        pl.Trainer(learner(), pl.sync(), sim, on_not_finite="ignore")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="use at least 1"):
        pl.Trainer(learner(), pl.sync(), sim, on_not_finite="skip", skip_limit=0)
