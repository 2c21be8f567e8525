"""Placements of parts on rows: around a circle by speed, on the edges of a graph, or at random."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from math import inf

import numpy as np

Holders = tuple[tuple[int, ...], ...]  # for each part the rows that compute it


def around(loads: Sequence[int], parts: int) -> Holders:
    """Lay the loads one after the other around the circle of parts, and return the holders.

    >>> around([2, 2, 2], 3)
    ((0, 1), (0, 2), (1, 2))
    """
    holders: list[list[int]] = [[] for _ in range(parts)]
    position = 0
    for row, load in enumerate(loads):
        for step in range(load):
            holders[(position + step) % parts].append(row)
        position += load
    return tuple(map(tuple, holders))


def loads(speeds: Sequence[float], parts: int, copies: int) -> list[int]:
    """Return the number of parts of each worker, in proportion to its speed, at most all parts.

    Each part is placed `copies` times, for codes in the manner of Wang et al.
    ("Heterogeneity-aware gradient coding", 2019). A share above all parts is capped, and its
    excess goes to the others; fractions go to the largest remainders.

    >>> loads([1, 1, 1, 2, 2, 4, 4, 8], 24, 2)
    [2, 2, 2, 4, 4, 9, 8, 17]
    """
    if not all(0 <= speed < inf for speed in speeds) or copies > sum(s > 0 for s in speeds):
        raise ValueError(
            f"{copies} copies of every part need as many workers of positive, finite speed; "
            f"speeds={list(speeds)}"
        )
    full: set[int] = set()
    while True:
        total = sum(speed for i, speed in enumerate(speeds) if i not in full)
        left = parts * (copies - len(full))
        shares = [
            float(parts) if i in full else left * speed / total if left else 0.0
            for i, speed in enumerate(speeds)
        ]
        over = {i for i, share in enumerate(shares) if share > parts} - full
        if not over:
            break
        full |= over
    given = [int(share + 1e-12) for share in shares]
    by_remainder = sorted(range(len(given)), key=lambda i: given[i] - shares[i])
    spare = [i for i in by_remainder if speeds[i] > 0 and given[i] < parts]
    for i in spare[: parts * copies - sum(given)]:
        given[i] += 1
    return given


def scattered(n: int, parts: int, copies: int, seed: int = 0) -> Holders:
    """Give each part to `copies` different rows at random, with loads that differ little."""
    if not 1 <= copies <= n:
        raise ValueError(f"{copies} copies on {n} rows; use 1 to {n}")
    rng = np.random.default_rng(seed)
    holders: list[tuple[int, ...]] = []
    left: list[int] = []
    for _ in range(parts):
        chosen: list[int] = []
        while len(chosen) < copies:
            if not left:
                left = rng.permutation(n).tolist()
            # Take the next row that does not hold this part; a new round may begin with a holder.
            at = next((i for i, row in enumerate(left) if row not in chosen), None)
            if at is None:
                left += rng.permutation(n).tolist()
                continue
            chosen.append(left.pop(at))
        holders.append(tuple(sorted(chosen)))
    return tuple(holders)


def regular_graph(vertices: int, degree: int, seed: int = 0) -> list[tuple[int, int]]:
    """Return the edges of a random simple graph in which every vertex has this degree.

    Pairs the ends of edges at random, and exchanges ends of loops and double edges with others.
    """
    if not 1 <= degree < vertices or vertices * degree % 2:
        raise ValueError(
            f"{vertices} vertices of degree {degree}; use a degree below the number of vertices, "
            "and an even product"
        )
    rng = np.random.default_rng(seed)
    ends = np.repeat(np.arange(vertices), degree)
    for attempt in count():
        if attempt % 100 == 0:  # exchanges may fail in dense graphs; shuffle again
            rng.shuffle(ends)
        edges = np.sort(ends.reshape(-1, 2), axis=1)
        names = edges[:, 0] * vertices + edges[:, 1]
        bad = np.ones(len(edges), dtype=bool)
        bad[np.unique(names, return_index=True)[1]] = False
        bad |= edges[:, 0] == edges[:, 1]
        if not bad.any():
            break
        for at in np.flatnonzero(bad).tolist():
            other = int(rng.integers(len(ends)))
            ends[[2 * at, other]] = ends[[other, 2 * at]]
    return [(u, v) for u, v in edges.tolist()]
