"""Baseline partitions, which use no information about the data, or only its labels.

`even` and `stratified` are for training; `by_label` and `dirichlet` make parts that differ on
purpose, for experiments.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite

import numpy as np
from numpy.typing import ArrayLike

from paceline.data.partition.base import Indices, Partition, normalized, quotas, whole_shares
from paceline.data.seeding import generator


def even(samples: int, shares: int | Iterable[float], *, seed: int = 0) -> Partition:
    """Divide the samples at random; each part gets its share.

    >>> even(10, [1, 1, 2]).sizes.tolist()
    [3, 2, 5]
    """
    if samples < 1:
        raise ValueError(f"{samples} samples: use at least 1")
    amounts = whole_shares(samples, portions := normalized(shares))
    of = np.repeat(np.arange(len(portions)), amounts)
    return Partition(generator(seed).permutation(of), len(portions))


def stratified(labels: ArrayLike, shares: int | Iterable[float], *, seed: int = 0) -> Partition:
    """Divide the samples of each class at random; each part gets its share of the class.

    >>> stratified([0, 0, 0, 0, 1, 1], 2).sizes.tolist()
    [3, 3]
    """
    portions = normalized(shares)
    classes, counts = _classes(labels)
    amounts = quotas(counts, portions)
    mixed = generator(seed).permutation(len(classes))
    order = mixed[np.argsort(classes[mixed], kind="stable")]
    of = np.empty(len(classes), np.int64)
    of[order] = np.repeat(np.tile(np.arange(len(portions)), len(counts)), amounts.reshape(-1))
    return Partition(of, len(portions))


def by_label(
    labels: ArrayLike, shares: int | Iterable[float], *, shards: int = 1, seed: int = 0
) -> Partition:
    """Sort the samples by label and cut, so that each part has few classes.

    With one shard each part is a contiguous range of the sorted samples. With more, each part gets
    that many ranges, drawn at random (McMahan et al., 2017, arXiv:1602.05629: 2 for each part).

    >>> by_label([1, 0, 1, 0], 2).of.tolist()
    [1, 0, 1, 0]
    """
    if shards < 1:
        raise ValueError(f"shards={shards} for each part: use at least 1")
    portions = normalized(shares)
    classes, _ = _classes(labels)
    owners = np.repeat(np.arange(len(portions)), shards)
    if shards > 1:
        owners = generator(seed).permutation(owners)
    amounts = whole_shares(len(classes), portions[owners] / shards)
    of = np.empty(len(classes), np.int64)
    of[np.argsort(classes, kind="stable")] = np.repeat(owners, amounts)
    return Partition(of, len(portions))


def dirichlet(labels: ArrayLike, parts: int, alpha: float, *, seed: int = 0) -> Partition:
    """Cut each class by shares drawn from a Dirichlet distribution; small alpha: unlike parts.

    As Hsu, Qi and Brown (2019, arXiv:1909.06335), but drawn for each class, as Yurochkin et al.
    (2019, arXiv:1905.12022). Sizes are random, but an empty part gets a sample of the largest one.

    >>> dirichlet([0, 1] * 50, 4, 0.1).sizes.sum()
    np.int64(100)
    """
    classes, counts = _classes(labels)
    if not 1 <= parts <= len(classes):
        raise ValueError(
            f"parts={parts} of {len(classes)} samples: use 1 to {len(classes)}, as each part gets "
            "at least one sample"
        )
    if not (isfinite(alpha) and alpha > 0):
        raise ValueError(
            f"alpha={alpha}: use a number > 0, such as 0.1 for unlike parts, 100 for like ones"
        )
    random = generator(seed)
    of = np.empty(len(classes), np.int64)
    for number, count in enumerate(counts):
        drawn = random.standard_gamma(alpha, parts)
        # A tiny alpha rounds all of them to 0: then one part gets the class, as in the limit.
        if not drawn.sum() > 0:
            drawn[random.integers(parts)] = 1.0
        dealt = np.repeat(np.arange(parts), whole_shares(int(count), drawn / drawn.sum()))
        of[np.flatnonzero(classes == number)] = random.permutation(dealt)
    sizes = np.bincount(of, minlength=parts)
    for empty in np.flatnonzero(sizes == 0):
        largest = int(sizes.argmax())
        of[random.choice(np.flatnonzero(of == largest))] = empty
        sizes[largest] -= 1
        sizes[empty] += 1
    return Partition(of, parts)


def _classes(labels: ArrayLike) -> tuple[Indices, Indices]:
    """Return each sample's class as a number from 0 on, and the classes' sizes."""
    given = np.asarray(labels)
    if given.ndim != 1 or not given.size:
        raise ValueError(
            f"labels of shape {given.shape}: give one label for each sample, in one dimension, "
            "such as labels.argmax(1) for one-hot ones"
        )
    _, codes, counts = np.unique(given, return_inverse=True, return_counts=True)
    return codes.astype(np.int64), counts.astype(np.int64)
