"""Train with torchrun and DistributedDataParallel on 3 ranks, one of them slow, and name it.

Run it:  torchrun --nproc-per-node=3 examples/torchrun_ddp.py
Data:    generated here

All-reduce makes every rank wait for the slowest, so that all ranks seem equally slow. The sampler
measures each rank before that wait. It shares the batch by these speeds.
"""

import argparse
import os
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from paceline.ddp import ProportionalSampler
from paceline.testing import Throttle


def make_data() -> TensorDataset:
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(6000, 64, generator=random)
    return TensorDataset(inputs, (inputs @ torch.randn(64, 10, generator=random)).argmax(dim=1))


def slowest(shares: tuple[int, ...]) -> str:
    """Name the rank with the smallest share of the batch."""
    rank = shares.index(min(shares))
    return f"rank {rank} is the slowest: {shares[rank]} of {sum(shares)} samples fit its speed"


def train(epochs: int) -> None:
    data = make_data()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(),
                      nn.Linear(512, 10))
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = ProportionalSampler(data, batch_size=600)  # of all ranks together
    loader: DataLoader[tuple[Tensor, ...]] = DataLoader(data, batch_sampler=sampler)
    for epoch in range(epochs):
        began, shares = time.perf_counter(), sampler.shares
        sampler.set_epoch(epoch)
        for inputs, labels in sampler.measured(loader):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            sampler.scale(loss).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            seconds = time.perf_counter() - began
            print(
                f"epoch {epoch}: {seconds:.2f} s, loss {loss.item():.3f}, shares {shares} at first"
            )
    if dist.get_rank() == 0:
        print(slowest(sampler.shares))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--slow", type=int, default=2, help="this rank runs a fifth of the time")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # or "nccl", with a device for each rank
    is_slow = dist.get_rank() == args.slow
    with Throttle(os.getpid(), 0.2, period=0.02, seconds=600) if is_slow else nullcontext():
        train(args.epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
