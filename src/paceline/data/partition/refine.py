"""Swaps samples between parts while swaps make the parts more alike."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from paceline.data.partition.base import Floats, Indices, Partition
from paceline.data.partition.features import Fourier, Rows, Vectors, add_by_key, as_rows
from paceline.data.partition.groups import CHUNK, chunks, classes_of, groups, sorted_at_random
from paceline.data.seeding import generator

_SWAP_GROUP = 64  # samples that are searched for the best swap
_SWAP_ROUNDS = 16  # most swaps in a group before the next group
_SWAPS = -1  # the seed's stream for swaps; streams from 0 on are for chunks
_WORTH = 1e-4  # of a swap's cost: single precision cannot resolve a smaller gain


def refined(
    partition: Partition,
    features: Rows,
    labels: ArrayLike | None = None,
    *,
    sweeps: int = 4,
    size: int = 256,
    seed: int = 0,
    chunk: int = CHUNK,
) -> Partition:
    """Swap samples of a class between parts while swaps make the parts more alike.

    It never raises the sum over classes and parts of |mean - mean of the class|^2, and keeps the
    sizes and the classes. A swap of x in a and y in b changes that sum by
    2 <y - x, D_a/n_a^2 - D_b/n_b^2> + |y - x|^2 (1/n_a^2 + 1/n_b^2). Here D is the excess of a
    part's sum. Do not use it with hundreds of classes: each class improves, but whole parts may get
    worse.
    """
    features = as_rows(features)
    codes, counts, _ = classes_of(labels, len(features))
    if len(partition) != len(features):
        raise ValueError(
            f"a partition of {len(partition)} samples, but features of {len(features)}; give both "
            "of the same data"
        )
    parts, of = partition.parts, partition.of.astype(np.int64)
    fourier = Fourier.fit(features, size, seed)
    cells = np.bincount(codes * parts + of, minlength=len(counts) * parts)
    sums = np.zeros((len(cells), size))
    for places, piece in chunks(features, chunk):
        add_by_key(sums, codes[places] * parts + of[places], fourier(piece))
    amounts = cells.reshape(-1, parts)
    excess = sums.reshape(-1, parts, size)
    means = excess.sum(1) / counts[:, None]
    excess -= amounts[:, :, None] * means[:, None]
    weights = np.divide(1.0, amounts, out=np.zeros(amounts.shape), where=amounts > 0) ** 2
    for sweep in range(sweeps):
        for number, (places, piece) in enumerate(chunks(features, chunk)):
            order = sorted_at_random(codes[places], generator(seed, _SWAPS, sweep, number))
            here, phi = places[order], fourier(piece)[order]
            present, amount = np.unique(codes[here], return_counts=True)
            phi -= np.repeat(means[present].astype(np.float32), amount, axis=0)
            for members, which in groups(amount, _SWAP_GROUP, 1):
                rows, x, own = present[which], phi[members], of[here[members]]
                new = _swapped(x, own, excess[rows], weights[rows])
                moved = (new[:, None] == np.arange(parts)[:, None]).astype(np.float32)
                moved -= own[:, None] == np.arange(parts)[:, None]
                excess[rows] += moved @ x
                of[here[members]] = new
    return Partition(of, parts)


def _swapped(x: Vectors, own: Indices, excess: Floats, weights: Floats) -> Indices:
    """Make the best swap in each group, again and again while the gain exceeds rounding."""
    own = own.copy()
    count, size = own.shape
    group, member = np.arange(count), np.arange(size)
    pull = (x @ excess.astype(np.float32).transpose(0, 2, 1)) * weights[:, None]
    inner = (x @ x.transpose(0, 2, 1)).astype(np.float64)
    norms = inner[:, member, member]
    apart = norms[:, :, None] + norms[:, None] - 2 * inner
    for _ in range(_SWAP_ROUNDS):
        across = pull[group[:, None, None], member[:, None], own[:, None]]  # of i toward k's part
        gain = across - across[:, member, member][:, :, None]
        weight = weights[group[:, None], own]
        cost = apart * (weight[:, :, None] + weight[:, None])
        change = 2 * (gain + gain.transpose(0, 2, 1)) + cost
        best = change.reshape(count, -1).argmin(1)
        i, k = np.divmod(best, size)
        # A gain below rounding does not count.
        worth = change[group, i, k] < -_WORTH * cost[group, i, k]
        if not worth.any():
            break
        r, i, k = group[worth], i[worth], k[worth]
        a, b = own[r, i], own[r, k]
        step = inner[r, :, k] - inner[r, :, i]
        pull[r, :, a] += step * weights[r, a, None]
        pull[r, :, b] -= step * weights[r, b, None]
        own[r, i], own[r, k] = b, a
    return own
