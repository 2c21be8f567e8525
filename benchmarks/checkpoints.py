"""What a checkpoint costs the steps beside it: written by servers, or gathered by the driver.

A model of 50M parameters (`--width 5000`: 200M) on workers and servers of this machine. In each
run a checkpoint is due every few steps, so that steps with and without one take turns; a step
counts as one with a checkpoint if that was under way when the step began. Runs of both ways take
turns as well. With `--seconds` a task also waits that long without using a core, as if it computed
on a GPU: on a machine with few cores, writing takes the time of the cores that compute.

    python benchmarks/checkpoints.py [--quick] [--width 2500] [--servers 2] [--seconds 0]
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from _report import OtherLoad, finish, machine, parser
from paceline.training import saving

LAYERS, WORKERS, WARM_UP = 8, 2, 2
BOUNDS = {"delay": 0.05}  # of the median step, if cores are free for it


def model(width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))


def examples(width: int) -> TensorDataset:
    return TensorDataset(torch.randn(8, width, generator=torch.Generator().manual_seed(0)))


def waiting_loss(seconds: float, model: nn.Module, batch: Any) -> torch.Tensor:
    time.sleep(seconds)
    loss: torch.Tensor = model(batch[0]).pow(2).mean()
    return loss


class Watch(pl.Callback):
    """Notes when each step begins, and whether a checkpoint is under way then."""

    def __init__(self, saves: pl.Checkpoints) -> None:
        self._saves, self._due, self._since = saves, 0, 0.0
        self.began: list[tuple[float, bool]] = []
        self.writing: list[float] = []  # seconds of each checkpoint, as seen after a step

    def stepped(self, progress: pl.Progress) -> None:
        now = time.monotonic()
        if self._due and (self._saves.folder(self._due) / "manifest.json").exists():
            self._due = 0
            self.writing.append(now - self._since)
        if not self._due and progress.step % self._saves.every == 0:
            self._due, self._since = progress.step, now
        self.began.append((now, bool(self._due)))

    def steps(self) -> tuple[list[float], list[float]]:
        """Return the seconds of the steps with a checkpoint, and of those without."""
        found: tuple[list[float], list[float]] = [], []
        for (begin, beside), (end, _) in zip(self.began, self.began[1:], strict=False):
            found[0 if beside else 1].append(end - begin)
        return found[0], found[1][WARM_UP:]


def block(engine: pl.Ray, recipe: pl.TorchLearner, steps: int, every: int, gather: bool) -> Watch:
    folder = tempfile.mkdtemp(prefix="paceline-checkpoints-")
    saves = pl.Checkpoints(folder, every=every, keep=1)
    watch, least = Watch(saves), saving.LEAST_BYTES
    saving.LEAST_BYTES = 2**62 if gather else least
    try:
        trainer = pl.Trainer(
            recipe, pl.sync(), engine, checkpoints=saves, callbacks=[watch], progress=False
        )
        trainer.fit(steps=steps)
    finally:
        saving.LEAST_BYTES = least
        shutil.rmtree(folder)
    return watch


def measure(given: Any) -> dict[str, Any]:
    recipe = pl.TorchLearner(
        partial(model, given.width),
        partial(waiting_loss, given.seconds),
        partial(torch.optim.SGD, lr=0.01, momentum=given.momentum),
        partial(examples, given.width),
        batch_size=8,
    )
    found: dict[str, list[Watch]] = {"servers": [], "driver": []}
    with pl.Ray(workers=WORKERS, servers=given.servers, timeout=300) as engine:
        for _ in range(1 if given.quick else given.blocks):
            for way, watches in found.items():
                watches.append(
                    block(engine, recipe, given.steps, given.every, gather=way == "driver")
                )
    figures: dict[str, Any] = {"model_MB": round(LAYERS * given.width**2 * 4 / 1e6)}
    for way, watches in found.items():
        beside = [s for watch in watches for s in watch.steps()[0]]
        without = [s for watch in watches for s in watch.steps()[1]]
        figures[way] = {
            "steps with and without": [len(beside), len(without)],
            "median": [round(median(beside), 3), round(median(without), 3)],
            "longest": [round(max(beside), 3), round(max(without), 3)],
            "delay": round(median(beside) / median(without) - 1, 3),
            "lost_per_checkpoint": round(
                (np.mean(beside) - np.mean(without))
                * len(beside)
                / max(sum(len(watch.writing) for watch in watches), 1),
                3,
            ),
            "seconds_to_manifest": [round(s, 2) for w in watches for s in w.writing],
        }
    return figures


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--width", type=int, default=2500, help="of eight layers")
    arguments.add_argument("--servers", type=int, default=2)
    arguments.add_argument("--seconds", type=float, default=0.0, help="that a task waits")
    arguments.add_argument("--momentum", type=float, default=0.0)
    arguments.add_argument("--steps", type=int, default=33, help="of each run")
    arguments.add_argument("--every", type=int, default=8)
    arguments.add_argument("--blocks", type=int, default=2, help="runs of each way")
    given = arguments.parse_args()
    about, load = machine("torch", "ray", "numpy"), OtherLoad()
    figures = measure(given)
    about["others"] = load.cores()
    print(json.dumps(figures, indent=1))
    ok = figures["servers"]["delay"] <= BOUNDS["delay"]
    finish("checkpoints", figures, BOUNDS, ok, about, given)


if __name__ == "__main__":
    main()
