"""A node without a main one, as an actor: its coordinator, its model, and its mail.

It decides by itself, and tells others by one-sided calls: a letter is put where it belongs by a
thread of its own at the receiver, who never waits for one. The driver only looks on.
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
from paceline.engines.base import PeersJob
from paceline.engines.node import Node, Outbox, Refused
from paceline.engines.ray.worker import Place, here
from paceline.learners.base import Array

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Bytes

logger = logger_of(__name__)

_LOOK = 60.0  # seconds after which a thread without work looks whether there is some
_PATIENCE = 0.2  # seconds for which entries are gathered before they are told


class Mail:
    """Sends letters, at most one call to each peer at a time; the rest waits in outboxes."""

    def __init__(self, me: WorkerId, node: Node, handles: Mapping[WorkerId, Any]) -> None:
        self._me, self._handles = me, dict(handles)
        self._changed = Condition()  # of all that follows
        self._outboxes = {peer: Outbox(node) for peer in handles}
        self._due: dict[WorkerId, None] = {}  # peers for whom there may be something to send
        self._later: dict[WorkerId, None] = {}  # to whom the copy is sent with the next step
        self._answers: deque[tuple[WorkerId, Future[Any]]] = deque()  # one for each call at most
        self._on_the_way: set[WorkerId] = set()
        self._sent, self._closed = 0, False
        self.error: BaseException | None = None

    def start(self) -> None:
        """Have a thread of its own send what there is."""
        Thread(target=self._run, daemon=True).start()

    def post(self, to: Sequence[WorkerId], letter: Bytes | None) -> None:
        """Have a letter sent, or a copy of the model if there is none."""
        with self._changed:
            for peer in to:
                if letter is None:
                    self._outboxes[peer].add_whole()
                else:
                    self._outboxes[peer].add(letter)
                self._due[peer] = None
            self._changed.notify()

    def again(self) -> None:
        """Send the whole copy to those who may not have it: a step has been taken since."""
        with self._changed:
            if self._later:
                self._due |= self._later
                self._later = {}
                self._changed.notify()

    def drop(self, peer: WorkerId) -> None:
        """Send nothing more to a peer that is gone."""
        with self._changed:
            self._handles.pop(peer, None)
            self._outboxes[peer].take()

    def sent(self) -> int:
        """Return the bytes sent since the last time."""
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
        except BaseException as error:  # told by the thread that trains
            self.error = self.error or error

    def turn(self) -> None:
        """See to what has been answered, and send what is due."""
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
            self._handles.pop(peer, None)  # as all will be told
        elif error is not None or not answer.result(
            timeout=0
        ):  # nobody knows whether it has arrived
            self._outboxes[peer].add_whole()
            self._due.pop(peer)
            self._later[peer] = None  # not at once, and not as late as the next news

    def _ship(self, peer: WorkerId) -> None:
        with self._changed:
            handle = self._handles.get(peer)
            if handle is None or peer in self._on_the_way:
                return
            letters = self._outboxes[peer].take()
            if not letters:
                return
            self._on_the_way.add(peer)
            self._sent += sum(letter.nbytes for letter in letters)
        answer = handle.receive.remote(self._me, letters).future()
        answer.add_done_callback(partial(self._tell_answered, peer))

    def _tell_answered(self, peer: WorkerId, answer: Future[Any]) -> None:
        with self._changed:
            self._answers.append((peer, answer))
            self._changed.notify()


class PeerProcess:
    """Wrapped by `ray.remote` where it is created. It is the engine of its own coordinator."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, place: Callable[[], Place] = here
    ) -> None:
        self._clock, self._place = clock, place
        self._name = ""
        self._node: Node | None = None
        self._mail: Mail | None = None
        self._coordinator: Coordinator | None = None
        self._origin = 0.0
        self._task: Task | None = None
        self._own: deque[Event] = deque()  # what came of its own commands
        self._timers: list[tuple[float, str]] = []
        self._changed = Condition()  # of what other threads put in:
        self._told: deque[Event] = deque()
        self._left: set[WorkerId] = set()  # of whose death it was told
        self._news: dict[WorkerId, int] = {}  # versions of copies that have moved
        self._got = 0
        self._entries: list[Entry] = []
        self._first = 0  # the number of the first of them
        self._ended = False

    def set_up(self, job: PeersJob, name: WorkerId) -> Place:
        """Build the node."""
        self._name, self._node, self._coordinator = name, job.node(name), job.coordinator(name)
        return self._place()

    def train(self, handles: Mapping[WorkerId, Any]) -> None:
        """Train until told to stop."""
        self._begin(handles).start()
        try:
            while self._act():
                pass
        finally:
            self._end()

    def _begin(self, handles: Mapping[WorkerId, Any]) -> Mail:
        assert self._node is not None
        self._mail = Mail(self._name, self._node, handles)
        self._origin = self._clock()
        self._own.append(Joined(self._name))
        return self._mail

    def _act(self) -> bool:
        """Wait for the next event and do what follows from it; False once it has stopped."""
        assert self._coordinator is not None
        for _, entry in drive({self._name: self._coordinator}, self):
            with self._changed:
                self._entries.append(entry)
            return True
        return False

    def _end(self) -> None:
        assert self._mail is not None
        self._mail.close()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def receive(self, sender: WorkerId, letters: Sequence[Bytes]) -> bool:
        """Put letters where they belong; return whether the sender's copy is now here.

        Else one was refused, as were those behind it, and the whole copy is to be sent.
        """
        assert self._node is not None
        for letter in letters:
            try:
                version = self._node.receive(sender, letter)
            except Refused as error:
                logger.warning("%s", error)
                return False
            with self._changed:
                self._got += letter.nbytes
                if version is not None and sender not in self._left:
                    self._news[sender] = version
                    self._changed.notify_all()
        return True

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def tell(self, event: Event) -> None:
        """Have the node hear of something that others have seen; twice is once."""
        with self._changed:
            if isinstance(event, Left):
                if event.worker in self._left:
                    return
                self._left.add(event.worker)
                self._news.pop(event.worker, None)
            self._told.append(event)
            self._changed.notify_all()

    @ray.method(concurrency_group="report")  # type: ignore[untyped-decorator]
    def vector(self) -> Array:
        """Return the model as it is."""
        assert self._node is not None
        return self._node.vector()

    @ray.method(concurrency_group="report")  # type: ignore[untyped-decorator]
    def entries(self, seen: int) -> tuple[int, list[Entry], bool]:
        """Return the number of the first entry, all from there on, and whether all is over.

        It takes a while, in which they gather. seen: how many the driver has; these are forgotten,
        and no others, since an answer may be lost.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ended, _PATIENCE)
            return self._since(seen)

    def _since(self, seen: int) -> tuple[int, list[Entry], bool]:
        if seen > self._first:  # else it is an older call, which came late
            del self._entries[: seen - self._first]
            self._first = seen
        return self._first, list(self._entries), self._ended

    # --- the engine ------------------------------------------------------------------------------

    def execute(self, node: WorkerId, command: Command) -> None:
        assert self._node is not None and self._mail is not None
        match command:
            case Start(task):
                self._task = task  # begun when there is nothing else to be seen to
            case Cancel():
                self._task = None
            case Discard(id):
                self._node.discard(id)
            case Step():
                stats, figures = self._node.step(command)
                self._mail.again()
                self._own.append(Stepped(self._node.version, stats, figures))
            case Send(to, tensors, whole):
                self._mail.post(to, None if whole else self._node.letter(tensors))
            case SetTimer(name, at):
                if at < inf:
                    heapq.heappush(self._timers, (at, name))
            case Stop() | Assign():
                pass

    def next_event(self) -> tuple[float, WorkerId, Event] | None:
        assert self._mail is not None
        while True:
            event = self._next()
            if self._mail.error is not None:
                raise self._mail.error
            if event is not None:
                return self._clock() - self._origin, self._name, event

    def _next(self) -> Event | None:
        """Return what is next, None if another look is due."""
        assert self._node is not None and self._mail is not None
        if self._own and isinstance(self._own[0], Joined):
            return self._own.popleft()  # before all else
        with self._changed:
            if self._told:
                event = self._told.popleft()
                if isinstance(event, Left):
                    self._mail.drop(event.worker)
                    self._node.forget(event.worker)
                return event
            if self._news:
                sender = next(iter(self._news))
                return Received(sender, self._news.pop(sender))
        if self._own:
            return self._own.popleft()
        if self._timers and self._timers[0][0] <= self._clock() - self._origin:
            return TimerFired(heapq.heappop(self._timers)[1])
        if self._task is not None:
            return self._compute(self._task)
        self._wait()
        return None

    def _wait(self) -> None:
        """Do nothing until there is something to do, for at most a second."""
        with self._changed:
            due = self._timers[0][0] + self._origin - self._clock() if self._timers else 1.0
            self._changed.wait_for(lambda: self._told or self._news, max(min(due, 1.0), 0.0))

    def _compute(self, task: Task) -> Event:
        assert self._node is not None and self._mail is not None
        self._task = None
        begin = self._clock()
        until = begin + task.work.budget
        outcome = self._node.compute(task, lambda done: self._clock() < until)
        seconds = self._clock() - begin
        with self._changed:
            got, self._got = self._got, 0
        sent = self._mail.sent()
        return Finished(task.id, outcome.samples, seconds, outcome.stats, 0.0, sent, got)
