from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from paceline.engines.ray.transport.current import close_peer, open_peer
from paceline.engines.ray.transport.holder import Holder, Holding, gaps
from paceline.engines.ray.transport.inbox import Lost
from paceline.engines.ray.transport.incoming import GivenUp, Incoming
from paceline.engines.ray.transport.link import Link
from paceline.engines.ray.transport.messages import PREFIX, encode, note
from paceline.engines.ray.transport.peer import PING, Peer
from paceline.engines.ray.transport.refs import Held

SECRET, HOST, SECONDS = b"s" * 32, "127.0.0.1", 20.0


@pytest.fixture
def peers() -> Iterator[Callable[[], Peer]]:
    made: list[Peer] = []

    def make(secret: bytes = SECRET) -> Peer:
        made.append(Peer(HOST, secret))
        return made[-1]

    yield make
    for peer in made:
        peer.close()


def until(holds: Callable[[], Any]) -> None:
    """Wait for something that another thread does."""
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def vector(size: int = 1000) -> np.ndarray[Any, Any]:
    return np.arange(size, dtype=np.float32)


def test_an_object_is_sent_when_it_exists(peers: Callable[[], Peer]) -> None:
    holder, asker = peers(), peers()
    found = asker.fetch(holder.address, 7)
    until(lambda: holder._asked)
    assert not found.done()
    holder.hold({7: vector()})
    got = found.result(SECONDS)
    assert isinstance(got, np.ndarray) and got.tolist() == vector().tolist()
    assert not got.flags.writeable


@pytest.mark.parametrize("shape", [(0,), (3,), (2, 5)])
@pytest.mark.parametrize("kind", ["<f4", "<f8", "|u1", "<i8"])
def test_arrays_and_states_arrive_as_they_were(
    peers: Callable[[], Peer], shape: tuple[int, ...], kind: str
) -> None:
    holder, asker = peers(), peers()
    array = np.ones(shape, kind)
    holder.hold({1: array, 2: ({"m": array}, {"lr": 0.5, "betas": [0.9, None]}), 3: None})
    one = asker.fetch(holder.address, 1).result(SECONDS)
    assert isinstance(one, np.ndarray) and one.dtype == array.dtype and one.shape == shape
    state = asker.fetch(holder.address, 2).result(SECONDS)
    assert isinstance(state, tuple) and state[1] == {"lr": 0.5, "betas": [0.9, None]}
    assert np.array_equal(state[0]["m"], array)
    assert asker.fetch(holder.address, 3).result(SECONDS) is None


def test_a_pushed_object_is_sent_once(peers: Callable[[], Peer]) -> None:
    holder, asker = peers(), peers()
    sent = []
    received = asker._received
    asker._received = lambda *told: (sent.append(told[1]), received(*told))  # type: ignore[method-assign, assignment, func-returns-value]
    holder.hold({1: vector()}, {1: asker.address})
    until(lambda: 1 in asker._inbox._arrived)
    assert isinstance(asker.fetch(holder.address, 1).result(SECONDS), np.ndarray)
    holder.hold({2: vector(10**6)}, {2: asker.address})
    found = asker.fetch(holder.address, 2).result(SECONDS)  # while it is on its way
    assert isinstance(found, np.ndarray) and found.size == 10**6
    assert [header["key"] for header in sent if "key" in header] == [1, 2]
    for key in (1, 2):  # a step that failed fetches it once more
        again = asker.fetch(holder.address, key).result(SECONDS)
        assert isinstance(again, np.ndarray)
    asker.release([1, 2])
    until(lambda: not asker._inbox.used and not asker._inbox._arrived)


def test_what_waits_is_pushed_as_soon_as_one_of_it_is_asked_for(peers: Callable[[], Peer]) -> None:
    holder, one, other = peers(), peers(), peers()
    to = {1: one.address, 2: other.address, 3: one.address}
    holder.hold({1: vector(), 2: vector(), 3: vector()}, to, waits=True)
    assert isinstance(one.fetch(holder.address, 3).result(SECONDS), np.ndarray)
    until(lambda: 1 in one._inbox._arrived and 2 in other._inbox._arrived)
    assert not holder._waiting
    holder.hold({4: vector(), 5: vector()}, {4: one.address, 5: other.address}, waits=True)
    holder.release([4, 5])
    until(lambda: not holder._waiting and 4 not in holder._held)
    assert 4 not in one._inbox._arrived


def test_the_time_of_an_arrival_is_that_of_the_push_and_not_of_the_fetch(
    peers: Callable[[], Peer],
) -> None:
    holder, asker = peers(), peers()
    before = time.monotonic()
    holder.hold({1: vector()}, {1: asker.address})
    until(lambda: 1 in asker._inbox._arrived)
    after = time.monotonic()
    asker.fetch(holder.address, 1).result(SECONDS)
    assert before <= (asker.arrived(1) or 0.0) <= after
    asker.release([1])
    until(lambda: asker.arrived(1) is None)


def test_both_ends_can_ask_over_either_connection(peers: Callable[[], Peer]) -> None:
    one, other = peers(), peers()
    one.hold({1: vector()})
    other.hold({2: vector()})
    for asker, holder, key in ((one, other, 2), (other, one, 1)):
        assert isinstance(asker.fetch(holder.address, key).result(SECONDS), np.ndarray)


def test_an_object_of_its_own_needs_no_connection(peers: Callable[[], Peer]) -> None:
    peer = peers()
    found = peer.fetch(peer.address, 1)
    peer.hold({1: vector()})
    assert found.result(SECONDS) is not None and not peer._links


def test_what_is_released_is_dropped_by_holder_and_receiver(peers: Callable[[], Peer]) -> None:
    holder, asker = peers(), peers()
    holder.hold({1: vector()}, {1: asker.address})
    until(lambda: 1 in asker._inbox._arrived)
    for peer in (holder, asker):
        peer.release([1])
    until(
        lambda: (
            not asker._inbox._arrived
            and 1 not in holder._held
            and not any(holder._pushes._to.values())
        )
    )


@pytest.mark.parametrize("begun", [False, True])
def test_the_end_of_a_holder_is_noticed_at_once(peers: Callable[[], Peer], begun: bool) -> None:
    holder, asker = peers(), peers()
    if begun:
        asker.fetch(holder.address, 1)
        until(lambda: holder._asked)
    found = asker.fetch(holder.address, 2)
    holder.close()
    with pytest.raises(Lost, match="the connection to"):
        found.result(SECONDS)
    with pytest.raises(Lost):  # nobody listens there any more
        asker.fetch(holder.address, 3).result(SECONDS)


def test_a_lost_connection_is_opened_again(peers: Callable[[], Peer]) -> None:
    holder, asker = peers(), peers()
    holder.hold({1: vector()}, {1: asker.address})
    until(lambda: 1 in asker._inbox._arrived)
    asker.release([1])
    link = holder._links[asker.address]
    link.sock.shutdown(socket.SHUT_RDWR)
    until(lambda: not holder._links and not holder._pushes._to)
    assert isinstance(asker.fetch(holder.address, 1).result(SECONDS), np.ndarray)


def test_a_fetch_that_was_given_up_is_not_sent(peers: Callable[[], Peer]) -> None:
    holder, asker = peers(), peers()
    asker.fetch(holder.address, 1)
    until(lambda: holder._asked.get(1))
    asker.give_up([1])
    until(lambda: not holder._asked[1])
    holder.hold({1: vector(), 2: vector()})
    asker.fetch(holder.address, 2).result(SECONDS)
    assert 1 not in asker._inbox._arrived


def linked() -> tuple[Link, Link]:
    """Return both ends of a connection, which have proved themselves."""
    ours, theirs = socket.socketpair()
    link = Link(ours, SECRET, (HOST, 1), lambda *told: None)
    other = Link(theirs, SECRET, None, lambda *told: None)
    for _ in range(4):
        for each in (link, other):
            each.write()
        for each in (link, other):
            each.read()
    assert link.opened and other.opened
    return link, other


def test_a_message_that_has_begun_does_not_hold_up_a_more_urgent_one() -> None:
    """Another connection with messages of an order between them would go first for as long."""
    link, other = linked()
    link.send(encode(1, vector(10**7), 9))
    link.write()
    assert link._begun and link.order == 9
    link.send(encode(2, vector(), 3))
    assert link.order == 3
    link.take_back(2)
    assert link.order == 9
    for each in (link, other):
        each.close()


def test_a_queued_object_is_taken_back_unless_it_is_begun() -> None:
    link, other = linked()
    large = encode(1, vector(10**7))
    link.send(large)
    link.send(encode(2, vector(10**6)))
    link.write()
    link.take_back(1)
    assert link._begun and link.wants_to_send  # a part of it is on its way
    assert len(link._out) == 1
    link.take_back(2)
    assert not link._out and link._begun
    for each in (link, other):
        each.close()


# --- strangers -----------------------------------------------------------------------------------


def test_a_process_with_another_secret_gets_nothing(peers: Any) -> None:
    holder, stranger = peers(), peers(b"t" * 32)
    holder.hold({1: vector()})
    with pytest.raises(Lost):
        stranger.fetch(holder.address, 1).result(SECONDS)
    assert not holder._links


def test_a_proof_cannot_be_sent_back_to_its_sender(peers: Callable[[], Peer]) -> None:
    peer = peers()
    with socket.create_connection(peer.address, timeout=SECONDS) as stranger:
        greeting = stranger.recv(4096)
        stranger.sendall(greeting)  # its own nonce
        proof = stranger.recv(4096)
        stranger.sendall(proof)
        assert stranger.recv(4096) == b""


@pytest.mark.parametrize("told", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(15), bytes(64)])
def test_whoever_speaks_otherwise_is_refused(peers: Callable[[], Peer], told: bytes) -> None:
    peer = peers()
    with socket.create_connection(peer.address, timeout=SECONDS) as stranger:
        stranger.sendall(told)
        with suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass
    other = peers()
    peer.hold({1: vector()})
    assert isinstance(other.fetch(peer.address, 1).result(SECONDS), np.ndarray)


@pytest.mark.parametrize(
    "bad",
    [
        PREFIX.pack(2**30, 0),
        PREFIX.pack(2, 0) + b"{]",
        note(key=1, kind="array", arrays=[["", "|O", [4]]], data=None).pieces()[0],
        note(key=1, kind="array", arrays=[["", "<f4", [4]]], data=None).pieces()[0],
    ],
)
def test_a_message_that_cannot_be_right_ends_its_connection_alone(
    peers: Callable[[], Peer], bad: bytes
) -> None:
    holder, asker, other = peers(), peers(), peers()
    found = asker.fetch(holder.address, 1)
    until(lambda: holder._asked)
    holder._do(lambda: holder._links[asker.address]._begun.append(memoryview(bad)))
    with pytest.raises(Lost):
        found.result(SECONDS)
    holder.hold({2: vector()})
    assert isinstance(other.fetch(holder.address, 2).result(SECONDS), np.ndarray)


# --- references ----------------------------------------------------------------------------------


def test_references_bring_slices_and_are_given_up_together() -> None:
    here, there = open_peer(HOST, SECRET), Peer(HOST, SECRET)
    try:
        there.hold({1: vector(), 2: vector()})
        both = [Held(there.address, key) for key in (1, 2)]
        assert [each.size for each in Incoming(both, SECONDS)] == [1000, 1000]
        incoming = Incoming([Held(there.address, 3)], SECONDS)
        until(lambda: there._asked.get(3))
        incoming.give_up()
        with pytest.raises(GivenUp):
            list(incoming)
        until(lambda: not there._asked[3] and not here._inbox._futures)
        there.close()
        lost = Incoming([Held(there.address, 4)], SECONDS)
        assert lost.fails() and lost.failed() == ([0], [])
    finally:
        close_peer()
    with pytest.raises(Lost, match="no direct transport"):
        Held(("", 1), 1).future()


def test_a_process_tells_which_address_it_cannot_reach() -> None:
    there, gone = Peer(HOST, SECRET), Peer(HOST, SECRET)
    holder = Holder()
    holder._peer = open_peer(HOST, SECRET)
    try:
        assert holder.unreachable([there.address, holder._peer.address]) is None
        gone.close()
        until(lambda: gone._closed and gone._selector.get_map() is None)
        why = holder.unreachable([there.address, gone.address])
        assert why is not None and f"cannot reach {HOST}:{gone.address[1]}" in why
    finally:
        close_peer()
        there.close()


def test_what_a_method_returns_is_held_and_pushed_until_it_is_released() -> None:
    class Maker(Holder):
        values = vector(4)

        def make(self) -> tuple[str, Any, Any]:
            return "told", self.values, ({"m": self.values}, {"lr": 1.0})

    maker, there = Maker(), Peer(HOST, SECRET)
    maker._peer = open_peer(HOST, SECRET)
    try:
        order: Holding = "make", [1, 2], [3, 4], [], [there.address, None], False
        assert maker.holding(order) == "told"
        maker.values += 1  # the process goes on working on it
        until(lambda: 1 in there._inbox._arrived)
        got = there.fetch(maker._peer.address, 2).result(SECONDS)
        assert isinstance(got, tuple) and got[0]["m"].tolist() == [0, 1, 2, 3]
        assert len(maker.publishing(("make", [5, 6], [7, 8], [1, 2], [], False))) == 3
        until(lambda: maker._peer is not None and set(maker._peer._held) == {-1, 5, 6})
    finally:
        close_peer()
        there.close()


def test_results_leave_a_host_through_its_server_and_survive_its_end() -> None:
    """Three end points of one host stand for a worker, its server, and a server elsewhere."""
    worker, relay, end = (Peer(HOST, SECRET) for _ in range(3))
    try:
        passed = []
        original = relay._pass_on
        relay._pass_on = lambda *told: (passed.append(told[1]["key"]), original(*told))  # type: ignore[method-assign, assignment, func-returns-value]
        to = {1: relay.address, 2: end.address}
        worker.hold({1: vector(), 2: vector()}, to, {1: 4, 2: 4})
        until(lambda: 1 in relay._inbox._arrived and 2 in end._inbox._arrived)
        assert passed == [2]
        assert isinstance(end.fetch(worker.address, 2).result(SECONDS), np.ndarray)
        relay._pass_on = lambda *told: None  # type: ignore[method-assign]
        worker.hold({3: vector()}, {1: relay.address, 3: end.address}, {3: 6})
        found = end.fetch(worker.address, 3)  # it is said to be on its way
        until(lambda: worker._asked.get(3))
        relay.close()
        assert isinstance(found.result(SECONDS), np.ndarray)
    finally:
        for peer in (worker, relay, end):
            peer.close()


def test_what_the_next_step_needs_is_sent_first() -> None:
    holder, asker = Peer("127.0.0.1", SECRET), Peer("127.0.0.2", SECRET)
    try:
        came: list[int] = []
        received = asker._received
        asker._received = lambda *told: (came.append(told[1].get("key")), received(*told))  # type: ignore[method-assign, assignment, func-returns-value]
        asker.fetch(holder.address, 99)  # opens the connection
        until(lambda: holder._asked)
        things = {key: vector(10**6) for key in range(1, 6)}
        orders = {key: 10 - key for key in things}
        holder.hold(things, dict.fromkeys(things, asker.address), orders)
        until(lambda: len([key for key in came if key in things]) == 5)
        assert [key for key in came if key in things] == [5, 4, 3, 2, 1]
    finally:
        for peer in (holder, asker):
            peer.close()


def test_whoever_waits_for_several_slices_learns_at_once_that_one_is_lost() -> None:
    open_peer(HOST, SECRET)
    there, gone = Peer(HOST, SECRET), Peer(HOST, SECRET)
    try:
        refs = [Held(there.address, 1), Held(gone.address, 2)]
        incoming = Incoming(refs, SECONDS)
        until(lambda: gone._asked)
        begin = time.monotonic()
        gone.close()
        assert incoming.fails() and incoming.failed() == ([1], [])
        assert time.monotonic() - begin < SECONDS / 2  # not as long as for the other one
    finally:
        close_peer()
        there.close()


# --- what must not stay in memory, and what must not be waited for --------------------------------


def test_the_answer_to_a_fetch_that_was_given_up_is_dropped(peers: Callable[[], Peer]) -> None:
    holder, asker = peers(), peers()
    holder.hold({1: vector(), 2: vector()})
    asker.fetch(holder.address, 2).result(SECONDS)
    asker._do(lambda: asker._inbox._futures.clear())
    asker.fetch(holder.address, 1)
    asker._do(lambda: asker._inbox._futures.clear())  # as if it was given up while the object came
    asker.fetch(holder.address, 2).result(SECONDS)  # comes after the other one
    assert not asker._inbox._arrived


def test_a_result_that_arrives_after_its_release_is_dropped(peers: Callable[[], Peer]) -> None:
    holder, asker = peers(), peers()
    asker.release([1])
    holder.hold({1: vector(), 2: vector()}, {1: asker.address, 2: asker.address})
    until(lambda: 2 in asker._inbox._arrived)
    assert 1 not in asker._inbox._arrived


def test_nobody_waits_for_a_process_whose_transport_has_failed(
    peers: Callable[[], Peer], caplog: pytest.LogCaptureFixture
) -> None:
    broken, asker = peers(), peers()
    found = asker.fetch(broken.address, 1)
    until(lambda: broken._asked)

    def fail() -> None:
        raise RuntimeError("a bug")

    broken._do(fail)
    with pytest.raises(Lost):
        found.result(SECONDS)
    assert "a bug" in caplog.text
    until(lambda: broken._closed)
    with pytest.raises(Lost, match="has ended"):
        broken.fetch(asker.address, 1).result(SECONDS)
    with pytest.raises(RuntimeError, match="has ended"):
        broken.hold({1: vector()})


def test_what_cannot_be_encoded_raises_where_it_was_made(peers: Callable[[], Peer]) -> None:
    holder, asker = peers(), peers()
    with pytest.raises(TypeError):
        holder.hold({1: ({}, {"lr": object()})})
    holder.hold({2: vector()})
    assert isinstance(asker.fetch(holder.address, 2).result(SECONDS), np.ndarray)


def test_an_object_pushed_in_parts_arrives_as_one(peers: Callable[[], Peer]) -> None:
    """While the method runs, parts go through the server of the host; the rest when it returns."""
    end, whole = peers(), vector(1000)

    class Maker(Holder):
        def make(self) -> tuple[str, Any, Any]:
            assert self._sending is not None and self._sending.wanted
            self._sending.send(0, whole[600:900], (600, 1000))
            self._sending.send(0, whole[100:200], (100, 1000))
            until(lambda: 1 in end._inbox._parts and end._inbox._parts[1][1] == 600)
            return "told", whole, whole

    maker, relay = Maker(), peers()
    maker._peer = open_peer(HOST, SECRET)
    try:
        order: Holding = "make", [1, 2], [4, 4], [], [end.address, relay.address], False
        found = end.fetch(maker._peer.address, 1)
        assert maker.holding(order) == "told" and maker._sending is None
        got = found.result(SECONDS)
        assert isinstance(got, np.ndarray) and np.array_equal(got, whole)
        assert not got.flags.writeable and not end._inbox._parts
        again = end.fetch(maker._peer.address, 1).result(SECONDS)  # as one
        assert isinstance(again, np.ndarray) and np.array_equal(again, whole)
    finally:
        close_peer()


def test_if_the_way_is_lost_what_has_arrived_is_not_sent_again() -> None:
    worker, end = Peer(HOST, SECRET), Peer(HOST, SECRET)
    try:
        sent = []
        received = end._received
        end._received = lambda *told: (sent.append(told[1]), received(*told))  # type: ignore[method-assign, assignment, func-returns-value]
        found = end.fetch(worker.address, 1)
        until(lambda: 1 in worker._asked)
        worker.hold({1: vector()}, {1: end.address})
        assert isinstance(found.result(SECONDS), np.ndarray)
        worker._do(lambda: worker._not_pushed({1}))  # as if the way was lost
        until(lambda: any("missed" in header for header in sent))
        assert end.fetch(worker.address, PING).result(SECONDS) is None  # after all before
        assert [header["key"] for header in sent if "key" in header] == [1, PING]
        waits = end.fetch(worker.address, 2)
        until(lambda: 2 in worker._asked)
        worker._do(lambda: worker._held.update({2: (vector(), encode(2, vector(), 0))}))
        worker._do(lambda: worker._not_pushed({2}))
        assert isinstance(waits.result(SECONDS), np.ndarray)  # this one had not arrived
    finally:
        for peer in (worker, end):
            peer.close()


def test_if_the_way_of_the_first_parts_is_lost_the_object_is_sent_whole() -> None:
    worker, relay, end = (Peer(HOST, SECRET) for _ in range(3))
    try:
        worker.push(1, vector(10), (0, 30), 4, end.address, relay.address)
        until(lambda: 1 in end._inbox._parts)
        relay.close()
        until(lambda: not any(worker._pushes._to.values()))
        worker.hold({1: vector(30)}, {1: end.address}, {1: 4}, {1: [(10, 30)]})
        got = end.fetch(worker.address, 1).result(SECONDS)
        assert isinstance(got, np.ndarray) and np.array_equal(got, vector(30))
        assert not end._inbox._parts
    finally:
        for peer in (worker, relay, end):
            peer.close()


def test_parts_of_a_released_object_are_dropped(peers: Callable[[], Peer]) -> None:
    holder, end = peers(), peers()
    holder.push(1, vector(10), (0, 30), 4, end.address, end.address)
    until(lambda: 1 in end._inbox._parts)
    end.release([1])
    holder.push(1, vector(10), (10, 30), 4, end.address, end.address)
    holder.hold({2: vector()}, {2: end.address})
    until(lambda: 2 in end._inbox._arrived)
    assert not end._inbox._parts


def test_a_part_outside_of_its_object_ends_the_connection(peers: Callable[[], Peer]) -> None:
    holder, end = peers(), peers()
    found = end.fetch(holder.address, 9)
    until(lambda: holder._asked)
    holder.push(1, vector(10), (25, 30), 4, end.address, end.address)
    with pytest.raises(Lost, match="a part of 10 values at 25 of 30"):
        found.result(SECONDS)


@pytest.mark.parametrize(
    ("spans", "left"),
    [([], [(0, 9)]), ([(0, 9)], []), ([(5, 7), (1, 5)], [(0, 1), (7, 9)])],
)
def test_what_parts_leave_out(spans: list[tuple[int, int]], left: list[tuple[int, int]]) -> None:
    assert gaps(spans, 9) == left
