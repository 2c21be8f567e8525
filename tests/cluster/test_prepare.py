"""`prepare=` on a real Ray: each process compiles its module, and the bits are the simulator's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline as pl
from tests.conftest import flat, make_learner

pytestmark = [pytest.mark.cluster, pytest.mark.long]


def test_each_process_compiles_its_module(ray_workers: pl.Ray, tmp_path: Path) -> None:
    folder = str(tmp_path)

    def compiled(model: nn.Module) -> nn.Module:
        with open(f"{folder}/{os.getpid()}", "a") as file:
            file.write("called\n")
        return torch.compile(model, backend="aot_eager")  # type: ignore[return-value]

    runs = [
        pl.Trainer(learner, pl.sync(), engine, progress=False).fit(steps=4)
        for learner, engine in (
            (make_learner(prepare=compiled), ray_workers),
            (make_learner(), pl.Simulator(4)),
        )
    ]
    assert torch.equal(flat(runs[0].model), flat(runs[1].model))
    calls = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert len(calls) == 4 and set(calls.values()) == {"called\n"}
    assert str(os.getpid()) not in calls
