"""Checks forecasts on 8 Ray workers of speeds 1:1:2:2:4:4:4:4.

A CNN on Fashion-MNIST with plain SGD. The workers are real processes, each in a control group with
its share of the cores; together they use less than all cores. A profile is measured on them. Then
policies are forecast, and run in turns, seed by seed, until the mean loss of five steps reaches the
target. A forecast is of the mean loss as well; single batches reach it earlier. A run that does not
reach it counts as ten times its time limit.

The forecast seconds of a step must be within 15 % of the measured ones. The order of the five
policies by time to the target must be the forecast one. The policy that a plan chooses runs too,
and its time must be within 10 % of the best. Needs root, for control groups.

The seconds of a step are also forecast from the journals of the `sync()` runs alone.

    python benchmarks/planner.py --part ray [--quick]
"""

from __future__ import annotations

import contextlib
import statistics
from collections import deque
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
from paceline.core.state import describe
from paceline.testing import groups

SPEEDS = (1, 1, 2, 2, 4, 4, 4, 4)
BATCH, LR = 512, 0.05
CORES = 0.8  # of all, for the workers together
WITHIN, CLOSE = 0.15, 1.1
TARGET = 1.1
SLOW = ["w0", "w1", "w2", "w3"]
POLICIES: dict[str, Policy] = {
    "sync()": pl.sync(),
    "k_sync(6)": pl.k_sync(6),
    "Gather(placement=BySpeed())": pl.policies.Gather(placement=pl.BySpeed()),
    "OnlyWorkers(the four slow ones, sync())": pl.policies.OnlyWorkers(SLOW, pl.sync()),
    "ringmaster(8)": pl.ringmaster(8),
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 48, 5, stride=2), nn.ReLU()),
        *(nn.Conv2d(48, 128, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        nn.Linear(128 * 5 * 5, 10),
    )


class Reached:
    """Whether the mean of the last five losses is at the target."""

    def __init__(self) -> None:
        self._last = deque[float](maxlen=5)

    def __call__(self, at: pl.Progress) -> bool:
        self._last.append(at.loss)
        return len(self._last) == 5 and statistics.mean(self._last) <= TARGET


@contextlib.contextmanager
def slowed(engine: pl.Ray) -> Iterator[None]:
    """Limit the cores of each worker in proportion to its speed."""
    cores = CORES * machine()["cores"]
    with contextlib.ExitStack() as leave:
        for place, (_, pid) in enumerate(sorted(engine.pids().items())):
            leave.enter_context(groups.Group([pid], cores * SPEEDS[place] / sum(SPEEDS)))
        yield


def measure(quick: bool) -> tuple[dict[str, Any], bool]:
    if reason := groups.missing():
        return {"not_run": reason}, False
    learner = pl.TorchLearner(
        make_model(), pixel_loss, partial(torch.optim.SGD, lr=LR), images(), BATCH
    )
    seeds = [0] if quick else [0, 1, 2]
    most = 60.0 if quick else 300.0
    with pl.Ray(workers=len(SPEEDS)) as engine:
        pl.Trainer(learner, pl.sync(), engine, progress=False).fit(steps=2)
        with slowed(engine):
            profile = pl.profile(learner, engine, seconds=20.0 if quick else 40.0)
            plan = pl.plan(profile, target=TARGET, learning_rate=LR, codecs=[None])
            print(plan, flush=True)
            arms = dict(POLICIES)
            same = describe(plan.policy)
            chosen = next((name for name, each in arms.items() if describe(each) == same), "")
            if not chosen:
                chosen = f"the plan's {plan.entries[0].text}"
                arms[chosen] = plan.policy
            told = {
                name: pl.forecast(policy, profile, learning_rate=LR, target=TARGET)
                for name, policy in arms.items()
            }
            steps: dict[str, list[float]] = {name: [] for name in arms}
            counts: dict[str, list[int]] = {name: [] for name in arms}
            seconds: dict[str, list[float]] = {name: [] for name in arms}
            journals = []
            for turn, seed in enumerate(seeds):
                names = list(arms)
                for name in names[turn:] + names[:turn]:
                    run = pl.Trainer(
                        learner, arms[name], engine, seed=seed, progress=False
                    ).fit(seconds=most, until=Reached())  # fmt: skip
                    journals += [run.journal] if name == "sync()" else []
                    took = np.diff(run.metrics["seconds"])
                    steps[name].append(float(np.mean(took[len(took) // 10 :])))
                    counts[name].append(run.steps)
                    seconds[name].append(run.seconds if "condition" in run.reason else 10 * most)
                    print(f"  {name}, seed {seed}: {run.steps} steps, {run.reason}", flush=True)
    known = pl.planner.profile_of(*journals)
    rows: list[list[str]] = []
    figures: dict[str, dict[str, Any]] = {}
    for name, found in told.items():
        step, real = found.per_step["seconds"], statistics.median(steps[name])
        again = pl.forecast(arms[name], known, learning_rate=LR, target=TARGET).per_step["seconds"]
        target, taken = statistics.median(seconds[name]), statistics.median(counts[name])
        figures[name] = {
            "step_forecast": round(step, 4), "step": round(real, 4),
            "step_ratio": round(step / real, 3), "from_journal": round(again / real, 3),
            "steps_forecast": found.steps, "steps": taken,
            "target_forecast": round(found.seconds, 2), "target": round(target, 2),
            "range": [round(s, 2) for s in sorted(seconds[name])],
        }  # fmt: skip
        rows.append(
            [name, f"{1000 * step:.0f}", f"{1000 * real:.0f}", f"{step / real:.2f}",
             f"{again / real:.2f}", f"{found.steps:.0f}", f"{taken:.0f}",
             f"{found.seconds:.1f}", f"{target:.1f}"]
        )  # fmt: skip
    ranks = [
        sorted(POLICIES, key=lambda name: figures[name][key])
        for key in ("target_forecast", "target")
    ]
    best = min(each["target"] for each in figures.values())
    to_best = round(figures[chosen]["target"] / best, 3)
    print(f"\n8 Ray workers of speeds {SPEEDS}, to a loss of {TARGET}")
    table(["policy", "ms a step, forecast", "in fact", "ratio", "from sync", "steps, forecast",
           "in fact", "s to target, forecast", "in fact"], rows)  # fmt: skip
    print(f"from the quickest on, by forecast: {', '.join(ranks[0])}")
    close = all(abs(each["step_ratio"] - 1) <= WITHIN for each in figures.values())
    print(f"forecast steps within {WITHIN:.0%}: {close}; order as forecast: {ranks[0] == ranks[1]}")
    print(f"the plan chose {chosen}: {to_best:.2f} times the best")
    return {
        "policies": figures, "chosen": chosen, "chosen_to_best": to_best,
        "order_as_forecast": ranks[0] == ranks[1],
    }, close and ranks[0] == ranks[1] and to_best <= CLOSE  # fmt: skip
