"""Messages that wait for a peer, never more than one copy of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.gossip.node import Node

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Bytes


class Outbox:
    """Messages for one peer that wait to be sent.

    Once they are longer than the public copy, the outbox sends the whole copy in their place. So
    it never holds more than one copy for a slow link.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._messages: list[Bytes] = []
        self._whole = False

    def add(self, message: Bytes) -> None:
        if not self._whole:
            self._messages.append(message)
            if len(self._messages) > 1:
                total = sum(each.nbytes for each in self._messages)
                self._whole = total > self._node.server.vector.nbytes
        if self._whole:
            self._messages = []

    def add_whole(self) -> None:
        self._messages, self._whole = [], True

    def take(self) -> list[Bytes]:
        """Return the messages to send now, and empty the outbox."""
        messages = [self._node.whole_copy()] if self._whole else self._messages
        self._messages, self._whole = [], False
        return messages
