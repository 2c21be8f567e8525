"""Virtual time for a run that processes join: its faults, and its seats with checks around them."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from paceline.core.protocol import WorkerId
from paceline.sessions.seats import Call, Reply, Seat, Seats
from tests.storms.storm import require
from tests.storms.weather import Weather, World

_MOST = 6  # calls of one seat that wait, or have no answer
_MEANWHILE = 0.02  # seconds that other threads get at a time


@dataclass(frozen=True)
class Rush(Weather):
    """How likely each fault of a client is, beside those of tasks."""

    stop: float = 0.0  # the process is paused (SIGSTOP); for each reply that it gets
    quit: float = 0.0  # the process leaves politely; for each reply
    dies: float = 0.0  # the process dies; for each reply
    unheard: float = 0.0  # a reply of the hub never arrives; for each reply
    delayed: float = 0.0  # a message takes seconds; for each message
    preempt: float = 0.0  # another thread of the hub goes on; for each call of a seat

    @staticmethod
    def drawn(rng: random.Random, share: float) -> Rush:
        """Draw how likely each fault is; some are absent, so that all mix.

        share: of the usual likelihood, for faults that cost a client.
        """
        most = {
            "lost": 0.08, "twice": 0.4, "late": 0.4, "crash": 0.08, "pause": 0.04, "wrong": 0.06,
            "stray": 0.03, "no_start": 0.2, "kill": 0.0006, "term": 0.0002, "stop": 0.06,
            "quit": 0.06, "dies": 0.04, "unheard": 0.05, "delayed": 0.2, "preempt": 0.5,
        }  # fmt: skip
        harmless = {"twice", "late", "delayed", "preempt"}
        drawn: dict[str, Any] = {
            name: rng.uniform(0, top if name in harmless else top * share)
            for name, top in most.items()
            if rng.random() < 0.6
        }
        return replace(Rush(chatter=int(rng.random() < 0.1)), **drawn)

    def calm(self) -> Rush:
        return replace(Rush(), preempt=self.preempt)


class Arena(World):
    """Virtual time in which the trainer's thread and the others of the hub take turns."""

    acting = False  # whether something happens outside of the trainer's thread

    def advance(self, until: float) -> bool:
        was, before, self.acting = self.acting, self.now, True
        try:
            return super().advance(until)
        finally:
            self.acting, self.now = was, max(before, self.now)

    def preempt(self) -> None:
        """Let other threads go on for a moment, if this is the trainer's."""
        if not self.acting:
            while self.strikes("preempt") and self.advance(self.now + _MEANWHILE):
                pass

    def new_hub(self) -> None:
        """Forget what the process of the hub knew; clients live on."""
        self.inbox.clear()
        self.spoiled.clear()
        self.raised_once.clear()
        self.usual_is_known = self.has_joined = False


class CheckedSeats(Seats):
    """The real seats. Whatever goes in or out is looked at."""

    def __init__(self, world: Arena, wake: Callable[[str], None]) -> None:
        super().__init__(wake)
        self._world = world
        self._live: dict[WorkerId, Seat] = {}  # the last seat of each name
        self._asked: dict[int, tuple[Seat, Future[Any]]] = {}  # calls without an answer
        self._given: dict[int, str] = {}  # calls, and the client that fetched each

    # --- for the engine, in the trainer's thread -------------------------------------------------

    def make(self, name: WorkerId) -> Seat:
        self._world.preempt()
        before = self._live.get(name)
        require(before is None or bool(before.ended), "S1", f"{name} has two seats")
        seat = self._live[name] = super().make(name)
        self._world.preempt()
        return seat

    def call(self, seat: Seat, method: str, arguments: tuple[Any, ...]) -> Reply:
        self._world.preempt()
        before = self._made
        reply = super().call(seat, method, arguments)
        if self._made > before and method != "abandon":  # which no client answers
            self._asked[before + 1] = seat, reply.future()
        self._world.preempt()
        return reply

    def dismiss(self, seat: Seat) -> None:
        self._world.preempt()
        super().dismiss(seat)
        require(bool(seat.ended), "S3", f"{seat.name} is dismissed, and its seat goes on")
        self._world.preempt()

    # --- for clients, in the hub's thread --------------------------------------------------------

    def fetch(self, client: str, now: float) -> list[Call] | None:
        calls = super().fetch(client, now)
        for call in calls or ():
            known = self._given.get(call.number)
            require(known is None, "S4", f"{client} gets call {call.number}, which {known} had")
            self._given[call.number] = client
        return calls

    def answer(self, client: str, number: int, reply: Any, error: BaseException | None) -> None:
        seat, future = self._asked.get(number, (None, None))
        may = seat is not None and seat.client == client and not seat.ended
        before = future is not None and future.done()
        super().answer(client, number, reply, error)
        taken = future is not None and future.done() and not before
        by = self._given.get(number)
        require(
            not taken or (may and by == client), "S2", f"{client} answers call {number} of {by}"
        )

    def leave(self, client: str, why: str) -> None:
        super().leave(client, why)
        require(client not in self.clients, "S5", f"{client} is still there after it left")

    # --- what holds at any time ------------------------------------------------------------------

    def check(self) -> None:
        """Look at all clients, seats and calls."""
        seated: dict[int, str] = {}
        waiting = []
        for name, client in self._clients.items():
            seat = client.seat
            if seat is None:
                waiting.append(name)
                continue
            other = seated.setdefault(id(seat), name)
            require(other == name, "S1", f"{name} and {other} have one seat, {seat.name}")
            require(seat.client == name, "S1", f"the seat of {name} is that of {seat.client}")
            require(not seat.ended, "S3", f"{name} is not told that its seat ended: {seat.ended}")
        vacant = list(self._vacant)
        require(not vacant or not waiting, "S6", f"{waiting} wait, and {vacant} are vacant")
        for seat in self._vacant.values():
            free = seat.client is None and not seat.ended
            require(free, "S1", f"{seat.name} counts as vacant, and {seat.client} has it")
        self._check_calls()

    def _check_calls(self) -> None:
        for seat in self._live.values():
            size = max(len(seat.calls), len(seat.open))
            require(size <= _MOST, "I8", f"{seat.name} has {size} calls")
            known = seat.client is None or seat.client in self._clients or bool(seat.ended)
            require(known, "S5", f"{seat.client} is gone, and still has the seat {seat.name}")
        for number, (seat, future) in list(self._asked.items()):
            if future.done():
                del self._asked[number]
            else:
                require(not seat.ended, "S3", f"call {number} of an ended seat has no answer")
