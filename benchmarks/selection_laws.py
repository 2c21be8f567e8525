"""Regret of the bandit under light and heavy tails, for the laws that its bounds assume.

Ten workers have mean times from 0.1 to 1 s, and a round takes the slowest of the three chosen. The
times are exponential, or Pareto of shape 2.5, of which only the mean and the variance are finite.
Each law starts from the parameters of the slowest worker. Every arm is tuned alike: each factor is
tried on other seeds (_tuning.py). It multiplies nu and alpha, the limit of `Bounded`, or the
exponent of `FiniteVariance`; `KL` gets the shape 1 / sqrt(factor). `selection.py --only laws` runs
this part.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

import paceline as pl
from _report import table, told
from _tuning import SEED, Trial, Tuned, tune
from paceline.policies.selection.ranking import Ranking

MEANS = np.array([round(0.1 * i, 1) for i in range(1, 11)])
NAMES = [f"w{i}" for i in range(len(MEANS))]
K = 3
FACTORS = (0.01, 0.03, 0.1, 0.3, 1.0)

Draw = Callable[[np.random.Generator, tuple[int, ...]], NDArray[np.float64]]


def pareto(shape: float) -> Draw:
    """Return a source of Pareto times of mean 1."""
    return lambda rng, size: (1 - 1 / shape) * (1 + rng.pareto(shape, size))


LAWS: dict[str, tuple[Draw, float, float]] = {  # times, deviation, quantile 0.999; of mean 1
    "exponential": (lambda rng, size: rng.exponential(1.0, size), 1.0, math.log(1000)),
    "Pareto 2.5": (pareto(2.5), 1 / math.sqrt(2.5 * 0.5), 0.6 * 1000 ** (1 / 2.5)),
}
INDICES: dict[str, Callable[[float, float, float], pl.selection.Index]] = {
    "SubExponential": lambda wide, spread, most: pl.selection.SubExponential(
        2 * spread * wide, 2 * spread * wide
    ),
    "Bounded": lambda wide, spread, most: pl.selection.Bounded(most * wide),
    "FiniteVariance": lambda wide, spread, most: pl.selection.FiniteVariance(spread, 4 * wide),
    "KL": lambda wide, spread, most: pl.selection.KL(shape=wide**-0.5),
}


@cache
def expected(law: str, chosen: tuple[int, ...]) -> float:
    """Return the expected seconds of a round, from 200,000 rounds with draws of their own."""
    drawn = LAWS[law][0](np.random.default_rng(12345), (200_000, len(MEANS)))
    return float((drawn[:, list(chosen)] * MEANS[list(chosen)]).max(axis=1).mean())


def regret(law: str, name: str, wide: float, rounds: int, seed: int) -> float:
    """Return the expected seconds lost to the three fastest workers."""
    draw, spread, most = LAWS[law]
    ranking = Ranking(INDICES[name](wide, spread, most), seed, 1.0, None)
    rng, lost = np.random.default_rng((seed, 1)), 0.0
    best = expected(law, tuple(range(K)))
    for round in range(rounds):
        chosen = ranking.best(round, NAMES, NAMES, K, lambda rows, seconds: seconds)
        workers = sorted(int(worker[1:]) for worker in chosen)
        for i, drawn in zip(workers, draw(rng, (K,)), strict=True):
            ranking.observe(NAMES[i], float(drawn * MEANS[i]), ended=True)
        lost += expected(law, tuple(workers)) - best
    return lost


def tuned(pool: Executor, law: str, rounds: int, seeds: Sequence[int]) -> dict[str, Tuned]:
    """Return the factor with the least mean regret, for each arm."""

    def scores(trials: Sequence[Trial]) -> list[float]:
        coming = [
            [pool.submit(regret, law, each.arm, each.rate, rounds, seed) for seed in seeds]
            for each in trials
        ]
        return [-statistics.fmean(run.result() for run in runs) for runs in coming]

    return tune(INDICES, scores, factors=FACTORS)


def measure_laws(pool: Executor, quick: bool) -> dict[str, Any]:
    """Print the regret of each law, as given and tuned, and the time over that of the best."""
    rounds, seeds = (300, range(2)) if quick else (3000, range(10))
    figures: dict[str, Any] = {}
    for law in LAWS:
        found = tuned(pool, law, rounds, range(SEED, SEED + (1 if quick else 5)))
        widths = {name: (1.0, found[name].best.rate) for name in INDICES}
        coming = {
            (name, wide): [pool.submit(regret, law, name, wide, rounds, seed) for seed in seeds]
            for name in INDICES
            for wide in {*widths[name]}
        }
        runs = {key: [each.result() for each in futures] for key, futures in coming.items()}
        oracle = rounds * expected(law, tuple(range(K)))
        print(f"\n{law}: regret in seconds after {rounds:,} rounds, {len(seeds)} seeds; "
              f"{next(iter(found.values())).trials} trials for each arm")  # fmt: skip
        rows = []
        for name, (given, best) in widths.items():
            extra = statistics.fmean(runs[name, best]) / oracle
            rows.append([name, told(runs[name, given], ".3g", ".2g"), f"{best:.3g}",
                         told(runs[name, best], ".3g", ".2g"), f"{100 * extra:.1f} %",
                         f"{max(runs[name, best]):.3g}"])  # fmt: skip
            figures.setdefault(law, {})[name] = {
                "given": round(statistics.fmean(runs[name, given]), 1),
                "tuned": round(statistics.fmean(runs[name, best]), 1),
                "worst": round(max(runs[name, best]), 1),
                "factor": round(best, 4),
                "extra": round(extra, 4),
            }
        table(["law", "as given", "factor", "tuned", "extra time", "worst seed"], rows)
    return figures
