"""Trains under DistributedDataParallel with shares by speed, fixed and measured, on gloo.

Run by torchrun on three ranks: python -m torch.distributed.run ... ddp_proportional.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from paceline.ddp import ProportionalSampler
from paceline.testing import Throttle
from tests.cluster.ddp_problem import classified, perceptron

RANKS, SLOW, SHARE = 3, 2, 0.15
STEPS, SAMPLES, BATCH = 30, 5800, 768  # so that the 8th batch is a smaller one
ITEMS, SMALL, EPOCHS = 1000, 24, 2  # of the loader with workers


def make_data() -> TensorDataset:
    return classified(SAMPLES, 64, 5, seed=3)


def make_model() -> nn.Module:
    return perceptron(64, 1024, 512, 5, seed=3)


def train(model: nn.Module, sampler: ProportionalSampler) -> list[list[int]]:
    """Take the steps, and return the shares as they were after each."""
    data = make_data()
    loader: DataLoader[tuple[Tensor, ...]] = DataLoader(data, batch_sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    shares: list[list[int]] = []
    for epoch in range(STEPS):
        sampler.set_epoch(epoch)
        for inputs, labels in sampler.measured(loader):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            sampler.scale(loss).backward()
            optimizer.step()
            shares.append([*sampler.shares])
            if len(shares) == STEPS:
                return shares
    raise AssertionError("an epoch has steps")


def look(rank: int) -> dict[str, Any]:
    """Draw from loaders that draw ahead, two of them, while the speeds turn around."""
    now, shares, seen = 0.0, [], list[list[int]]()
    sampler = ProportionalSampler(ITEMS, SMALL, every=4, smoothing=0.0, clock=lambda: now)
    workers = 0 if rank == 1 else 2
    loader: DataLoader[Tensor] = DataLoader(
        torch.arange(ITEMS),  # type: ignore[arg-type]
        batch_sampler=sampler,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in sampler.measured(loader):
            now += len(batch) / (8.0 if (len(seen) // 9 + rank) % RANKS else 1.0)
            sampler.scale(torch.tensor(0.0))
            seen.append(batch.tolist())
            shares.append([*sampler.shares])
    return {"seen": seen, "shares": shares}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    rank = dist.get_rank()
    found: dict[str, Any] = {"workers": look(rank)}
    cores = len(os.sched_getaffinity(0))
    slowed = Throttle(os.getpid(), SHARE * min(1.0, cores / RANKS), period=0.02, seconds=60)
    for name, speeds in (("fixed", [3.0, 1.0, 2.0]), ("measured", None)):
        model = DistributedDataParallel(make_model())
        sampler = ProportionalSampler(SAMPLES, BATCH, speeds=speeds)
        with slowed if rank == SLOW and speeds is None else nullcontext():
            found[name] = {"shares": train(model, sampler)}
        if rank == 0:
            torch.save(model.module.state_dict(), folder / f"{name}.pt")
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
