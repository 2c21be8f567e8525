"""Bringing slices to a process: by Ray's stores, or the short way over a long link.

Ray's object stores find and fetch an object in three round trips. Where a round trip takes longer
than the bytes, a slice is asked of the carrier on its node instead, a process that sends what lies
in its store, and comes back within the reply: one round trip. Nothing depends on it: without a
carrier, slices go by the stores.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeAlias

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from paceline.core.logs import logger_of
from paceline.learners.base import Array

logger = logger_of(__name__)

FAR = 0.005
"""Seconds of a round trip from which on a node counts as far."""
CARRIED_BYTES = 8 * 2**20
"""Larger slices go by the stores: their bytes take longer than the round trips saved."""
_LONGEST = 3600.0  # seconds; the engine gives a worker up long before
Carriers: TypeAlias = Mapping[str, Any]
"""The carrier of each far node."""


class Carrier:
    """Wrapped by `ray.remote` where it is created, so this stays a plain class."""

    async def read(self, refs: Sequence[Any]) -> Any:
        """Return an object of this node's store, when it is there."""
        return await refs[0]

    async def ping(self) -> None:
        pass


def start_carriers(nodes: Sequence[str], patience: float) -> dict[str, Any]:
    """Start a carrier on each node; return none if no node is far from here, or one is silent."""
    inline = {"RAY_max_direct_call_object_size": str(CARRIED_BYTES + 2**16)}
    carrier = ray.remote(
        num_cpus=0, max_restarts=0, max_task_retries=0, runtime_env={"env_vars": inline}
    )(Carrier)
    made = {
        node: carrier.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote()
        for node in nodes
    }
    try:
        ray.get([actor.ping.remote() for actor in made.values()], timeout=patience)
        if max(_round_trip(actor, patience) for actor in made.values()) > FAR:
            return made
    except ray.exceptions.RayError as error:
        logger.warning("slices go by the stores alone: %s", error)
    for actor in made.values():
        ray.kill(actor)
    return {}


def _round_trip(actor: Any, patience: float) -> float:
    times = []
    for _ in range(3):
        begin = time.monotonic()
        ray.get(actor.ping.remote(), timeout=patience)
        times.append(time.monotonic() - begin)
    return min(times)


def ask(refs: Sequence[Any], nodes: Sequence[str | None], carriers: Carriers) -> list[Any]:
    """Have objects brought here: those with a node by its carrier, the others by the stores."""
    if not carriers:
        return list(refs)
    here = ray.get_runtime_context().get_node_id()
    return [
        ref
        if node is None or node == here or node not in carriers
        else carriers[node].read.remote([ref])
        for ref, node in zip(refs, nodes, strict=True)
    ]


class GivenUp(Exception):
    """The task is not wanted any more."""


class Incoming:
    """Slices that come as references, and travel as soon as they appear.

    Whoever waits is woken when all are here or the task is given up, and never looks in between:
    a wait that begins again and again makes Ray ask for the slices again and again.
    """

    def __init__(
        self,
        refs: Sequence[Any],
        patience: float = _LONGEST,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._patience, self._clock = patience, clock
        self.slices: list[Array] = []
        self.waited = 0.0  # by whoever iterates
        self.seconds = [0.0] * len(refs)  # until each was here
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._given_up = False
        self._missing = len(refs)
        self._begin = clock()
        self._futures: list[Future[Any]] = [ref.future() for ref in refs]
        for index, future in enumerate(self._futures):
            future.add_done_callback(partial(self._arrived, index))

    def give_up(self) -> None:
        self._given_up = True
        self._wake.set()

    def __iter__(self) -> Iterator[Array]:
        begin = self._clock()
        if not self._wake.wait(self._patience):
            raise ray.exceptions.GetTimeoutError(f"slices did not come in {self._patience:g} s")
        self.waited = self._clock() - begin
        if self._given_up:
            raise GivenUp
        self.slices = [future.result(timeout=0) for future in self._futures]
        yield from self.slices

    def _arrived(self, index: int, future: Future[Any]) -> None:
        self.seconds[index] = self._clock() - self._begin
        with self._lock:
            self._missing -= 1
            if not self._missing:
                self._wake.set()
