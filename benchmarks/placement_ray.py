"""Seconds to the same loss on 8 Ray workers of speeds 1:1:2:2:4:4:4:4, by how the batch is shared.

A CNN on Fashion-MNIST. The workers are real processes, stopped and continued so that they run in
these proportions; together they use less than all cores. Three methods take turns, seed by seed:
equal shares (`sync`, the reference), shares by measured speed, and these with the fastest k of n.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

import paceline as pl
from _fashion import images, pixel_loss
from _report import finish, machine, parser, table
from paceline.core.policy import Policy
from paceline.core.protocol import Finished, Start
from paceline.policies.placement.base import Placement
from paceline.testing import SlowWorkers

SPEEDS = (1, 1, 2, 2, 4, 4, 4, 4)
LIMIT = sum(SPEEDS) / (len(SPEEDS) * min(SPEEDS))  # time with equal shares over proportional ones
BOUND = 1.47  # 32 % of the time saved, as RCD-SGD reports (arXiv 2211.00839)
BATCH, LR = 512, 0.1
PERIOD = 0.04  # seconds of stopping and continuing; tasks take some ten times as long
METHODS: dict[str, tuple[Policy, Placement | None]] = {
    "sync, equal shares": (pl.sync(), None),
    "sync, by speed": (pl.sync(), pl.BySpeed()),
    "k_sync(7), by speed": (pl.k_sync(7), pl.BySpeed()),
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 48, 5, stride=2), nn.ReLU()),
        *(nn.Conv2d(48, 128, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        nn.Linear(128 * 5 * 5, 10),
    )


def speeds(run: pl.Run) -> list[float]:
    """Return the samples a second of each worker, by its own clock."""
    tasks = {c.task.id: c.task for e in run.journal for c in e.commands if isinstance(c, Start)}
    rates: dict[str, list[float]] = {}
    for entry in run.journal:
        if isinstance(event := entry.event, Finished) and event.samples:
            rates.setdefault(tasks[event.task].worker, []).append(event.samples / event.seconds)
    return [statistics.median(rates[f"w{i}"]) for i in range(len(SPEEDS))]


def measure(seeds: Sequence[int], target: float, most: float) -> dict[str, Any]:
    """Train by each method in turn; print and return the figures."""
    learner = pl.TorchLearner(
        make_model(), pixel_loss, partial(torch.optim.SGD, lr=LR, momentum=0.9), images(), BATCH
    )
    cores = machine()["cores"]
    duty = {f"w{i}": 0.8 * cores * v / sum(SPEEDS) for i, v in enumerate(SPEEDS)}
    seconds: dict[str, list[float]] = {name: [] for name in METHODS}
    steps: dict[str, list[float]] = {name: [] for name in METHODS}
    samples: dict[str, list[float]] = {name: [] for name in METHODS}
    measured = []
    with pl.Ray(workers=len(SPEEDS)) as engine:
        pl.Trainer(learner, pl.sync(), engine, progress=False).fit(steps=2)
        for turn, seed in enumerate(seeds):
            names = list(METHODS)
            for name in names[turn % 3 :] + names[: turn % 3]:
                policy, placement = METHODS[name]
                slow = SlowWorkers(engine, duty, PERIOD)
                trainer = pl.Trainer(
                    learner, policy, engine, seed=seed, progress=False, callbacks=[slow],
                    placement=placement,
                )  # fmt: skip
                recent: list[float] = []

                def reached(progress: pl.Progress, recent: list[float] = recent) -> bool:
                    recent.append(progress.loss)
                    return len(recent) >= 8 and float(np.mean(recent[-8:])) <= target

                run = trainer.fit(seconds=most, until=reached)
                done = len(recent) >= 8 and float(np.mean(recent[-8:])) <= target
                seconds[name].append(run.seconds if done else float("inf"))
                steps[name].append(float(np.median(np.diff(run.metrics["seconds"]))))
                samples[name].append(float(run.metrics["samples"].mean()))
                if placement is None:
                    measured.append(speeds(run))
    v = np.median(measured, axis=0)
    limit = float(v.sum() / (len(v) * v.min()))
    reference = seconds["sync, equal shares"]
    ratios = {
        n: [a / b for a, b in zip(reference, each, strict=True)] for n, each in seconds.items()
    }
    print(f"\n8 Ray workers, samples a second measured: {', '.join(f'{x:.0f}' for x in v)}")
    print(f"the limit sum(v) / (n v_min): {LIMIT:.2f} by design, {limit:.2f} as measured")
    rows = [
        [
            name,
            f"{statistics.median(each):.1f}",
            f"{min(each):.1f} - {max(each):.1f}",
            f"{1000 * statistics.median(steps[name]):.0f}",
            f"{statistics.mean(samples[name]):.0f}",
            f"{statistics.median(ratios[name]):.2f}",
        ]
        for name, each in seconds.items()
    ]
    header = [f"to loss {target}", "seconds", "range", "ms a step", "samples a step", "times sync"]
    table(header, rows)
    return {
        "seconds": {name: [round(s, 2) for s in each] for name, each in seconds.items()},
        "ratio": {n: round(statistics.median(each), 3) for n, each in ratios.items()},
        "ms_a_step": {n: round(1000 * statistics.median(each)) for n, each in steps.items()},
        "limit": round(LIMIT, 2),
        "limit_measured": round(limit, 2),
        "target_loss": target,
    }


def main() -> None:
    options = parser(__doc__).parse_args()
    figures = measure([0], 1.2, 60.0) if options.quick else measure([0, 1, 2], 0.7, 240.0)
    ok = figures["ratio"]["sync, by speed"] >= BOUND
    about = machine("torch", "ray", "paceline")
    finish("placement_ray", figures, {"ratio": BOUND}, ok, about, options)


if __name__ == "__main__":
    main()
