"""The part of a worker or server that holds objects for other processes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import ray

from paceline.engines.ray.transport.current import close_peer, open_peer
from paceline.engines.ray.transport.inbox import Lost
from paceline.engines.ray.transport.link import Address
from paceline.engines.ray.transport.messages import Part
from paceline.engines.ray.transport.peer import PING, Peer
from paceline.learners.base import Array, Span

_REACH_SECONDS = 15.0

Holding: TypeAlias = tuple[
    str, Sequence[int], Sequence[int], Sequence[int], Sequence[Address | None], bool
]
"""The method to call, the keys of what it returns after its first value, their orders among what
waits to be sent, the keys to release, and the address to which each object is pushed, if any. Last,
whether objects are pushed only after one of them was asked for."""


class Sending:
    """Pushes parts of what a method will return, while it still runs."""

    def __init__(self, peer: Peer, order: Holding) -> None:
        _, self._keys, self._orders, _, to, self._waits = order
        self._peer = peer
        self._to = [None if each is None else (each[0], each[1]) for each in to]
        self._sent: dict[int, list[Span]] = {}  # by key

    @property
    def wanted(self) -> bool:
        return any(self._to) and not self._waits

    def send(self, index: int, part: Array, at: Part) -> None:
        """Push a part of an object, the method's own name of which is an index from 0 on."""
        end, key = self._to[index], self._keys[index]
        if end is None or end == self._peer.address:
            return
        via = self._peer.relay(each for each in self._to if each is not None) or end
        self._peer.push(key, part.copy(), at, self._orders[index], end, via)
        self._sent.setdefault(key, []).append((at[0], at[0] + part.size))

    def hold(self, things: Sequence[Any]) -> None:
        """Hold the objects, and push what has not been pushed of them."""
        given = dict(zip(self._keys, things, strict=True))
        to = {
            key: end
            for key, end in zip(self._keys, self._to, strict=False)
            if end is not None and given[key] is not None
        }
        missing = {
            key: gaps(sent, given[key].size) for key, sent in self._sent.items() if key in to
        }
        orders = dict(zip(self._keys, self._orders, strict=True))
        self._peer.hold(given, to, orders, missing, self._waits)


class Holder:
    """Calls its own methods, and holds what they return for other processes."""

    _peer: Peer | None = None
    _sending: Sending | None = None  # of the call that runs

    def _open(self, secret: bytes | None) -> Address | None:
        """Open the end point of this process, if there is a secret; return its address."""
        if secret is None:
            close_peer()
            self._peer = None
            return None
        self._peer = open_peer(ray.util.get_node_ip_address(), secret)
        return self._peer.address

    def holding(self, order: Holding, *given: Any) -> Any:
        """Call a method, hold all values that it returns but the first, and return that one."""
        return self._held(order, *given)[0]

    def publishing(self, order: Holding, *given: Any) -> Any:
        """Call a method, hold all values that it returns but the first, and return all."""
        return self._held(order, *given)

    @ray.method(concurrency_group="report")  # type: ignore[untyped-decorator]
    def unreachable(self, addresses: Sequence[Address]) -> str | None:
        """Return why one of the addresses cannot be reached from here, or None."""
        assert self._peer is not None
        for host, port in addresses:
            try:
                self._peer.fetch((host, port), PING).result(timeout=_REACH_SECONDS)
            except (Lost, TimeoutError) as error:
                return f"{self._peer.address[0]} cannot reach {host}:{port} ({error})"
        return None

    def _held(self, order: Holding, *given: Any) -> Any:
        method, _, _, released, _, _ = order
        assert self._peer is not None
        self._peer.release(released)
        sending = self._sending = Sending(self._peer, order)
        try:
            values = getattr(self, method)(*given)
        finally:
            self._sending = None
        sending.hold([_own(value) for value in values[1:]])
        return values


def gaps(spans: Sequence[Span], size: int) -> list[Span]:
    """Return what spans leave out of a whole."""
    edges = [(0, 0), *sorted(spans), (size, size)]
    return [(a, b) for (_, a), (b, _) in pairwise(edges) if a < b]


def _own(thing: Any) -> Any:
    """Copy arrays that the process goes on working on."""
    if isinstance(thing, np.ndarray):
        return thing.copy() if thing.flags.writeable else thing
    if isinstance(thing, tuple):
        arrays, data = thing
        return {name: _own(array) for name, array in arrays.items()}, data
    return thing
