"""The thread of a node that sends its messages to peers."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any

import ray

from paceline.core.protocol import WorkerId
from paceline.gossip.node import Node
from paceline.gossip.outbox import Outbox

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Bytes

_LOOK = 60.0  # seconds after which an idle thread looks for work


class MessageSender:
    """Sends messages, with at most one call to each peer in flight; the rest waits in outboxes."""

    def __init__(self, me: WorkerId, node: Node, handles: Mapping[WorkerId, Any]) -> None:
        self._me, self._handles = me, dict(handles)
        self._changed = Condition()  # guards all that follows
        self._node = node
        self._outboxes: dict[WorkerId, Outbox] = {}
        self._due: dict[WorkerId, None] = {}  # peers whose outbox may hold messages
        self._later: dict[WorkerId, None] = {}  # peers that get the whole copy with the next step
        # At most one for each call, with the handle that was called.
        self._answers: deque[tuple[WorkerId, Any, Future[Any]]] = deque()
        self._on_the_way: set[WorkerId] = set()
        self._sent, self._closed = 0, False
        self.error: BaseException | None = None

    def start(self) -> None:
        """Start the thread that sends."""
        Thread(target=self._run, daemon=True).start()

    def post(self, to: Sequence[WorkerId], message: Bytes | None) -> None:
        """Queue a message; None queues the whole copy."""
        with self._changed:
            for peer in to:
                outbox = self._outboxes.setdefault(peer, Outbox(self._node))
                if message is None:
                    outbox.add_whole()
                else:
                    outbox.add(message)
                self._due[peer] = None
            self._changed.notify()

    def again(self) -> None:
        """Send the whole copy to peers that may lack a message, after a further step."""
        with self._changed:
            if self._later:
                self._due |= self._later
                self._later = {}
                self._changed.notify()

    def drop(self, peer: WorkerId) -> None:
        """Send nothing more to a peer that left."""
        with self._changed:
            self._handles.pop(peer, None)
            self._outboxes.pop(peer, None)
            self._later.pop(peer, None)
            self._on_the_way.discard(peer)

    def add(self, peer: WorkerId, handle: Any) -> None:
        """Send to a peer that joined again."""
        with self._changed:
            self._handles[peer] = handle

    def sent(self) -> int:
        """Return the bytes sent since the last call."""
        with self._changed:
            sent, self._sent = self._sent, 0
        return sent

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        try:
            while not self._closed:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._due or self._answers or self._closed, _LOOK
                    )
                self.turn()
        except BaseException as error:  # the thread that trains raises it
            self.error = self.error or error

    def turn(self) -> None:
        """Handle the answers, then send the messages that are due."""
        with self._changed:
            if self._closed:
                return
            while self._answers:
                self._answered(*self._answers.popleft())
            due, self._due = list(self._due), {}
        for peer in due:
            self._ship(peer)

    def _answered(self, peer: WorkerId, handle: Any, answer: Future[Any]) -> None:
        if handle is not self._handles.get(peer):
            return  # of a process that has left
        self._on_the_way.discard(peer)
        self._due[peer] = None
        error = answer.exception(timeout=0)
        if isinstance(error, ray.exceptions.RayTaskError):
            self.error = self.error or error
        elif isinstance(error, ray.exceptions.ActorDiedError):
            self._handles.pop(peer, None)  # the driver reports the death to all
        elif error is not None or not answer.result(timeout=0):  # rejected, or perhaps lost
            self._outboxes[peer].add_whole()
            self._due.pop(peer)
            self._later[peer] = None  # not at once, and not as late as the next update

    def _ship(self, peer: WorkerId) -> None:
        with self._changed:
            handle = self._handles.get(peer)
            if handle is None or peer in self._on_the_way or peer not in self._outboxes:
                return
            messages = self._outboxes[peer].take()
            if not messages:
                return
            self._on_the_way.add(peer)
            self._sent += sum(message.nbytes for message in messages)
        answer = handle.receive.remote(self._me, messages).future()
        answer.add_done_callback(partial(self._on_answer, peer, handle))

    def _on_answer(self, peer: WorkerId, handle: Any, answer: Future[Any]) -> None:
        with self._changed:
            self._answers.append((peer, handle, answer))
            self._changed.notify()
