"""Accuracy against bytes for a ResNet-8 on CIFAR-10: methods of messages_gossip.py.

8 nodes train in simulated time with real arithmetic in bfloat16, on mixed shards and on shards
sorted by label. The model has GroupNorm, not BatchNorm. With BatchNorm, a worker with one class
has statistics of that class only. The accuracy of all models then falls for every method (Hsieh et
al., 2020, arXiv 1910.00189). Tensors are not channels_last, since GroupNorm in bfloat16 would take
twice the time.

All methods have the usual learning rate and knob. `--tune` gives each the same number of trials
first, and takes hours.

    python benchmarks/messages.py --only cifar --cifar DIR [--quick] [--tune]

DIR holds CIFAR-10 (Krizhevsky, 2009) in its binary version: data_batch_1.bin to data_batch_5.bin
and test_batch.bin.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from messages_gossip import CONTROL, DENSE, REFERENCE, compare, saved
from messages_star import Task

BOUNDS = {"points": 2.0, "bytes_saved": 0.9, "no_communication_sorted": 30.0}
METHODS = (
    *(REFERENCE, CONTROL, "EventGraD", "ours, int8, at every step", "ours, int8"),
    "ours, top 10 % + int8",
    *("CHOCO, top 10 %", DENSE, "a central coordinator, top 1 % + int8, feedback"),
    "DiLoCo, 10 local steps, int8",
)
# A step takes about 0.15 s of a core, so 60 runs take about 40 minutes on two cores.
BATCH, STEPS, QUICK_STEPS = 128, 480, 4
SCALES = 0.0125, 0.05  # the best of a few, tuned with another seed
NAMES = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]


def missing(folder: Path | None) -> str | None:
    """Return why the data cannot be read, or None."""
    if folder is None:
        return "give the folder of CIFAR-10's binary files by --cifar DIR"
    absent = [name for name in NAMES if not (folder / name).exists()]
    return f"{folder} has no {', '.join(absent)}" if absent else None


def read(files: Sequence[Path]) -> TensorDataset:
    """Return images as bytes and their labels; each record is a label and three planes."""
    records = torch.from_numpy(np.concatenate([np.fromfile(each, np.uint8) for each in files]))
    records = records.reshape(-1, 1 + 3 * 32 * 32)
    return TensorDataset(records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long())


class Block(nn.Module):
    """Two convolutions and a skip connection (He et al., 2016, arXiv 1512.03385)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            *(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.GroupNorm(8, after)),
            *(nn.ReLU(), nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.GroupNorm(8, after)),
        )
        self.past = (
            nn.Conv2d(before, after, 1, stride, bias=False) if after != before else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.inner(x) + self.past(x))


def resnet8() -> nn.Module:
    """Return a network of 78,000 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.GroupNorm(8, 16), nn.ReLU()),
        *(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )


def outputs(model: nn.Module, pixels: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        found: Tensor = model((pixels.float() - 120) / 64)
    return found.float()


def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return nn.functional.cross_entropy(outputs(model, batch[0]), batch[1])


def accuracy(model: nn.Module, test: TensorDataset) -> float:
    pixels, labels = test.tensors
    with torch.no_grad():
        found = torch.cat([outputs(model, some).argmax(dim=1) for some in torch.split(pixels, 500)])
    return 100 * float((found == labels).float().mean())


@cache
def task(folder: Path, steps: int, tested: int) -> Task:
    train = read([folder / name for name in NAMES[:-1]])
    test = TensorDataset(*read([folder / NAMES[-1]])[:tested])
    labels = train.tensors[1].numpy()
    right = partial(accuracy, test=test)
    return Task(train, labels, resnet8, loss, right, 0.1, BATCH, steps, SCALES)


def measure(folder: Path, quick: bool, tuned: bool) -> dict[str, Any]:
    steps, seeds, tested = (QUICK_STEPS, [0], 500) if quick else (STEPS, [0, 1, 2], 4000)
    print(f"\nCIFAR-10, {steps} steps of {BATCH} samples, {len(seeds)} seeds", flush=True)
    began = time.monotonic()
    figures = compare(partial(task, folder, steps, tested), METHODS, seeds, tuned)
    figures["seconds"] = round(time.monotonic() - began, 1)
    print(f"{figures['seconds']:.0f} s", flush=True)
    return figures


def holds(figures: dict[str, Any], quick: bool) -> bool:
    """Return whether ours save most bytes at nearly the same accuracy, and the control fails.

    A quick run has too few steps for accuracy: only the bytes are checked.
    """
    if quick:
        return bool(figures["ours, int8"]["mixed"]["saved"] >= 0.7)
    few = saved(figures, "mixed", points=BOUNDS["points"])
    worst = figures[CONTROL]["sorted"]["mean model"]
    return few >= BOUNDS["bytes_saved"] and bool(worst <= BOUNDS["no_communication_sorted"])
