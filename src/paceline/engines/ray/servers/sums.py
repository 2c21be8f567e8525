"""Results of one node, added up there before they leave it.

The server on a node with several workers adds up their results, and servers on other nodes fetch
the sum alone. Every server adds up in the same order, with or without such sums: first the results
of each node, then those sums. So a lost sum does not change the bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.engines.ray.servers.slices import NodeSum, Result
from paceline.learners.base import Array

_BLOCK = 2**16  # values at a time, which stay in the cache


def by_node(results: Sequence[Result]) -> list[NodeSum]:
    """Return the results of each node, by their places in the order of results."""
    found: dict[str, list[int]] = {}
    for index, result in enumerate(results):
        found.setdefault(result.node, []).append(index)
    return [NodeSum(node, members) for node, members in found.items()]


def weighted_sum(weights: Sequence[float], vectors: Sequence[Array]) -> Array:
    """Return the sum of weighted vectors, added up in their order.

    Raise ValueError if they are not alike; then one of them is spoiled.

    >>> weighted_sum([0.5, 2.0], [np.array([2.0, 4.0]), np.array([1.0, 0.0])]).tolist()
    [3.0, 2.0]
    """
    if len({(vector.shape, vector.dtype) for vector in vectors}) > 1:  # numpy would broadcast
        raise ValueError("results of one step differ in shape or type")
    found = np.empty_like(vectors[0])
    for start in range(0, found.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        np.multiply(vectors[0][block], weights[0], out=found[block])
        for weight, vector in zip(weights[1:], vectors[1:], strict=True):
            found[block] += weight * vector[block]
    return found


def grouped(
    weights: Sequence[float], vectors: Sequence[Array], groups: Sequence[Sequence[int]]
) -> tuple[list[float], list[Array]]:
    """Return weights and vectors with each group of several added up to one.

    groups: the places of the vectors that belong together.
    """
    factors, found = [], []
    for group in groups:
        if len(group) == 1:
            factors.append(weights[group[0]])
            found.append(vectors[group[0]])
        else:
            factors.append(1.0)
            found.append(weighted_sum([weights[i] for i in group], [vectors[i] for i in group]))
    return factors, found
