"""Ringleader ASGD on workers whose data differ, beside other policies: time to a loss.

Eight simulated workers fit one linear regression with real arithmetic. Their speeds are 1 to 8, and
the time of a task is exponential. The data stay with the workers (`Placed(…, move=False)`), and
each worker's data have their own best model. Arms:

- sync: waits for all workers;
- k_sync: waits for four results, and for data that fall behind (`Placed`'s bound);
- asynchronous: steps on each result, with the same bound;
- asynchronous, no bound: data of fast workers count more, as in plain asynchronous SGD;
- ringleader: `pl.policies.ringleader()`.

A task has 1/8 of the batch on average, larger for faster workers. Every arm gets the same number of
trials of its learning rate, on another seed (_tuning.py). The loss is that of all samples, above
its minimum, as a part of that at the start.

    python benchmarks/ringleader.py [--quick]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import cache
from math import inf, isfinite
from typing import Any

import numpy as np

import paceline as pl
from _report import finish, machine, parser, table
from _tuning import SEED, Trial, tune

WORKERS, EACH, WIDTH, BATCH = 8, 100, 10, 64
TARGETS = (0.03, 0.003)  # of the loss at the start
LONGEST, SHARES = 2000.0, WORKERS
BOUNDS = {"to_best_other": 1.0}
FACTORS = (0.1, 0.3, 1.0, 3.0)


@cache
def data(seed: int) -> tuple[Any, Any]:
    """Return rows and targets; worker i has rows 100 i to 100 i + 99."""
    random = np.random.default_rng([seed, 7])
    rows = random.normal(size=(WORKERS * EACH, WIDTH))
    best = random.normal(size=WIDTH) + 1.0 * random.normal(size=(WORKERS, WIDTH))
    models = np.repeat(best, EACH, axis=0)
    return rows, (rows * models).sum(axis=1) + 0.3 * random.normal(size=WORKERS * EACH)


def placed(bound: float | None = 2.0) -> pl.policies.Placed:
    tiles = pl.partition.Partition(np.repeat(range(WORKERS), EACH))
    owners = {f"w{i}": [i] for i in range(WORKERS)}
    return pl.policies.Placed(tiles, move=False, owners=owners, bound=bound)


def each(policy: pl.policies.Gather) -> pl.policies.Gather:
    """Return the policy with tasks of an eighth of the batch."""
    policy.work = pl.protocol.Work(samples=BATCH // SHARES)
    return policy


ARMS: dict[str, Callable[[], Any]] = {
    "sync": lambda: pl.sync().placed(placed()),
    "k_sync": lambda: pl.k_sync(WORKERS // 2, BATCH // SHARES).placed(placed()),
    "asynchronous": lambda: each(pl.asynchronous(damping=False)).placed(placed()),
    "asynchronous, no bound": lambda: each(pl.asynchronous(damping=False)).placed(placed(None)),
    "ringleader": lambda: pl.policies.ringleader().placed(placed()),
}


class Below:
    """Whether the loss of all samples has fallen to a part of that at the start."""

    def __init__(self, seed: int, target: float) -> None:
        self._rows, self._targets = data(seed)
        best = np.linalg.lstsq(self._rows, self._targets, rcond=None)[0]
        self._least, self.done = self._loss(best), False
        self._limit = target * (self._loss(np.zeros(WIDTH)) - self._least)

    def _loss(self, model: Any) -> float:
        return float(0.5 * np.mean((self._rows @ model - self._targets) ** 2))

    def __call__(self, at: pl.Progress) -> bool:
        self.done = self._loss(at.model()) - self._least <= self._limit
        return self.done


def train(arm: str, rate: float, seed: int, target: float) -> float:
    """Return the simulated seconds to the target; infinity if it is not reached."""
    rows, targets = data(seed)
    learner = pl.learners.LeastSquares(rows, targets, 0.1 * rate, BATCH)
    delays = [pl.delays.Exponential(8.0 / (1 + worker)) for worker in range(WORKERS)]
    engine = pl.Simulator(WORKERS, delays, unit=float(BATCH // SHARES))
    below = Below(seed, target)
    trainer = pl.Trainer(learner, ARMS[arm](), engine, seed=seed, progress=False)
    run = trainer.fit(seconds=LONGEST, steps=8_000, until=below)
    return run.seconds if below.done else inf


def compare(target: float, seeds: int) -> dict[str, Any]:
    """Tune all arms and measure them; return the figures of each."""

    def scores(trials: Sequence[Trial]) -> list[float]:
        return [-train(trial.arm, trial.rate, SEED, target) for trial in trials]

    tuned = tune(ARMS, scores, factors=FACTORS)
    found = {
        arm: [train(arm, tuned[arm].best.rate, seed, target) for seed in range(seeds)]
        for arm in ARMS
    }
    rows, figures = [], {}
    for arm, seconds in found.items():
        middle = statistics.median(seconds)
        ratios = [a / b for a, b in zip(seconds, found["sync"], strict=True)]
        figures[arm] = {
            "seconds": round(middle, 1) if isfinite(middle) else None,
            "reached": sum(map(isfinite, seconds)),
            "to_sync": round(statistics.median(ratios), 2) if isfinite(middle) else None,
            "least": round(min(ratios), 2) if isfinite(min(ratios)) else None,
            "most": round(max(ratios), 2) if isfinite(max(ratios)) else None,
            "tuned": tuned[arm].report(),
        }
        about = f"{middle:.1f} [{min(seconds):.1f}–{max(seconds):.1f}]"
        rows.append([arm, about, f"{statistics.median(ratios):.2f}", str(tuned[arm].report())])
    table([f"to {target:g}", "seconds, median [range]", "to sync", "tuned"], rows)
    return figures


def main() -> None:
    options = parser(__doc__, 60)
    options.add_argument("--seeds", type=int, default=5)
    given = options.parse_args()
    np.seterr(over="ignore", invalid="ignore")  # trials with too large a rate diverge
    targets = TARGETS[:1] if given.quick else TARGETS
    figures = {
        f"{target:g}": compare(target, 2 if given.quick else given.seeds) for target in targets
    }
    ratios = {}
    for target, arms in figures.items():
        others = [a["seconds"] for name, a in arms.items() if name != "ringleader" and a["seconds"]]
        ours = arms["ringleader"]["seconds"] or inf
        ratios[target] = round(ours / min(others), 2) if isfinite(ours) else None
    figures["to_best_other"] = ratios
    ok = given.quick or all(each is not None and each <= 1.0 for each in ratios.values())
    finish("ringleader", figures, BOUNDS, ok, machine("numpy", "paceline"), given)


if __name__ == "__main__":
    main()
