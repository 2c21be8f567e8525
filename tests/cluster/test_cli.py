"""The command on a real Ray: it is examined, and a script's own workers are measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import paceline as pl

pytestmark = pytest.mark.cluster

SCRIPT = """
from functools import partial

import torch
from torch.utils.data import TensorDataset

import paceline as pl

inputs = torch.randn(256, 20, generator=torch.Generator().manual_seed(0))
data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def loss(model, batch):  # defined here, and needed by the workers
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


optimizer = partial(torch.optim.SGD, lr=0.01)
learner = pl.TorchLearner(torch.nn.Linear(20, 1), loss, optimizer, data, batch_size=32)
with pl.Ray(workers=2, timeout=60) as engine:
    pl.Trainer(learner, pl.sync(), engine, progress=False).fit(steps=3)
print("trained")
"""


def paceline(*args: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "paceline", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_doctor_examines_a_cluster() -> None:
    found = paceline("doctor", "--workers", 2, "--json")
    assert found["cluster"]["started"] and len(found["cluster"]["nodes"]) == 1
    assert list(found["cluster"]["workers"]) == ["w0", "w1"]
    for worker in found["cluster"]["workers"].values():
        assert worker["gigaflops"] > 0.1
        assert 0 < worker["latency"] < 5
        assert worker["bytes_per_second"] > 1e6
        assert worker["versions"] == found["host"]["versions"]
    assert "error" not in {finding["level"] for finding in found["findings"]}


@pytest.mark.long
def test_a_script_on_ray_is_measured_and_trained(tmp_path: Path) -> None:
    script, fleet = tmp_path / "train.py", tmp_path / "fleet.json"
    script.write_text(SCRIPT)
    found = paceline("profile", "--json", "--seconds", 4, "-o", fleet, script)
    assert list(found["workers"]) == ["w0", "w1"]
    for worker in found["workers"].values():
        assert 0 < worker["seconds_per_sample"] < 1
    assert pl.planner.Profile.load(fleet).message_bytes == found["message_bytes"] == 84
    (run,) = paceline("train", "--json", script)["runs"]
    assert run["steps"] == 3 and run["samples"] == 96
