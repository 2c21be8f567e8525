"""Checks forecasts on 8 Ray workers of speeds 1:1:2:2:4:4:4:4.

A CNN on Fashion-MNIST with plain SGD. The workers are real processes, stopped and continued so that
they run in these proportions; together they use less than all cores. A profile is measured on them.
Then policies are forecast, and run in turns, seed by seed, until the loss reaches the target. A run
that does not reach it counts as ten times its time limit.

The forecast seconds of a step must be within 15 % of the measured ones. The order of the four
policies without stale gradients, by time to the target, must be the forecast one. The forecast of
the extra steps that stale gradients cost early in training is poor; that policy is only shown.

    python benchmarks/planner.py --part ray [--quick]
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

import paceline as pl
from _fashion import images, pixel_loss
from _report import machine, table
from paceline.core.policy import Policy
from paceline.testing import Throttle

SPEEDS = (1, 1, 2, 2, 4, 4, 4, 4)
BATCH, LR = 512, 0.05
PERIOD = 0.04  # seconds of stopping and continuing; tasks take some ten times as long
WITHIN = 0.15
TARGET = 1.1
SLOW = ["w0", "w1", "w2", "w3"]
STALE = "ringmaster(8)"
POLICIES: dict[str, Policy] = {
    "sync()": pl.sync(),
    "k_sync(6)": pl.k_sync(6),
    "Gather(placement=BySpeed())": pl.policies.Gather(placement=pl.BySpeed()),
    "OnlyWorkers(the four slow ones, sync())": pl.policies.OnlyWorkers(SLOW, pl.sync()),
    STALE: pl.ringmaster(8),
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 48, 5, stride=2), nn.ReLU()),
        *(nn.Conv2d(48, 128, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        nn.Linear(128 * 5 * 5, 10),
    )


@contextlib.contextmanager
def slowed(engine: pl.Ray) -> Iterator[None]:
    """Let the workers run in proportion to their speeds."""
    cores = machine()["cores"]
    with contextlib.ExitStack() as leave:
        for place, (_, pid) in enumerate(sorted(engine.pids().items())):
            share = 0.8 * cores * SPEEDS[place] / sum(SPEEDS)
            leave.enter_context(Throttle(pid, share, PERIOD, seconds=3600))
        yield


def measure(quick: bool) -> tuple[dict[str, Any], bool]:
    learner = pl.TorchLearner(
        make_model(), pixel_loss, partial(torch.optim.SGD, lr=LR), images(), BATCH
    )
    seeds = [0] if quick else [0, 1, 2]
    most = 60.0 if quick else 300.0
    steps: dict[str, list[float]] = {name: [] for name in POLICIES}
    seconds: dict[str, list[float]] = {name: [] for name in POLICIES}
    with pl.Ray(workers=len(SPEEDS)) as engine:
        pl.Trainer(learner, pl.sync(), engine, progress=False).fit(steps=2)
        with slowed(engine):
            profile = pl.profile(learner, engine, seconds=20.0 if quick else 40.0)
            told = {
                name: pl.forecast(policy, profile, learning_rate=LR, target=TARGET)
                for name, policy in POLICIES.items()
            }
            for turn, seed in enumerate(seeds):
                names = list(POLICIES)
                for name in names[turn:] + names[:turn]:
                    run = pl.Trainer(
                        learner, POLICIES[name], engine, seed=seed, progress=False
                    ).fit(seconds=most, until=lambda at: at.loss <= TARGET)  # fmt: skip
                    took = np.diff(run.metrics["seconds"])
                    steps[name].append(float(np.mean(took[len(took) // 10 :])))
                    seconds[name].append(run.seconds if "condition" in run.reason else 10 * most)
                    print(f"  {name}, seed {seed}: {run.steps} steps, {run.reason}", flush=True)
    rows: list[list[str]] = []
    figures: dict[str, dict[str, Any]] = {}
    for name, found in told.items():
        step, real = found.seconds / found.steps, statistics.median(steps[name])
        target = statistics.median(seconds[name])
        figures[name] = {
            "step_forecast": round(step, 4), "step": round(real, 4),
            "step_ratio": round(step / real, 3), "target_forecast": round(found.seconds, 2),
            "target": round(target, 2), "range": [round(s, 2) for s in sorted(seconds[name])],
        }  # fmt: skip
        rows.append(
            [name, f"{1000 * step:.0f}", f"{1000 * real:.0f}", f"{step / real:.2f}",
             f"{found.seconds:.1f}", f"{target:.1f}"]
        )  # fmt: skip
    ranked = [name for name in figures if name != STALE]
    ranks = [
        sorted(ranked, key=lambda name: figures[name][key]) for key in ("target_forecast", "target")
    ]
    print(f"\n8 Ray workers of speeds {SPEEDS}, to a loss of {TARGET}")
    table(["policy", "ms a step, forecast", "in fact", "ratio", "s to target, forecast", "in fact"],
          rows)  # fmt: skip
    print(f"from the quickest on, by forecast: {', '.join(ranks[0])}")
    ok = all(abs(each["step_ratio"] - 1) <= WITHIN for each in figures.values())
    print(f"forecast steps within {WITHIN:.0%}: {ok}; order as forecast: {ranks[0] == ranks[1]}")
    return {"policies": figures, "order_as_forecast": ranks[0] == ranks[1]}, (
        ok and ranks[0] == ranks[1]
    )
