"""Approximate codes: an estimate of the sum from any set of answers, with its error.

All have m = 1. Let B be the coefficients of the parts in the rows that answered, and a the weights
of their messages. The error is ||B^T a - 1||² / parts: 0 is exact, 1 is that of an estimate of 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.codes.base import Code, Coefficients, Collector, Counted, Floats, check_rows
from paceline.codes.placements import Holders, regular_graph

Ints = NDArray[np.intp]
Mask = NDArray[np.bool_]

_ITERATIONS = 2000  # limit: half a second for 10,000 rows; most need under 100 iterations


@dataclass(frozen=True)
class Estimate:
    """The weights of messages, and the squared error per part that they leave."""

    weights: dict[int, Coefficients]
    error: float


class Approximate(Code, Protocol):
    """A code whose `decode` accepts any set of answers."""

    def estimate(self, rows: Collection[int]) -> Estimate:
        """Return the weights that `decode` returns, and their error."""


class _Sparse:
    """The sparse matrix B of the coefficient of each part in each row, as lists of indices."""

    def __init__(self, n: int, entries: Iterable[tuple[int, int, float]], parts: int) -> None:
        self.n, self.parts = n, parts
        ordered = sorted(entries)
        self.row: Ints = np.array([row for row, _, _ in ordered], dtype=np.intp)
        self.part: Ints = np.array([part for _, part, _ in ordered], dtype=np.intp)
        self.value: Floats = np.array([value for _, _, value in ordered], dtype=np.float64)
        check_rows(self.row.tolist(), n)
        self.begin: Ints = np.searchsorted(self.row, np.arange(n + 1))

    def estimate(self, a: Floats) -> Estimate:
        sums = np.bincount(self.part, self.value * a[self.row], self.parts)
        used = np.flatnonzero(a)
        each: Iterator[Coefficients] = ((x,) for x in a[used].tolist())
        weights = dict(zip(used.tolist(), each, strict=True))
        return Estimate(weights, float(((sums - 1.0) ** 2).mean()))

    def smallest(self, here: Mask) -> Floats:
        """Return argmin of ||B^T a - 1|| over the rows in `here`, of least norm, by CGLS."""
        alive = here[self.row]
        row, part, value = self.row[alive], self.part[alive], self.value[alive]
        a = np.zeros(self.n)
        residual = np.ones(self.parts)
        step = gradient = np.bincount(row, value * residual[part], self.n)
        square = first = float(gradient @ gradient)
        for _ in range(_ITERATIONS):
            if square <= 1e-20 * first:
                break
            moved = np.bincount(part, value * step[row], self.parts)
            length = square / float(moved @ moved)
            a += length * step
            residual -= length * moved
            gradient = np.bincount(row, value * residual[part], self.n)
            square, before = float(gradient @ gradient), square
            step = gradient + square / before * step
        return a


class _Rows:
    """Base of the codes below."""

    n: int
    exact = False
    messages = 1
    _sparse: _Sparse

    @property
    def parts(self) -> int:
        return self._sparse.parts

    @property
    def load(self) -> int:
        return int(np.diff(self._sparse.begin).max())

    def row(self, i: int) -> dict[int, Coefficients]:
        check_rows([i], self.n)
        here = slice(self._sparse.begin[i], self._sparse.begin[i + 1])
        values = ((value,) for value in self._sparse.value[here].tolist())
        return dict(zip(self._sparse.part[here].tolist(), values, strict=True))

    def estimate(self, rows: Collection[int]) -> Estimate:
        check_rows(rows, self.n)
        here = np.zeros(self.n, dtype=bool)
        here[np.fromiter(rows, np.intp, len(rows))] = True
        return self._sparse.estimate(self._weights(here))

    def decode(self, rows: Collection[int]) -> dict[int, Coefficients]:
        return self.estimate(rows).weights

    def _weights(self, here: Mask) -> Floats:
        raise NotImplementedError


@dataclass(frozen=True)
class LeastSquares(_Rows):
    """Decodes with the weights of least error, and among these of least norm.

    Conjugate gradients on the normal equations, started from zero, stay in the span of B and so
    end at the solution of least norm. Float32 payloads need it: other solutions may have weights
    in the hundreds.

    n: the number of rows.
    holders: for each part the rows that compute it.
    stragglers: s; the collector is ready after n - s answers.
    values: for each part its coefficient in each of its holders; None: all 1.
    """

    n: int
    holders: Holders
    stragglers: int
    values: tuple[tuple[float, ...], ...] | None = None
    _sparse: _Sparse = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check(self.n, self.stragglers, self.holders)
        values = self.values or tuple((1.0,) * len(rows) for rows in self.holders)
        entries = (
            (row, part, value)
            for part, (rows, each) in enumerate(zip(self.holders, values, strict=True))
            for row, value in zip(rows, each, strict=True)
        )
        object.__setattr__(self, "_sparse", _Sparse(self.n, entries, len(self.holders)))

    def collector(self) -> Collector:
        return Counted(range(self.n), self.n - self.stragglers)

    def _weights(self, here: Mask) -> Floats:
        return self._sparse.smallest(here)


def least_squares(code: Code, stragglers: int) -> LeastSquares:
    """Return the rows of a code with m = 1, decoded from any set of answers."""
    if code.messages != 1:
        raise ValueError(f"messages={code.messages}; approximate decoding needs m = 1")
    holders: list[list[int]] = [[] for _ in range(code.parts)]
    values: list[list[float]] = [[] for _ in range(code.parts)]
    for i in range(code.n):
        for part, (value,) in code.row(i).items():
            holders[part].append(i)
            values[part].append(value)
    placed = tuple(map(tuple, holders))
    return LeastSquares(code.n, placed, stragglers, tuple(map(tuple, values)))


def graph(n: int, copies: int, stragglers: int, seed: int = 0) -> LeastSquares:
    """Return the code whose rows are the edges of a random regular graph, and parts its vertices.

    Each row computes two parts and each part has `copies` holders. The code is robust to random
    stragglers and to the worst ones (Glasgow and Wootters, 2020, arXiv 2006.09638).
    """
    if copies < 1 or 2 * n % copies:
        raise ValueError(f"n={n}, copies={copies}: copies must be >= 1 and divide 2 n = {2 * n}")
    holders: list[list[int]] = [[] for _ in range(2 * n // copies)]
    for edge, vertices in enumerate(regular_graph(2 * n // copies, copies, seed)):
        for vertex in vertices:
            holders[vertex].append(edge)
    return LeastSquares(n, tuple(map(tuple, holders)), stragglers)


@dataclass(frozen=True)
class Replicated(_Rows):
    """Fractional repetition that omits lost groups, and scales the other groups up for them.

    All `copies` rows of a group compute the same parts, and one of their answers is used. The
    collector is ready when every group has answered or n - s rows have, as in ErasureHead (Wang
    et al., 2019). With `rescale` the estimate is unbiased if losses do not depend on the data.
    """

    n: int
    copies: int
    stragglers: int
    rescale: bool = True
    _sparse: _Sparse = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.copies < 1 or self.n % self.copies:
            raise ValueError(f"n={self.n} is no multiple of copies={self.copies}; use a divisor")
        _check(self.n, self.stragglers, ((0,),))
        each = range(self.copies)
        entries = ((i, i - i % self.copies + part, 1.0) for i in range(self.n) for part in each)
        object.__setattr__(self, "_sparse", _Sparse(self.n, entries, self.n))

    def collector(self) -> Collector:
        return _Covered(self.n, self.copies, self.n - self.stragglers)

    def _weights(self, here: Mask) -> Floats:
        groups = here.reshape(-1, self.copies)
        found = np.flatnonzero(groups.any(axis=1))
        a = np.zeros(self.n)
        if found.size:
            scale = len(groups) / found.size if self.rescale else 1.0
            a[found * self.copies + groups[found].argmax(axis=1)] = scale
        return a


class _Covered:
    """A collector that is ready when every group has an answer, or `enough` rows answered."""

    def __init__(self, n: int, copies: int, enough: int) -> None:
        self._copies = copies
        self._groups = set(range(n // copies))
        self._count = Counted(range(n), enough)

    @property
    def ready(self) -> bool:
        return not self._groups or self._count.ready

    def add(self, row: int) -> bool:
        self._groups.discard(row // self._copies)
        self._count.add(row)
        return self.ready


@dataclass(frozen=True)
class Stochastic(_Rows):
    """Stochastic gradient coding: each part is sent weighted by 1 / (d_j (1 - p)).

    Decoding only scales the sum of r answers by n (1 - p) / r. A row is among the first r of n
    equally fast rows with probability r / n. So the estimate is unbiased for every r >= 1, and for
    any d_j holders of part j. At r = n (1 - p) the scale is 1, as in "Stochastic gradient coding"
    (Bitar, Wootters and El Rouayheb, 2019).

    probability: p; the collector is ready after n - round(n p) answers.
    """

    n: int
    holders: Holders
    probability: float
    _sparse: _Sparse = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.probability < 1:
            raise ValueError(f"probability={self.probability}: use at least 0, below 1")
        _check(self.n, self.stragglers, self.holders)
        entries = (
            (row, part, 1 / (len(rows) * (1 - self.probability)))
            for part, rows in enumerate(self.holders)
            for row in rows
        )
        object.__setattr__(self, "_sparse", _Sparse(self.n, entries, len(self.holders)))

    @property
    def stragglers(self) -> int:
        return min(round(self.n * self.probability), self.n - 1)

    def collector(self) -> Collector:
        return Counted(range(self.n), self.n - self.stragglers)

    def _weights(self, here: Mask) -> Floats:
        scale = self.n * (1 - self.probability) / max(int(here.sum()), 1)
        return np.where(here, scale, 0.0)


def _check(n: int, stragglers: int, holders: Holders) -> None:
    if not 0 <= stragglers < n:
        raise ValueError(f"stragglers={stragglers} of {n} rows: use 0 to {n - 1}")
    if not holders or not all(holders):
        raise ValueError("a part without holders is never computed; give each part a row")
