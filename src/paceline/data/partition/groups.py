"""Iterates over data in chunks, and over a chunk in groups of samples of one class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.data.partition.base import Indices
from paceline.data.partition.features import Rows

CHUNK = 32_768  # samples; with 256 features 32 MB
_STRETCHES = 16  # a chunk is taken from this many places of the data, so sorted data get mixed
# Groups of any class that are matched at a time, independently of each other: with 64 instead the
# distance is 35 % larger for 1,000 classes, and the time is the same.
_ROWS = 16


def classes_of(labels: ArrayLike | None, count: int) -> tuple[Indices, Indices, list[object]]:
    """Return each sample's class as a number from 0 on, the classes' sizes and their names."""
    if labels is None:
        return np.zeros(count, np.int64), np.array([count]), [None]
    given = np.asarray(labels)
    if given.shape != (count,):
        raise ValueError(
            f"labels of shape {given.shape} for {count} samples; give one label for each"
        )
    names, codes, counts = np.unique(given, return_inverse=True, return_counts=True)
    return codes.astype(np.int64), counts.astype(np.int64), names.tolist()


def chunks(features: Rows, chunk: int) -> Iterator[tuple[Indices, NDArray[Any]]]:
    """Yield the data in chunks, each taken from many places of the data."""
    if chunk < 1:
        raise ValueError(f"chunk={chunk} samples: use at least 1, better some thousands")
    count = len(features)
    length = max(1, chunk // _STRETCHES)
    apart = -(-count // _STRETCHES)
    for offset in range(0, apart, length):
        pieces = [
            slice(start + offset, min(start + min(offset + length, apart), count))
            for start in range(0, count, apart)
            if start + offset < count
        ]
        yield (
            np.concatenate([np.arange(piece.start, piece.stop) for piece in pieces]),
            np.concatenate([np.asarray(features[piece]) for piece in pieces]),
        )


def sorted_at_random(codes: Indices, random: np.random.Generator) -> Indices:
    """Return an order of the samples by class, random in each class."""
    mixed = random.permutation(len(codes))
    return mixed[np.argsort(codes[mixed], kind="stable")]


def interleaved(amounts: NDArray[np.int64]) -> Indices:
    """Return for each class (row) its parts, each part `amounts` times, evenly spread."""
    flat = amounts.reshape(-1)
    nth = np.arange(flat.sum()) - np.repeat(np.cumsum(flat) - flat, flat)
    position = (nth + 0.5) / np.repeat(flat, flat)
    part = np.repeat(np.tile(np.arange(amounts.shape[1]), len(amounts)), flat)
    row = np.repeat(np.arange(len(amounts)), amounts.sum(1))
    slots: Indices = part[np.lexsort((position, row))]
    return slots


def groups(counts: Indices, size: int, lanes: int) -> Iterator[tuple[Indices, Indices]]:
    """Cut samples that are sorted by class into groups, and yield batches of groups.

    A batch is the places of the members, a row for each group, and the groups' classes. It has one
    group of each class, or up to `lanes` groups of a class with most of the samples. The remaining
    samples of each class form smaller groups, whose batches come at the end.
    """
    starts, full = np.cumsum(counts) - counts, counts // size
    which = np.repeat(np.arange(len(counts)), full)
    nth = np.arange(len(which)) - np.repeat(np.cumsum(full) - full, full)
    level = nth // np.ceil(lanes * counts / counts.sum()).astype(np.int64)[which]
    order = np.lexsort((which, level))
    batches = [
        (size, which[each], starts[which[each]] + size * nth[each])
        for each in np.split(order, np.flatnonzero(np.diff(level[order])) + 1)
    ]
    rest = counts % size
    for least in np.unique(rest[rest > 0]).tolist():
        few = np.flatnonzero(rest == least)
        batches.append((least, few, starts[few] + counts[few] - least))
    for length, classes, begins in batches:
        for cut in range(0, len(classes), _ROWS):
            here = slice(cut, cut + _ROWS)
            yield begins[here, None] + np.arange(length), classes[here]
