"""The samples of a task: a pure function of (seed, tile, offset); a tile is a data shard."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from paceline.core.protocol import SHARED, Task
from paceline.data.partition.base import Partition
from paceline.data.permutation import Permutation
from paceline.data.seeding import generator

LARGE = 2**22
"""Streams of more samples compute their order place by place; it would need 8 bytes a sample."""
_KEPT_EPOCHS = 3  # an asynchronous run uses the end of an epoch and the beginning of the next


class Stream:
    """An endless stream of sample indices: one shuffled epoch after the other.

    Any range of it is computed directly, so workers need not know what others have drawn.

    >>> sorted(Stream(size=4, seed=0).indices(start=4, count=4).tolist())
    [0, 1, 2, 3]
    """

    def __init__(self, size: int, seed: int, tile: int = SHARED) -> None:
        if size < 1:
            raise ValueError(f"a stream needs at least one sample, got size={size}")
        self.size, self._seed, self._tile = size, seed, tile
        self._epochs: OrderedDict[int, NDArray[np.int64]] = OrderedDict()

    def indices(self, start: int, count: int) -> NDArray[np.int64]:
        """Return the samples at offsets `start` to `start + count` of the stream."""
        pieces = []
        while count > 0:
            epoch, offset = divmod(start, self.size)
            piece = self._part(epoch, offset, min(count, self.size - offset))
            pieces.append(piece)
            start, count = start + len(piece), count - len(piece)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _part(self, epoch: int, start: int, count: int) -> NDArray[np.int64]:
        """Return a part of an epoch's order."""
        if self.size <= LARGE:
            return self._epoch(epoch)[start : start + count]
        order = Permutation(self.size, self._seed, (self._tile, epoch))
        return order.at(np.arange(start, start + count))

    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        order = self._epochs.get(epoch)
        if order is None:
            order = generator(self._seed, self._tile, epoch).permutation(self.size)
            self._epochs[epoch] = order
            if len(self._epochs) > _KEPT_EPOCHS:
                self._epochs.popitem(last=False)
        return order


class Samples:
    """The samples of tasks, from the shared stream over all data or one stream for each tile."""

    def __init__(self, shared: Stream, seed: int, tiles: Partition | None = None) -> None:
        if tiles is not None and len(tiles) != shared.size:
            raise ValueError(
                f"the data shards (tiles) have {len(tiles)} samples together, and the dataset has "
                f"{shared.size}; partition the dataset that you train on"
            )
        if tiles is not None and type(shared) is not Stream:
            raise ValueError(
                "Shards are read in their own order, and Placed draws from anywhere in its tiles; "
                "use BySpeed() or no placement with Shards"
            )
        self._seed, self._tiles, self._shared = seed, tiles, shared
        self._streams: dict[int, Stream] = {}

    def stretch(self, start: int, count: int) -> NDArray[np.int64]:
        """Return `count` samples of the stream over all data."""
        return self._shared.indices(start, count)

    def of(self, task: Task, step: int = 0) -> NDArray[np.int64]:
        """Return the samples of a task's local step.

        The samples of several tiles are interleaved, so a task cut short has used all tiles.
        """
        if task.work.tiles is None:
            return self.stretch(task.offset + step * task.samples, task.samples)
        if self._tiles is None:
            raise ValueError(
                f"task {task.id} draws from data shards (tiles) {list(task.work.tiles)}, but the "
                "learner has none; give Trainer(placement=…), not only the policy"
            )
        pieces, turns = [], []
        for (tile, count), draw in zip(task.work.tiles.items(), task.tile_offsets, strict=True):
            pieces.append(
                self._tiles.indices(tile)[self._stream(tile).indices(draw + step * count, count)]
            )
            turns.append((np.arange(count) + 0.5) / count)
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces)[np.argsort(np.concatenate(turns), kind="stable")]

    def generator(self, task: Task) -> np.random.Generator:
        """Return the random generator of a task's samples, the same on every worker."""
        for tile, draw, _ in task.stretches():
            return generator(self._seed, tile, draw)
        return generator(self._seed, SHARED, task.offset)

    def _stream(self, tile: int) -> Stream:
        assert self._tiles is not None
        if tile not in self._streams:
            self._streams[tile] = Stream(int(self._tiles.sizes[tile]), self._seed, tile)
        return self._streams[tile]
