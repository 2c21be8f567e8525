"""The places of workers in a run that processes join: who has which, and the calls to each.

A seat takes the part of an actor for the engine. Its methods are called as those of an actor, and a
client, which has dialed in, fetches these calls and answers them. This file performs no I/O: the
hub passes on what clients ask, and a clock.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.core.protocol import WorkerId
from paceline.engines.ray.failures import Disconnected


class Call(NamedTuple):
    """A call for a client: the method of its worker, and the arguments."""

    number: int
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Reply:
    """The answer to a call that is still to come; it stands in for a reference of Ray."""

    made: Future[Any]

    def future(self) -> Future[Any]:
        return self.made


@dataclass(frozen=True)
class Method:
    """A method of a seat; `remote` puts a call into the client's queue."""

    seat: Seat
    name: str

    def remote(self, *arguments: Any) -> Reply:
        return self.seat.call(self.name, arguments)


class Seat:
    """The place of one worker. A client takes it; when the client is lost, the seat has ended."""

    def __init__(self, name: WorkerId, seats: Seats) -> None:
        self.name, self._seats = name, seats
        self.client: str | None = None
        self.ended = ""  # why
        self.calls: deque[Call] = deque()  # which the client has not fetched
        self.open: dict[int, Future[Any]] = {}  # calls without an answer
        self.set_up, self.compute = Method(self, "set_up"), Method(self, "compute")
        self.abandon = Method(self, "abandon")

    def call(self, method: str, arguments: tuple[Any, ...]) -> Reply:
        return self._seats.call(self, method, arguments)


@dataclass
class Client:
    """A process that has dialed in."""

    seen: float  # when it last asked for calls
    seat: Seat | None = None
    note: str = ""  # how messages name it


@dataclass
class Seats:
    """All seats of a run, and its clients. Several threads may use it.

    wake: is called with a client's id when there is something for it.
    lost: is called with a seat whose client is lost, and the reason.
    """

    wake: Callable[[str], None]
    lost: Callable[[Seat, str], None] = lambda seat, why: None
    _clients: OrderedDict[str, Client] = field(default_factory=OrderedDict)
    _vacant: OrderedDict[WorkerId, Seat] = field(default_factory=OrderedDict)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _made: int = 0  # calls so far

    # --- for the engine --------------------------------------------------------------------------

    def make(self, name: WorkerId) -> Seat:
        """Add a seat; the first client without a seat takes it."""
        seat = Seat(name, self)
        with self._lock:
            self._vacant[name] = seat
        self._fill()
        return seat

    def call(self, seat: Seat, method: str, arguments: tuple[Any, ...]) -> Reply:
        answer: Future[Any] = Future()
        with self._lock:
            if not (why := seat.ended):
                self._made += 1
                seat.calls.append(Call(self._made, method, arguments))
                if method != "abandon":  # which nobody answers
                    seat.open[self._made] = answer
            client = seat.client
        if why:
            answer.set_exception(Disconnected(why))
        elif client is not None:
            self.wake(client)
        return Reply(answer)

    def dismiss(self, seat: Seat) -> None:
        """End a seat: its client has to dial in again."""
        self._end(seat, "the run has dismissed it")

    # --- for clients -----------------------------------------------------------------------------

    def dial(self, client: str, now: float, note: str = "") -> None:
        """Add a client; it waits until a seat is vacant."""
        with self._lock:
            self._clients[client] = Client(now, None, note)
        self._fill()

    def fetch(self, client: str, now: float) -> list[Call] | None:
        """Return the calls for a client; None if it has to dial in again."""
        with self._lock:
            found = self._clients.get(client)
            if found is None:
                return None
            found.seen = now
            if found.seat is None:
                return []
            calls = list(found.seat.calls)
            found.seat.calls.clear()
            return calls

    def answer(self, client: str, number: int, reply: Any, error: BaseException | None) -> None:
        """Take a client's answer; one that is not expected any more is ignored."""
        with self._lock:
            found = self._clients.get(client)
            seat = None if found is None else found.seat
            future = None if seat is None else seat.open.pop(number, None)
        if future is None:
            return
        if error is None:
            future.set_result(reply)
        else:
            future.set_exception(error)

    def leave(self, client: str, why: str) -> None:
        """Remove a client; its seat ends."""
        with self._lock:
            found = self._clients.pop(client, None)
        if found is not None and found.seat is not None:
            self._end(found.seat, why)

    def silent(self, now: float, patience: float) -> list[str]:
        """Return the clients that have not asked for that many seconds."""
        with self._lock:
            return [id for id, client in self._clients.items() if now - client.seen > patience]

    def name(self, client: str) -> WorkerId | None:
        """Return the name of a client's worker, if it has a seat."""
        with self._lock:
            found = self._clients.get(client)
            return None if found is None or found.seat is None else found.seat.name

    @property
    def clients(self) -> list[str]:
        with self._lock:
            return list(self._clients)

    # --- both ------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Give vacant seats to clients without one, both in the order of their coming."""
        seated = []
        with self._lock:
            for id, client in self._clients.items():
                if client.seat is None and self._vacant:
                    _, client.seat = self._vacant.popitem(last=False)
                    client.seat.client = id
                    seated.append(id)
        for id in seated:
            self.wake(id)

    def _end(self, seat: Seat, why: str) -> None:
        with self._lock:
            if seat.ended:
                return
            seat.ended = why
            if self._vacant.get(seat.name) is seat:
                del self._vacant[seat.name]
            answers = list(seat.open.values())
            seat.open.clear()
            seat.calls.clear()
            client = seat.client
            was_seated = client is not None
            if client is not None and client in self._clients:
                del self._clients[client]  # it dials in again when it asks
        for answer in answers:
            answer.set_exception(Disconnected(why))
        if client is not None:
            self.wake(client)
        if was_seated:
            self.lost(seat, why)
