"""Exact codes for any placement of parts on workers, in dual form.

The matrix W = [N | Z] has n rows and s + m columns. The coefficients P_j of part j on its holders
H_j solve P_j W[H_j] = [0 | I]. Then for any Y the weights Z + N Y give block u of the sum in column
u. The decoder chooses Y so that the rows of missing workers vanish. This needs s x s systems
instead of the (n-s) x (n-s) of the primal form. Holders may be any s + m workers or more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice
from math import comb, inf
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from paceline.codes.base import (
    Coefficients,
    Collector,
    Counted,
    Floats,
    NotDecodable,
    check_rows,
)
from paceline.codes.generators import WORST
from paceline.codes.generators import frame as harmonic_frame
from paceline.codes.placements import Holders, around, loads

Frame = Literal["harmonic", "gaussian"]

_DRAWS = 200  # limit of draws of each frame
_WORK = 20_000  # limit of draws times the straggler sets (or rows, if more) to check each on
_SETS = 2000  # straggler sets to check a draw on: all of them, or this many


@dataclass(frozen=True)
class Placed:
    """An exact code for any placement in which each part has s + m holders or more.

    n: the number of rows.
    holders: for each part the rows that compute it.
    stragglers: s.
    messages: m.
    seed: seed of the random W; None takes the best of up to 200 draws, fewer for large n.
    frame: how N is made. A harmonic frame is good for up to some dozen rows. A Gaussian draw like
        Z tolerates clusters of stragglers among many rows. None takes the better.
    """

    n: int
    holders: Holders
    stragglers: int
    messages: int = 1
    seed: int | None = None
    frame: Frame | None = None
    gain: float = field(init=False, compare=False)  # worst amplification of rounding
    condition: float = field(init=False, compare=False)  # the worst of the decoding systems
    exact: bool = field(default=True, init=False, repr=False)
    _dual: _Dual = field(init=False, repr=False, compare=False)
    _rows: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        s, m = self.stragglers, self.messages
        holders = tuple(tuple(sorted(rows)) for rows in self.holders)
        if s < 0 or m < 1 or not holders:
            raise ValueError(
                f"stragglers={s}, messages={m}: use s >= 0, m >= 1 and at least one part"
            )
        for part, rows in enumerate(holders):
            check_rows(rows, self.n)
            if len(set(rows)) < max(len(rows), s + m):
                raise ValueError(
                    f"part {part} is held by rows {rows}; stragglers={s} with messages={m} need "
                    f"{s + m} different holders of every part"
                )
        held: list[list[int]] = [[] for _ in range(self.n)]
        for part, rows in enumerate(holders):
            for row in rows:
                held[row].append(part)
        used = [row for row in range(self.n) if held[row]]
        if s + m > len(used):
            raise ValueError(f"s + m = {s + m} exceeds the {len(used)} rows that hold parts")
        work = max(self.n, min(comb(len(used), s), _SETS))
        draws = range(max(1, min(_DRAWS, _WORK // work))) if self.seed is None else [self.seed]
        frames: tuple[Frame, ...] = (self.frame,) if self.frame else ("harmonic", "gaussian")
        duals = (
            _Dual(self.n, used, holders, s, m, seed, frame) for frame in frames for seed in draws
        )
        dual = min(duals, key=lambda dual: dual.gain)
        if dual.gain > WORST:
            raise ValueError(
                "no random code for this placement is usable: at best, errors grow "
                f"{dual.gain:.1e}-fold; use fewer stragglers, or other seeds"
            )
        for name in ("seed", "frame", "gain", "condition"):
            object.__setattr__(self, name, getattr(dual, name))
        object.__setattr__(self, "holders", holders)
        object.__setattr__(self, "_dual", dual)
        object.__setattr__(self, "_rows", tuple(map(tuple, held)))

    @property
    def parts(self) -> int:
        return len(self.holders)

    @property
    def load(self) -> int:
        return max(map(len, self._rows))

    def row(self, i: int) -> dict[int, Coefficients]:
        check_rows([i], self.n)
        return {part: self._dual.coefficients(part, i) for part in self._rows[i]}

    def collector(self) -> Collector:
        return Counted(self._dual.used.tolist(), self._dual.used.size - self.stragglers)

    def decode(self, rows: Collection[int]) -> dict[int, Coefficients]:
        """Return the smallest weights that recover the sum from all these rows."""
        check_rows(rows, self.n)
        here = np.zeros(self.n, dtype=bool)
        here[np.fromiter(rows, np.intp, len(rows))] = True
        used = self._dual.used
        missing = np.flatnonzero(~here[used])
        if missing.size > self.stragglers:
            raise NotDecodable(
                f"{missing.size} of {used.size} rows are missing, the first is row "
                f"{used[missing[0]]}; this code decodes if at most {self.stragglers} are missing"
            )
        weights = self._dual.weights(missing)
        if weights is None:
            raise NotDecodable(
                f"rows {', '.join(map(str, used[missing].tolist()))} are missing, and without "
                f"them the code of seed={self.seed} is too ill-conditioned; use another seed"
            )
        answered = here[used]
        return dict(
            zip(used[answered].tolist(), map(tuple, weights[answered].tolist()), strict=True)
        )


class _Dual:
    """One draw of W for the rows that hold parts, with N orthonormal and Z orthogonal to it.

    Orthogonalizing does not change the code. It gives ||Z + N Y||² = ||Z||² + ||Y||², so that the
    smallest Y gives the smallest weights.
    """

    def __init__(
        self, n: int, used: list[int], holders: Holders, s: int, m: int, seed: int, frame: Frame
    ) -> None:
        self.seed: int = seed
        self.frame: Frame = frame
        self.used = np.array(used, dtype=np.intp)
        w = np.random.default_rng(seed).standard_normal((n, s + m))[self.used]
        if frame == "harmonic":
            w[:, :s] = harmonic_frame(len(used), s).T
        basis = np.linalg.qr(w[:, :s])[0]
        self._null: Floats = basis
        self._start: Floats = w[:, s:] - basis @ (basis.T @ w[:, s:])
        self._holders = holders
        at = np.zeros(n, dtype=np.intp)
        at[self.used] = np.arange(self.used.size)
        self._part: list[Floats] = [np.empty(0)] * len(holders)
        squares = np.zeros(self.used.size)
        both = np.hstack([self._null, self._start])
        wanted = np.vstack([np.zeros((s, m)), np.eye(m)])
        by_count: dict[int, list[int]] = {}
        for part, rows in enumerate(holders):
            by_count.setdefault(len(rows), []).append(part)
        for parts in by_count.values():
            for begin in range(0, len(parts), 500):  # bounds the memory of large loads
                some = parts[begin : begin + 500]
                index = at[np.array([holders[part] for part in some])]
                solved = _smallest(both[index].transpose(0, 2, 1), wanted)
                for part, p in zip(some, solved, strict=True):
                    self._part[part] = p
                np.add.at(squares, index, (solved**2).sum(axis=2))
        self.gain, self.condition = self._judge(squares, s, m, len(holders))

    def coefficients(self, part: int, row: int) -> Coefficients:
        return tuple(self._part[part][self._holders[part].index(row)].tolist())

    def weights(self, missing: NDArray[np.intp]) -> Floats | None:
        """Return the weights of all rows, 0 for missing ones; None if that is ill-conditioned."""
        y = np.linalg.lstsq(self._null[missing], -self._start[missing], rcond=None)[0]
        weights = self._start + self._null @ y
        if missing.size and np.abs(weights[missing]).max() > 1.0 / WORST:
            return None
        return weights

    def _judge(self, squares: Floats, s: int, m: int, parts: int) -> tuple[float, float]:
        """Return the worst error of a sum over that of a message, and the worst condition number.

        squares: the squared norm of each message if all blocks have norm 1.
        The error grows with the coefficients, and with the condition of the decoding systems.
        """
        rows = len(squares)
        found = list(_sets(rows, s))
        sets = np.array(found, dtype=np.intp).reshape(len(found), s)
        systems = self._null[sets]
        condition = float(np.linalg.cond(systems).max()) if s else 1.0
        if not condition < WORST:
            return inf, inf
        y = np.linalg.solve(systems, -self._start[sets]) if s else np.zeros((1, 0, m))
        worst = 0.0
        for some in np.array_split(y, max(1, len(y) * rows // 1_000_000)):
            z = self._start + self._null @ some
            worst = max(worst, float((squares @ (z**2).sum(axis=2).T).max()))
        return float(np.sqrt(worst / (m * parts))), condition


def _smallest(systems: Floats, wanted: Floats) -> Floats:
    """Solve the stacked systems; return the smallest solutions if they are underdetermined."""
    _, equations, unknowns = systems.shape
    right = np.broadcast_to(wanted, (len(systems), *wanted.shape))
    if equations == unknowns:
        return np.asarray(np.linalg.solve(systems, right), dtype=np.float64)
    return np.asarray(np.linalg.pinv(systems) @ right, dtype=np.float64)


def _sets(rows: int, s: int) -> Iterator[tuple[int, ...]]:
    """Yield all sets of s rows; if too many, neighbors (often the worst) and random sets."""
    if comb(rows, s) <= _SETS:
        yield from combinations(range(rows), s)
        return
    affordable = max(20, min(_SETS, 2_000_000 // (rows * s)))
    for first in islice(range(0, rows, max(1, 2 * rows // affordable)), affordable // 2):
        yield tuple((first + i) % rows for i in range(s))
    rng = np.random.default_rng(0)
    for _ in range(affordable // 2):
        yield tuple(rng.choice(rows, s, replace=False).tolist())


def by_speed(
    speeds: Sequence[float],
    parts: int,
    stragglers: int,
    messages: int = 1,
    seed: int | None = None,
    frame: Frame | None = None,
) -> Placed:
    """Return an exact code in which fast workers compute more of the parts."""
    given = loads(speeds, parts, stragglers + messages)
    return Placed(len(speeds), around(given, parts), stragglers, messages, seed, frame)


def cyclic(
    n: int, d: int, m: int = 1, seed: int | None = None, frame: Frame | None = None
) -> Placed:
    """Return the exact code in which row i computes parts i to i + d - 1, of n, and s = d - m."""
    if not 1 <= m <= d <= n:
        raise ValueError(f"n={n}, d={d}, m={m}: use 1 <= m <= d <= n")
    holders = tuple(tuple((j - t) % n for t in range(d)) for j in range(n))
    return Placed(n, holders, d - m, m, seed, frame)
