"""Calls to actors that are in flight, and the one inbox in which their answers arrive."""

from __future__ import annotations

import queue
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

_LONGEST_WAIT = 3600.0  # seconds: a lock limits its timeout


@dataclass(eq=False, slots=True)
class Call:
    """A call in flight, with a callback for its answer and one for its deadline.

    overdue: returns whether to wait for the same timeout once more.
    """

    deadline: float
    answered: Callable[[Future[Any]], None]
    overdue: Callable[[], bool | None]


class Inbox(Protocol):
    """A queue of actions from other threads, such as `queue.SimpleQueue`."""

    def put(self, item: Callable[[], None]) -> None: ...
    def get(self, *, timeout: float) -> Callable[[], None]:
        """Wait for the next action; raise `queue.Empty` after the timeout."""

    def empty(self) -> bool: ...
    def qsize(self) -> int: ...


class Calls:
    """Calls in flight, each with a deadline. Callbacks in Ray's own thread report completion, since
    `ray.wait` blocks on a result whose bytes are still traveling over a slow link."""

    def __init__(self, inbox: Inbox | None = None, clock: Callable[[], float] = time.monotonic):
        self._inbox: Inbox = queue.SimpleQueue() if inbox is None else inbox
        self._clock = clock
        # By timeout: of the calls with one timeout, the first submitted is overdue first.
        self._open: dict[float, OrderedDict[Call, None]] = {}
        self.waited = 0.0  # seconds that the current answer lay in the inbox

    def add(
        self,
        ref: Any,
        patience: float,
        answered: Callable[[Future[Any]], None],
        overdue: Callable[[], bool | None],
    ) -> Call:
        """Add a call; `wait` runs `answered` when it is done or failed, `overdue` if it is late."""
        call = Call(self._clock() + patience, answered, overdue)
        self._open.setdefault(patience, OrderedDict())[call] = None
        inbox = self._inbox

        def done(future: Future[Any]) -> None:
            at = self._clock()
            inbox.put(lambda: self._take(call, future, at))

        ref.future().add_done_callback(done)
        return call

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Run an action in a `wait`, that many seconds from now."""
        call = Call(self._clock() + seconds, lambda future: None, action)
        self._open.setdefault(seconds, OrderedDict())[call] = None

    def drop(self, call: Call) -> None:
        """Forget a call: its callbacks no longer run."""
        for calls in self._open.values():
            calls.pop(call, None)

    def post(self, action: Callable[[], None]) -> None:
        """Run an action in the next `wait`. Safe in other threads and signal handlers."""
        self._inbox.put(action)

    def wait(self, until: float) -> bool:
        """Handle one answer, or the overdue calls; return False if no answer can come.

        until: the latest time to return, on the clock of this object (`time.monotonic`).
        """
        first = min([until, *(next(iter(c)).deadline for c in self._open.values() if c)])
        if first == inf and self._inbox.empty():
            return False
        now = self._clock()
        if first <= now and not self._inbox.empty():
            self.take_arrived()  # an answer in the inbox is not overdue, however late it is read
            self._expire(now)
            return True
        try:
            self._inbox.get(timeout=min(max(first - now, 0.0), _LONGEST_WAIT))()
        except queue.Empty:
            self._expire(self._clock())
        return True

    def take_arrived(self) -> None:
        """Handle the answers that have arrived by now, but no later ones."""
        for _ in range(self._inbox.qsize()):
            self._inbox.get(timeout=0.0)()

    def _take(self, call: Call, future: Future[Any], at: float) -> None:
        self.waited = self._clock() - at
        for calls in self._open.values():
            if call in calls:
                del calls[call]
                call.answered(future)
                return  # a call in no list was answered before, or dropped

    def _expire(self, now: float) -> None:
        for patience, calls in list(self._open.items()):
            while calls and (call := next(iter(calls))).deadline <= now:
                del calls[call]
                if call.overdue():
                    call.deadline = now + patience
                    calls[call] = None
            if not calls:
                self._open.pop(patience, None)
