"""The objects that come to a process: pushed to it, or asked for."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future

import numpy as np
import ray

from paceline.engines.ray.transport.link import Link
from paceline.engines.ray.transport.messages import Thing
from paceline.learners.base import Array

_DROPPED = 2**14  # released keys that are remembered


class Lost(ray.exceptions.RayError):  # type: ignore[misc]
    """The connection to the holder of an object has ended."""


class Inbox:
    """Fills the futures of fetches; only the thread of its `Peer` uses it."""

    def __init__(self) -> None:
        self._arrived: dict[int, Thing] = {}  # pushed here, and not yet fetched
        self._parts: dict[int, tuple[Array, int]] = {}  # and the values that are still missing
        self.used: set[int] = set()  # pushed here, and fetched
        self.times: dict[int, float] = {}  # when they were here that were pushed
        self._dropped: dict[int, None] = {}  # released last: they may still be on their way here
        self._futures: dict[int, tuple[Future[Thing], Link | None]] = {}

    def collect(self, key: int, future: Future[Thing]) -> bool:
        """Fill a future with what was pushed here; return whether it was there."""
        if key not in self._arrived:
            return False
        fill(future, self._arrived.pop(key))
        self.used.add(key)
        return True

    def expect(self, key: int, future: Future[Thing], link: Link | None) -> None:
        """Fill a future when the object comes; link: the connection to its holder."""
        self._futures[key] = future, link

    def expects(self, key: int) -> bool:
        """Return whether a fetch waits for an object."""
        return key in self._futures

    def take(self, key: int, thing: Thing, pushed: bool = False) -> None:
        """Pass an object to the fetch that waits for it.

        Without one, keep what was pushed until it is fetched or released. Drop the answer to a
        fetch that was given up, and what was released while it was on its way.
        """
        self._parts.pop(key, None)
        if pushed and key not in self._dropped:
            self.times[key] = time.monotonic()
        future, _ = self._futures.pop(key, (None, None))
        if future is not None:
            fill(future, thing)
            if pushed:
                self.used.add(key)
        elif pushed and key not in self._dropped:
            self._arrived[key] = thing

    def take_part(self, key: int, part: Thing, at: Sequence[int]) -> None:
        """Put a part of an array into its place; take the whole when it is complete."""
        if key in self._dropped or key in self.used or not isinstance(part, np.ndarray):
            return
        start, size = at
        if not 0 <= start <= size - part.size:
            raise ValueError(f"a part of {part.size} values at {start} of {size}")
        whole, left = self._parts.pop(key, (None, size))
        if whole is None:
            whole = np.empty(size, part.dtype)
        whole[start : start + part.size] = part
        if left > part.size:
            self._parts[key] = whole, left - part.size
        else:
            whole.flags.writeable = False
            self.take(key, whole, pushed=True)

    def give_up(self, key: int) -> Link | None:
        """Forget a fetch; return the connection to the holder, if it was asked."""
        return self._futures.pop(key, (None, None))[1]

    def lose(self, link: Link, why: str) -> None:
        """Fail the fetches that wait for a connection."""
        for key in [key for key, (_, other) in self._futures.items() if other is link]:
            fail(self._futures.pop(key)[0], f"the connection to {link.address} ended: {why}")

    def release(self, keys: Collection[int]) -> None:
        """Drop what was pushed here, or is on its way here."""
        for key in keys:
            self._arrived.pop(key, None)
            self._parts.pop(key, None)
            self.used.discard(key)
            self.times.pop(key, None)
            self._dropped[key] = None
        for key in list(self._dropped)[:-_DROPPED]:
            del self._dropped[key]

    def end(self, why: str) -> None:
        """Fail all fetches."""
        for future, _ in self._futures.values():
            fail(future, why)
        self._futures.clear()


def fill(future: Future[Thing], thing: Thing) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(thing)


def fail(future: Future[Thing], why: str) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(Lost(why))
