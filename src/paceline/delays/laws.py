"""Laws of response times, each fitted by maximum likelihood.

A censored value, known only as a lower bound, enters by its probability to be exceeded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, log, pi, sqrt
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize, minimize_scalar
from scipy.special import gammaln, log_ndtr, logsumexp, xlogy

from paceline.delays.models import (
    Delay,
    Erlang,
    Exponential,
    LogNormal,
    Pareto,
    ShiftedExponential,
)

Vector: TypeAlias = NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]
Interval: TypeAlias = tuple[float, float]

ENOUGH = 8
"""Finished tasks needed to tell one law from another."""
NORMAL = 1.96  # the 97.5 % quantile: all intervals are of 95 %
STRONG = 10.0  # difference in BIC that is very strong evidence (Kass and Raftery, 1995)

_MOST_STAGES = 200  # a spread of 7 %, which a log-normal law describes equally well
# With parameters fitted to the same data, Kolmogorov's statistic is smaller by about this factor:
# its 5 % point is 1.358 against 1.094 and 0.895 (Stephens, 1974, table 1A, cases 4 and 3).
_ONE_FITTED, _SHAPE_FITTED = 1.358 / 1.094, 1.358 / 0.895


@dataclass(frozen=True)
class Law:
    """A law fitted by maximum likelihood.

    free: number of fitted parameters; a least value counts twice, as its error falls like 1 / n.
    shrinks: factor by which fitting to the same data reduces the distance to them.
    """

    model: Delay
    log_likelihood: float
    free: int
    intervals: Mapping[str, Interval]
    shrinks: float

    def score(self, observations: int) -> float:
        """Return Schwarz's criterion (BIC, 1978); smaller is better.

        A law whose mean may be infinite needs very strong evidence: no run can be planned with it.
        """
        endless = 0.0 if self.intervals["mean"][1] < inf else STRONG
        return self.free * log(observations) - 2 * self.log_likelihood + endless

    def parameters(self) -> dict[str, float]:
        names: Sequence[str] = type(self.model).__dataclass_fields__  # type: ignore[attr-defined]
        return {name: float(getattr(self.model, name)) for name in names}


def fitted(times: Vector, done: Flags) -> Iterator[Law]:
    """Fit each law that allows these times; `done` marks the times that are not censored."""
    yield _exponential(times, done)
    yield _shifted(times, done)
    if times[done].min() > 0:
        yield _erlang(times, done)
        yield _log_normal(times, done)
        yield _pareto(times, done)


def _exponential(times: Vector, done: Flags) -> Law:
    finished = int(done.sum())
    mean = float(times.sum()) / finished
    within = _spread(mean, 1 / sqrt(finished))
    best = -finished * (log(mean) + 1)
    return Law(Exponential(mean), best, 1, {"mean": within}, _ONE_FITTED)


def _least_and_rest(values: Vector, done: Flags) -> tuple[float, float, float, float]:
    """Fit a least value and an exponential rest; return both, the likelihood and the minimum.

    The maximum likelihood estimate of the least value is the minimum of the data, which is too
    large by scale / n; the returned value is corrected for that.
    """
    finished = int(done.sum())
    least = float(values[done].min())
    above = float(np.maximum(values - least, 0.0).sum())
    scale = above / (finished - 1)
    likelihood = -finished * (log(above / finished) + 1)
    return least - scale / int(np.sum(values >= least)), scale, likelihood, least


def _shifted(times: Vector, done: Flags) -> Law:
    shift, scale, best, least = _least_and_rest(times, done)
    shift = max(shift, 0.0)
    error = 1 / sqrt(done.sum())
    below = -log(0.05) * scale / int(np.sum(times >= least))
    intervals = {
        "shift": (max(least - below, 0.0), least),
        "scale": _spread(scale, error),
        "mean": (shift + scale * (1 - NORMAL * error), shift + scale * (1 + NORMAL * error)),
    }
    return Law(ShiftedExponential(shift, scale), best, 3, intervals, _ONE_FITTED)


def _pareto(times: Vector, done: Flags) -> Law:
    """Fit log(seconds), which has a least value and an exponential rest."""
    hidden = times > 0
    logs = np.log(times[hidden])
    start, scale, best, least = _least_and_rest(logs, done[hidden])
    alpha = max(1 / scale, 0.1)
    error = 1 / sqrt(done.sum())
    low, high = _spread(alpha, error)
    below = -log(0.05) * scale / int(np.sum(logs >= least))
    model = Pareto(exp(start), alpha)
    means = [Pareto(exp(start), max(value, 0.1)).mean for value in (high, low)]
    intervals = {
        "minimum": (exp(least - below), exp(least)),
        "alpha": (low, high),
        "mean": (means[0], means[1]),
    }
    density = best - float(logs[done[hidden]].sum())
    return Law(model, density, 3, intervals, _ONE_FITTED)


def _erlang(times: Vector, done: Flags) -> Law:
    """Search the number of stages by hill climbing, with the likeliest mean for each number."""
    finished = times[done]
    guess = float(finished.mean() ** 2 / max(finished.var(), 1e-12 * finished.mean() ** 2))
    stages = int(min(max(round(guess), 2), _MOST_STAGES))
    found: dict[int, tuple[float, float]] = {}

    def of(count: int) -> float:
        if count not in found:
            found[count] = _erlang_mean(count, times, done)
        return found[count][0]

    step = max(stages // 4, 1)
    while step:
        near = [c for c in (stages, stages - step, stages + step) if 2 <= c <= _MOST_STAGES]
        better = max(near, key=of)
        stages, step = better, step if better != stages else step // 2
    best, mean = found[stages]
    likely = [count for count, (value, _) in found.items() if best - value <= NORMAL**2 / 2]
    error = 1 / sqrt(stages * finished.size)
    intervals = {
        "stages": (float(min(likely)), float(max(likely))),
        "mean": _spread(mean, error),
    }
    return Law(Erlang(stages, mean), best, 2, intervals, _SHAPE_FITTED)


def _erlang_mean(stages: int, times: Vector, done: Flags) -> tuple[float, float]:
    """Return the largest likelihood and its mean.

    The mean is at least that of all values taken as finished, and at most that of an exponential
    law, under which censored times would last longer.
    """
    finished, hidden = times[done], times[~done]
    constant = (stages - 1) * float(np.log(finished).sum()) - finished.size * gammaln(stages)

    def likelihood(mean: float) -> float:
        rate = stages / mean
        seen = constant + finished.size * stages * log(rate) - rate * float(finished.sum())
        return float(seen + log_survival(Erlang(stages, mean), hidden).sum())

    low, high = float(times.mean()), float(times.sum()) / finished.size
    if not hidden.size:
        return likelihood(low), low
    found = minimize_scalar(
        lambda x: -likelihood(exp(x)),
        bounds=(log(low), log(high)),
        method="bounded",
        options={"xatol": 1e-6},
    )
    return -float(found.fun), exp(found.x)


def _log_normal(times: Vector, done: Flags) -> Law:
    """Maximize over d = mu/sigma and h = 1/sigma: the likelihood is concave (Olsen, 1978)."""
    told = times > 0
    logs, done = np.log(times[told]), done[told]
    center, width = float(logs.mean()), max(float(logs.std()), 1e-9)
    y, hidden = (logs[done] - center) / width, (logs[~done] - center) / width

    def cost(at: Vector) -> float:
        d, h = at
        if h <= 0:
            return inf
        seen = y.size * (log(h) - log(2 * pi) / 2) - np.sum((h * y - d) ** 2) / 2
        return -float(seen + log_ndtr(d - h * hidden).sum())

    def mills(u: Vector) -> Vector:
        return np.asarray(np.exp(-(u**2) / 2 - log(2 * pi) / 2 - log_ndtr(u)))

    def slope(at: Vector) -> Vector:
        d, h = at
        off, hazard = h * y - d, mills(d - h * hidden)
        return -np.array(
            [off.sum() + hazard.sum(), y.size / h - (off * y).sum() - (hazard * hidden).sum()]
        )

    def bend(at: Vector) -> Vector:
        d, h = at
        u = d - h * hidden
        hazard = mills(u)
        falls = hazard * (hazard + u)
        mixed = -y.sum() - (falls * hidden).sum()
        last = (falls * hidden**2).sum() + y.size / h**2 + (y**2).sum()
        return np.array([[falls.sum() + y.size, mixed], [mixed, last]])

    best = minimize(
        cost, (0.0, 1.0), jac=slope, hess=bend, method="trust-exact", options={"gtol": 1e-8}
    )
    d, h = best.x.tolist()
    covariance = np.linalg.inv(best.hess)
    sigma, mu = width / h, center + width * d / h
    to_mu = np.array([width / h, -width * d / h**2])
    to_sigma = np.array([0.0, -width / h**2])
    to_mean = to_mu + sigma * to_sigma
    errors = [sqrt(float(to @ covariance @ to)) for to in (to_mu, to_sigma, to_mean)]
    model = LogNormal(exp(mu), min(sigma, 30.0))
    intervals = {
        "median": _spread(model.median, errors[0]),
        "sigma": _spread(sigma, errors[1] / sigma),
        "mean": _spread(model.mean, errors[2]),
    }
    density = -float(best.fun) - y.size * log(width) - float(logs[done].sum())
    return Law(model, density, 2, intervals, _SHAPE_FITTED)


def _spread(value: float, error: float) -> Interval:
    """Return the interval of a value whose logarithm has this standard error."""
    factor = exp(min(NORMAL * error, 700.0))
    return value / factor, value * factor


def log_survival(model: Delay, t: Vector) -> Vector:
    """Return log P(seconds > t) of one of the laws."""
    match model:
        case Exponential(mean):
            return -t / mean
        case ShiftedExponential(shift, scale):
            return -np.maximum(t - shift, 0.0) / scale
        case Pareto(minimum, alpha):
            return -alpha * np.log(np.maximum(t / minimum, 1.0))
        case LogNormal(median, sigma):
            return np.asarray(log_ndtr(-np.log(np.maximum(t, 1e-300) / median) / sigma))
        case Erlang(stages, mean):
            # Equals log(gammaincc(stages, x)), which loses all digits for a large x.
            x = t[:, None] * (stages / mean)
            fewer = np.arange(stages)  # events of a Poisson process until t
            return np.asarray(logsumexp(xlogy(fewer, x) - gammaln(fewer + 1) - x, axis=1))
    raise TypeError(f"{model!r} has no law to compare with")
