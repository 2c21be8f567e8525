"""A node of decentralized training as an actor: its coordinator, its model, its messages.

A node decides for itself and sends messages by one-sided calls. A separate thread of the receiver
handles a message, so that no node ever waits for one. The driver only collects journals.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from math import inf
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any

import ray

from paceline.core.coordinator import Coordinator, drive
from paceline.core.journal import Entry
from paceline.core.logs import logger_of
from paceline.core.protocol import (
    Assign,
    Cancel,
    Command,
    Discard,
    Event,
    Finished,
    Joined,
    Left,
    Received,
    Send,
    SetTimer,
    Start,
    Step,
    Stepped,
    Stop,
    Task,
    TimerFired,
    WorkerId,
)
from paceline.engines.ray.worker import Place, here, hide_gpus
from paceline.gossip.job import GossipJob
from paceline.gossip.node import Node, Outbox, RejectedUpdate
from paceline.learners.base import Array

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Bytes

logger = logger_of(__name__)

_LOOK = 60.0  # seconds after which an idle thread looks for work
_REPORT_EVERY = 0.2  # seconds for which entries gather before the driver gets them


class MessageSender:
    """Sends messages, with at most one call to each peer in flight; the rest waits in outboxes."""

    def __init__(self, me: WorkerId, node: Node, handles: Mapping[WorkerId, Any]) -> None:
        self._me, self._handles = me, dict(handles)
        self._changed = Condition()  # guards all that follows
        self._outboxes = {peer: Outbox(node) for peer in handles}
        self._due: dict[WorkerId, None] = {}  # peers whose outbox may hold messages
        self._later: dict[WorkerId, None] = {}  # peers that get the whole copy with the next step
        self._answers: deque[tuple[WorkerId, Future[Any]]] = deque()  # at most one for each call
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
                if message is None:
                    self._outboxes[peer].add_whole()
                else:
                    self._outboxes[peer].add(message)
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
            self._outboxes[peer].take()

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

    def _answered(self, peer: WorkerId, answer: Future[Any]) -> None:
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
            if handle is None or peer in self._on_the_way:
                return
            messages = self._outboxes[peer].take()
            if not messages:
                return
            self._on_the_way.add(peer)
            self._sent += sum(message.nbytes for message in messages)
        answer = handle.receive.remote(self._me, messages).future()
        answer.add_done_callback(partial(self._on_answer, peer))

    def _on_answer(self, peer: WorkerId, answer: Future[Any]) -> None:
        with self._changed:
            self._answers.append((peer, answer))
            self._changed.notify()


class NodeProcess:
    """The actor of a node, and the engine of its coordinator. The pool wraps it by `ray.remote`."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        place: Callable[[], Place] = here,
        gpus: float | None = None,
    ) -> None:
        hide_gpus(gpus)
        self._clock, self._place = clock, place
        self._name = ""
        self._node: Node | None = None
        self._sender: MessageSender | None = None
        self._coordinator: Coordinator | None = None
        self._origin = 0.0
        self._task: Task | None = None
        self._own: deque[Event] = deque()  # results of its own commands
        self._timers: list[tuple[float, str]] = []
        self._changed = Condition()  # guards the state that other threads write:
        self._told: deque[Event] = deque()
        self._left: set[WorkerId] = set()  # nodes whose death was reported
        self._updated: dict[WorkerId, int] = {}  # versions of the copies that moved
        self._got = 0
        self._entries: list[Entry] = []
        self._first = 0  # the number of the first of them
        self._ended = False

    def set_up(self, job: GossipJob, name: WorkerId) -> Place:
        """Build the node."""
        self._name, self._node, self._coordinator = name, job.node(name), job.coordinator(name)
        return self._place()

    def train(self, handles: Mapping[WorkerId, Any]) -> None:
        """Train until the driver stops the run."""
        self._begin(handles).start()
        try:
            while self._act():
                pass
        finally:
            self._end()

    def _begin(self, handles: Mapping[WorkerId, Any]) -> MessageSender:
        assert self._node is not None
        self._sender = MessageSender(self._name, self._node, handles)
        self._origin = self._clock()
        self._own.append(Joined(self._name))
        return self._sender

    def _act(self) -> bool:
        """Handle the next event; return False once the run has stopped."""
        assert self._coordinator is not None
        for _, entry in drive({self._name: self._coordinator}, self):
            with self._changed:
                self._entries.append(entry)
            return True
        return False

    def _end(self) -> None:
        assert self._sender is not None
        self._sender.close()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def receive(self, sender: WorkerId, messages: Sequence[Bytes]) -> bool:
        """Apply messages to the copy of their sender; return whether all were accepted.

        After a rejected message the sender must send the whole copy.
        """
        assert self._node is not None
        for message in messages:
            try:
                version = self._node.receive(sender, message)
            except RejectedUpdate as error:
                logger.warning("%s", error)
                return False
            with self._changed:
                self._got += message.nbytes
                if version is not None and sender not in self._left:
                    self._updated[sender] = version
                    self._changed.notify_all()
        return True

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def tell(self, event: Event) -> None:
        """Queue an event that the driver reports; a second report changes nothing."""
        with self._changed:
            if isinstance(event, Left):
                if event.worker in self._left:
                    return
                self._left.add(event.worker)
                self._updated.pop(event.worker, None)
            self._told.append(event)
            self._changed.notify_all()

    @ray.method(concurrency_group="report")  # type: ignore[untyped-decorator]
    def vector(self) -> Array:
        """Return a copy of the model."""
        assert self._node is not None
        return self._node.vector()

    @ray.method(concurrency_group="report")  # type: ignore[untyped-decorator]
    def entries(self, seen: int) -> tuple[int, list[Entry], bool]:
        """Return the number of the first entry, all entries from there, and whether training ended.

        The call waits a while, so that entries gather. seen: the number of entries that the driver
        has. The node drops only these, since an answer may be lost.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ended, _REPORT_EVERY)
            return self._since(seen)

    def _since(self, seen: int) -> tuple[int, list[Entry], bool]:
        if seen > self._first:  # else an older call arrived late
            del self._entries[: seen - self._first]
            self._first = seen
        return self._first, list(self._entries), self._ended

    # --- the engine ------------------------------------------------------------------------------

    def execute(self, node: WorkerId, command: Command) -> None:
        assert self._node is not None and self._sender is not None
        match command:
            case Start(task):
                self._task = task  # computed once no other event is left
            case Cancel():
                self._task = None
            case Discard(id):
                self._node.discard(id)
            case Step():
                stats, figures = self._node.step(command)
                self._sender.again()
                self._own.append(Stepped(self._node.version, stats, figures))
            case Send(to, tensors, whole):
                self._sender.post(to, None if whole else self._node.publish(tensors))
            case SetTimer(name, at):
                if at < inf:
                    heapq.heappush(self._timers, (at, name))
            case Stop() | Assign():
                pass

    def next_event(self) -> tuple[float, WorkerId, Event] | None:
        assert self._sender is not None
        while True:
            event = self._next()
            if self._sender.error is not None:
                raise self._sender.error
            if event is not None:
                return self._clock() - self._origin, self._name, event

    def _next(self) -> Event | None:
        """Return the next event; None: look again."""
        assert self._node is not None and self._sender is not None
        if self._own and isinstance(self._own[0], Joined):
            return self._own.popleft()  # before all other events
        with self._changed:
            if self._told:
                event = self._told.popleft()
                if isinstance(event, Left):
                    self._sender.drop(event.worker)
                    self._node.forget(event.worker)
                return event
            if self._updated:
                sender = next(iter(self._updated))
                return Received(sender, self._updated.pop(sender))
        if self._own:
            return self._own.popleft()
        if self._timers and self._timers[0][0] <= self._clock() - self._origin:
            return TimerFired(heapq.heappop(self._timers)[1])
        if self._task is not None:
            return self._compute(self._task)
        self._wait()
        return None

    def _wait(self) -> None:
        """Wait for an event of another thread or a timer, for at most a second."""
        with self._changed:
            due = self._timers[0][0] + self._origin - self._clock() if self._timers else 1.0
            self._changed.wait_for(lambda: self._told or self._updated, max(min(due, 1.0), 0.0))

    def _compute(self, task: Task) -> Event:
        assert self._node is not None and self._sender is not None
        self._task = None
        begin = self._clock()
        until = begin + task.work.budget
        outcome = self._node.compute(task, lambda done: self._clock() < until)
        seconds = self._clock() - begin
        with self._changed:
            got, self._got = self._got, 0
        sent = self._sender.sent()
        return Finished(task.id, outcome.samples, seconds, outcome.stats, 0.0, sent, got)
