"""Cuts data by content: every part gets the same mixture, not only the same number, of samples.

Samples are processed in groups of one class. The shares determine in advance how many samples of a
group each part gets. The samples themselves are chosen so that the parts' sums of random Fourier
features stay close to their shares of the whole. This is vector balancing, as in GraB (Lu et al.,
2022, arXiv:2205.10733) and CD-GraB (Cooper et al., 2023, arXiv:2302.00845). Here it is for more
than two parts and for unequal shares.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.data.partition.base import Floats, Indices, Partition, normalized, quotas
from paceline.data.partition.features import Fourier, Rows, Vectors, add_by_key, as_rows
from paceline.data.partition.groups import (
    CHUNK,
    chunks,
    classes_of,
    groups,
    interleaved,
    sorted_at_random,
)
from paceline.data.partition.refine import refined
from paceline.data.seeding import generator

Number = TypeVar("Number", bound=np.generic)

_GROUP = 8  # minimum of samples to choose among at a time; with more parts, one for each
# Groups of one class that are matched at a time, if a chunk has only this class: with 4 the total
# takes 0.6 of the time and the parts' distance is 1 % larger (Fashion-MNIST, no labels).
_LANES = 4
# The weight of the sum over all classes besides that of the class: with 0 the distance is 5 %
# larger for 10 classes and twice as large for 1,000 (Fashion-MNIST, its classes cut at random).
_COUPLING = np.float32(0.3)
_ROUNDING = 1e-9
_SHUT = np.array([np.inf, 0], np.float32)  # extra cost of a part with no slot, or some slots, left


def balanced(
    features: Rows,
    shares: int | Iterable[float],
    labels: ArrayLike | None = None,
    *,
    size: int = 256,
    swaps: int = 0,
    seed: int = 0,
    chunk: int = CHUNK,
) -> Partition:
    """Cut data by content, given as feature vectors, such as an embedding or `pca(inputs)`.

    With labels every part gets its share of each class. `swaps` is the number of sweeps of
    `refined`. Memory holds a chunk of features, a sum per class and part, and a few numbers per
    sample.

    >>> halves = balanced(np.arange(8.0).reshape(8, 1) // 2, 2)
    >>> halves.sizes.tolist()
    [4, 4]
    """
    features, portions = as_rows(features), normalized(shares)
    classes, counts, _ = classes_of(labels, len(features))
    balancer = Balancer(
        portions, Fourier.fit(features, size, seed), seed=seed, quotas=quotas(counts, portions)
    )
    of = np.empty(len(features), np.int32)
    for places, piece in chunks(features, chunk):
        of[places] = balancer.assign(piece, classes[places])
    partition = Partition(of, len(portions))
    if swaps:
        partition = refined(
            partition, features, labels, sweeps=swaps, size=size, seed=seed, chunk=chunk
        )
    return partition


class Balancer:
    """Divides a stream of samples chunk by chunk, for data that do not fit in one place.

    At every moment each part has its share of each class, to within two samples. Chunks should
    hold some hundred samples or more: a class with one sample in a chunk leaves no choice.
    `quotas`: row c is the exact number of samples of class c that each part has at the end.
    """

    def __init__(
        self,
        shares: int | Iterable[float],
        fourier: Fourier,
        *,
        seed: int = 0,
        quotas: NDArray[np.int64] | None = None,
    ) -> None:
        self.shares, self.fourier, self._seed = normalized(shares), fourier, seed
        parts = len(self.shares)
        # The weight of D_j is that of the mean D_j / n_j in the sum of squares.
        least = self.shares.max()
        weights = np.divide(least, self.shares, out=np.zeros(parts), where=self.shares > 0) ** 2
        self._weights = weights.astype(np.float32)
        self._group = max(_GROUP, parts)
        self._chunks = 0
        self._rows: dict[object, int] = {}
        self._owed = np.zeros(parts)  # samples due to each part, over all classes
        self._portions = np.empty((0, parts))  # row c: each part's share of class c
        self._seen = np.empty(0, np.int64)
        self._given = np.empty((0, parts), np.int64)
        self._sums = np.empty((0, fourier.size))
        self._excess = np.empty((0, parts, fourier.size), np.float32)
        self._total = np.zeros((parts, fourier.size), np.float32)
        if quotas is not None:
            self._grow(range(len(quotas)))
            self._portions[:] = quotas / np.maximum(quotas.sum(1, keepdims=True), 1)

    def assign(self, features: Any, labels: ArrayLike | None = None) -> NDArray[np.int32]:
        """Return the part of each sample of the next chunk."""
        phi = self.fourier(features)
        codes, counts, names = classes_of(labels, len(phi))
        self._grow(names)
        rows = np.array([self._rows[name] for name in names])
        order = sorted_at_random(codes, generator(self._seed, self._chunks))
        self._chunks += 1
        phi = phi[order]
        add_by_key(self._sums, np.repeat(rows, counts), phi)
        self._seen[rows] += counts
        means = self._sums[rows] / self._seen[rows, None]
        phi -= np.repeat(means.astype(np.float32), counts, axis=0)
        due = [self._due(row, int(count)) for row, count in zip(rows, counts, strict=True)]
        slots = interleaved(np.array(due))
        chosen = np.empty(len(phi), np.int32)
        for members, which in groups(counts, self._group, _LANES):
            chosen[members] = self._match(rows[which], phi[members], slots[members])
        parts = np.empty_like(chosen)
        parts[order] = chosen
        return parts

    def _grow(self, names: Iterable[object]) -> None:
        """Add rows for new classes."""
        new = [name for name in names if name not in self._rows]
        for name in new:
            self._rows[name] = len(self._rows)

        def longer(values: NDArray[Number], fill: Floats | float = 0) -> NDArray[Number]:
            more = np.empty((len(new), *values.shape[1:]), values.dtype)
            more[:] = fill
            return np.concatenate([values, more])

        if new:
            self._portions = longer(self._portions, self.shares)
            self._seen, self._given = longer(self._seen), longer(self._given)
            self._sums, self._excess = longer(self._sums), longer(self._excess)

    def _due(self, row: int, count: int) -> Indices:
        """Return how many of the next samples of a class each part gets.

        A part's exact share has a fraction. The parts for which the fraction plus the samples due
        from other classes is largest round up.
        """
        exact = self._seen[row] * self._portions[row] - self._given[row]
        whole: Indices = np.floor(np.maximum(exact + _ROUNDING, 0)).astype(np.int64)
        fraction = exact - whole
        missing = count - int(whole.sum())
        if missing > 0:
            urgency = np.where(fraction > _ROUNDING, fraction + self._owed, -np.inf)
            whole[np.argsort(-urgency, kind="stable")[:missing]] += 1
        for _ in range(-missing):  # some parts already have more than their share
            whole[np.where(whole > 0, fraction, np.inf).argmin()] -= 1
        self._owed += count * self._portions[row] - whole
        self._given[row] += whole
        return whole

    def _match(self, rows: Indices, x: Vectors, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Choose the part of each sample, x[r, i], for groups of the classes `rows`.

        Sample i in part j costs w_j <x_i, D_j>, with D_j the excess of the part's sum over its
        share of the class. The samples choose one by one, in the order of the cost of their second
        choice over the first, largest first. An optimal matching would make the parts' distance 3
        to 5 % smaller.
        """
        parts, (count, size) = len(self.shares), slots.shape
        each = np.arange(count)
        places = (each[:, None] * parts + slots).reshape(-1)
        left = np.bincount(places, minlength=count * parts).reshape(count, parts)
        excess = self._excess[rows] + _COUPLING * self._total
        cost = (x @ excess.transpose(0, 2, 1)) * self._weights
        cost -= cost.mean(1, keepdims=True)
        if parts > 1:
            least = np.partition(cost + _SHUT[np.minimum(left, 1)][:, None], 1, axis=2)
            turns = np.argsort(least[:, :, 0] - least[:, :, 1], axis=1, kind="stable")
        else:
            turns = np.zeros((count, 1), np.int64) + np.arange(size)
        picked: Indices = np.empty((size, count), np.int64)
        open_slots, firsts = left.reshape(-1), each * parts
        for turn, costs in enumerate(cost[each, turns.T]):
            picked[turn] = (costs + _SHUT[np.minimum(left, 1)]).argmin(1)
            open_slots[firsts + picked[turn]] -= 1
        chosen: Indices = np.empty((count, size), np.int64)
        chosen[each, turns.T] = picked
        taken = (chosen[:, None, :] == np.arange(parts)[:, None]).astype(np.float32)
        taken -= self._portions[rows, :, None].astype(np.float32)
        for row, added in zip(rows.tolist(), taken @ x, strict=True):
            self._excess[row] += added
            self._total += added
        return chosen
