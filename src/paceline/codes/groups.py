"""Group codes: n / d groups of d workers, each with d parts; all groups share one small code.

Every worker of a group computes all parts of the group and adds them up to S. With its column t of
the generator G it sends the sum over u of G[u, t] * block u of S. A [d, m, s+1] code keeps rank m
when any s columns are missing. The length is the load, the dimension shortens messages, and the
distance tolerates stragglers (Kadhe, Koyluoglu and Ramchandran, 2020, arXiv 2005.07184).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from paceline.codes.base import (
    Coefficients,
    Collector,
    Floats,
    NotDecodable,
    check_rows,
)
from paceline.codes.generators import WORST, Matrix, matrix, tolerance

CACHED = 4096  # decoders kept, each for one pattern of answers in a group

Decoder = tuple[tuple[int, Coefficients], ...]  # position in the group, weights of its message


@dataclass(frozen=True)
class Grouped:
    """A group code whose groups have one worker per column of the generator, any real matrix.

    n: the number of workers, a multiple of the columns.
    generator: m rows, d columns; see `generators.py` for good ones, `best` above all.
    """

    n: int
    generator: Matrix | Sequence[Sequence[float]] | Floats
    stragglers: int = field(init=False)
    condition: float = field(init=False)  # the worst over all sets of up to `stragglers` missing
    exact: bool = field(default=True, init=False, repr=False)
    _decoders: _Decoders = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        generator = matrix(self.generator)
        d = len(generator[0])
        if self.n < 1 or self.n % d:
            raise ValueError(
                f"n={self.n} is no multiple of the generator's {d} columns; use {self.n // d * d} "
                f"or {-(-self.n // d) * d} workers, or hybrid(n, d, m)"
            )
        stragglers, condition = tolerance(generator)
        object.__setattr__(self, "generator", generator)
        object.__setattr__(self, "stragglers", stragglers)
        object.__setattr__(self, "condition", condition)
        object.__setattr__(self, "_decoders", _Decoders(generator, stragglers))

    @property
    def parts(self) -> int:
        return self.n

    @property
    def messages(self) -> int:
        return len(self.generator)

    @property
    def load(self) -> int:
        return len(self.generator[0])

    def row(self, i: int) -> dict[int, Coefficients]:
        check_rows([i], self.n)
        group, t = divmod(i, self.load)
        column = tuple(float(row[t]) for row in self.generator)
        return dict.fromkeys(range(group * self.load, (group + 1) * self.load), column)

    def collector(self) -> Collector:
        return _Groups(self.n, self.load, self._decoders)

    def decode(self, rows: Collection[int]) -> dict[int, Coefficients]:
        """Return weights that use every answer of a group, or the plain blocks if all are there.

        Least squares over all answers is exact here, and better conditioned with more answers. If
        each block of a group was sent plain by some row, these need no arithmetic.
        """
        check_rows(rows, self.n)
        d = self.load
        patterns = [0] * (self.n // d)
        for row in rows:
            patterns[row // d] |= 1 << row % d
        decoders = self._decoders.of(set(patterns))
        short = [group for group, pattern in enumerate(patterns) if not decoders[pattern]]
        if short:
            raise NotDecodable(_explain(short, patterns, self))
        return {
            group * d + t: weights
            for group, pattern in enumerate(patterns)
            for t, weights in decoders[pattern]
        }


def _explain(short: list[int], patterns: list[int], code: Grouped) -> str:
    group, d = short[0], code.load
    missing = [group * d + t for t in range(d) if not patterns[group] >> t & 1]
    others = f", and {len(short) - 1} other groups with too few answers" if short[1:] else ""
    return (
        f"rows {', '.join(map(str, missing))} of group {group} (rows {group * d} to "
        f"{group * d + d - 1}) are missing{others}; a group decodes when any {code.stragglers} "
        "are missing, and with more missing only if the remaining rows have full rank"
    )


class _Groups:
    """A collector that is ready when every group has enough answers."""

    def __init__(self, n: int, d: int, decoders: _Decoders) -> None:
        self._d, self._decoders = d, decoders
        self._patterns = [0] * (n // d)
        self._short = n // d

    @property
    def ready(self) -> bool:
        return self._short == 0

    def add(self, row: int) -> bool:
        group, t = divmod(row, self._d)
        before = self._patterns[group]
        after = self._patterns[group] = before | 1 << t
        if after != before and self._decoders.enough(after) and not self._decoders.enough(before):
            self._short -= 1
        return self.ready


class _Decoders:
    """The decoders of one generator, by pattern of answers as bits; all groups share them."""

    def __init__(self, generator: Matrix, stragglers: int) -> None:
        self._g = np.array(generator)
        self._m, self._d = self._g.shape
        self._stragglers = stragglers
        # The columns that are block u alone: their messages need no arithmetic.
        units = np.eye(self._m).tolist()
        columns = self._g.T.tolist()
        self._plain = [[t for t in range(self._d) if columns[t] == unit] for unit in units]
        self._kept: OrderedDict[int, Decoder] = OrderedDict()  # empty: not decodable

    def __len__(self) -> int:
        return len(self._kept)

    def enough(self, pattern: int) -> bool:
        """Return whether a group decodes from these answers; beyond s missing, by their rank."""
        answers = pattern.bit_count()
        if answers >= self._d - self._stragglers:
            return True
        return answers >= self._m and bool(self.of({pattern})[pattern])

    def of(self, patterns: Collection[int]) -> dict[int, Decoder]:
        """Return the decoder for each pattern; all unknown ones are computed together."""
        unknown = [pattern for pattern in patterns if pattern not in self._kept]
        found = {p: self._kept[p] for p in patterns if p in self._kept}
        for pattern in found:
            self._kept.move_to_end(pattern)
        found.update(self._compute(unknown))
        for pattern in unknown[-CACHED:]:
            self._kept[pattern] = found[pattern]
        while len(self._kept) > CACHED:
            self._kept.popitem(last=False)
        return found

    def _compute(self, patterns: Iterable[int]) -> Iterator[tuple[int, Decoder]]:
        rest: list[int] = []
        for pattern in patterns:
            plain = [next((t for t in at if pattern >> t & 1), -1) for at in self._plain]
            if -1 not in plain:
                weights = np.eye(self._m).tolist()
                yield pattern, tuple((t, tuple(weights[u])) for u, t in enumerate(plain))
            elif pattern.bit_count() < self._m:
                yield pattern, ()
            else:
                rest.append(pattern)
        rest.sort(key=int.bit_count)
        for _, same in groupby(rest, key=int.bit_count):  # equal numbers of answers stack
            some = list(same)
            bits = np.array(some, dtype=np.int64)[:, None] >> np.arange(self._d) & 1
            index = np.nonzero(bits)[1].reshape(len(some), -1)
            solved = self._solve(self._g[:, index].transpose(1, 0, 2)).tolist()
            for pattern, positions, weights in zip(some, index.tolist(), solved, strict=True):
                if weights[0][0] != weights[0][0]:  # NaN: the rank is too low
                    yield pattern, ()
                else:
                    yield pattern, tuple(zip(positions, map(tuple, weights), strict=True))

    def _solve(self, g: Floats) -> Floats:
        """Return, for each stacked G, the smallest Z with G @ Z = I, or NaN if no Z exists."""
        patterns, m, answers = g.shape
        if answers < self._d - self._stragglers:
            values = np.linalg.svd(g, compute_uv=False)
            low = values[:, -1] * WORST < values[:, 0]
        else:
            low = np.zeros(patterns, dtype=bool)
        z = np.full((patterns, answers, m), np.nan)
        full = g[~low]
        if answers == m:
            z[~low] = np.linalg.inv(full)
        else:  # G^T = Q R; the normal equations would square the condition number
            q, r = np.linalg.qr(full.transpose(0, 2, 1))
            z[~low] = q @ np.linalg.inv(r).transpose(0, 2, 1)
        return z
