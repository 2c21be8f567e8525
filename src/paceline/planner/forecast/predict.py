"""Predicts by theory the time of a policy until a loss, without simulating SGD.

Without stale gradients, the recursion of every mode is solved. With stale gradients, the
stochastic delay differential equation is solved for the delays of the policy's steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil, inf, isfinite

import numpy as np

from paceline.planner.forecast.quadratic import Modes
from paceline.planner.forecast.timeline import Timeline
from paceline.planner.theory.asynchrony import Asynchrony
from paceline.planner.theory.responses import measured

_LONGEST = 2.0**40  # seconds or steps after which the target counts as never reached


def predicted_seconds(
    modes: Modes, timeline: Timeline, learning_rate: float, target: float
) -> float:
    """Return the seconds until the expected loss is at the target; `inf` if it never is."""
    wanted = target - modes.floor
    if wanted <= 0:
        return inf
    if modes.fades:  # take the geometric mean of the noise at the first loss and at the target
        modes = replace(modes, noise=modes.noise * np.sqrt(modes.left(np.array(wanted))))
    # A step reports the loss of the models that its results began from.
    if timeline.staleness > 0:
        weight = sum(share for _, share in timeline.delays)
        lag = sum(delay * share for delay, share in timeline.delays) / weight
        return lag + _first(_stale(modes, timeline, learning_rate), wanted)
    steps = _first(_fresh(modes, timeline, learning_rate), wanted)
    each = timeline.seconds / len(timeline)
    return (ceil(steps) + 1) * each if isfinite(steps) else inf


def fewest_steps(modes: Modes, batch: int, learning_rate: float, target: float) -> float:
    """Return the steps on whole batches until the target, with the noise that is left there."""
    if modes.fades:
        modes = replace(modes, noise=modes.noise * modes.left(np.array(target - modes.floor)))
    return _first(_excess(modes, learning_rate, 1.0, 1 / batch, 1), target - modes.floor)


def _fresh(modes: Modes, timeline: Timeline, rate: float) -> Callable[[float], float]:
    weight, variance = _applied(timeline)
    return _excess(modes, rate, weight, variance, timeline.reads[0][0].steps)


def _applied(timeline: Timeline) -> tuple[float, float]:
    """Return the mean weight of a step, and the variance of its noise relative to weight².

    Results of weights w_i and variances v_i add up to a noise of Σ w_i² v_i.
    """
    reads = [read for each in timeline.reads for read in each]
    weight = sum(read.weight for read in reads) / len(timeline)
    noise = sum(read.weight**2 * read.variance for read in reads) / len(timeline)
    return weight, noise / weight**2


def _excess(
    modes: Modes, rate: float, weight: float, variance: float, local: int
) -> Callable[[float], float]:
    """Return the excess loss as a function of steps, each a contraction with noise."""
    once = 1 - rate * modes.curvature
    factor = 1 - weight * (1 - once**local)
    added = weight**2 * rate**2 * modes.noise * variance
    added = added * sum(once ** (2 * j) for j in range(local))
    with np.errstate(divide="ignore", invalid="ignore"):
        left = np.where(abs(factor) < 1, added / (1 - factor**2), np.inf)

    def excess(steps: float) -> float:
        with np.errstate(over="ignore", invalid="ignore"):
            fading = abs(factor) ** (2 * steps)
            square = modes.start**2 * fading + np.where(fading < 1, left * (1 - fading), np.inf)
        return float(0.5 * np.sum(modes.curvature * square))

    return excess


def _stale(modes: Modes, timeline: Timeline, rate: float) -> Callable[[float], float]:
    """Return the excess loss as a function of seconds, by the characteristic root of each mode."""
    interval = timeline.seconds / len(timeline)
    # A delay of d + 1/2 steps, and not of d + 1, approximates x(k+1) = x(k) - a x(k-d) best.
    seconds = [max(delay - interval / 2, interval / 2) for delay, _ in timeline.delays]
    kernel = measured(seconds, weights=[weight for _, weight in timeline.delays])
    weight, variance = _applied(timeline)
    rates, left = np.empty(modes.curvature.size), np.empty(modes.curvature.size)
    known: dict[tuple[float, float], tuple[float, float]] = {}
    for place, pair in enumerate(zip(modes.curvature, modes.noise * variance, strict=True)):
        if pair not in known:
            plan = Asynchrony(kernel.mean / interval, kernel, rate * weight, *map(float, pair))
            known[pair] = plan.rate, plan.variance
        rates[place], left[place] = known[pair]

    def excess(seconds: float) -> float:
        if rates.min() <= 0:
            return inf
        fading = np.exp(-2 * rates * seconds)
        square = modes.start**2 * fading + left * (1 - fading)
        return float(0.5 * np.sum(modes.curvature * square))

    return excess


def _first(excess: Callable[[float], float], wanted: float) -> float:
    """Return the first time or step at which a falling excess is at the wanted value."""
    high = 1e-6
    while not excess(high) <= wanted:
        high *= 2
        if high > _LONGEST:
            return inf
    low = high / 2
    for _ in range(40):
        middle = (low + high) / 2
        if excess(middle) <= wanted:
            high = middle
        else:
            low = middle
    return high
