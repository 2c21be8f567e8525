"""A node's process: what its driver and others ask of it may be lost, or come twice."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import ray

import paceline as pl
from paceline.codecs.base import Bytes
from paceline.core.journal import Entry
from paceline.core.protocol import Left, Peer, TimerFired
from paceline.gossip.node import Node
from paceline.gossip.ray.process import NodeProcess
from paceline.gossip.ray.sender import MessageSender

ENTRIES = [Entry(float(at), TimerFired(str(at)), ()) for at in range(5)]


def test_entries_are_kept_until_the_driver_has_them() -> None:
    peer = NodeProcess()
    peer._ended = True  # so that nobody waits
    peer._entries = ENTRIES[:3]
    assert peer.entries(0) == (0, ENTRIES[:3], True)
    assert peer.entries(0) == (0, ENTRIES[:3], True)  # the answer was lost
    peer._entries.append(ENTRIES[3])
    assert peer.entries(3) == (3, ENTRIES[3:4], True)
    assert peer.entries(0) == (3, ENTRIES[3:4], True)  # an older call that comes late
    assert peer.entries(4) == (4, [], True)


def test_a_death_that_is_told_twice_is_heard_once_and_ends_all_news() -> None:
    peer = NodeProcess()
    peer._updated = {"w1": 7, "w2": 3}
    peer.tell(0, Left("w1"))
    peer.tell(0, Left("w1"))
    assert list(peer._told) == [(Left("w1"), None)] and peer._updated == {"w2": 3}


class Handle:
    """A peer whose answers are given by hand, called as an actor is."""

    def __init__(self) -> None:
        self.receive = self
        self.calls: list[tuple[list[Bytes], Future[Any]]] = []

    def remote(self, me: str, messages: list[Bytes]) -> Handle:
        self.calls.append((messages, Future()))
        return self

    def future(self) -> Future[Any]:
        return self.calls[-1][1]


@pytest.mark.parametrize("answer", [False, ray.exceptions.ActorUnavailableError("", None)],
                         ids=["refused", "unknown"])  # fmt: skip
def test_who_may_lack_a_message_gets_the_copy_with_the_next_step(answer: Any) -> None:
    learner = pl.learners.Quadratic((1.0, 2.0))
    node = Node(
        Peer("w0", ("w1",), (2,)), learner, 0, None, pl.codecs.TopK(0.5), frozenset({"rate"})
    )
    handle = Handle()
    sender = MessageSender("w0", node, {"w1": handle})
    sender.post(["w1"], node.publish(None))
    sender.turn()
    (_, future), size = handle.calls[0], len(node.whole_copy())
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)
    sender.turn()
    assert len(handle.calls) == 1  # not at once
    sender.again()
    sender.turn()
    assert len(handle.calls) == 2 and [len(each) for each in handle.calls[1][0]] == [size]
