"""The exact code for any number of workers: groups of d, and one larger group for a remainder."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from paceline.codes.base import Code, Coefficients, Collector, check_rows
from paceline.codes.dual import cyclic
from paceline.codes.generators import best
from paceline.codes.groups import Grouped

# The best seeds of up to 2,000 for the larger group, by its workers, load and m.
_SEEDS = {
    (5, 4, 2): 1016,
    (6, 4, 2): 1449,
    (7, 4, 2): 1188,
    (7, 6, 3): 172,
    (8, 6, 3): 217,
    (9, 6, 3): 512,
    (10, 6, 3): 217,
    (11, 6, 3): 394,
    (9, 8, 4): 1463,
    (10, 8, 4): 1852,
    (11, 8, 4): 1821,
    (12, 8, 4): 569,
}


@dataclass(frozen=True)
class Beside:
    """Two codes side by side: the rows and parts of the first, then those of the second."""

    first: Code
    second: Code

    def __post_init__(self) -> None:
        if self.first.messages != self.second.messages:
            raise ValueError(
                f"the two codes have messages={self.first.messages} and "
                f"messages={self.second.messages}; use codes of the same m"
            )

    @property
    def exact(self) -> bool:
        return self.first.exact and self.second.exact

    @property
    def n(self) -> int:
        return self.first.n + self.second.n

    @property
    def parts(self) -> int:
        return self.first.parts + self.second.parts

    @property
    def messages(self) -> int:
        return self.first.messages

    @property
    def stragglers(self) -> int:
        return min(self.first.stragglers, self.second.stragglers)

    @property
    def load(self) -> int:
        return max(self.first.load, self.second.load)

    def row(self, i: int) -> dict[int, Coefficients]:
        check_rows([i], self.n)
        if i < self.first.n:
            return dict(self.first.row(i))
        shift = self.first.parts
        return {part + shift: c for part, c in self.second.row(i - self.first.n).items()}

    def collector(self) -> Collector:
        return _Both(self.first.n, self.first.collector(), self.second.collector())

    def decode(self, rows: Collection[int]) -> dict[int, Coefficients]:
        check_rows(rows, self.n)
        n = self.first.n
        weights = self.first.decode([row for row in rows if row < n])
        second = self.second.decode([row - n for row in rows if row >= n])
        weights.update((row + n, weight) for row, weight in second.items())
        return weights


class _Both:
    """A collector that is ready when both of its collectors are."""

    def __init__(self, n: int, first: Collector, second: Collector) -> None:
        self._n, self._first, self._second = n, first, second

    @property
    def ready(self) -> bool:
        return self._first.ready and self._second.ready

    def add(self, row: int) -> bool:
        if row < self._n:
            self._first.add(row)
        else:
            self._second.add(row - self._n)
        return self.ready


def hybrid(n: int, d: int, m: int) -> Code:
    """Return the best exact code for n workers of load d with messages of 1/m, and s = d - m.

    It has groups of d. If d does not divide n, one group has d + n mod d rows, in dual form.
    """
    if not 1 <= m <= d <= n:
        raise ValueError(f"n={n}, d={d}, m={m}: use 1 <= m <= d <= n")
    if n % d == 0:
        return Grouped(n, best(d, m))
    size = d + n % d
    remainder = cyclic(size, d, m, _SEEDS.get((size, d, m)), "harmonic")
    return remainder if size == n else Beside(Grouped(n - size, best(d, m)), remainder)
