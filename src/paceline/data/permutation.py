"""A permutation of any size that needs no memory: the order of an epoch of very large data."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.data.seeding import generator

Whole: TypeAlias = NDArray[np.uint64]

ROUNDS = 8
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Permutation:
    """A random order of 0 to `size - 1`, of which any place is computed directly.

    A Feistel network shuffles the numbers of the next larger power of four. Numbers outside are
    shuffled again until they are inside ("cycle walking", Black and Rogaway, 2002). Its round
    function is the finalizer of SplitMix64 (Steele et al., 2014).

    >>> order = Permutation(5, seed=0, key=(1, 2))
    >>> sorted(order.at(np.arange(5)).tolist())
    [0, 1, 2, 3, 4]
    """

    def __init__(self, size: int, seed: int, key: tuple[int, ...] = ()) -> None:
        if not 1 <= size <= 2**62:
            raise ValueError(f"size={size} is not within 1 and 2**62")
        self.size = size
        half = max(1, ((size - 1).bit_length() + 1) // 2)  # bits of each half of a number
        self._half, self._mask = np.uint64(half), np.uint64(2**half - 1)
        self._keys = generator(seed, *key).integers(2**64, size=ROUNDS, dtype=np.uint64)

    def at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers at these places, each within 0 and `size - 1`."""
        found = self._shuffled(places.astype(np.uint64))
        while (outside := np.flatnonzero(found >= self.size)).size:
            found[outside] = self._shuffled(found[outside])
        return found.astype(np.int64)

    def _shuffled(self, numbers: Whole) -> Whole:
        left, right = numbers >> self._half, numbers & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & self._mask)
        return (left << self._half) | right


def _mixed(numbers: Whole) -> Whole:
    """Return numbers of which every bit depends on all bits of those given."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _FIRST
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _SECOND
    return numbers ^ (numbers >> np.uint64(31))
