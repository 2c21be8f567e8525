"""How long a step is expected to wait for independent exponential workers, without sampling.

Each function takes the workers' mean seconds. Expectations are integrals of P(still waiting at t)
over t = exp(u), where means of any size need no more points than equal ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite, log

import numpy as np
from numpy.typing import NDArray

_Vector = NDArray[np.float64]

_ACCURACY = 1e-12  # relative, of two grids that must agree
_TAIL = 37.0  # exp(-37) is below half a digit of a float


def slowest(means: Sequence[float]) -> float:
    """Return the expected seconds until all are done: the integral of 1 - prod(1 - exp(-t/m)).

    >>> round(slowest([1.0, 1.0]), 9)
    1.5
    """
    checked = _checked(means)

    def waiting(t: _Vector) -> _Vector:
        done = np.zeros_like(t)
        for mean in checked:
            done += np.log(-np.expm1(-t / mean))
        return -np.expm1(done)

    return _expected(waiting, checked)


def kth(means: Sequence[float], k: int) -> float:
    """Return the expected seconds until `k` are done, whoever they are.

    How many are done by t is Poisson-binomial, built up worker by worker. With n equal means m
    it is m (H_n - H_(n-k)), where H_n = 1 + 1/2 + … + 1/n.

    >>> round(kth([1.0, 1.0], 1), 9)
    0.5
    """
    checked = _checked(means)
    if not 1 <= k <= checked.size:
        raise ValueError(f"k={k} of {checked.size} workers; use k from 1 to {checked.size}")

    def waiting(t: _Vector) -> _Vector:
        count = np.zeros((k, t.size))  # row i: the probability that i are done
        count[0] = 1.0
        for mean in checked:
            running = np.exp(-t / mean)
            finished = count[:-1] * -np.expm1(-t / mean)
            count *= running
            count[1:] += finished
        return np.asarray(count.sum(axis=0), dtype=np.float64)

    return _expected(waiting, checked)


def _expected(waiting: Callable[[_Vector], _Vector], means: _Vector) -> float:
    """Integrate P(still waiting at t) by the trapezoidal rule in log t, on ever finer grids.

    Both tails of the integrand in log t vanish, and so all derivatives there: the rule converges
    faster than any power of the grid's width.
    """
    least = -log(float(np.sum(1 / means)))  # of log t: nothing is done before the fastest is
    most = log(float(np.max(means)) * (_TAIL + log(means.size) + 1))
    found, intervals = 0.0, 256
    while intervals <= 2**16:
        grid, width = np.linspace(least - _TAIL, most, intervals + 1, retstep=True)
        t = np.exp(grid)
        before, found = found, float(np.sum(waiting(t) * t) * width)
        if abs(found - before) <= _ACCURACY * found:
            break
        intervals *= 2
    return found


def _checked(means: Sequence[float]) -> _Vector:
    if not len(means):
        raise ValueError("no means were given; give the mean seconds of at least one worker")
    for position, mean in enumerate(means):
        if not (isfinite(mean) and mean > 0):
            raise ValueError(f"means[{position}]={mean!r}: a mean must be finite and > 0 seconds")
    return np.asarray(means, dtype=np.float64)
