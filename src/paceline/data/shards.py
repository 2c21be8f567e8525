"""Data in shards that are read from their beginning: files, archives, streams.

A sample has a number, so the ledger counts it like any other. The order of an epoch is made for
reading: a batch takes its samples from a few shards at a time, each of which is read in sequence.
"""

from __future__ import annotations

import tarfile
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.checks import check_whole
from paceline.data.permutation import Permutation
from paceline.data.sampling import Stream
from paceline.data.seeding import generator

Indices = NDArray[np.int64]


class Shards:
    """A dataset of samples in shards, each an iterable that `open` opens.

    sources: what `open` is called with: paths, addresses, numbers.
    lengths: the number of samples of each shard; `count(sources, open)` reads all of them once.
    lanes: shards that a batch is taken from. As many as workers is best: each reads its own.
    window: samples of a shard that are held in memory and shuffled; 1 leaves them in their order.

    The shards of an epoch are shuffled, and so is each window. A worker that gets samples further
    back in a shard opens it again. Each process holds at most 2 lanes + 2 windows.
    """

    def __init__(
        self,
        sources: Iterable[Any],
        open: Callable[[Any], Iterable[Any]],
        lengths: Sequence[int],
        *,
        lanes: int = 8,
        window: int = 256,
    ) -> None:
        self.sources, self.open, self.lengths = tuple(sources), open, tuple(map(int, lengths))
        self.lanes, self.window = lanes, window
        check_whole("lanes", lanes)
        check_whole("window", window)
        if len(self.sources) != len(self.lengths) or not self.sources or min(self.lengths) < 0:
            raise ValueError(
                f"{len(self.sources)} shards and {len(self.lengths)} lengths: give at least one "
                "shard and the number of samples of each; paceline.data.shards.count counts them"
            )
        self._starts = [0, *accumulate(self.lengths)]
        self._reader = _Reader(self.sources, open, 2 * lanes + 2)

    @classmethod
    def from_datasets(cls, dataset: Any, lengths: Sequence[int], **more: Any) -> Shards:
        """Make shards of a streaming dataset of Hugging Face, which is an `IterableDataset`."""
        return cls(range(dataset.num_shards), partial(_open_part, dataset), lengths, **more)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return samples by their numbers, in which shards follow each other."""
        found = []
        for index in indices:
            if not 0 <= index < len(self):
                raise IndexError(f"sample {index} is not within 0 and {len(self) - 1}")
            shard = bisect_right(self._starts, index) - 1
            window, place = divmod(index - self._starts[shard], self.window)
            found.append(self._held(shard, window)[place])
        return found

    def _held(self, shard: int, window: int) -> list[Any]:
        """Return the samples of a window."""
        start = window * self.window
        return self._reader.window(shard, start, min(self.window, self.lengths[shard] - start))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reader = _Reader(self.sources, self.open, 2 * self.lanes + 2)


class ShardStream(Stream):
    """The order of samples in shards.

    The shards of an epoch follow each other in random order, and this sequence is cut into lanes.
    A batch takes an equal part from each lane, always at the same place of the batch. So workers
    whose shares stay the same read on where they were.
    """

    def __init__(self, shards: Shards, seed: int, batch_size: int) -> None:
        super().__init__(len(shards), seed)
        self._window, self._batch = shards.window, batch_size
        self._lengths = np.array(shards.lengths, np.int64)
        self._starts = np.cumsum(self._lengths) - self._lengths
        lanes = min(shards.lanes, batch_size)
        self._bounds = np.arange(lanes + 1) * batch_size // lanes

    def _part(self, epoch: int, start: int, count: int) -> Indices:
        shard, place = self._located(epoch, self._sequence(np.arange(start, start + count)))
        return self._starts[shard] + self._shuffled(epoch, shard, place)

    def _sequence(self, places: Indices) -> Indices:
        """Return the places in the sequence of shards for places in the epoch."""
        rows = self.size // self._batch  # whole batches; the rest follows as it is
        row, column = np.divmod(places, self._batch)
        lane = np.searchsorted(self._bounds, column, side="right") - 1
        width = self._bounds[lane + 1] - self._bounds[lane]
        inside = rows * self._bounds[lane] + row * width + column - self._bounds[lane]
        return np.where(row < rows, inside, places)

    def _located(self, epoch: int, places: Indices) -> tuple[Indices, Indices]:
        """Return the shard and the place in it for places in the sequence of shards."""
        order = generator(self._seed, self._tile, epoch).permutation(len(self._lengths))
        ends = np.cumsum(self._lengths[order])
        turn = np.searchsorted(ends, places, side="right")
        shard = order[turn]
        return shard, places - (ends[turn] - self._lengths[shard])

    def _shuffled(self, epoch: int, shard: Indices, place: Indices) -> Indices:
        """Return other places in the same windows."""
        if self._window == 1:
            return place
        window, inside = np.divmod(place, self._window)
        found = place.copy()
        for key in sorted({*zip(shard.tolist(), window.tolist(), strict=True)}):
            chosen = (shard == key[0]) & (window == key[1])
            begin = key[1] * self._window
            size = min(self._window, int(self._lengths[key[0]]) - begin)
            order = Permutation(size, self._seed, (self._tile, epoch, *key))
            found[chosen] = begin + order.at(inside[chosen])
        return found


def stream_of(dataset: Any, seed: int, batch_size: int) -> Stream:
    """Return the order in which a dataset is used."""
    if isinstance(dataset, Shards):
        return ShardStream(dataset, seed, batch_size)
    return Stream(len(dataset), seed)


def count(sources: Iterable[Any], open: Callable[[Any], Iterable[Any]]) -> list[int]:
    """Return the number of samples of each shard, by reading all of them."""
    return [sum(1 for _ in open(source)) for source in sources]


def tar_samples(path: Path | str) -> Iterator[dict[str, Any]]:
    """Yield the samples of a tar archive as WebDataset writes them.

    Files that follow each other and share the name before the first dot are one sample. It maps
    "__key__" to that name, and the rest of each name to the bytes of the file.
    """
    sample: dict[str, Any] = {}
    with tarfile.open(path, "r|*") as archive:
        for member in archive:
            if not member.isfile():
                continue
            folder, _, name = member.name.rpartition("/")
            first, _, kind = name.partition(".")
            key = f"{folder}/{first}" if folder else first
            if sample and sample["__key__"] != key:
                yield sample
                sample = {}
            content = archive.extractfile(member)
            assert content is not None  # it is a file
            sample |= {"__key__": key, kind: content.read()}
    if sample:
        yield sample


class _Reader:
    """Reads windows of shards: those in memory, or by reading on, or from the beginning."""

    def __init__(
        self, sources: Sequence[Any], open: Callable[[Any], Iterable[Any]], most: int
    ) -> None:
        self._sources, self._open, self._most = sources, open, most
        self._windows: OrderedDict[tuple[int, int], list[Any]] = OrderedDict()
        self._opened: OrderedDict[int, tuple[Iterator[Any], int]] = OrderedDict()

    def window(self, shard: int, start: int, size: int) -> list[Any]:
        """Return samples `start` to `start + size` of a shard."""
        if (shard, start) in self._windows:
            self._windows.move_to_end((shard, start))
            return self._windows[shard, start]
        samples, place = self._opened.pop(shard, (None, 0))
        if samples is None or place > start:
            samples, place = iter(self._open(self._sources[shard])), 0
        found = list(islice(samples, start - place, start - place + size))
        if len(found) < size:
            raise ValueError(
                f"shard {self._sources[shard]!r} has fewer samples than lengths= says; count them "
                "again with paceline.data.shards.count"
            )
        self._opened[shard] = samples, start + size
        self._windows[shard, start] = found
        for held in (self._opened, self._windows):
            while len(held) > self._most:
                held.popitem(last=False)
        return found


def _open_part(dataset: Any, index: int) -> Iterable[Any]:
    part: Iterable[Any] = dataset.shard(num_shards=dataset.num_shards, index=index)
    return part
