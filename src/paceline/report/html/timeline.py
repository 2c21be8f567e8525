"""The timeline of each worker: exact while tasks are few, then in equal time intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.core.protocol import WorkerId

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

COUNT = 1024
"""The number of time intervals; at least half are in use, more than a page can show."""
EXACT = 2500
"""The most tasks that are kept one by one, so that a short run shows each task."""
_START = 2.0**-20  # the first length of an interval, in seconds


class Bins:
    """Sums for each row over equal time intervals, which double when the run outgrows them."""

    def __init__(self, origin: float = 0.0) -> None:
        self._origin, self._width = origin, _START
        self._sums = np.zeros((16, COUNT))
        self._whole = np.zeros((16, COUNT + 1))  # spans that begin, less those that end, here

    def spread(self, rows: Ints, begin: Floats, end: Floats) -> None:
        """Add to each row the seconds from begin to end, divided among the intervals."""
        if not len(rows):
            return
        self._cover(rows, end)
        a, b = ((at - self._origin) / self._width for at in (begin, end))
        first, last = a.astype(np.int64), b.astype(np.int64)
        np.add.at(self._sums, (rows, first), (np.minimum(b, first + 1) - a) * self._width)
        longer = last > first
        rows, first, last, b = rows[longer], first[longer], last[longer], b[longer]
        np.add.at(self._sums, (rows, last), (b - last) * self._width)
        np.add.at(self._whole, (rows, first + 1), 1.0)
        np.add.at(self._whole, (rows, last), -1.0)

    def count(self, rows: Ints, at: Floats) -> None:
        """Add one to each row at its time."""
        if len(rows):
            self._cover(rows, at)
            places = ((at - self._origin) / self._width).astype(np.int64)
            np.add.at(self._sums, (rows, places), 1.0)

    def over(self, rows: int, edges: Floats) -> Floats:
        """Return the sums of the first rows, a column for each two neighboring times."""
        self._settle()
        if rows > len(self._sums):
            self._grow(rows)
        inner = self._origin + self._width * np.arange(COUNT + 1)
        totals = np.zeros((rows, COUNT + 1))
        np.cumsum(self._sums[:rows], axis=1, out=totals[:, 1:])
        found = [np.diff(np.interp(edges, inner, total)) for total in totals]
        return np.array(found).reshape(rows, len(edges) - 1)

    def _cover(self, rows: Ints, at: Floats) -> None:
        if (most := int(rows.max())) >= len(self._sums):
            self._grow(most + 1)
        while at.max() - self._origin >= COUNT * self._width:
            self._settle()
            pairs = self._sums.reshape(len(self._sums), COUNT // 2, 2).sum(axis=2)
            self._sums[:, : COUNT // 2] = pairs
            self._sums[:, COUNT // 2 :] = 0.0
            self._width *= 2

    def _settle(self) -> None:
        """Add the intervals that spans cover completely."""
        self._sums += np.cumsum(self._whole, axis=1)[:, :COUNT] * self._width
        self._whole[:] = 0.0

    def _grow(self, rows: int) -> None:
        more = max(rows, 2 * len(self._sums)) - len(self._sums)
        self._sums = np.pad(self._sums, ((0, more), (0, 0)))
        self._whole = np.pad(self._whole, ((0, more), (0, 0)))


@dataclass
class Timeline:
    """The used and wasted tasks of workers, their parts in steps, and their presence."""

    origin: float = 0.0
    presence: dict[WorkerId, list[tuple[float, float | None]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.used, self.wasted = Bins(self.origin), Bins(self.origin)
        self.chosen = Bins(self.origin)
        self.exact: list[tuple[int, float, float, bool]] | None = []

    def add(self, rows: Ints, begin: Floats, end: Floats, used: NDArray[np.bool_]) -> None:
        """Add tasks, each with the row of its worker and whether its result was used."""
        begin, end = np.maximum(begin, self.origin), np.maximum(end, self.origin)  # if resumed
        self.used.spread(rows[used], begin[used], end[used])
        self.wasted.spread(rows[~used], begin[~used], end[~used])
        if self.exact is not None:
            pairs = zip(rows.tolist(), begin.tolist(), end.tolist(), used.tolist(), strict=True)
            self.exact.extend(pairs)
            if len(self.exact) > EXACT:
                self.exact = None

    def join(self, worker: WorkerId, now: float) -> None:
        stays = self.presence.setdefault(worker, [])
        if not stays or stays[-1][1] is not None:
            stays.append((now, None))

    def leave(self, worker: WorkerId, now: float) -> None:
        stays = self.presence.setdefault(worker, [])
        if stays and stays[-1][1] is None:
            stays[-1] = (stays[-1][0], now)

    def there(self, workers: Sequence[WorkerId], edges: Floats) -> Floats:
        """Return the seconds in which each worker was connected between these times."""
        found = np.zeros((len(workers), len(edges) - 1))
        for row, worker in enumerate(workers):
            for begin, end in self.presence.get(worker, ()):
                until = edges[-1] if end is None else end
                found[row] += np.diff(np.clip(edges, begin, max(until, begin)))
        return found
