"""Calls on their way to actors, and the one inbox in which their answers arrive."""

from __future__ import annotations

import queue
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

_LONGEST_WAIT = 3600.0  # what a lock can wait for has a limit


@dataclass(eq=False, slots=True)
class Call:
    """A call without an answer so far: what to do when it comes, and what if it does not.

    overdue: returns whether to be patient once more.
    """

    deadline: float
    answered: Callable[[Future[Any]], None]
    overdue: Callable[[], bool | None]


class Inbox(Protocol):
    """Where other threads leave what is to be done; `queue.SimpleQueue` is one."""

    def put(self, item: Callable[[], None]) -> None: ...
    def get(self, *, timeout: float) -> Callable[[], None]:
        """Wait for the next; raise `queue.Empty` if there is none in time."""

    def empty(self) -> bool: ...


class Calls:
    """Completion comes through callbacks of Ray's own thread, never through `ray.wait`: that
    blocks on a result whose bytes are still travelling over a slow link."""

    def __init__(self, inbox: Inbox | None = None, clock: Callable[[], float] = time.monotonic):
        self._inbox: Inbox = queue.SimpleQueue() if inbox is None else inbox
        self._clock = clock
        # By patience: in order of submission the first is then the first to be overdue.
        self._open: dict[float, OrderedDict[Call, None]] = {}
        self.waited = 0.0  # seconds that the answer being taken in lay in the inbox

    def add(
        self,
        ref: Any,
        patience: float,
        answered: Callable[[Future[Any]], None],
        overdue: Callable[[], bool | None],
    ) -> Call:
        """Have `answered` called from `wait` when the call is done or has failed."""
        call = Call(self._clock() + patience, answered, overdue)
        self._open.setdefault(patience, OrderedDict())[call] = None
        inbox = self._inbox

        def done(future: Future[Any]) -> None:
            at = self._clock()
            inbox.put(lambda: self._take(call, future, at))

        ref.future().add_done_callback(done)
        return call

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Have something done by a `wait` that many seconds from now."""
        call = Call(self._clock() + seconds, lambda future: None, action)
        self._open.setdefault(seconds, OrderedDict())[call] = None

    def drop(self, call: Call) -> None:
        """Forget a call: nobody wants to hear of it any more."""
        for calls in self._open.values():
            calls.pop(call, None)

    def post(self, action: Callable[[], None]) -> None:
        """Have something done by the next `wait`. Safe in other threads and signal handlers."""
        self._inbox.put(action)

    def wait(self, until: float) -> bool:
        """Take in one answer, or what has become of an overdue one; False if none can come.

        until: on this one's clock, by default that of `time.monotonic`.
        """
        first = min([until, *(next(iter(c)).deadline for c in self._open.values() if c)])
        if first == inf and self._inbox.empty():
            return False
        try:  # what has arrived is not overdue, however long nobody looked
            patience = min(max(first - self._clock(), 0.0), _LONGEST_WAIT)
            action = self._inbox.get(timeout=patience)
        except queue.Empty:
            self._expire()
        else:
            action()
        return True

    def _take(self, call: Call, future: Future[Any], at: float) -> None:
        self.waited = self._clock() - at
        for calls in self._open.values():
            if call in calls:
                del calls[call]
                call.answered(future)
                return  # answered before, or dropped, otherwise

    def _expire(self) -> None:
        now = self._clock()
        for patience, calls in list(self._open.items()):
            while calls and (call := next(iter(calls))).deadline <= now:
                del calls[call]
                if call.overdue():
                    call.deadline = now + patience
                    calls[call] = None
