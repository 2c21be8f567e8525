"""`sync` is data-parallel SGD: equal to one process, and to DistributedDataParallel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.data.sampling import Stream
from tests.conftest import MOMENTUM, cross_entropy, flat, make_learner, module_of

pytestmark = pytest.mark.cluster

STEPS = 50
ROOT = Path(__file__).parents[2]


def relative_error(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((mine - theirs).norm() / theirs.norm())


@pytest.fixture(scope="module")
def trained(ray_workers: pl.Ray) -> torch.Tensor:
    run = pl.Trainer(make_learner(), pl.sync(shares=4), ray_workers, progress=False).fit(
        steps=STEPS
    )
    return flat(run.model)


def test_sync_equals_one_process_with_the_whole_batch(trained: torch.Tensor) -> None:
    learner = make_learner()
    assert isinstance(learner.dataset, TensorDataset)
    inputs, labels = learner.dataset.tensors
    model = module_of(learner)
    optimizer = MOMENTUM(model.parameters())
    stream = Stream(len(labels), seed=0)
    for step in range(STEPS):
        chosen = torch.from_numpy(stream.indices(step * 64, 64))
        optimizer.zero_grad()
        cross_entropy(model, [inputs[chosen], labels[chosen]]).backward()
        optimizer.step()
    assert relative_error(trained, flat(model)) < 1e-5


def test_sync_equals_distributed_data_parallel_on_gloo(
    trained: torch.Tensor, tmp_path: Path
) -> None:
    out = tmp_path / "ddp.pt"
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    script, rendezvous = str(ROOT / "tests/cluster/ddp_reference.py"), str(tmp_path / "meet")
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), "4", str(STEPS), rendezvous, str(out)],
            env=environment,
            cwd=ROOT,
        )
        for rank in range(4)
    ]
    try:
        assert [process.wait(timeout=120) for process in ranks] == [0, 0, 0, 0]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert relative_error(trained, torch.load(out, weights_only=True)) < 1e-5
