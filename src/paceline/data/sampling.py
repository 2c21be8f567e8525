"""Which samples a task sees: a pure function of (seed, part, place in the stream)."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

SHARED = -1
"""The part that stands for the whole data, drawn from by whoever comes."""

_KEPT_EPOCHS = 3  # an asynchronous run works at an epoch's end and the next one's beginning


def generator(seed: int, *key: int) -> np.random.Generator:
    """Return the random generator that belongs to a seed and a key, the same everywhere."""
    return np.random.Generator(np.random.PCG64([seed, *(part + 1 for part in key)]))


class Stream:
    """An endless stream of sample indices: one shuffled epoch after the other.

    Any stretch of it can be had directly, so nobody needs to know what others have drawn.

    >>> sorted(Stream(size=4, seed=0).indices(start=4, count=4).tolist())
    [0, 1, 2, 3]
    """

    def __init__(self, size: int, seed: int, part: int = SHARED) -> None:
        if size < 1:
            raise ValueError(f"a stream needs at least one sample, got size={size}")
        self.size, self._seed, self._part = size, seed, part
        self._epochs: OrderedDict[int, NDArray[np.int64]] = OrderedDict()

    def indices(self, start: int, count: int) -> NDArray[np.int64]:
        """Return the samples at places `start` to `start + count` of the stream."""
        pieces = []
        while count > 0:
            epoch, offset = divmod(start, self.size)
            piece = self._epoch(epoch)[offset : offset + count]
            pieces.append(piece)
            start, count = start + len(piece), count - len(piece)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        order = self._epochs.get(epoch)
        if order is None:
            order = generator(self._seed, self._part, epoch).permutation(self.size)
            self._epochs[epoch] = order
            if len(self._epochs) > _KEPT_EPOCHS:
                self._epochs.popitem(last=False)
        return order
