"""Cuts data so that each part covers the whole well, by greedy submodular partition.

Coverage is not a distance: it rewards a part for reaching rare samples, not for resembling the
whole. Parts of equal size and equal coverage are more alike than random ones. With unequal shares
the paper's rule is worse than a random cut by class. It keeps all parts at equal coverage, hence at
nearly equal size, until the small parts are full. These have then had the first choice, and the
large parts get the rest. So the default cuts the data into tiles (small blocks of equal size) and
merges them into parts. The few samples outside of tiles are assigned at random. `faithful=True` is
the paper's rule, for comparison.

Sizes are exact: `quotas` sets the number of samples of each class in a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.data.partition.base import (
    Floats,
    Indices,
    Partition,
    normalized,
    quotas,
    whole_shares,
)
from paceline.data.partition.greedy import (
    facility_location_blocks,
    feature_based_blocks,
    graph_cut_blocks,
)
from paceline.data.seeding import generator

Blocks: TypeAlias = Callable[[Floats, Indices], Indices]
Cut: TypeAlias = Callable[[Floats, Indices, np.random.Generator], Indices]

_GRID = 2.0**30  # similarities are multiples of 1 / _GRID; sums are exact up to 2**23
_SAMPLED_FOR_BANDWIDTH = 2000
# The squared distance (MMD) of merged tiles, relative to random ones, was 0.2 + 4 / size, plus
# the fraction of samples outside of tiles (graph cut, Fashion-MNIST, sizes 15 to 125).
_COST_OF_SMALL_TILES = 4.0


def facility_location(
    features: ArrayLike,
    shares: Iterable[float] | int,
    labels: ArrayLike | None = None,
    *,
    tiles: int | None = None,
    faithful: bool = False,
    chunk: int | None = 1000,
    bandwidth: float | None = None,
    seed: int = 0,
) -> Partition:
    """Cut by f(A) = sum over v of max over a in A of s(v, a), as RCD-SGD does.

    This is Algorithm 1 of He and Dube, 2022, arXiv:2211.00839. Within each class the part with the
    least f takes the sample that raises f most, until it is full. Without labels, all samples are
    one class. It is the min-block greedy of Wang et al., 2021, "Constrained Robust Submodular
    Partitioning". The kernel s is Gaussian, and its bandwidth is the median distance.

    A class is first cut at random into chunks, which are partitioned separately. So time and
    memory grow with samples * chunk and chunk ** 2; `chunk=None` takes classes whole. A chunk is
    cut into `tiles` blocks of equal size; None chooses a number that fits the shares. More parts
    need larger chunks: tiles of 10 samples or fewer gain little.
    """
    blocks = facility_location_blocks
    return _covering(features, shares, labels, blocks, tiles, faithful, chunk, bandwidth, seed)


def graph_cut(
    features: ArrayLike,
    shares: Iterable[float] | int,
    labels: ArrayLike | None = None,
    *,
    tiles: int | None = None,
    faithful: bool = False,
    chunk: int | None = 1000,
    bandwidth: float | None = None,
    seed: int = 0,
) -> Partition:
    """Cut by f(A) = sum over v not in A, a in A of s(v, a), otherwise as `facility_location`.

    It is faster, and equal parts are more alike; with `faithful=True` unequal parts are less alike.
    """
    blocks = graph_cut_blocks
    return _covering(features, shares, labels, blocks, tiles, faithful, chunk, bandwidth, seed)


def feature_based(
    features: ArrayLike,
    shares: Iterable[float] | int,
    labels: ArrayLike | None = None,
    *,
    candidates: int = 64,
    seed: int = 0,
) -> Partition:
    """Cut by f(A) = sum over u of sqrt(sum over a in A of x(a, u)), in proportional turns.

    x are the positive and the negative parts of the centered features. Turns in proportion to
    the shares suit this f, so it needs neither tiles nor chunks. Time grows with samples *
    candidates * features, memory with the largest class.
    """
    if candidates < 1:
        raise ValueError(f"candidates={candidates}: use at least 1")
    given = _matrix(features)
    center = given.mean(axis=0, dtype=np.float64)

    def cut(values: Floats, quota: Indices, random: np.random.Generator) -> Indices:
        signed = values - center
        split = np.hstack([np.maximum(signed, 0.0), np.maximum(-signed, 0.0)])
        return feature_based_blocks(split, quota, candidates, random)

    return _by_class(given, normalized(shares), labels, None, seed, cut)


def _covering(
    features: ArrayLike,
    shares: Iterable[float] | int,
    labels: ArrayLike | None,
    blocks: Blocks,
    tiles: int | None,
    faithful: bool,
    chunk: int | None,
    bandwidth: float | None,
    seed: int,
) -> Partition:
    """Cut every chunk by its similarities, into tiles or by the paper's rule."""
    given, wanted = _matrix(features), normalized(shares)
    if faithful and tiles is not None:
        raise ValueError(f"faithful=True is the paper's rule, without tiles; leave out {tiles=}")
    if tiles is not None and tiles < 1:
        raise ValueError(f"{tiles=}: use at least 1, or None to choose it automatically")
    if chunk is not None and chunk < 1:
        raise ValueError(f"{chunk=}: use at least 1, or None to take classes whole")
    if bandwidth is not None and not 0 < bandwidth < np.inf:
        raise ValueError(f"{bandwidth=}: use a finite distance > 0, or None for the median one")
    width = _median_distance(given, generator(seed)) if bandwidth is None else bandwidth

    def cut(values: Floats, quota: Indices, random: np.random.Generator) -> Indices:
        similarity = np.exp(_squared_distances(values) / (-2 * width**2))
        similarity = np.rint(similarity * _GRID) / _GRID
        if faithful:
            return blocks(similarity, quota)
        size = _tile_size(quota) if tiles is None else max(1, len(values) // tiles)
        return _merged_tiles(similarity, quota, size, blocks, random)

    return _by_class(given, wanted, labels, chunk, seed, cut)


def _by_class(
    features: NDArray[np.number],
    shares: Floats,
    labels: ArrayLike | None,
    chunk: int | None,
    seed: int,
    cut: Cut,
) -> Partition:
    """Cut each class separately, one random chunk at a time."""
    classes = np.zeros(len(features), np.int64) if labels is None else np.asarray(labels)
    if classes.shape != (len(features),):
        raise ValueError(
            f"labels of shape {classes.shape} for {len(features)} samples: give one for each"
        )
    _, which, counts = np.unique(classes, return_inverse=True, return_counts=True)
    members = np.split(np.argsort(which, kind="stable"), np.cumsum(counts)[:-1])
    of = np.empty(len(features), np.int64)
    for number, (mine, left) in enumerate(zip(members, quotas(counts, shares), strict=True)):
        random = generator(seed, number)
        pieces = 1 if chunk is None else -(-len(mine) // chunk)
        for piece in np.array_split(random.permutation(mine), pieces):
            piece.sort()  # the order of the data breaks ties
            quota = whole_shares(len(piece), left / left.sum())
            left = left - quota
            of[piece] = cut(features[piece].astype(np.float64), quota, random)
    return Partition(of, len(shares))


def _merged_tiles(
    similarity: Floats, quota: Indices, size: int, blocks: Blocks, random: np.random.Generator
) -> Indices:
    """Cut into tiles of one size, and give each part, at random, as many as fit its quota.

    The remaining samples are drawn at random before the cut, and assigned at random. The greedy
    rule takes outliers last: tiles larger than others by only a tenth were worse than random.
    """
    parts = np.arange(len(quota))
    whole, over = np.divmod(quota, size)
    tiled = np.ones(len(similarity), bool)
    tiled[random.choice(len(similarity), over.sum(), replace=False)] = False
    of = np.empty(len(similarity), np.int64)
    of[~tiled] = random.permutation(np.repeat(parts, over))
    tiles = blocks(similarity[np.ix_(tiled, tiled)], np.full(whole.sum(), size))
    of[tiled] = random.permutation(np.repeat(parts, whole))[tiles]
    return of


def _tile_size(quota: Indices) -> int:
    """Return the tile size with the least sum of leftover fraction and cost of small tiles."""
    sizes = np.arange(1, quota.max() + 1)
    over = np.mean([each % sizes / each for each in quota if each], axis=0)
    return int(sizes[(over + _COST_OF_SMALL_TILES / sizes).argmin()])


def _squared_distances(values: Floats) -> Floats:
    centered = values - values.mean(axis=0)  # avoids cancellation of large products
    products = centered @ centered.T
    squares = products.diagonal()
    distances: Floats = np.maximum(squares[:, None] + squares - 2 * products, 0.0)
    return distances


def _median_distance(features: NDArray[np.number], random: np.random.Generator) -> float:
    """Return the median distance of two samples, the usual bandwidth of a Gaussian kernel."""
    count = min(len(features), _SAMPLED_FOR_BANDWIDTH)
    some = features[random.choice(len(features), count, replace=False)].astype(np.float64)
    squared = _squared_distances(some)[np.triu_indices(count, 1)]
    return float(np.sqrt(np.median(squared))) if squared.any() else 1.0  # all samples are equal


def _matrix(features: ArrayLike) -> NDArray[np.number]:
    """Return features as one row for each sample."""
    given = np.asarray(features)
    if given.ndim < 2 or not given.size or given.dtype.kind not in "iuf":
        raise ValueError(
            f"features are numbers, one row for each sample, not {given.dtype} of shape "
            f"{given.shape}; a single feature is given as a column"
        )
    if not np.isfinite(given).all():
        raise ValueError("features have values that are not finite; replace or drop those samples")
    return given.reshape(len(given), -1)
