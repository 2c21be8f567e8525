"""Slices on their way to this process, through Ray's stores or directly."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from math import inf, nan
from typing import Any

import ray

from paceline.engines.ray.transport.inbox import Lost
from paceline.engines.ray.transport.refs import Held, give_up
from paceline.learners.base import Array

LONGEST = 3600.0
"""The default timeout of slices, in seconds."""


def timed(refs: Sequence[Any], timeout: float, clock: Callable[[], float]) -> list[float]:
    """Fetch objects; return the seconds that each took: `inf` after a timeout, `nan` for a lost
    object."""
    incoming = Incoming(refs, timeout, clock, all_of_them=True)
    seconds = incoming.seconds
    if incoming.fails():
        lost, late = incoming.failed()
        failed = dict.fromkeys(lost, nan) | dict.fromkeys(late, inf)
        seconds = [failed.get(index, each) for index, each in enumerate(seconds)]
    return seconds


class GivenUp(Exception):
    """The task was abandoned."""


class _Arrivals:
    """Counts arrived slices, and wakes the thread that waits for them, at the first loss as well.

    It does not refer to the futures, which refer to it. So slices are freed with their last
    reference, without the garbage collector.
    """

    def __init__(self, count: int, clock: Callable[[], float], all_of_them: bool) -> None:
        self._all_of_them = all_of_them
        self.seconds = [0.0] * count
        self.wake = threading.Event()
        self._missing, self._lock = count, threading.Lock()
        self._clock, self.began = clock, clock()

    def one_more(self, index: int, ref: Held | None, future: Future[Any]) -> None:
        pushed = None if ref is None else ref.arrived
        self.seconds[index] = (self._clock() if pushed is None else pushed) - self.began
        with self._lock:
            self._missing -= 1
            lost = not self._all_of_them and future.exception(timeout=0) is not None
            if not self._missing or lost:
                self.wake.set()


class Incoming:
    """Slices given as references, each transferred as soon as it exists.

    The waiting thread wakes up when all slices are here, one is lost, or the task is abandoned. It
    does not poll: with every new wait Ray would request the slices again.

    all_of_them: whether to wait for the others after one is lost.
    """

    def __init__(
        self,
        refs: Sequence[Any],
        patience: float = LONGEST,
        clock: Callable[[], float] = time.monotonic,
        all_of_them: bool = False,
    ) -> None:
        self._patience, self._clock, self._all_of_them = patience, clock, all_of_them
        self.slices: list[Array] = []
        self.waited = 0.0  # seconds, by the thread that iterates
        arrivals = _Arrivals(len(refs), clock, all_of_them)
        # Until each arrived: below 0 for what was pushed here before.
        self.seconds, self._wake = arrivals.seconds, arrivals.wake
        self.began = arrivals.began
        self._ended: Exception | None = None  # why it waits no longer
        self._held = [ref for ref in refs if isinstance(ref, Held)]
        self._futures: list[Future[Any]] = [ref.future() for ref in refs]
        for index, (ref, future) in enumerate(zip(refs, self._futures, strict=True)):
            held = ref if isinstance(ref, Held) else None
            future.add_done_callback(partial(arrivals.one_more, index, held))

    def give_up(self) -> None:
        """Stop to wait, since the task was cancelled."""
        self._end(GivenUp())

    def lose(self) -> None:
        """Stop to wait for slices that have not come."""
        if not all(future.done() for future in self._futures):
            self._end(Lost("a slice has moved to another server"))

    def _end(self, why: Exception) -> None:
        self._ended = self._ended or why
        self._wake.set()
        give_up(self._held)

    def here(self, done: int = 0) -> bool:
        """Return whether iterating would not wait; done: see `Arriving`."""
        return self._wake.is_set()

    def __iter__(self) -> Iterator[Array]:
        begin = self._clock()
        if not self._wake.wait(self._patience):
            raise ray.exceptions.GetTimeoutError(
                f"slices did not arrive within {self._patience:g} s"
            )
        self.waited = self._clock() - begin
        if self._ended is not None:
            raise self._ended
        for future in self._futures:
            if future.done():
                future.result(timeout=0)  # raises if it is lost
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
        """Return the indices of lost slices, or if none is lost, of late slices."""
        lost, late = [], []
        for index, future in enumerate(self._futures):
            try:
                future.result(timeout=0)
            except TimeoutError:
                late.append(index)
            except ray.exceptions.RayError:
                lost.append(index)
        return lost, late if self._all_of_them or not lost else []
