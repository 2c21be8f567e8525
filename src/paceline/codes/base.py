"""The gradient code protocol.

Each of n workers computes the gradients g_j of some parts, and sends one message of 1/m of a
gradient's length. The message is a linear combination of the blocks of its gradients (`blocks.py`).
Each block of the sum of all g_j is in turn a combination of messages (Kadhe, Koyluoglu and
Ramchandran, 2020, arXiv 2005.07184).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]
Floats = NDArray[np.float64]
Coefficients = tuple[float, ...]  # one for each of the m blocks


class NotDecodable(ValueError):
    """The answers do not decode to the exact sum; the message names the missing rows."""


class Collector(Protocol):
    """Records the answers of one step, and reports when they decode."""

    @property
    def ready(self) -> bool:
        """Whether the answers so far decode."""

    def add(self, row: int) -> bool:
        """Record the answer of a row, and return whether the answers so far decode."""


class Code(Protocol):
    """A placement of parts on rows (one per worker), with coefficients to encode and decode."""

    @property
    def exact(self) -> bool:
        """Whether `decode` gives the exact sum or raises; otherwise it gives an estimate."""

    @property
    def n(self) -> int:
        """The number of rows."""

    @property
    def parts(self) -> int:
        """The number of parts that the data is divided into."""

    @property
    def messages(self) -> int:
        """m: a message has 1/m of a gradient's length."""

    @property
    def stragglers(self) -> int:
        """s: any s rows may be missing."""

    @property
    def load(self) -> int:
        """d: the largest number of parts that a row computes."""

    def row(self, i: int) -> Mapping[int, Coefficients]:
        """Return the parts that a row computes, each with its m coefficients."""

    def collector(self) -> Collector:
        """Return a collector for the answers of one step."""

    def decode(self, rows: Collection[int]) -> dict[int, Coefficients]:
        """Return the m weights of each used row's message, one for each block of the sum."""


class Counted:
    """A collector that is ready when `enough` of the rows have answered."""

    def __init__(self, rows: Collection[int], enough: int) -> None:
        self._waiting = set(rows)
        self._missing = enough

    @property
    def ready(self) -> bool:
        return self._missing <= 0

    def add(self, row: int) -> bool:
        if row in self._waiting:
            self._waiting.remove(row)
            self._missing -= 1
        return self.ready


def check_rows(rows: Collection[int], n: int) -> None:
    """Refuse rows that the code does not have."""
    if rows and (min(rows) < 0 or max(rows) >= n):
        wrong = next(row for row in rows if not 0 <= row < n)
        raise ValueError(f"row {wrong} is not of this code; its rows are 0 to {n - 1}")
