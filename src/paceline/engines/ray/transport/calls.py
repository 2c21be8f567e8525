"""How the driver calls a process whose values stay where they are made."""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from paceline.engines.ray.transport.refs import Owned

if TYPE_CHECKING:  # which imports this module
    from paceline.engines.ray.pool import Member
    from paceline.engines.ray.servers.slices import Object


_keys = itertools.count()  # of all jobs: objects of the one before are released during the next
_KINDS = 3  # in the order of need: results that lead to a version, its slices, copies of its state


class Made(NamedTuple):
    """The values and the state of a slice that a call makes.

    lag: steps that may follow before the state must have arrived elsewhere.
    """

    version: int
    lag: int
    values: Object
    state: Object


class Transport(Protocol):
    """Calls processes, and names the objects that they make.

    direct: whether results are in the process of their worker, and are lost with it.
    """

    direct: bool

    def call(
        self,
        member: Member,
        version: int,
        to: Sequence[Member],
        waits: bool,
        method: str,
        count: int,
        *given: Any,
    ) -> tuple[Any, list[Any]]:
        """Call a method; return the references of its first value, and of the `count` others.

        version: of the model for which these others are needed.
        to: the processes to which they are pushed, if any.
        waits: whether to push them after one of them was asked for, and not as soon as they exist.
        """

    def publish(self, member: Member, made: Made, method: str, *given: Any) -> Any:
        """Call a method whose second and third value outlive the process; return the reference of
        the first."""

    def unreachable(self, workers: Iterable[Member], servers: Iterable[Member]) -> list[Any]:
        """Ask workers whether they reach all servers; return the references of their answers, each
        None or the reason why not."""


class Stores:
    """Objects are in the stores of Ray, and outlive the process that made them."""

    direct = False

    def unreachable(self, workers: Iterable[Member], servers: Iterable[Member]) -> list[Any]:
        return []

    def call(
        self,
        member: Member,
        version: int,
        to: Sequence[Member],
        waits: bool,
        method: str,
        count: int,
        *given: Any,
    ) -> tuple[Any, list[Any]]:
        first, *rest = getattr(member.actor, method).options(num_returns=1 + count).remote(*given)
        return first, rest

    def publish(self, member: Member, made: Made, method: str, *given: Any) -> Any:
        first, refs = self.call(member, made.version, (), False, method, 2, *given)
        made.values.ref, made.state.ref = refs
        return first


class Direct:
    """Objects are in the process that made them, and go from there to others over TCP.

    What servers publish is in Ray's stores as well.
    """

    direct = True

    def call(
        self,
        member: Member,
        version: int,
        to: Sequence[Member],
        waits: bool,
        method: str,
        count: int,
        *given: Any,
    ) -> tuple[Any, list[Any]]:
        addresses = [None if m.place is None else m.place.address for m in to]
        pushed: list[deque[int] | None] = [m.released for m in to] or [None] * count
        refs = [self._owned(member, other) for other in pushed]
        orders = [_KINDS * version] * count
        order = method, [ref.key for ref in refs], orders, _taken(member), addresses, waits
        return member.actor.holding.remote(order, *given), refs

    def publish(self, member: Member, made: Made, method: str, *given: Any) -> Any:
        values, state = made.values, made.state
        values.held, state.held = self._owned(member), self._owned(member)
        orders = [_KINDS * made.version + 1, _KINDS * (made.version + made.lag) + 2]
        order = method, [values.held.key, state.held.key], orders, _taken(member), (), False
        first, values.ref, state.ref = member.actor.publishing.options(num_returns=3).remote(
            order, *given
        )
        return first

    def unreachable(self, workers: Iterable[Member], servers: Iterable[Member]) -> list[Any]:
        addresses = [m.place.address for m in servers if m.place is not None]
        return [m.actor.unreachable.remote(addresses) for m in workers if m.joined]

    def _owned(self, member: Member, other: deque[int] | None = None) -> Owned:
        assert member.place is not None and member.place.address is not None
        lists = (member.released,) if other is None else (member.released, other)
        return Owned(member.place.address, next(_keys), lists)


def _taken(member: Member) -> list[int]:
    """Return the keys of the objects that a process need no longer hold."""
    return [member.released.popleft() for _ in range(len(member.released))]


def new_secret() -> bytes:
    """Return a secret for the processes of one run."""
    return secrets.token_bytes(32)
