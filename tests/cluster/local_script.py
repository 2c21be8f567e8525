"""A user's script with local steps: alone, or as a group of processes under torchrun.

python local_script.py FOLDER alone|ddp|fsdp [overlap] [silent]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import paceline as pl

EVERY, ROUNDS, RATE = 5, 4, 0.01


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def batch(worker: int, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Return the samples of a step, which differ from worker to worker and rank to rank."""
    random = torch.Generator().manual_seed(1000 * worker + 100 * rank + step)
    inputs = torch.randn(8, 6, generator=random)
    return inputs, inputs[:, :1] - 2 * inputs[:, 1:2]


def train(folder: Path, kind: str, overlap: bool) -> None:
    torch.set_num_threads(1)
    model: nn.Module = make_model()
    group, rank = None, 0
    if kind != "alone":
        dist.init_process_group("gloo")
        group, rank = dist.group.WORLD, dist.get_rank()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp":
        fully_shard(model)
    worker = int(os.environ["PACELINE_WORKER"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    outer = pl.local_steps(
        model,
        optimizer,
        every=EVERY,
        rounds=ROUNDS,
        workers=2,
        overlap=overlap,
        process_group=group,
        journal=folder / "run.jsonl",
    )
    step, versions = 0, [outer.version]
    while not outer.ended and step < 500:
        inputs, targets = batch(worker, rank, step)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        if "silent" not in sys.argv:
            outer.report(loss)
        optimizer.step()
        step += 1
        versions.append(outer.version)
    assert versions == sorted(versions) and versions[-1] == ROUNDS, versions
    assert overlap or versions == [each // EVERY for each in range(step + 1)], versions
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if rank == 0:
        torch.save(dict(state), folder / f"{worker}.pt")
        (folder / f"{worker}.txt").write_text(f"{step} {outer.rounds} {outer.ended}")
    if kind != "alone":
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2], "overlap" in sys.argv)
