"""Seats: who has which, whose answers count, and what happens to calls when a client is lost."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from paceline.engines.ray.failures import Disconnected, reason_of
from paceline.sessions.seats import Call, Seat, Seats


class Noted(Seats):
    """Notes whom it woke up, and which seats it called lost."""

    def __init__(self) -> None:
        self.woken: list[str] = []
        self.told: list[tuple[str, str]] = []
        super().__init__(self.woken.append, lambda seat, why: self.told.append((seat.name, why)))


@pytest.fixture
def seats() -> Noted:
    return Noted()


def seated(seats: Seats, client: str = "a", name: str = "w0") -> Seat:
    seat = seats.make(name)
    seats.dial(client, 0.0)
    assert seat.client == client
    return seat


def failure(future: Future[Any]) -> str:
    error = future.exception(timeout=0)
    assert isinstance(error, Disconnected)
    return str(error)


def test_seats_go_to_clients_in_the_order_of_their_coming(seats: Noted) -> None:
    for client in "abc":
        seats.dial(client, 0.0)
    assert seats.fetch("a", 0.0) == [] and seats.name("a") is None
    seats.make("w0")
    seats.make("w1")
    assert [seats.name(client) for client in "abc"] == ["w0", "w1", None]
    assert seats.woken == ["a", "b"] and seats.clients == ["a", "b", "c"]
    assert seats.make("w2").client == "c"


def test_the_client_that_comes_takes_the_first_vacant_seat(seats: Noted) -> None:
    made = [seats.make(name) for name in ("w0", "w1")]
    seats.dial("a", 0.0)
    assert [seat.client for seat in made] == ["a", None]


def test_a_call_is_fetched_once_and_answered_once(seats: Noted) -> None:
    seat = seated(seats)
    reply = seat.compute.remote(b"order", None)
    assert seats.woken == ["a", "a"]  # when it got the seat, and for the call
    assert seats.fetch("a", 1.0) == [Call(1, "compute", (b"order", None))]
    assert seats.fetch("a", 1.0) == []
    seats.answer("a", 1, "first", None)
    seats.answer("a", 1, "second", None)
    assert reply.future().result(timeout=0) == "first"


def test_calls_wait_for_the_client_of_a_vacant_seat(seats: Noted) -> None:
    seat = seats.make("w0")
    reply = seat.set_up.remote("learner", 0, None)
    assert not seats.woken and not reply.future().done()
    seats.dial("a", 0.0)
    assert seats.fetch("a", 0.0) == [Call(1, "set_up", ("learner", 0, None))]


def test_what_a_client_raises_is_the_answer(seats: Noted) -> None:
    reply = seated(seats).compute.remote()
    seats.answer("a", 1, None, OSError("no such mount"))
    with pytest.raises(OSError, match="no such mount"):
        reply.future().result(timeout=0)


@pytest.mark.parametrize("how", ["leaves", "is dismissed"])
def test_a_lost_client_fails_its_calls_and_has_to_dial_in_again(seats: Noted, how: str) -> None:
    seat = seated(seats)
    fetched, unfetched = seat.set_up.remote().future(), seat.compute.remote().future()
    seats.fetch("a", 0.0)
    if how == "leaves":
        seats.leave("a", "it has left")
    else:
        seats.dismiss(seat)
    assert failure(fetched) == failure(unfetched) == seat.ended
    assert seats.told == [("w0", seat.ended)] and not seats.clients
    assert seats.fetch("a", 0.0) is None and seats.name("a") is None
    assert reason_of(Disconnected(seat.ended)) == seat.ended


def test_a_seat_ends_once_and_for_one_reason(seats: Noted) -> None:
    seat = seated(seats)
    seats.leave("a", "it has left")
    seats.dismiss(seat)  # as the engine does with each lost worker
    seats.leave("a", "it is silent")
    assert seats.told == [("w0", "it has left")]


def test_calls_of_a_seat_that_has_ended_fail_at_once(seats: Noted) -> None:
    seat = seated(seats)
    seats.leave("a", "it has left")
    assert failure(seat.compute.remote().future()) == "it has left"
    assert not seat.calls and not seat.open


def test_the_answer_of_a_lost_client_is_ignored(seats: Noted) -> None:
    old = seated(seats).compute.remote().future()
    seats.leave("a", "it is silent")
    new = seated(seats, "b").compute.remote().future()
    seats.answer("a", 1, "late", None)
    seats.answer("a", 2, "of another", None)
    seats.answer("b", 1, "of another", None)
    seats.answer("c", 2, "of a stranger", None)
    assert failure(old) == "it is silent" and not new.done()
    seats.answer("b", 2, "right", None)
    assert new.result(timeout=0) == "right"


def test_a_client_that_dials_in_again_takes_the_next_seat(seats: Noted) -> None:
    first = seated(seats)
    seats.dismiss(first)
    second = seats.make("w0")
    assert second.client is None and first.client == "a"
    seats.dial("a2", 1.0)
    assert second.client == "a2" and seats.name("a2") == "w0"


def test_a_vacant_seat_that_is_dismissed_is_given_to_no_client(seats: Noted) -> None:
    seat = seats.make("w0")
    call = seat.set_up.remote().future()
    seats.dismiss(seat)
    seats.dial("a", 0.0)
    assert seats.name("a") is None and seat.client is None
    assert failure(call) == seat.ended and not seats.told  # no client was lost


def test_a_client_without_a_seat_may_leave(seats: Noted) -> None:
    seats.dial("a", 0.0)
    seats.leave("a", "it has left")
    assert seats.make("w0").client is None and not seats.told


def test_clients_that_do_not_ask_are_silent(seats: Noted) -> None:
    for client in "ab":
        seats.dial(client, 0.0)
    seats.fetch("b", 6.0)
    assert seats.silent(10.0, 10.0) == []
    assert seats.silent(10.5, 10.0) == ["a"]
    assert seats.silent(16.5, 10.0) == ["a", "b"]


def test_a_task_that_is_abandoned_leaves_nothing_behind(seats: Noted) -> None:
    """A client does not answer it, so that nothing may wait for its answer."""
    seat = seated(seats)
    for _ in range(3):
        seat.abandon.remote(b"token")
    assert [call.method for call in seats.fetch("a", 0.0) or ()] == ["abandon"] * 3
    assert not seat.open


def test_clients_of_many_threads_get_all_calls_once() -> None:
    """The trainer's thread calls and dismisses while others fetch, answer and dial in."""
    seats, answered = Seats(lambda client: None), list[str]()
    ended = threading.Event()

    def client(name: str) -> None:
        number = 0
        seats.dial(f"{name}.{number}", 0.0)
        while not ended.is_set():
            calls = seats.fetch(f"{name}.{number}", 0.0)
            for call in calls or ():
                answered.append(str(call.number))
                seats.answer(f"{name}.{number}", call.number, call.number, None)
            if calls is None:
                number += 1
                seats.dial(f"{name}.{number}", 0.0)
            ended.wait(timeout=0.0005)

    threads = [threading.Thread(target=client, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    replies = []
    for turn in range(40):
        made = [seats.make(f"w{index}") for index in range(2)]
        calls = [seat.compute.remote(turn).future() for seat in made for _ in range(3)]
        replies += calls
        if turn % 2:
            assert [call.result(timeout=20) for call in calls]
        for seat in made:
            seats.dismiss(seat)
    ended.set()
    for thread in threads:
        thread.join(timeout=20)
    assert all(reply.done() for reply in replies)
    assert len(answered) == len(set(answered)) >= 120
