"""Sees to it that no part of the data is forgotten, whoever is slow, dropped or not selected.

Every tile of the data is owed its part of every step. When results are used, each pays those who
own its tiles: it weighs what all tiles of these workers are owed. So over any number of steps T
the weight that a worker's data, a fraction p of all, have had is p T, less what they are owed at
that moment. And that is bounded: those who are owed too much are waited for. The sum of a step's
weights is 1 on the average and not in each step: what is missing in one comes in another.

To average over who happens to come leads to the wrong point when data and speed go together; to
weigh by how long somebody was missing corrects it (Wang and Ji, 2023, arXiv 2306.03401, who
estimate the weights online; another cure is to go on using the last update of who is missing, Gu
et al., 2021, arXiv 2106.04159).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from paceline.core.protocol import Result, TaskId
from paceline.data.partition.base import Floats, Indices


class Guard:
    """What each tile is owed, in steps' worth of weight.

    bound: how many turns a worker's tiles may be owed before steps wait for them. If k of n are
        awaited, a worker's turn comes every n / k steps.
    """

    def __init__(self, sizes: Indices, bound: float) -> None:
        self.due: Floats = sizes / sizes.sum()  # in each step
        self.owed: Floats = np.zeros(len(sizes))
        self.missed: Floats = np.zeros(len(sizes))  # never to be paid: nobody had the tile
        self._bound = bound

    def weigh(self, results: Iterable[Result], owner: Indices) -> dict[TaskId, float]:
        """Let a step be due, and pay with it the owners of the tiles that results are of.

        Several results on one owner's tiles share what it is owed, by their samples.
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
        """Return whom the next step has to wait for: the numbers of workers, `owner` of each tile.

        What is owed beyond the bound can only be of workers that are away, and is written off:
        a result that weighed more than all others of some steps would do more harm than good.
        """
        owed = np.bincount(owner, self.owed, workers)
        due = np.bincount(owner, self.due, workers)
        most = self._bound * due * workers / max(k, 1)  # a deadline may pass with nobody there
        limit = most + due
        kept = np.minimum(limit / np.maximum(owed, limit), 1.0)[owner]
        self.missed += self.owed * (1 - kept)
        self.owed *= kept
        return np.flatnonzero(owed >= most - 1e-9)  # what rounding may have taken

    def state_dict(self) -> dict[str, Any]:
        return {"owed": self.owed.tolist(), "missed": self.missed.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.owed, self.missed = np.array(state["owed"]), np.array(state["missed"])


def _by_owner(result: Result, owner: Indices) -> dict[int, int]:
    """Return how many of a result's samples are of each owner's tiles."""
    tiles = result.task.work.tiles
    if tiles is None:
        raise ValueError(
            f"the result of task {result.task.id} is of no tile; tasks of a run with placed data "
            "must name theirs"
        )
    found: dict[int, int] = {}
    for tile, samples in tiles.items():
        number = int(owner[tile])
        found[number] = found.get(number, 0) + samples
    return found
