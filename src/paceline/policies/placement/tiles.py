"""Data that stay with the workers, in tiles (data shards): the owner and the debt of each tile."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from paceline.core.protocol import (
    Cancel,
    Event,
    Joined,
    Left,
    Result,
    Task,
    TaskId,
    View,
    Work,
    WorkerId,
)
from paceline.core.schema import converted
from paceline.data.partition.base import Floats, Indices, Partition, rounded
from paceline.data.placement import Most, dealt, step_seconds
from paceline.policies.placement.base import check_most, check_smoothing, sized
from paceline.policies.placement.guard import Guard
from paceline.policies.placement.pace import Pace


@dataclass
class Placed:
    """Keeps the data with the workers: every worker computes on its own tiles (data shards).

    tiles: the partition of the data. If tiles move, use many more tiles than workers, all alike in
        content, so that any worker may own any tile (`partition.balanced(…, shares=64)`).
    move: whether tiles move to other workers when speeds change and when their worker is lost. A
        worker then has tiles in proportion to its speed, and tasks in proportion to its tiles.
        Up to one step's samples, every sample is used once before any is used again. Otherwise
        tiles stay with their worker, speed sets the size of tasks, and results are weighted by
        the worker's fraction of the data.
    owners: the initial tiles of each worker; by default equal numbers of tiles, in order.
    bound: the turns that a worker's data may fall behind before steps wait for the worker; see
        `Guard`. 0: steps wait for all workers. None: tasks are in proportion to the data and
        weighted by samples, and the data of dropped workers are not made up for.
    max_samples: as in `BySpeed`.
    smoothing: the weight of the last task in the average speed. Moving tiles is costly, so it is
        smaller than for `BySpeed`.
    every: steps between checks of the number of tiles per worker. Tiles move if two checks in a
        row expect steps to take `tolerance` less time afterwards.
    """

    tiles: Partition
    move: bool = True
    owners: Mapping[WorkerId, Sequence[int]] | None = None
    bound: float | None = 2.0
    max_samples: Most = None
    smoothing: float = 0.1
    every: int = 10
    tolerance: float = 0.1
    moved: int = field(default=0, init=False)  # tiles that went from one worker to another
    _pace: Pace = field(init=False, repr=False, compare=False)
    _guard: Guard | None = field(init=False, repr=False, compare=False)
    _owner: dict[int, WorkerId] = field(default_factory=dict, init=False, repr=False)
    _carry: dict[int, float] = field(default_factory=dict, init=False, repr=False)  # fractions
    _late: tuple[WorkerId, ...] = field(default=(), init=False, repr=False)
    _settled: bool = field(default=False, init=False, repr=False)
    _looked: int = field(default=0, init=False, repr=False)  # version of the last check
    _wished: bool = field(default=False, init=False, repr=False)  # the last check favored a move
    schema = converted(
        "placed", 1, "moved", "owner", "carry", "late", "settled", "looked", "wished",
        partition="tiles", pace="_pace", guard="_guard",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_smoothing(self.smoothing)
        if not isinstance(self.tiles, Partition):
            self.tiles = Partition(self.tiles)
        if self.bound is not None and not self.bound >= 0:
            raise ValueError(f"bound={self.bound}: use a number of turns >= 0, or None")
        if self.every < 1 or not 0 <= self.tolerance < 1:
            raise ValueError(
                f"every={self.every}, tolerance={self.tolerance}: use every >= 1 step, and a "
                "fraction of the time below 1"
            )
        if not self.tiles.sizes.all():
            empty = int(np.flatnonzero(self.tiles.sizes == 0)[0])
            raise ValueError(
                f"data shard {empty} in tiles= is empty; number the shards from 0 on without "
                "gaps, and use fewer shards than samples"
            )
        if self.owners is not None:
            named = sorted(tile for tiles in self.owners.values() for tile in tiles)
            if named != list(range(self.tiles.parts)):
                raise ValueError(
                    f"owners= must name each of the data shards 0 to {self.tiles.parts - 1} "
                    "exactly once"
                )
            self._owner = {tile: w for w, tiles in self.owners.items() for tile in tiles}
        self._pace = Pace(self.smoothing, steady=True)
        self._guard = None if self.bound is None else Guard(self.tiles.sizes, self.bound)
        self._owned: dict[WorkerId, Indices] = {}
        self._index()

    def for_workers(self, workers: Sequence[WorkerId]) -> Placed:
        """Return this placement with an owner for each tile, if tiles do not move."""
        if self.move or self.owners is not None:
            return self
        even = dealt({}, range(self.tiles.parts), dict.fromkeys(workers, 1.0))
        owners = {w: [tile for tile, owner in even.items() if owner == w] for w in workers}
        return replace(self, owners=owners)

    def check(self, workers: Sequence[WorkerId], samples: Sequence[float]) -> None:
        check_most(self.max_samples, workers, samples)
        if self.tiles.parts < len(workers):
            raise ValueError(
                f"{self.tiles.parts} data shards (tiles) for {len(workers)} workers: each worker "
                "needs at least one; use more shards"
                + (", say 16 for each worker" if self.move else "")
            )
        owners = None if self.move else self.owners
        if owners is not None and (without := [w for w in workers if not owners.get(w)]):
            raise ValueError(
                f"owners= gives no data shard to {', '.join(without)}; each worker needs at least "
                "one"
            )

    def learn(self, view: View, news: Event | Cancel) -> None:
        self._pace.learn(view, news)
        if isinstance(news, Joined | Left):
            self._settled = False

    def sizes(
        self,
        view: View,
        workers: Sequence[WorkerId],
        each: float,
        total: int | None,
        among: Collection[WorkerId] | None,
    ) -> dict[WorkerId, int]:
        self._settle(view)
        if among is not None:
            mean = sum(self._amounts(among)) / len(among)
        else:
            mean = self._pace.mean if self._by_speed else len(self.tiles) / len(view.workers)
        return sized(workers, self._amounts(workers), mean, each, total, self.max_samples)

    @property
    def _by_speed(self) -> bool:
        """Whether speed sets the size of tasks; the guard then sets the weights separately."""
        return not self.move and self._guard is not None

    def _amounts(self, workers: Collection[WorkerId]) -> list[float]:
        """Return the amounts to which the sizes of tasks are proportional."""
        if self._by_speed:
            return self._pace.of(workers)
        return [float(self.tiles.sizes[self._owned[worker]].sum()) for worker in workers]

    def work(self, view: View, worker: WorkerId, work: Work) -> Work:
        """Return the work with samples from the worker's tiles, in proportion to their sizes.

        The proportion holds over several tasks: fractions of samples carry over to the next.
        """
        assert work.samples is not None
        tiles = self._owned[worker]
        sizes = self.tiles.sizes[tiles]
        carried = np.array([self._carry.get(tile, 0.0) for tile in tiles.tolist()])
        wanted: Floats = work.samples * sizes / sizes.sum() + carried
        counts = rounded(wanted, work.samples)
        self._carry.update(zip(tiles.tolist(), (wanted - counts).tolist(), strict=True))
        drawn = {tile: n for tile, n in zip(tiles.tolist(), counts.tolist(), strict=True) if n}
        return replace(work, tiles=drawn)

    def redo(self, worker: WorkerId, lost: Mapping[TaskId, Task]) -> Task | None:
        if self.move:
            return next(iter(lost.values()), None)
        mine = set(self._owned.get(worker, np.empty(0)).tolist())
        return next((t for t in lost.values() if mine.issuperset(t.work.tiles or ())), None)

    def weigh(self, results: Collection[Result], k: int) -> dict[TaskId, float] | None:
        if self._guard is None:
            return None
        weights = self._guard.weigh(results, self._numbers)
        names = list(self._owned)
        late = self._guard.late(self._numbers, len(names), k)
        self._late = tuple(names[number] for number in late.tolist())
        return weights

    def awaited(self, view: View) -> list[WorkerId]:
        if not self._late:
            return []
        here = {result.task.worker for result in view.held.values()}
        return [worker for worker in self._late if worker in view.workers and worker not in here]

    def speeds(self) -> dict[WorkerId, float]:
        """Return the samples a second of each worker that was measured."""
        return self._pace.known()

    def fractions(self) -> dict[WorkerId, float]:
        """Return the fraction of the data that each worker has."""
        sizes = self.tiles.sizes
        total = sizes.sum()
        return {worker: float(sizes[own].sum() / total) for worker, own in self._owned.items()}

    def missed(self) -> dict[int, float]:
        """Return the tiles whose debt was written off, with the number of steps of each."""
        if self._guard is None:
            return {}
        steps = self._guard.missed / self._guard.due
        return {int(tile): float(steps[tile]) for tile in np.flatnonzero(steps > 1e-9)}

    # --- owners of tiles -------------------------------------------------------------------------

    def _settle(self, view: View) -> None:
        """Ensure that all workers have tiles, and periodically check the number of each."""
        # Speeds are less certain early on, so the first checks are one, two, four, … steps apart.
        again = self._looked + min(self.every, self._looked + 1)
        if self._settled and (view.version < again or not self.move):
            return
        if self.move:
            self._deal(view)
        elif not self._owner:
            names = sorted(view.workers, key=lambda name: (len(name), name))
            self._owner = dealt({}, range(self.tiles.parts), dict.fromkeys(names, 1.0))
            self._index()
        self._settled, self._looked = True, view.version

    def _deal(self, view: View) -> None:
        names = sorted(view.workers, key=lambda name: (len(name), name))
        speeds = dict(zip(names, self._pace.of(names), strict=True))
        tiles = range(self.tiles.parts)
        first = [] if self._guard is None else np.argsort(-self._guard.owed, kind="stable").tolist()
        new = dealt(self._owner, tiles, speeds, first)
        homeless = any(owner not in speeds for owner in self._owner.values())
        if not homeless and all(len(self._owned.get(w, ())) for w in names):
            worth = (1 - self.tolerance) * self._seconds(self._owner, speeds)
            before, self._wished = self._wished, self._seconds(new, speeds) < worth
            if not (before and self._wished):
                return
        self._wished = False
        self.moved += sum(self._owner.get(tile, new[tile]) != new[tile] for tile in tiles)
        self._owner = new
        self._index()

    def _seconds(self, owner: Mapping[int, WorkerId], speeds: Mapping[WorkerId, float]) -> float:
        """Return the time for one pass over all data that waits for all workers."""
        samples = dict.fromkeys(speeds, 0)
        for tile, worker in owner.items():
            samples[worker] += int(self.tiles.sizes[tile])
        return step_seconds(list(samples.values()), list(speeds.values()))

    def _index(self) -> None:
        lists: dict[WorkerId, list[int]] = {}
        for tile, worker in sorted(self._owner.items()):
            lists.setdefault(worker, []).append(tile)
        self._owned = {worker: np.array(tiles, np.int64) for worker, tiles in lists.items()}
        self._numbers = np.zeros(self.tiles.parts, np.int64)
        for number, tiles in enumerate(self._owned.values()):
            self._numbers[tiles] = number

    def state_dict(self) -> dict[str, Any]:
        return {
            "moved": self.moved,
            "owner": self._owner,
            "carry": self._carry,
            "late": self._late,
            "settled": self._settled,
            "looked": self._looked,
            "wished": self._wished,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.moved, self._owner, self._carry = state["moved"], state["owner"], state["carry"]
        self._late, self._settled, self._looked = state["late"], state["settled"], state["looked"]
        self._wished = state["wished"]
        self._index()
