"""LightningModules travel to real workers and back, and train there as in the simulator."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import paceline as pl
from tests.conftest import flat

if not os.environ.get("CI"):  # there it must be
    pytest.importorskip("lightning")
from tests.unit.integrations.test_lightning import SCHEDULES, Classifier, make_data

pytestmark = [pytest.mark.cluster, pytest.mark.long]


@pytest.fixture(scope="module")
def engine() -> Iterator[pl.Ray]:
    with pl.Ray(workers=2, timeout=60) as engine:
        yield engine


@pytest.mark.parametrize("servers", ["driver", 2])
def test_real_workers_train_as_simulated_ones(engine: pl.Ray, servers: Any) -> None:
    """With two servers each has a part of the tensors, and the schedule."""

    def run(engine: Any) -> pl.Run:
        module = Classifier(SCHEDULES["one cycle"])
        trainer = pl.Trainer.from_lightning(
            module, make_data(), pl.sync(), engine, progress=False, batch_size=24
        )
        return trainer.fit(steps=20)

    engine.servers = servers
    real = run(engine)
    simulated = run(pl.Simulator(workers=2, delays=pl.delays.Fixed(1.0)))
    assert isinstance(real.model, Classifier)
    if servers == "driver":
        assert real.metrics["loss"].tolist() == simulated.metrics["loss"].tolist()
        assert torch.equal(flat(real.model), flat(simulated.model))
    else:
        assert real.metrics["loss"] == pytest.approx(simulated.metrics["loss"], rel=1e-4)
        # BatchNorm takes the bias before it away: its gradient is rounding, which Adam scales up.
        free = {"layers.0.bias", "layers.1.running_mean"}
        expected = simulated.model.state_dict()
        for name, tensor in real.model.state_dict().items():
            close = torch.allclose(tensor, expected[name], rtol=1e-4, atol=1e-5)
            assert close or name in free, name
    assert real.metrics["loss"][-1] < 0.8 * real.metrics["loss"][0]
