"""What a session refuses before it joins anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline as pl
from paceline.sessions.launchers import run_name, started_workers


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.usefixtures("group")
def test_a_model_of_a_group() -> None:
    model = DistributedDataParallel(nn.Linear(2, 1))
    with pytest.raises(ValueError, match=r"pl\.local_steps"):
        pl.session(model, sgd(model), batch_size=8)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model": "net"}, "give the nn.Module"),
        ({"optimizer": "sgd"}, "give the torch.optim.Optimizer"),
        ({"scheduler": "cosine"}, "torch.optim.lr_scheduler"),
        ({"workers": 0}, "workers=0"),
        ({"micro_batch": 0}, "micro_batch"),
        ({"batch_size": -1}, "batch_size"),
    ],
)
def test_arguments_that_cannot_be(change: dict[str, Any], told: str) -> None:
    model = nn.Linear(2, 1)
    given = {"model": model, "optimizer": sgd(model), "batch_size": 8, **change}
    with pytest.raises(ValueError, match=told):
        pl.session(**given)


def test_a_schedule_of_another_optimizer() -> None:
    model = nn.Linear(2, 1)
    other = torch.optim.lr_scheduler.ConstantLR(sgd(model))
    with pytest.raises(ValueError, match="another optimizer"):
        pl.session(model, sgd(model), scheduler=other)


def test_no_cluster_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    model = nn.Linear(2, 1)
    with pytest.raises(RuntimeError, match="paceline launch"):
        pl.session(model, sgd(model), batch_size=8)
    with pytest.raises(RuntimeError, match="paceline serve"):
        pl.local_steps(model, sgd(model))


def test_what_launchers_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PACELINE_RUN", "PACELINE_WORKERS", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    assert run_name() == "main" and started_workers() is None
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert run_name() == "torchrun-10.0.0.1-29500" and started_workers() == (3, 3)
    assert started_workers(process_group=object()) is None
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "5")
    assert started_workers() == (5, 5)
    monkeypatch.setenv("PACELINE_WORKERS", "8")
    monkeypatch.setenv("PACELINE_RUN", "gpt")
    assert run_name() == "gpt" and started_workers() == (8, 8)
