"""Compares response times, some of them censored, with a law and with each other."""

from __future__ import annotations

from math import isfinite, log, sqrt

import numpy as np
from scipy.special import chdtrc, kolmogorov
from scipy.stats import CensoredData, ecdf, logrank

from paceline.delays.laws import ENOUGH, Flags, Law, Vector, log_survival
from paceline.delays.models import Trace

PRECISION = 1e-3  # relative precision of measured seconds: a smaller spread counts as constant


def is_constant(times: Vector, done: Flags) -> bool:
    """Return whether the spread of the seconds is within the precision of measurement."""
    low, high = float(times[done].min()), float(times[done].max())
    return high - low <= PRECISION * high and bool(np.all(times[~done] <= high))


def kaplan_meier(times: Vector, done: Flags) -> tuple[Vector, Vector]:
    """Return the times of finished tasks, and the Kaplan-Meier estimate of P(longer) after each."""
    at = np.unique(times[done])
    return at, np.asarray(ecdf(_censored(times, done)).sf.evaluate(at))


def distance(law: Law, times: Vector, done: Flags) -> tuple[float, float]:
    """Return the largest distance to the Kaplan-Meier law, and its p-value.

    Distances at t are weighted by 1 / ((1 + C) P(longer than t)), as in the bands of Hall and
    Wellner (1980). C is n times the integral of hazard / number at risk. The statistic then has
    Kolmogorov's law, or is smaller. Without censoring all weights are 1.
    """
    at, after = kaplan_meier(times, done)
    before = np.concatenate([[1.0], after[:-1]])
    hazard = -log_survival(law.model, at)
    longer = np.exp(-hazard)
    gap = np.maximum(abs(after - longer), abs(before - longer))
    weight = np.ones_like(gap)
    if not done.all():
        every = np.unique(times)
        hazards = -log_survival(law.model, every)
        at_risk = times.size - np.searchsorted(np.sort(times), every)
        steps = np.diff(hazards, prepend=0.0) / at_risk
        growth = times.size * np.cumsum(steps)[np.searchsorted(every, at)]
        weight = 1 / ((1 + growth) * np.maximum(longer, 1e-300))
    root = sqrt(times.size)
    # With more censored times, fitting reduces the distance less.
    shrinks = 1 + (law.shrinks - 1) * float(done.mean())
    statistic = float((weight * gap).max()) * (root + 0.12 + 0.11 / root) * shrinks
    return float(gap.max()), float(kolmogorov(statistic))


def continued(times: Vector, done: Flags) -> Trace:
    """Replace each censored time by a draw from the Kaplan-Meier law of longer times.

    Beyond the last finished task the law continues exponentially (Brown, Hollander and Korwar,
    1974).
    """
    at, after = kaplan_meier(times, done)
    rng = np.random.Generator(np.random.PCG64(0))
    values = times.copy()
    end = max(float(after[-1]), 1e-300)
    mean = float(at[-1]) / -log(end) if 0 < end < 1 else 0.0
    for place in np.flatnonzero(~done):
        position = int(np.searchsorted(at, times[place], side="right"))
        survival = float(after[position - 1]) if position else 1.0
        level = survival * rng.random()
        beyond = int(np.searchsorted(-after, -level))
        if beyond < at.size:
            values[place] = at[beyond]
        else:
            values[place] = max(float(at[-1]), times[place]) + rng.exponential(mean)
    return Trace(values.tolist())


def drift(times: Vector, done: Flags) -> tuple[float, float]:
    """Compare the early half with the late half; return the p-value and the autocorrelation."""
    half = times.size // 2
    parts = (times[:half], done[:half]), (times[half:], done[half:])
    if min(int(finished.sum()) for _, finished in parts) < ENOUGH // 2:
        return 1.0, 0.0
    if is_constant(times, done):
        return 1.0, 0.0
    found = float(np.mean([autocorrelation(values[finished]) for values, finished in parts]))
    return log_rank(*parts, found), found


def autocorrelation(values: Vector) -> float:
    """Return the correlation between the rank of each value and the rank of the next."""
    ranks = np.unique(values, return_inverse=True)[1].astype(np.float64)
    before, after = ranks[:-1], ranks[1:]
    if values.size < 4 or before.std() == 0 or after.std() == 0:
        return 0.0
    return float(np.corrcoef(before, after)[0, 1])


def log_rank(
    one: tuple[Vector, Flags], other: tuple[Vector, Flags], autocorrelation: float
) -> float:
    """Return the p-value of both samples having the same law, by the log-rank test.

    The squared statistic is divided by (1 + r) / (1 - r), the factor by which an autocorrelation r
    increases the variance of a mean. An autocorrelation that may be chance counts as 0.
    """
    with np.errstate(all="ignore"):
        z = float(logrank(_censored(*one), _censored(*other)).statistic)
    if not isfinite(z):  # no comparison is possible, as if all times are equal
        return 1.0
    finished = one[1].sum() + other[1].sum()
    r = autocorrelation if autocorrelation > 2 / sqrt(finished) else 0.0
    return float(chdtrc(1, z**2 * max(1 - r, 1e-9) / (1 + r)))


def _censored(times: Vector, done: Flags) -> CensoredData:
    return CensoredData.right_censored(times, ~done)
