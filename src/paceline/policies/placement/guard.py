"""Keeps all data represented in training, even if workers are slow, dropped or not selected.

A tile is a data shard. Every step adds to the debt of each tile the tile's fraction of the data.
When a step uses a result, the result's weight is the whole debt of the worker that owns its tiles,
and that debt becomes 0. So over T steps the data of a worker, a fraction p of all, get the weight p
T minus the current debt. The debt is bounded: steps wait for workers whose debt is too large. The
weights of a step sum to 1 on average, not in each step: weight missing in one step comes in a later
one.

Averaging the results that happen to arrive converges to the wrong point if data and speed are
correlated. Weighting by the time that a worker was missing corrects this (Wang and Ji, 2023, arXiv
2306.03401, estimate the weights online). Another remedy is to keep using the last update of a
missing worker (Gu et al., 2021, arXiv 2106.04159).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from paceline.core.protocol import Result, TaskId
from paceline.core.schema import converted
from paceline.data.partition.base import Floats, Indices


class Guard:
    """The debt of each tile (data shard): the weight that past steps did not give it, in steps.

    bound: the debt of a worker's tiles, in turns, at which steps wait for it. If steps wait for k
        of n workers, a worker's turn comes every n / k steps.
    """

    schema = converted("guard", 1, "owed", "missed")

    def __init__(self, sizes: Indices, bound: float) -> None:
        self.due: Floats = sizes / sizes.sum()  # added to the debt in each step
        self.owed: Floats = np.zeros(len(sizes))
        self.missed: Floats = np.zeros(len(sizes))  # written off: the tile's worker was away
        self._bound = bound

    def weigh(self, results: Iterable[Result], owner: Indices) -> dict[TaskId, float]:
        """Add one step to all debts; return weights that pay the owners of the results' tiles.

        Several results on one owner's tiles share the owner's debt by their samples.
        """
        self.owed += self.due
        parts = {result.task.id: _by_owner(result, owner) for result in results}
        samples: dict[int, float] = {}
        for part in parts.values():
            for number, count in part.items():
                samples[number] = samples.get(number, 0.0) + count
        owed = np.bincount(owner, self.owed, int(owner.max()) + 1)
        paid = np.isin(owner, list(samples))
        self.owed[paid] = 0.0
        return {
            id: sum(float(owed[number]) * n / samples[number] for number, n in part.items())
            for id, part in parts.items()
        }

    def late(self, owner: Indices, workers: int, k: int) -> Indices:
        """Return the numbers of the workers that the next step must wait for.

        owner: the number of each tile's worker.

        Only disconnected workers can have a debt beyond the bound, and that part is written off.
        A result with more weight than all others of some steps would do more harm than good.
        """
        owed = np.bincount(owner, self.owed, workers)
        due = np.bincount(owner, self.due, workers)
        most = self._bound * due * workers / max(k, 1)  # a deadline may pass without any worker
        limit = most + due
        kept = np.minimum(limit / np.maximum(owed, limit), 1.0)[owner]
        self.missed += self.owed * (1 - kept)
        self.owed *= kept
        return np.flatnonzero(owed >= most - 1e-9)  # allow for rounding

    def state_dict(self) -> dict[str, Any]:
        return {"owed": self.owed.tolist(), "missed": self.missed.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.owed, self.missed = np.array(state["owed"]), np.array(state["missed"])


def _by_owner(result: Result, owner: Indices) -> dict[int, int]:
    """Return a result's number of samples from each owner's tiles."""
    tiles = result.task.work.tiles
    if tiles is None:
        raise ValueError(
            f"task {result.task.id} names no data shard; with Placed, every task must name its "
            "shards in Work(tiles=…)"
        )
    found: dict[int, int] = {}
    for tile, samples in tiles.items():
        number = int(owner[tile])
        found[number] = found.get(number, 0) + samples
    return found
