"""What a gradient code is.

n workers compute the gradients g_j of some parts each, and send one message of 1/m of a gradient's
length: a linear combination of the blocks of their gradients (`blocks.py`). Each block of the sum
of all g_j is in turn a combination of messages (Kadhe, Koyluoglu and Ramchandran, 2020, arXiv
2005.07184).
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
    """Says which answers are missing for the exact sum."""


class Collector(Protocol):
    """Watches answers come in, and tells when they are enough."""

    @property
    def ready(self) -> bool:
        """Whether the answers so far decode."""

    def add(self, row: int) -> bool:
        """Take in the answer of a row, and return whether the answers so far decode."""


class Code(Protocol):
    """A placement of parts on rows, one for each worker, with coefficients to encode and decode."""

    @property
    def exact(self) -> bool:
        """Whether `decode` gives the exact sum or raises; else it gives an estimate."""

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
        """s: any so many rows may be missing."""

    @property
    def load(self) -> int:
        """d: the most parts that one row computes."""

    def row(self, i: int) -> Mapping[int, Coefficients]:
        """Return the parts that a row computes, each with its m coefficients."""

    def collector(self) -> Collector:
        """Return what watches the answers of one step."""

    def decode(self, rows: Collection[int]) -> dict[int, Coefficients]:
        """Return for each row used the m weights of its message, one for each block of the sum."""


class Counted:
    """Is ready when so many of the rows have answered."""

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
