"""Lazy messages (only the changes of results are sent): where they pay, and where not.

Least squares on 8 simulated workers, each with an eighth of the rows, on scales from 1 to 17. It
runs with full gradients, and with batches of 8 rows per worker. Every method gets the same number
of trials of its learning rate (_tuning.py). A quick run has no trials: all have the same rate.

    python benchmarks/messages.py --only lazy [--quick]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import paceline as pl
from _report import table
from _tuning import SEED, Trial, tune
from paceline.codecs.base import Codec
from paceline.core.protocol import Finished

WORKERS, ROWS, SIZE = 8, 64, 50
BOUNDS = {"lag_sent": 0.25, "ef21_over_feedback": 0.1, "feedback_over_ef21_sampled": 0.2}
METHODS: dict[str, Codec] = {
    "all": pl.codecs.Lazy(),
    "LAG": pl.codecs.Lazy(pl.codecs.Lag(workers=1)),
    "EF21, top 10 %": pl.codecs.Lazy(codec=pl.codecs.TopK(0.1)),
    "EF21-SGDM, top 10 %": pl.codecs.Lazy(codec=pl.codecs.TopK(0.1), momentum=0.9),
    "top 10 %, feedback": pl.codecs.Feedback(pl.codecs.TopK(0.1)),
}


def run(codec: Codec, batch: int, rate: float, steps: int, seed: int) -> tuple[float, float]:
    """Return the loss above the minimum, and the fraction of messages that were not empty."""
    rng = np.random.default_rng(seed)
    scales = np.repeat(1.5 ** np.arange(1.0 - WORKERS, 1.0), ROWS)[:, None]
    rows = scales * rng.standard_normal((WORKERS * ROWS, SIZE))
    targets = rows @ rng.standard_normal(SIZE) + 0.1 * rng.standard_normal(len(rows))
    lr = rate / np.linalg.eigvalsh(rows.T @ rows / len(rows))[-1]
    placement = pl.policies.Placed(
        pl.partition.Partition(np.arange(len(rows)) // ROWS),
        move=False,
        max_samples=batch // WORKERS,
    )
    done = pl.Trainer(
        pl.learners.LeastSquares(rows, targets, lr=lr, batch_size=batch),
        *(pl.sync(), pl.Simulator(WORKERS, pl.delays.Fixed(1.0))),
        placement=placement,
        codec=codec,
        progress=False,
    ).fit(steps=steps)
    away = rows @ (done.model - np.linalg.lstsq(rows, targets)[0])
    sent = [entry.event.sent or 0 for entry in done.journal if isinstance(entry.event, Finished)]
    return float(away @ away) / 2 / len(rows), sum(each > 60 for each in sent) / len(sent)


CASES = {"whole": (WORKERS * ROWS, 1.0, 80), "sampled": (WORKERS * 8, 0.2, 400)}


def measure(quick: bool) -> dict[str, Any]:
    seeds = [0] if quick else [0, 1, 2]
    figures: dict[str, Any] = {name: {} for name in METHODS}
    rows: dict[str, list[str]] = {name: [name] for name in METHODS}
    for case, (batch, rate, steps) in CASES.items():

        def scores(
            trials: Sequence[Trial], batch: int = batch, rate: float = rate, steps: int = steps
        ) -> list[float]:
            return [-run(METHODS[t.arm], batch, rate * t.rate, steps, SEED)[0] for t in trials]

        with np.errstate(all="ignore"):  # rates that diverge
            tuned = {} if quick else tune(METHODS, scores)
        for name, codec in METHODS.items():
            factor = tuned[name].best.rate if tuned else 1.0
            found = [run(codec, batch, rate * factor, steps, seed) for seed in seeds]
            figures[name][case] = found
            chosen = {"rate": round(factor, 4), "trials": tuned[name].trials if tuned else 0}
            figures[name][f"{case}, tuned"] = chosen
            rows[name] += [f"{factor:.2g}", *told(found)]
    print("\nlazy: least squares on 8 unlike workers, loss above the least", flush=True)
    header = ["rate", "whole gradients", "sent", "rate", "batches of 8", "sent"]
    table(["results sent", *header], list(rows.values()))
    return figures


def holds(figures: dict[str, Any]) -> bool:
    """Return whether LAG and EF21 pay with full gradients, and feedback with small batches."""
    ef21, feedback = figures["EF21, top 10 %"], figures["top 10 %, feedback"]
    return all(
        figures["LAG"]["whole"][i][1] < BOUNDS["lag_sent"]
        and figures["LAG"]["whole"][i][0] < figures["all"]["whole"][i][0]
        and ef21["whole"][i][0] < BOUNDS["ef21_over_feedback"] * feedback["whole"][i][0]
        and feedback["sampled"][i][0] < BOUNDS["feedback_over_ef21_sampled"] * ef21["sampled"][i][0]
        for i in range(len(ef21["whole"]))
    )


def told(runs: list[tuple[float, float]]) -> tuple[str, str]:
    """Return the range of losses, and the range of the fractions sent."""
    losses, sent = zip(*runs, strict=True)
    return f"{min(losses):.0e} to {max(losses):.0e}", f"{min(sent):.0%} to {max(sent):.0%}"
