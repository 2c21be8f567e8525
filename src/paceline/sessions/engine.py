"""The engine of a run that processes join: `Ray` with seats in place of worker actors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from typing import Any

from paceline.core.protocol import Command, Start, WorkerId
from paceline.engines.base import Job
from paceline.engines.kinds import Fleet
from paceline.engines.ray.engine import Ray
from paceline.engines.ray.job import RayJob
from paceline.engines.ray.pool import Cluster, Pool
from paceline.engines.ray.reclaimed import Notice
from paceline.engines.ray.worker import Worker
from paceline.sessions.seats import Seat, Seats

_RESPAWNS = 10**9
"""A seat is made anew after each loss: a process that stays away costs nothing."""


class SeatCluster(Cluster):
    """A cluster whose workers are seats. Ray runs already: the hub is one of its actors."""

    def watch(self, tell: Callable[[frozenset[str]], None]) -> Callable[[], None]:
        return lambda: None  # a loop of the user's leaves by itself

    def listen(self, actor: Seat, tell: Callable[[Notice | None], None]) -> None:
        pass

    def __init__(self, seats: Seats) -> None:
        super().__init__()
        self._seats = seats

    def connect(self, address: str | None, workers: int, store_bytes: int) -> bool:
        return False

    def warn_small_stores(self, servers: bool, workers: int, model: int, state: int) -> None:
        pass  # the hub may be on any node

    def gpus(self) -> float:
        return 0.0  # a client has the GPUs of its own process

    def make_workers(
        self, fleet: Fleet, gpus: Mapping[str, float], fixed: bool, actor: type = Worker
    ) -> Callable[[str], Any]:
        return self._seats.make

    def put(self, thing: Any) -> Any:
        return thing  # it is small: a client has the model and the data

    def kill(self, actor: Seat) -> None:
        self._seats.dismiss(actor)

    def has_process(self, actor: Seat) -> bool:
        return actor.client is not None

    def has_lost(self, node: str) -> bool:
        return False  # a client need not be on a node of the cluster

    def tell_waiting(self, name: str) -> None:
        pass  # a vacant seat is the normal case


class Sessions(Ray):
    """Workers that dial in, up to `workers` at a time; `seats` has them.

    timeout: seconds a task may take before its worker counts as lost.
    last: the step with which the run ends. No loop gets a task after it.
    """

    def __init__(
        self, workers: int, seats: Seats, *, timeout: float = 600.0, last: int | None = None
    ) -> None:
        self._seats, self._last = seats, inf if last is None else last
        super().__init__(workers, timeout=timeout, respawns=_RESPAWNS, servers="driver")

    def _make_cluster(self) -> Cluster:
        return SeatCluster(self._seats)

    _learns_timeouts = False  # a loop of the user's may evaluate for minutes

    def _make_job(self, job: Job, pool: Pool) -> RayJob:
        made = super()._make_job(job, pool)

        def lost(seat: Seat, why: str) -> None:
            self._calls.post(partial(made.disconnected, seat, why))

        self._seats.lost = lost
        return made

    def execute(self, node: WorkerId, command: Command) -> None:
        if not (isinstance(command, Start) and command.task.version >= self._last):
            super().execute(node, command)

    def __repr__(self) -> str:
        return f"Sessions(workers={self.size})"
