"""Coded steps on a real Ray, with workers that are really killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.core.protocol import Left
from tests.conftest import cross_entropy, flat

pytestmark = pytest.mark.cluster


def cnn() -> pl.TorchLearner:
    """Make a small CNN on random but learnable images.

    Without BatchNorm and dropout: what they do depends on how the batch is cut, here as elsewhere.
    """
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(512, 1, 16, 16, generator=generator)
    labels = (images.flatten(1) @ torch.randn(256, 4, generator=generator)).argmax(dim=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = nn.Sequential(
            *(nn.Conv2d(1, 8, 3), nn.ReLU()),
            *(nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.Flatten()),
            nn.Linear(16 * 6 * 6, 4),
        )
    sgd = partial(torch.optim.SGD, lr=0.05)
    return pl.TorchLearner(model, cross_entropy, sgd, TensorDataset(images, labels), 48)


class Kill(pl.Callback):
    """Kills a worker at each of some steps."""

    def __init__(self, engine: pl.Ray, victims: dict[int, str]) -> None:
        self._engine, self._victims = engine, victims

    def stepped(self, progress: pl.Progress) -> None:
        if progress.step in self._victims:
            os.kill(self._engine.pids()[self._victims[progress.step]], signal.SIGKILL)


@pytest.fixture(
    scope="module",
    params=["driver", pytest.param(2, marks=pytest.mark.long)],
    ids=["driver", "servers"],
)
def engine(request: pytest.FixtureRequest) -> Iterator[pl.Ray]:
    with pl.Ray(workers=6, servers=request.param, timeout=60, respawns=0) as engine:
        yield engine


def test_two_killed_workers_change_nothing(engine: pl.Ray) -> None:
    """50 steps of a CNN: the same parameters as `sync` to 1e-5, though two workers never return.

    The code bears both; five steps later it is made anew for the four who are left.
    """
    expected = pl.Trainer(cnn(), pl.sync(), pl.Simulator(6), progress=False).fit(steps=50)
    trainer = pl.Trainer(
        cnn(),
        pl.coded(stragglers=2, messages=2),
        engine,
        callbacks=[Kill(engine, {10: "w1", 12: "w4"})],
        progress=False,
    )
    run = trainer.fit(steps=50)
    lost = [entry.event.worker for entry in run.journal if isinstance(entry.event, Left)]
    assert sorted(lost) == ["w1", "w4"]
    assert run.metrics["samples"].tolist() == [48] * 50
    assert (flat(run.model) - flat(expected.model)).abs().max() < 1e-5
    assert run.metrics["loss"][-5:].mean() < run.metrics["loss"][:5].mean() - 0.05
    assert pl.protocol.replay(run.driven_policy, run.journal) == run.journal
