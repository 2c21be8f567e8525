"""References to objects that a process holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from paceline.engines.ray.transport.current import current
from paceline.engines.ray.transport.inbox import Lost
from paceline.engines.ray.transport.link import Address
from paceline.engines.ray.transport.messages import Thing


class Held:
    """An object that a process holds, or will hold, under a key."""

    __slots__ = ("address", "key")

    def __init__(self, address: Address, key: int) -> None:
        self.address, self.key = address, key

    def __reduce__(self) -> tuple[Any, ...]:
        return Held, (self.address, self.key)

    def future(self) -> Future[Thing]:
        """Get it; `Lost` if the connection to its holder ends before."""
        return current().fetch(self.address, self.key)

    @property
    def arrived(self) -> float | None:
        """When it was here, if it was pushed to this process; by `time.monotonic`."""
        try:
            return current().arrived(self.key)
        except Lost:  # the end point is closed
            return None


class Owned(Held):
    """The driver's reference: when it is dropped, the object is released.

    released: the lists of keys to release, of the holder and of a process to which it was pushed.
    """

    __slots__ = ("released",)

    def __init__(self, address: Address, key: int, released: Sequence[deque[int]]) -> None:
        super().__init__(address, key)
        self.released = released

    def __del__(self) -> None:
        for keys in self.released:
            keys.append(self.key)


def give_up(refs: Iterable[Held]) -> None:
    """Cancel the fetches of objects by this process."""
    if keys := [ref.key for ref in refs]:
        current().give_up(keys)
