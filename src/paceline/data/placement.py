"""How much of a batch, and of the data, each worker gets: whole numbers in proportion to speed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from math import inf
from typing import TypeAlias

from paceline.core.protocol import WorkerId

Most: TypeAlias = int | Mapping[WorkerId, int] | None
"""The samples that fit into a worker's memory: of all alike, or by worker; None: any number."""

_STILL = 1e-9
_ROUNDING = 1e-9


def shares(
    total: int, speeds: Sequence[float], least: int = 1, most: Sequence[float] | None = None
) -> tuple[int, ...]:
    """Cut a total in proportion to speeds, so that all are done at the same time.

    Everyone gets `least` or more, and no more than `most`; what those who are held to a limit
    leave or take is shared by the others. The total is kept unless the limits forbid it. In plain
    floats, one by one: whoever computes this, on whatever machine, rounds alike.

    >>> shares(22, [1, 1, 2, 2, 4, 4, 4, 4])
    (1, 1, 2, 2, 4, 4, 4, 4)
    >>> shares(16, [1, 1, 2, 4], most=[16, 16, 16, 6])
    (3, 2, 5, 6)
    """
    upper = [inf] * len(speeds) if most is None else [max(limit, least) for limit in most]
    if total <= least * len(speeds):
        return (least,) * len(speeds)
    if total >= sum(upper):
        return tuple(int(limit) for limit in upper)
    exact = _level(total, _above_zero(speeds), least, upper)
    whole = [int(each + _ROUNDING) for each in exact]
    fractions = sorted(range(len(whole)), key=lambda i: whole[i] - exact[i])
    for i in [i for i in fractions if whole[i] < upper[i]][: total - sum(whole)]:
        whole[i] += 1
    return tuple(whole)


def _above_zero(speeds: Sequence[float]) -> list[float]:
    """Return speeds of which the largest is 1; who stands still is a billion times slower."""
    fastest = max(speeds)
    return [max(speed / fastest, _STILL) if fastest > 0 else 1.0 for speed in speeds]


def _level(total: int, speeds: list[float], least: int, most: Sequence[float]) -> list[float]:
    """Return what all do in the time in which they do the total, within their limits."""

    def done(seconds: float) -> list[float]:
        return [min(max(seconds * v, least), limit) for v, limit in zip(speeds, most, strict=True)]

    def amount(seconds: float) -> float:
        return sum(done(seconds))

    # Between the moments at which one of them meets a limit, the total is linear in the time.
    ends = [min(limit, total) for limit in most]
    corners = sorted({end / v for v, limit in zip(speeds, ends, strict=True)
                      for end in (0, least, limit)})  # fmt: skip
    after = min(bisect_left(corners, float(total), key=amount), len(corners) - 1)
    before = max(after - 1, 0)
    low, high = amount(corners[before]), amount(corners[after])
    part = min(max((total - low) / (high - low), 0.0), 1.0) if high > low else 1.0
    return done(corners[before] + part * (corners[after] - corners[before]))


def limits(most: Most, workers: Sequence[WorkerId]) -> list[float] | None:
    """Return the limit of each worker; who is not named has none."""
    if most is None:
        return None
    if not isinstance(most, Mapping):
        return [float(most)] * len(workers)
    return [float(most.get(worker, inf)) for worker in workers]


def step_seconds(samples: Sequence[float], speeds: Sequence[float]) -> float:
    """Return how long a step takes that waits for everyone: the largest samples / speed."""
    return max(each / speed for each, speed in zip(samples, speeds, strict=True) if each)


def dealt(
    owners: Mapping[int, WorkerId],
    tiles: Sequence[int],
    speeds: Mapping[WorkerId, float],
    first: Sequence[int] = (),
) -> dict[int, WorkerId]:
    """Give the tiles to workers in proportion to speed, and leave as many as can be where they are.

    owners: who has them now; tiles of workers that are not named in `speeds` go to others.
    first: tiles that rather than others leave a worker that has too many.
    """
    workers = list(speeds)
    counts = dict(zip(workers, shares(len(tiles), list(speeds.values())), strict=True))
    new: dict[int, WorkerId] = {}
    rank = {tile: turn for turn, tile in enumerate(first)}
    # Those that shall leave come last, and find their owner's places taken.
    for tile in sorted(tiles, key=lambda tile: -rank.get(tile, len(rank))):
        owner = owners.get(tile)
        if owner is not None and counts.get(owner, 0) > 0:
            counts[owner] -= 1
            new[tile] = owner
    places = (worker for worker in workers for _ in range(counts[worker]))
    for tile in tiles:
        if tile not in new:
            new[tile] = next(places)
    return dict(sorted(new.items()))
