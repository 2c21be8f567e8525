"""Transfer of slices to a process: through Ray's object stores, or through carriers.

Ray's object stores find and fetch an object in three round trips. A carrier is a process that
returns an object of its node's store within the reply: one round trip. Carriers serve links whose
round trip takes longer than the bytes. They are optional: without a carrier, slices go through the
stores.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from math import inf, nan
from typing import Any, TypeAlias

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from paceline.core.logs import logger_of
from paceline.learners.base import Array

logger = logger_of(__name__)

FAR = 0.005
"""A node counts as far if a round trip to it takes more than these seconds."""
CARRIED_BYTES = 8 * 2**20
"""Larger slices go through the stores: their bytes take longer than the saved round trips."""
LONGEST = 3600.0
"""The default timeout of slices, in seconds."""
Carriers: TypeAlias = Mapping[str, Any]
"""The carrier of each node; empty if no node is far."""


class Carrier:
    """Returns objects of its node's store. `start_carriers` wraps this class by `ray.remote`."""

    async def read(self, refs: Sequence[Any]) -> Any:
        """Return an object of this node's store, once it is there."""
        return await refs[0]

    async def ping(self) -> None:
        pass


def start_carriers(nodes: Sequence[str], patience: float) -> dict[str, Any]:
    """Start a carrier on each node; return {} if no node is far from here, or a node is silent."""
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
        if max(_round_trips(list(made.values()), patience)) > FAR:
            return made
    except ray.exceptions.RayError as error:
        logger.warning("slices go through Ray's object stores only: %s", error)
    for actor in made.values():
        ray.kill(actor)
    return {}


def _round_trips(actors: Sequence[Any], timeout: float) -> list[float]:
    """Return the shortest of three round trips to each actor; the timeout covers them all."""
    until = time.monotonic() + timeout
    times = []
    for actor in [*actors] * 3:
        begin = time.monotonic()
        ray.get(actor.ping.remote(), timeout=max(until - begin, 0.0))
        times.append(time.monotonic() - begin)
    return [min(times[i :: len(actors)]) for i in range(len(actors))]


def ask(refs: Sequence[Any], nodes: Sequence[str | None], carriers: Carriers) -> list[Any]:
    """Return references for objects here: by the carrier of a given node, else by the stores."""
    if not carriers:
        return list(refs)
    here = ray.get_runtime_context().get_node_id()
    return [
        ref
        if node is None or node == here or node not in carriers
        else carriers[node].read.remote([ref])
        for ref, node in zip(refs, nodes, strict=True)
    ]


def timed(refs: Sequence[Any], timeout: float, clock: Callable[[], float]) -> list[float]:
    """Fetch objects; return the seconds that each took: `inf` after a timeout, `nan` for a lost
    object."""
    incoming = Incoming(refs, timeout, clock)
    seconds = incoming.seconds
    if incoming.fails():
        lost, late = incoming.failed()
        failed = dict.fromkeys(lost, nan) | dict.fromkeys(late, inf)
        seconds = [failed.get(index, each) for index, each in enumerate(seconds)]
    return seconds


class GivenUp(Exception):
    """The task was abandoned."""


class _Arrivals:
    """Counts arrived slices, and wakes the thread that waits for all of them.

    It does not refer to the futures, which refer to it. So slices are freed with their last
    reference, without the garbage collector.
    """

    def __init__(self, count: int, clock: Callable[[], float]) -> None:
        self.seconds = [0.0] * count
        self.wake = threading.Event()
        self._missing, self._lock = count, threading.Lock()
        self._clock, self._begin = clock, clock()

    def one_more(self, index: int, future: Future[Any]) -> None:
        self.seconds[index] = self._clock() - self._begin
        with self._lock:
            self._missing -= 1
            if not self._missing:
                self.wake.set()


class Incoming:
    """Slices given as references, each transferred as soon as it exists.

    The waiting thread wakes up when all slices are here or the task is abandoned. It does not poll:
    with every new wait Ray would request the slices again.
    """

    def __init__(
        self,
        refs: Sequence[Any],
        patience: float = LONGEST,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._patience, self._clock = patience, clock
        self.slices: list[Array] = []
        self.waited = 0.0  # seconds, by the thread that iterates
        arrivals = _Arrivals(len(refs), clock)
        self.seconds, self._wake = arrivals.seconds, arrivals.wake  # until each arrived
        self._given_up = False
        self._futures: list[Future[Any]] = [ref.future() for ref in refs]
        for index, future in enumerate(self._futures):
            future.add_done_callback(partial(arrivals.one_more, index))

    def give_up(self) -> None:
        self._given_up = True
        self._wake.set()

    def __iter__(self) -> Iterator[Array]:
        begin = self._clock()
        if not self._wake.wait(self._patience):
            raise ray.exceptions.GetTimeoutError(
                f"slices did not arrive within {self._patience:g} s"
            )
        self.waited = self._clock() - begin
        if self._given_up:
            raise GivenUp
        self.slices = [future.result(timeout=0) for future in self._futures]
        yield from self.slices

    def fails(self) -> bool:
        """Wait for all slices; return whether one is lost or late."""
        try:
            list(self)
        except ray.exceptions.RayError:
            return True
        return False

    def failed(self) -> tuple[list[int], list[int]]:
        """Return the indices of lost slices, and of late slices."""
        lost, late = [], []
        for index, future in enumerate(self._futures):
            try:
                future.result(timeout=0)
            except TimeoutError:
                late.append(index)
            except ray.exceptions.RayError:
                lost.append(index)
        return lost, late
