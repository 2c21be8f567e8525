"""Swaps samples between parts for as long as that makes them more alike."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from paceline.data.partition.base import Floats, Indices, Partition
from paceline.data.partition.features import Fourier, Rows, Vectors, add_by_key, as_rows
from paceline.data.partition.groups import CHUNK, chunks, classes_of, groups, sorted_at_random
from paceline.data.seeding import generator

_SWAP_GROUP = 64  # samples among which the best swap is looked for
_SWAP_ROUNDS = 16  # swaps in a group before the next one comes
_SWAPS = -1  # the stream of the seed that is for them; those from 0 on are for chunks
_WORTH = 1e-4  # of the cost of a swap: below it, single precision cannot tell gain from loss


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
    """Swap samples of a class between parts while that makes the parts more alike.

    Never raises the sum over classes and parts of |mean - mean of the class|^2; keeps the sizes
    and the classes. A swap of x in a and y in b changes it by 2 <y - x, D_a/n_a^2 - D_b/n_b^2> +
    |y - x|^2 (1/n_a^2 + 1/n_b^2), with D the excess of a part's sum. With hundreds of classes
    leave it: what each of them gains, the parts as wholes may lose.
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
    """Make the best swap in each group, then the best after it, as long as it is worth it."""
    own = own.copy()
    count, size = own.shape
    group, member = np.arange(count), np.arange(size)
    pull = (x @ excess.astype(np.float32).transpose(0, 2, 1)) * weights[:, None]
    inner = (x @ x.transpose(0, 2, 1)).astype(np.float64)
    norms = inner[:, member, member]
    apart = norms[:, :, None] + norms[:, None] - 2 * inner
    for _ in range(_SWAP_ROUNDS):
        across = pull[group[:, None, None], member[:, None], own[:, None]]  # of i, to k's part
        gain = across - across[:, member, member][:, :, None]
        weight = weights[group[:, None], own]
        cost = apart * (weight[:, :, None] + weight[:, None])
        change = 2 * (gain + gain.transpose(0, 2, 1)) + cost
        best = change.reshape(count, -1).argmin(1)
        i, k = np.divmod(best, size)
        # Less than rounding is no gain.
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
