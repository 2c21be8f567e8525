"""Each worker's number of samples of a batch and of tiles (data shards), by its speed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from math import inf
from typing import TypeAlias

from paceline.core.protocol import WorkerId

Most: TypeAlias = int | Mapping[WorkerId, int] | None
"""The samples that fit into a worker's memory: one limit for all, or by worker; None: no limit."""

_KEPT = 0.25
"""Of the share by speed alone: what a worker keeps, however many fixed seconds it has."""
_STILL = 1e-9
_ROUNDING = 1e-9


def shares(
    total: int,
    speeds: Sequence[float],
    least: int = 1,
    max_samples: Sequence[float] | None = None,
    fixed: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Divide a total in proportion to speeds, so that all workers finish at the same time.

    Each worker gets at least `least` and at most `max_samples`; the other workers share the
    difference. The shares add up to the total unless the limits forbid it. The arithmetic uses
    plain floats in a fixed order, so every machine rounds alike.

    fixed: seconds that each worker needs beside its samples. They reduce its share to no less than
        a quarter of what its speed alone would give, since they are measured less precisely.

    >>> shares(22, [1, 1, 2, 2, 4, 4, 4, 4])
    (1, 1, 2, 2, 4, 4, 4, 4)
    >>> shares(16, [1, 1, 2, 4], max_samples=[16, 16, 16, 6])
    (3, 2, 5, 6)
    >>> shares(100, [10, 10, 10], fixed=[0, 0, 2])  # all take 4 seconds
    (40, 40, 20)
    """
    upper = (
        [inf] * len(speeds) if max_samples is None else [max(limit, least) for limit in max_samples]
    )
    if total <= least * len(speeds):
        return (least,) * len(speeds)
    if total >= sum(upper):
        return tuple(int(limit) for limit in upper)
    above, lower = _above_zero(speeds), [float(least)] * len(speeds)
    waits = [0.0] * len(speeds)
    if fixed is not None and any(fixed):
        alone = _level(total, above, lower, upper, waits)
        lower = [max(least, _KEPT * each) for each in alone]
        waits = [each * max(speeds) for each in fixed]  # in samples of the fastest
    exact = _level(total, above, lower, upper, waits)
    whole = [int(each + _ROUNDING) for each in exact]
    fractions = sorted(range(len(whole)), key=lambda i: whole[i] - exact[i])
    for i in [i for i in fractions if whole[i] < upper[i]][: total - sum(whole)]:
        whole[i] += 1
    return tuple(whole)


def _above_zero(speeds: Sequence[float]) -> list[float]:
    """Return speeds scaled to a maximum of 1 and a minimum of 1e-9; all 1 if none is above 0."""
    fastest = max(speeds)
    return [max(speed / fastest, _STILL) if fastest > 0 else 1.0 for speed in speeds]


def _level(
    total: int,
    speeds: Sequence[float],
    lower: Sequence[float],
    upper: Sequence[float],
    waits: Sequence[float],
) -> list[float]:
    """Return each worker's samples at the time when all, within their limits, reach `total`."""
    workers = list(zip(speeds, lower, upper, waits, strict=True))

    def done(seconds: float) -> list[float]:
        return [min(max((seconds - wait) * v, low), high) for v, low, high, wait in workers]

    def amount(seconds: float) -> float:
        return sum(done(seconds))

    # Between the times at which a worker reaches a limit, the amount is linear in time.
    corners = sorted({wait + end / v for v, low, high, wait in workers
                      for end in (0.0, low, min(high, total))})  # fmt: skip
    after = min(bisect_left(corners, float(total), key=amount), len(corners) - 1)
    before = max(after - 1, 0)
    first, last = amount(corners[before]), amount(corners[after])
    part = min(max((total - first) / (last - first), 0.0), 1.0) if last > first else 1.0
    return done(corners[before] + part * (corners[after] - corners[before]))


def limits(max_samples: Most, workers: Sequence[WorkerId]) -> list[float] | None:
    """Return the limit of each worker; a worker that is not named has no limit."""
    if max_samples is None:
        return None
    if not isinstance(max_samples, Mapping):
        return [float(max_samples)] * len(workers)
    return [float(max_samples.get(worker, inf)) for worker in workers]


def step_seconds(samples: Sequence[float], speeds: Sequence[float]) -> float:
    """Return the time of a step that waits for all workers: the largest samples / speed."""
    return max(each / speed for each, speed in zip(samples, speeds, strict=True) if each)


def dealt(
    owners: Mapping[int, WorkerId],
    tiles: Sequence[int],
    speeds: Mapping[WorkerId, float],
    first: Sequence[int] = (),
) -> dict[int, WorkerId]:
    """Assign tiles (data shards) to workers in proportion to speed; move as few as possible.

    owners: the current owners; tiles of workers that are not in `speeds` go to others.
    first: tiles that leave a worker before others if it has too many.
    """
    workers = list(speeds)
    counts = dict(zip(workers, shares(len(tiles), list(speeds.values())), strict=True))
    new: dict[int, WorkerId] = {}
    rank = {tile: turn for turn, tile in enumerate(first)}
    # The tiles in `first` come last, when their owner's places may be taken.
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
