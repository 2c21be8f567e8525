"""Feeding a worker: real JPEG files decoded by loader processes while the model computes.

A worker on Ray trains a small convolutional network on images of 224 x 224. Four arms, in turn:

load      a DataLoader alone, with as many processes: seconds to fetch a batch
compute   training on images that are in memory already
serial    training with `num_workers=0`: a batch is fetched, then computed
fed       training with `num_workers=1`

The step of `fed` should take as long as the longer of `load` and `compute`. The model that `serial`
and `fed` reach must have the same bits, with random flips in the dataset and dropout in the model.

shards    64 shards, 8 workers of which each takes its part of every batch: what they read and open

    python benchmarks/feeding.py [--quick]
"""

from __future__ import annotations

import io
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import paceline as pl
from _report import OtherLoad, finish, machine, parser, table
from paceline.data.shards import Shards, ShardStream

SIDE, IMAGES, BATCH, WARM_UP, LOADERS = 224, 256, 32, 4, 1
BOUNDS = {"fed / longer of load and compute": 1.15, "read / samples": 1.15}
QUICK = {"fed / longer of load and compute": 1.5, "read / samples": 1.15}


def jpegs(count: int) -> list[bytes]:
    """Return pictures of smooth noise, encoded."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(count):
        coarse = random.integers(0, 256, (28, 28, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(coarse).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(file, "JPEG")
        found.append(file.getvalue())
    return found


class Pictures(Dataset[tuple[Tensor, int]]):
    """Decodes a file for each sample, and flips it at random."""

    def __init__(self, files: list[bytes]) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels = np.asarray(Image.open(io.BytesIO(self._files[index])).convert("RGB"))
        picture = torch.from_numpy(pixels.copy()).permute(2, 0, 1).float().div_(255)
        return picture.flip(2) if torch.rand(()) < 0.5 else picture, index % 10


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 7, stride=4), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 10)),
    )


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train(engine: pl.Ray, data: Dataset[Any], workers: int, steps: int) -> tuple[float, nn.Module]:
    """Return the median seconds of a step, and the model."""
    learner = pl.TorchLearner(
        make_model(),
        loss_of,
        partial(torch.optim.SGD, lr=0.01),
        data,
        BATCH,
        num_workers=workers,
    )
    run = pl.Trainer(learner, pl.sync(), engine, progress=False).fit(steps=steps)
    times = run.metrics["seconds"].tolist()[WARM_UP:]
    return median(b - a for a, b in pairwise(times)), run.model


def load(data: Dataset[Any], batches: int) -> float:
    """Return the median seconds between two batches of a loader that nobody computes with."""
    order = [list(range(BATCH))] * (batches + WARM_UP)
    times = []
    for _ in DataLoader(data, batch_sampler=order, num_workers=LOADERS):
        times.append(time.monotonic())
    return median(b - a for a, b in pairwise(times[WARM_UP:]))


class Numbers:
    """Opens shards of numbers, and counts what is read."""

    def __init__(self) -> None:
        self.read, self.opened = 0, Counter[int]()

    def __call__(self, shard: int) -> Iterator[int]:
        self.opened[shard] += 1
        for place in range(1000):
            self.read += 1
            yield 1000 * shard + place


def read_shards() -> dict[str, float]:
    """Read an epoch of 64 shards by 8 workers; return what is read more often than once."""
    files = [Numbers() for _ in range(8)]
    workers = [Shards(range(64), each, [1000] * 64) for each in files]
    stream, seen = ShardStream(workers[0], 0, 256), list[int]()
    for step in range(64_000 // 256):
        for turn, worker in enumerate(workers):
            seen += worker.__getitems__(stream.indices(256 * step + 32 * turn, 32).tolist())
    assert sorted(seen) == list(range(64_000)), "a sample is missing or doubled"
    opened = sum(sum(each.opened.values()) for each in files)
    return {"read / samples": sum(each.read for each in files) / 64_000, "opened": opened}


def main() -> None:
    arguments = parser(__doc__, 60).parse_args()
    bounds, other = QUICK if arguments.quick else BOUNDS, OtherLoad()
    blocks, steps = (1, 14) if arguments.quick else (5, 40)
    files = jpegs(IMAGES)
    pictures = Pictures(files)
    decoded = TensorDataset(*(torch.stack(c) for c in ([pictures[i][0] for i in range(IMAGES)],)),
                            torch.arange(IMAGES) % 10)  # fmt: skip
    found: dict[str, list[float]] = {"load": [], "compute": [], "serial": [], "fed": []}
    ratios = []
    with pl.Ray(1, cpus=1) as engine:
        for _ in range(blocks):
            found["load"].append(load(pictures, steps))
            found["compute"].append(train(engine, decoded, 0, steps)[0])
            seconds, one = train(engine, pictures, 0, steps)
            found["serial"].append(seconds)
            seconds, other_model = train(engine, pictures, LOADERS, steps)
            found["fed"].append(seconds)
            ratios.append(seconds / max(found["load"][-1], found["compute"][-1]))
            pairs = zip(one.parameters(), other_model.parameters(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), "the bits differ"
    rows = [[name, f"{1000 * median(times):.1f}", f"{1000 * min(times):.1f}",
             f"{1000 * max(times):.1f}"] for name, times in found.items()]  # fmt: skip
    table(["arm", "ms a batch", "least", "most"], rows)
    figures = {"fed / longer of load and compute": median(ratios), **read_shards()}
    for name, value in figures.items():
        print(f"{name}: {value:.2f}" + (f" (bound {bounds[name]:g})" if name in bounds else ""))
    ok = all(figures[name] <= bound for name, bound in bounds.items())
    about = {**machine("torch", "ray"), "other_cores": other.cores()}
    everything = {**figures, "ms": {name: median(times) for name, times in found.items()}}
    finish("feeding", everything, bounds, ok, about, arguments)


if __name__ == "__main__":
    main()
