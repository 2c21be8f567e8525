"""A node of decentralized training as an actor: its coordinator, its model, its messages.

A node decides for itself and sends messages by one-sided calls. A separate thread of the receiver
handles a message, so that no node ever waits for one. The driver only collects journals.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import inf
from threading import Condition
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
from paceline.engines.ray.place import Place, here
from paceline.engines.ray.worker import hide_gpus
from paceline.gossip.job import GossipJob, NodeState, Return
from paceline.gossip.node import Node, RejectedUpdate
from paceline.gossip.ray.sender import MessageSender
from paceline.learners.base import Array, Saved

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Bytes

logger = logger_of(__name__)

_REPORT_EVERY = 0.2  # seconds for which entries gather before the driver gets them


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
        self._saved: Saved | None = None  # of a neighbor, for a node that joins again
        self._others: set[WorkerId] = set()
        self._origin = 0.0
        self._task: Task | None = None
        self._own: deque[Event] = deque()  # results of its own commands
        self._timers: list[tuple[float, str]] = []
        self._changed = Condition()  # guards the state that other threads write:
        self._told: deque[tuple[Event, Any]] = deque()  # with the handle of a node that joined
        self._tells = 0  # events told so far
        self._left: set[WorkerId] = set()  # nodes whose death was reported
        self._updated: dict[WorkerId, int] = {}  # versions of the copies that moved
        self._got = 0
        self._entries: list[Entry] = []
        self._first = 0  # the number of the first of them
        self._ended = False
        self._state: NodeState | None = None
        self._asked = False  # whether the driver wants the state

    def set_up(self, job: GossipJob, name: WorkerId, saved: Saved | None = None) -> Place:
        """Build the node. A node that joins again has the saved state of a neighbor."""
        self._name, self._node, self._coordinator = name, job.node(name), job.coordinator(name)
        self._saved, self._others = saved, set(job.headers) - {name}
        return self._place()

    def train(self, handles: Mapping[WorkerId, Any], returned: Return | None = None) -> None:
        """Train until the driver stops the run."""
        self._begin(handles, returned).start()
        try:
            while self._act():
                pass
        finally:
            self._end()

    def _begin(
        self, handles: Mapping[WorkerId, Any], returned: Return | None = None
    ) -> MessageSender:
        assert self._node is not None and self._coordinator is not None
        self._origin = self._clock()
        if returned is not None:
            assert self._saved is not None
            self._origin -= returned.began
            self._coordinator.load(returned.state)
            version, gone = self._coordinator.ledger.version, self._others - set(handles)
            self._node.load(self._saved, version, returned.deaths, gone)
            self._left |= gone
            self._saved = None
        self._sender = MessageSender(self._name, self._node, handles)
        self._own.append(Joined(self._name))
        return self._sender

    def _act(self) -> bool:
        """Handle the next event; return False once the run has stopped."""
        assert self._coordinator is not None
        if self._asked:
            with self._changed:
                self._take()
                self._changed.notify_all()
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
        if self._saved is not None:
            return False  # it has not begun with the state of its neighbor
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
    def tell(self, number: int, event: Event, handle: Any = None) -> None:
        """Queue an event that the driver reports; a second report changes nothing.

        number: of the events told to this process before.
        handle: of the process of a node that joined.
        """
        with self._changed:
            if number < self._tells:
                return
            self._tells += 1
            if isinstance(event, Left):
                self._left.add(event.worker)
                self._updated.pop(event.worker, None)
            self._told.append((event, handle))
            self._changed.notify_all()

    @ray.method(concurrency_group="report")  # type: ignore[untyped-decorator]
    def vector(self) -> Array:
        """Return a copy of the model."""
        assert self._node is not None
        return self._node.vector()

    @ray.method(concurrency_group="report")  # type: ignore[untyped-decorator]
    def saved(self) -> Saved:
        """Return the state of model and optimizer, for a node that joins again."""
        assert self._node is not None
        return self._node.saved()

    @ray.method(concurrency_group="report")  # type: ignore[untyped-decorator]
    def state(self) -> NodeState:
        """Return the state of the node, for a checkpoint.

        The thread that trains takes it between two events, so that its parts belong together.
        """
        with self._changed:
            self._state, self._asked = None, True
            while self._state is None and not self._ended:
                self._changed.wait(1.0)  # the driver has a deadline for this call
            return self._state or self._take()

    def _take(self) -> NodeState:
        assert self._node is not None and self._coordinator is not None
        self._asked = False
        self._state = NodeState(self._node.saved(), self._coordinator.state())
        return self._state

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
                event, handle = self._told.popleft()
                if isinstance(event, Left):
                    self._left.add(event.worker)
                    self._updated.pop(event.worker, None)
                    self._sender.drop(event.worker)
                    self._node.forget(event.worker)
                elif isinstance(event, Joined):
                    self._left.discard(event.worker)
                    self._sender.add(event.worker, handle)
                    self._node.welcome(event.worker)
                return event
            while self._updated:
                sender = next(iter(self._updated))
                version = self._updated.pop(sender)
                if self._node.has_copy(sender):  # else it left meanwhile
                    return Received(sender, version)
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
