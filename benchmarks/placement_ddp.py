"""Seconds per step of DistributedDataParallel on 4 unequal ranks: shares equal, and by speed.

A CNN on Fashion-MNIST over gloo, launched by torchrun. The ranks are real processes, stopped and
continued so that their speeds are 1 : 1 : 2 : 4. The fastest runs for its equal share of the cores.
DistributedSampler and ProportionalSampler take turns, a few steps each, in the same processes.
ProportionalSampler learns the speeds before, which is timed separately. Its model is compared with
that of one process that trains on the global batches.

A stopped process also delays its neighbors in the ring, by 0.1 to 0.2 s per all-reduce. A slow
device would not do so. So the model computes much and sends little.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from _report import OtherLoad, finish, machine, parser, table
from fashion_mnist import fashion_mnist
from paceline.data.sampling import Stream
from paceline.ddp import ProportionalSampler
from paceline.testing import Throttle

SPEEDS = (1, 1, 2, 4)
LIMIT = sum(SPEEDS) / (len(SPEEDS) * min(SPEEDS))  # time with equal shares over that with the best
BATCH, BLOCK = 1024, 2
BOUNDS = {"ratio": 1.47, "difference": 1e-5}  # 32 % saved, as RCD-SGD reports


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Fashion-MNIST, a batch at a time."""

    def __init__(self) -> None:
        data = fashion_mnist()
        self.images = torch.from_numpy(data.train_images).unsqueeze(1)
        self.labels = torch.from_numpy(data.train_labels).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.images[indices] / 255, self.labels[indices]


def together(batch: Any) -> Any:
    """Return the batch: it is already collated."""
    return batch


def make_model() -> nn.Module:
    torch.manual_seed(0)
    # Tanh is smooth. At the kink of a ReLU, rounding alone makes parameters differ by 1e-5.
    return nn.Sequential(
        *(nn.Conv2d(1, 48, 5, stride=2), nn.Tanh()),
        *(nn.Conv2d(48, 128, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten()),
        nn.Linear(128 * 5 * 5, 10),
    )


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def equal(data: Images, model: nn.Module) -> Iterator[None]:
    """Train as the tutorials do, a step at a time."""
    ranks = dist.get_world_size()
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader: DataLoader[Any] = DataLoader(
        data, BATCH // ranks, sampler=sampler, collate_fn=together, drop_last=True
    )
    optimizer = make_optimizer(model)
    for epoch in range(1000):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield


def proportional(data: Images, model: nn.Module, sampler: ProportionalSampler) -> Iterator[None]:
    """Train with shares by speed, a step at a time."""
    loader: DataLoader[Any] = DataLoader(data, batch_sampler=sampler, collate_fn=together)
    optimizer = make_optimizer(model)
    for epoch in range(1000):
        sampler.set_epoch(epoch)
        for images, labels in sampler.measured(loader):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            sampler.scale(loss).backward()
            optimizer.step()
            yield


def alone(data: Images, steps: int) -> nn.Module:
    """Train in this process on the global batches."""
    model, stream = make_model(), Stream(len(data), seed=0)
    optimizer = make_optimizer(model)
    places = (
        epoch * len(data) + step * BATCH
        for epoch in range(1000)
        for step in range(len(data) // BATCH)
    )
    for _, start in zip(range(steps), places, strict=False):
        images, labels = data.__getitems__(stream.indices(start, BATCH).tolist())
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    return model


def seconds(steps: Iterator[None], count: int) -> float:
    """Return the mean seconds of a step over `count` steps; all ranks start together."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        next(steps)
    return (time.perf_counter() - begin) / count


def rank_main(folder: Path, learning: int, turns: int) -> None:
    """Train as one rank; rank 0 writes its measurements to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, data = dist.get_rank(), Images()
    models = [DistributedDataParallel(make_model()) for _ in range(2)]
    sampler = ProportionalSampler(data, BATCH, drop_last=True)
    by_speed, by_count = proportional(data, models[0], sampler), equal(data, models[1])
    share = min(1.0, len(os.sched_getaffinity(0)) / len(SPEEDS)) * SPEEDS[rank] / max(SPEEDS)
    found: dict[str, Any] = {"equal": [], "proportional": []}
    with Throttle(os.getpid(), share, period=0.02, seconds=600):
        found["learning"] = seconds(by_speed, learning)
        for _ in range(turns):
            found["equal"].append(seconds(by_count, BLOCK))
            found["proportional"].append(seconds(by_speed, BLOCK))
    found["shares"] = sampler.shares
    found["steps"] = learning + turns * BLOCK
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
        torch.save(models[0].module.state_dict(), folder / "model.pt")
    dist.destroy_process_group()


def torchrun(folder: Path, arguments: Sequence[str]) -> None:
    """Run this file on all ranks, over the loopback interface."""
    launch = [
        *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={len(SPEEDS)}"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
        *(__file__, "--rank", str(folder), *arguments),
    ]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(launch, env=environment)
    try:
        if process.wait(timeout=600):
            raise RuntimeError("torchrun failed; its output above tells why")
    finally:
        process.terminate()
        process.wait(timeout=60)


def measure(quick: bool = False) -> dict[str, Any]:
    """Run the comparison and return its figures."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        torchrun(Path(folder), ["6", "2"] if quick else ["16", "12"])
        found = json.loads((Path(folder) / "found.json").read_text())
        theirs = torch.load(Path(folder) / "model.pt", weights_only=True)
    mine = alone(Images(), found["steps"]).state_dict()
    difference = max(float((theirs[key] - mine[key]).abs().max()) for key in mine)
    pairs = zip(found["equal"], found["proportional"], strict=True)
    ratios = [slow / quick_ for slow, quick_ in pairs]
    return {
        "speeds": SPEEDS,
        "batch_size": BATCH,
        "equal": found["equal"],
        "proportional": found["proportional"],
        "learning": found["learning"],
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "limit": LIMIT,
        "shares": found["shares"],
        "steps": found["steps"],
        "parameters": sum(value.numel() for value in mine.values()),
        "difference": difference,
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--rank",
        nargs=3,
        metavar=("FOLDER", "LEARNING", "TURNS"),
        help="be one of the ranks (for torchrun)",
    )
    options = arguments.parse_args()
    if options.rank:
        folder, learning, turns = options.rank
        rank_main(Path(folder), int(learning), int(turns))
        return
    load = OtherLoad()
    figures = measure(options.quick)
    figures["other_cores"] = load.cores()
    rows = [
        [name, *(f"{pick(figures[key]):.3f}" for pick in (statistics.median, min, max))]
        for name, key in (("DistributedSampler", "equal"), ("ProportionalSampler", "proportional"))
    ]
    print(f"4 gloo ranks of speeds 1:1:2:4, batches of {BATCH}, {figures['steps']} steps")
    table(["sampler", "s per step", "least", "most"], rows)
    print(f"ratio {figures['ratio']:.2f} of at most {LIMIT:.2f}; shares {figures['shares']}")
    print(
        f"while learning: {figures['learning']:.3f} s per step; "
        f"largest difference of a parameter to one process: {figures['difference']:.1e}"
    )
    ok = figures["ratio"] >= BOUNDS["ratio"] and figures["difference"] <= BOUNDS["difference"]
    finish("placement_ddp", figures, BOUNDS, ok, machine("torch", "paceline"), options)


if __name__ == "__main__":
    main()
