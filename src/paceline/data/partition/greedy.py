"""Greedy rules that cut a chunk of samples into blocks of given sizes by coverage.

`submodular` makes similarities that are multiples of a power of two, so all sums are exact.
Neither the order of summation nor lazy evaluation changes a choice. Ties between blocks or samples
go to the lower index; two samples that are each other's nearest are often tied.
"""

from __future__ import annotations

from heapq import heappop, heapreplace

import numpy as np

from paceline.data.partition.base import Floats, Indices


def facility_location_blocks(similarity: Floats, sizes: Indices) -> Indices:
    """Return the block of each sample for f(A) = sum over v of max over a in A of s(v, a).

    The block with the least f takes the sample that raises it most, until it is full (min-block
    greedy: He and Dube, 2022, arXiv:2211.00839, Algorithm 1). A gain only falls as its block
    grows, so old gains are upper bounds. A sample that stays first after its gain is updated is
    the best of all (Minoux, 1978).
    """
    of = np.full(len(similarity), -1, np.int64)
    at_first = sorted((-gain, v) for v, gain in enumerate(similarity.sum(axis=0).tolist()))
    bounds = [at_first.copy() for _ in sizes]
    covered = np.zeros((len(sizes), len(similarity)))
    left = sizes.tolist()
    turn = [(0.0, block) for block, size in enumerate(left) if size]
    while turn:
        value, block = turn[0]
        bound, reached = bounds[block], covered[block]
        while True:
            _, v = bound[0]
            if of[v] >= 0:
                heappop(bound)
                continue
            gain = float(np.maximum(similarity[v], reached).sum()) - value
            heapreplace(bound, (-gain, v))
            if bound[0] == (-gain, v):
                break
        of[v] = block
        np.maximum(reached, similarity[v], out=reached)
        _end_turn(turn, left, value + gain)
    return of


def graph_cut_blocks(similarity: Floats, sizes: Indices) -> Indices:
    """Return the block of each sample for f(A) = sum over v not in A, a in A of s(v, a).

    The turns are those of `facility_location_blocks`. All gains are kept up to date. The gain of v
    is the sum over u != v of s(u, v), less 2 sum over a in A of s(a, v).
    """
    of = np.full(len(similarity), -1, np.int64)
    gains = np.tile(similarity.sum(axis=0) - similarity.diagonal(), (len(sizes), 1))
    left = sizes.tolist()
    turn = [(0.0, block) for block, size in enumerate(left) if size]
    while turn:
        value, block = turn[0]
        v = int(gains[block].argmax())
        gain = float(gains[block, v])
        of[v] = block
        gains[block] -= 2 * similarity[v]
        gains[:, v] = -np.inf
        _end_turn(turn, left, value + gain)
    return of


def feature_based_blocks(
    values: Floats, sizes: Indices, candidates: int, random: np.random.Generator
) -> Indices:
    """Return the block of each sample for f(A) = sum over u of sqrt(sum over a in A of x(a, u)).

    Blocks take turns in proportion to their sizes. Each takes, from `candidates` random samples,
    the one that raises f most (stochastic greedy: Mirzasoleiman et al., 2015, arXiv:1409.7938).
    """
    of = np.full(len(values), -1, np.int64)
    sums = np.zeros((len(sizes), values.shape[1]))
    free = np.arange(len(values))
    for taken, block in enumerate(proportional_turns(sizes).tolist()):
        count = len(values) - taken
        some = random.integers(count, size=candidates) if count > candidates else np.arange(count)
        reached = values[free[some]] + sums[block]
        best = np.sqrt(reached).sum(axis=1).argmax()
        place = some[best]
        of[free[place]], sums[block] = block, reached[best]
        free[place] = free[count - 1]
    return of


def proportional_turns(sizes: Indices) -> Indices:
    """Return the order of turns: each block as often as its size, spread as evenly as possible.

    >>> proportional_turns(np.array([1, 4])).tolist()
    [1, 1, 0, 1, 1]
    """
    when = np.concatenate([(np.arange(size) + 0.5) / size for size in sizes if size] or [[]])
    return np.repeat(np.arange(len(sizes)), sizes)[np.argsort(when, kind="stable")]


def _end_turn(turn: list[tuple[float, int]], left: list[int], value: float) -> None:
    """Set the first block's new value of f, or remove the block if it is full."""
    _, block = turn[0]
    left[block] -= 1
    if left[block]:
        heapreplace(turn, (value, block))
    else:
        heappop(turn)
