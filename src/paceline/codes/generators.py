"""Real [d, m, s+1] codes for groups, each as its generator matrix of m rows and d columns.

The quality of a generator is its worst condition number over all sets of columns that may remain.
This is the factor by which the decoder may amplify the rounding of messages. It depends on (d, m)
only, never on the number of workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain, combinations, islice
from math import comb, inf, pi, sqrt

import numpy as np

from paceline.codes.base import Floats

Matrix = tuple[tuple[float, ...], ...]  # rows, so that codes can be compared and hashed

# Beyond this condition number float64 keeps fewer than 8 digits: columns count as dependent.
WORST = 1e8
CHECKS = 200_000  # limit of sub-matrices to check
_AT_ONCE = 8192
_DRAWS = 300


def matrix(values: Sequence[Sequence[float]] | Floats) -> Matrix:
    """Return the values as a generator matrix; refuse a wrong shape, NaN and zero columns."""
    try:
        g = np.array(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError("a generator matrix needs rows of equal length, of real numbers") from None
    if g.ndim != 2 or not 1 <= g.shape[0] <= g.shape[1]:
        raise ValueError(
            f"a generator matrix of shape {g.shape}; use m rows and d columns with 1 <= m <= d"
        )
    if not np.isfinite(g).all():
        raise ValueError("the generator matrix holds NaN or infinite numbers; use finite ones")
    zero = np.flatnonzero(~g.any(axis=0))
    if zero.size:
        raise ValueError(
            f"column {zero[0]} of the generator matrix is zero: that worker would send nothing; "
            "leave the column out"
        )
    return tuple(tuple(row) for row in g.tolist())


def tolerance(generator: Matrix) -> tuple[int, float]:
    """Return s, such that any s columns may be missing, and the worst condition number then.

    All sets of columns that may remain are checked, from the smallest sets upwards.
    """
    g = np.array(generator)
    m, d = g.shape
    if m == 1:
        return d - 1, 1.0
    for remain in range(m, d + 1):
        if comb(d, remain) > CHECKS:
            raise ValueError(
                f"a generator of {d} columns and {m} rows has {comb(d, remain):,} sets of columns "
                f"to check, more than {CHECKS:,}; use smaller groups"
            )
        worst = _worst(g, remain)
        if worst <= WORST:
            return d - remain, worst
    raise ValueError(
        f"the generator matrix has rank below its {m} rows, or nearly so (condition number "
        f"{worst:.1e}); use independent rows"
    )


def _worst(g: Floats, remain: int) -> float:
    """Return the worst condition number of `remain` columns, infinite if any are dependent."""
    sets = combinations(range(g.shape[1]), remain)
    worst = 0.0
    while worst < inf and (some := list(islice(sets, _AT_ONCE))):
        index = np.fromiter(chain.from_iterable(some), np.intp).reshape(-1, remain)
        values = np.linalg.svd(g[:, index].transpose(1, 0, 2), compute_uv=False)
        least = values[:, -1]
        with np.errstate(divide="ignore"):
            worst = max(worst, float((values[:, 0] / least).max()))
        if worst > WORST:
            return inf if not least.all() else worst
    return worst


def repetition(d: int) -> Matrix:
    """Return [d, 1, d]: each worker sends the sum, as in fractional repetition (Tandon, Lei,
    Dimakis and Karampatziakis, 2017, arXiv 1612.03301)."""
    return matrix([[1.0] * d])


def identity(d: int) -> Matrix:
    """Return [d, d, 1]: each worker sends its own block of the sum, as in reduce-scatter."""
    return matrix(np.eye(d))


def parity(d: int) -> Matrix:
    """Return [d, d-1, 2]: each worker sends a plain block, the last one the sum of all blocks."""
    return matrix(np.hstack([np.eye(d - 1), np.ones((d - 1, 1))]))


def harmonic(d: int, m: int = 2) -> Matrix:
    """Return [d, m, d-m+1]: the lowest m real frequencies, at d equally spaced points.

    Any m columns are independent: as complex numbers they are a Vandermonde matrix of different
    roots of unity. For m = 2 the columns are lines at equal angles. Their worst condition number
    cot(pi / 2d) is the least possible: of d lines in the plane two are within pi / d.
    """
    _check(d, m)
    return matrix(frame(d, m))


def frame(d: int, m: int) -> Floats:
    """Return the harmonic frame with rows of equal norm; m = 0 gives no rows."""
    t = np.arange(d)
    rows = [np.full(d, sqrt(0.5))] if m % 2 else []
    for k in range(m // 2):
        angles = pi * (2 * k + 1 + m % 2) * t / d
        rows += [np.cos(angles), np.sin(angles)]
    return np.array(rows, dtype=np.float64).reshape(m, d)


def icosahedral() -> Matrix:
    """Return [6, 3, 4]: the six diagonals of the icosahedron, with worst condition 3.7025."""
    g, norm = (1 + sqrt(5)) / 2, sqrt((5 + sqrt(5)) / 2)
    columns = [(0, 1, g), (0, 1, -g), (1, g, 0), (1, -g, 0), (g, 0, 1), (-g, 0, 1)]
    return matrix(np.array(columns, dtype=np.float64).T / norm)


def gaussian(d: int, m: int, seeds: Iterable[int] = range(_DRAWS)) -> Matrix:
    """Return [d, m, d-m+1]: unit columns of a Gaussian draw, from the seed of best condition.

    Random Gaussian matrices are MDS codes with probability 1 (Kadhe, Koyluoglu and Ramchandran,
    2020, arXiv 2005.07184). But a first draw may be a hundred times worse than a good one.
    """
    return _screened(d, m, (_unit(d, m, seed) for seed in seeds))


def systematic(d: int, m: int, seeds: Iterable[int] = range(_DRAWS)) -> Matrix:
    """Return [d, m, d-m+1] as [I | A], A as in `gaussian`: plain blocks if the first m answer."""
    draws = (_unit(d, m, seed)[:, : d - m] for seed in seeds)
    return _screened(d, m, (np.hstack([np.eye(m), a]) for a in draws))


def _unit(d: int, m: int, seed: int) -> Floats:
    g: Floats = np.random.default_rng(seed).standard_normal((m, d))
    g /= np.linalg.norm(g, axis=0)
    return g


def _screened(d: int, m: int, candidates: Iterable[Floats]) -> Matrix:
    _check(d, m)
    # A draw costs more for large groups, so these get fewer draws: about a second at most.
    affordable = max(3, min(10 * _DRAWS, 100_000 // comb(d, m)))
    found = ((_worst(g, m), g) for g in islice(candidates, affordable))
    condition, chosen = min(found, key=lambda pair: pair[0])
    if condition > WORST:
        raise ValueError(
            f"no random generator for d={d}, m={m} has a condition number below {WORST:.0e}; try "
            "more seeds"
        )
    return matrix(chosen)


def _check(d: int, m: int) -> None:
    if not 1 <= m <= d or comb(d, m) > CHECKS:
        raise ValueError(
            f"d={d}, m={m}: use 1 <= m <= d, with at most {CHECKS:,} ways to choose m of d"
        )


@lru_cache(maxsize=64)
def best(d: int, m: int) -> Matrix:
    """Return the best generator known here for groups of d and messages of 1/m.

    Harmonic frames were better conditioned than the best of thousands of Gaussian draws for every
    (d, m) tried. Parity has a condition up to three times worse (for d = 8: 7.9 against 2.8), but
    mostly needs no arithmetic, and otherwise only additions.
    """
    _check(d, m)
    if m == 1:
        return repetition(d)
    if m == d:
        return identity(d)
    if m == d - 1:
        return parity(d)
    return icosahedral() if (d, m) == (6, 3) else harmonic(d, m)
