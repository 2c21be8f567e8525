"""Sees to it that no part of the data is forgotten, whoever is slow, dropped or not selected.

Every tile of the data is owed its part of every step, and is paid when a result on it is used: a
result weighs what its tiles are owed. So over any number of steps T the weight that a tile of the
fraction p of all data has had is p T, less what it is owed at that moment. And that is bounded:
those who are owed too much are waited for. The sum of a step's weights is 1 on the average and
not in each step: what is missing in one comes in another.

Weights that count how often a part takes part are those of unbiased partial participation, as in
Gu et al., 2021, arXiv 2106.04159 (MIFA), and Wang and Ji, 2022, arXiv 2205.13648, who show that
averaging over who happens to come converges to the wrong point when data and speed go together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from paceline.core.protocol import Result, TaskId
from paceline.data.partition.base import Floats, Indices


class Guard:
    """What each tile is owed, in steps' worth of weight.

    bound: how many results' worth (each 1 / k of a step) a worker's tiles may be owed, before
        steps wait for them.
    """

    def __init__(self, sizes: Indices, bound: float) -> None:
        self.due: Floats = sizes / sizes.sum()  # in each step
        self.owed: Floats = np.zeros(len(sizes))
        self.missed: Floats = np.zeros(len(sizes))  # never to be paid: nobody had the tile
        self._bound = bound

    def weigh(self, results: Iterable[Result]) -> dict[TaskId, float]:
        """Let a step be due, and pay with it those tiles that results are of."""
        self.owed += self.due
        held = [(result.task.id, _portions(result)) for result in results]
        total: dict[int, float] = {}
        for _, portions in held:
            for tile, part in portions.items():
                total[tile] = total.get(tile, 0.0) + part
        claims = {
            id: sum(self.owed[tile] * part / total[tile] for tile, part in portions.items())
            for id, portions in held
        }
        weights = {id: max(float(claim), 0.0) for id, claim in claims.items()}
        for id, portions in held:
            samples = sum(portions.values())
            for tile, part in portions.items():
                self.owed[tile] -= weights[id] * part / samples
        return weights

    def late(self, owner: Indices, workers: int, k: int) -> Indices:
        """Return whom the next step has to wait for: the numbers of workers, `owner` of each tile.

        What is owed beyond the bound can only be of workers that are away, and is written off:
        a result that weighed more than all others of some steps would do more harm than good.
        """
        most = self._bound / k
        owed = np.bincount(owner, self.owed, workers)
        limit = most + np.bincount(owner, self.due, workers)
        kept = np.minimum(limit / np.maximum(owed, limit), 1.0)[owner]
        self.missed += self.owed * (1 - kept)
        self.owed *= kept
        return np.flatnonzero(owed >= most - 1e-9)  # what rounding may have taken

    def state_dict(self) -> dict[str, Any]:
        return {"owed": self.owed.tolist(), "missed": self.missed.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.owed, self.missed = np.array(state["owed"]), np.array(state["missed"])


def _portions(result: Result) -> Mapping[int, int]:
    tiles = result.task.work.tiles
    if tiles is None:
        raise ValueError(
            f"the result of task {result.task.id} is of no tile; tasks of a run with placed data "
            "must name theirs"
        )
    return tiles
