"""Faults put on purpose into the seats of a run: fault simulation has to find them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline.core.protocol import WorkerId
from paceline.sessions.engine import Sessions
from paceline.sessions.seats import Seat, Seats
from tests.storms.planted import BUGS as OF_ALL_RUNS
from tests.storms.planted import Patch


def _take_answers_by_their_number_alone() -> list[Patch]:
    def broken(self: Any, client: str, number: int, reply: Any, error: Any) -> None:
        for known in list(self._clients.values()):
            future = None if known.seat is None else known.seat.open.pop(number, None)
            if future is not None and error is None:
                future.set_result(reply)
            elif future is not None:
                future.set_exception(error)

    return [(Seats, "answer", broken)]


def _take_answers_of_lost_clients() -> list[Patch]:
    """A seat that has ended stays with its client, and its calls stay open."""
    whole, ended = Seats.answer, dict[tuple[int, str], Seat]()

    def end(self: Any, seat: Any, why: str) -> None:
        if not seat.ended and seat.client is not None:
            ended[id(self), seat.client] = seat
            kept, seat.open = seat.open, {}
            _END(self, seat, why)
            seat.open = kept
        else:
            _END(self, seat, why)

    def answer(self: Any, client: str, number: int, reply: Any, error: Any) -> None:
        seat = ended.get((id(self), client))
        future = None if seat is None else seat.open.pop(number, None)
        if future is None:
            whole(self, client, number, reply, error)
        else:
            future.set_result(reply)

    return [(Seats, "_end", end), (Seats, "answer", answer)]


def _let_no_call_of_an_ended_seat_fail() -> list[Patch]:
    def broken(self: Any, seat: Any, why: str) -> None:
        seat.open.clear()
        _END(self, seat, why)

    return [(Seats, "_end", broken)]


def _count_no_client_as_silent() -> list[Patch]:
    return [(Seats, "silent", lambda self, now, patience: [])]


def _count_those_who_ask_as_silent() -> list[Patch]:
    whole = Seats.fetch

    def broken(self: Any, client: str, now: float) -> Any:
        known = self._clients.get(client)
        return whole(self, client, now if known is None else known.seen)

    return [(Seats, "fetch", broken)]


def _keep_the_seat_of_one_who_left() -> list[Patch]:
    def broken(self: Any, client: str, why: str) -> None:
        self._clients.pop(client, None)

    return [(Seats, "leave", broken)]


def _give_a_seat_to_two_clients() -> list[Patch]:
    def broken(self: Any) -> None:
        waiting = [id for id, client in self._clients.items() if client.seat is None]
        while waiting and self._vacant:
            _, seat = self._vacant.popitem(last=False)
            for id in waiting[:2]:
                self._clients[id].seat, seat.client = seat, id
                self.wake(id)
            waiting = waiting[2:]

    return [(Seats, "_fill", broken)]


def _keep_calls_that_were_fetched() -> list[Patch]:
    def broken(self: Any, client: str, now: float) -> Any:
        known = self._clients.get(client)
        if known is None:
            return None
        known.seen = now
        return [] if known.seat is None else list(known.seat.calls)

    return [(Seats, "fetch", broken)]


def _tell_the_engine_of_no_loss() -> list[Patch]:
    def broken(self: Any, job: Any, pool: Any) -> Any:
        return super(Sessions, self)._make_job(job, pool)

    return [(Sessions, "_make_job", broken)]


def _keep_clients_that_are_dismissed() -> list[Patch]:
    whole = Seats.dismiss

    def broken(self: Any, seat: Any) -> None:
        known = self._clients.get(seat.client)
        whole(self, seat)
        if known is not None:
            self._clients[seat.client] = known

    return [(Seats, "dismiss", broken)]


def _leave_new_seats_vacant() -> list[Patch]:
    def broken(self: Any, name: WorkerId) -> Seat:
        seat = self._vacant[name] = Seat(name, self)
        return seat

    return [(Seats, "make", broken)]


def _keep_vacant_seats_after_the_end() -> list[Patch]:
    def broken(self: Any, seat: Any, why: str) -> None:
        vacant = self._vacant.copy()
        _END(self, seat, why)
        self._vacant = vacant

    return [(Seats, "_end", broken)]


_END = Seats._end

BUGS: Mapping[str, Callable[[], list[Patch]]] = {
    **{
        bug.__name__.strip("_").replace("_", " "): bug
        for bug in (
            _take_answers_by_their_number_alone,
            _take_answers_of_lost_clients,
            _let_no_call_of_an_ended_seat_fail,
            _count_no_client_as_silent,
            _count_those_who_ask_as_silent,
            _keep_the_seat_of_one_who_left,
            _give_a_seat_to_two_clients,
            _keep_calls_that_were_fetched,
            _tell_the_engine_of_no_loss,
            _keep_clients_that_are_dismissed,
            _leave_new_seats_vacant,
            _keep_vacant_seats_after_the_end,
        )
    },
    "say nothing of a death": OF_ALL_RUNS["say nothing of a death"],
}
