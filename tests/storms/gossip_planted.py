"""Faults put on purpose into decentralized training: fault simulation has to find them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import paceline.gossip.messages as messages
from paceline.core.protocol import WorkerId
from paceline.engines.checks import ResultCheck
from paceline.engines.ray.pool import Pool
from paceline.gossip.node import Node
from paceline.gossip.outbox import Outbox
from paceline.gossip.ray.driver import RayGossip
from paceline.gossip.ray.process import NodeProcess
from paceline.gossip.ray.sender import MessageSender
from paceline.gossip.validation import MessageCheck
from tests.storms.planted import Patch


def _take_messages_as_often_as_they_come() -> list[Patch]:
    whole = Node.receive

    def broken(self: Any, sender: WorkerId, packed: Any) -> int | None:
        if sender in self._heard:
            self._heard[sender] = self._read(sender, packed).number - 1, 0
        return whole(self, sender, packed)

    return [(Node, "receive", broken)]


def _take_messages_that_are_not_finite() -> list[Patch]:
    return [(MessageCheck, "fault", lambda self, sender, move: None)]


def _take_messages_under_any_name() -> list[Patch]:
    return [(messages, "sender_mark", lambda name: 0)]


def _use_results_that_are_not_finite() -> list[Patch]:
    return [(ResultCheck, "fault", lambda self, *given: None)]


def _keep_copies_of_the_dead() -> list[Patch]:
    return [(Node, "forget", lambda self, peer: None)]


def _tell_of_a_death_once() -> list[Patch]:
    def _once(self: Any, member: Any, event: Any, handle: Any = None) -> None:
        number = self._numbers.get(member, 0)
        self._numbers[member] = number + 1
        member.actor.tell.remote(number, event, handle)

    return [(RayGossip, "_tell", _once)]


def _let_go_of_entries_that_nobody_has_heard() -> list[Patch]:
    def broken(self: Any, seen: int) -> Any:
        first, entries = self._first, self._entries
        self._first, self._entries = first + len(entries), []
        return first, entries, self._ended

    return [(NodeProcess, "_since", broken)]


def _take_a_lost_message_for_one_that_arrived() -> list[Patch]:
    def broken(self: Any, peer: WorkerId, handle: Any, answer: Future[Any]) -> None:
        self._on_the_way.discard(peer)
        self._due[peer] = None

    return [(MessageSender, "_answered", broken)]


def _gather_messages_without_end() -> list[Patch]:
    return [(Outbox, "add", lambda self, message: self._messages.append(message))]


def _mix_twice() -> list[Patch]:
    whole = Node._mix

    def broken(self: Any, mix: Any) -> None:
        whole(self, mix)
        whole(self, mix)

    return [(Node, "_mix", broken)]


def _leave_nodes_behind() -> list[Patch]:
    return [(Pool, "end", lambda self: self.members.clear())]


BUGS: dict[str, Callable[[], list[Patch]]] = {
    bug.__name__.strip("_").replace("_", " "): bug
    for bug in (
        _take_messages_as_often_as_they_come,
        _take_messages_that_are_not_finite,
        _take_messages_under_any_name,
        _use_results_that_are_not_finite,
        _keep_copies_of_the_dead,
        _tell_of_a_death_once,
        _let_go_of_entries_that_nobody_has_heard,
        _take_a_lost_message_for_one_that_arrived,
        _gather_messages_without_end,
        _mix_twice,
        _leave_nodes_behind,
    )
}
