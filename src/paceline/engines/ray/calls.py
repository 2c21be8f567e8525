"""Calls on their way to actors, and the one inbox in which their answers arrive."""

from __future__ import annotations

import queue
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from math import inf
from typing import Any

_LONGEST_WAIT = 3600.0  # what a lock can wait for has a limit


@dataclass(eq=False, slots=True)
class Call:
    """A call without an answer so far: what to do when it comes, and what if it does not.

    overdue: returns whether to be patient once more.
    """

    deadline: float
    answered: Callable[[Future[Any]], None]
    overdue: Callable[[], bool | None]


class Calls:
    """Completion comes through callbacks of Ray's own thread, never through `ray.wait`: that
    blocks on a result whose bytes are still travelling over a slow link."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
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
        call = Call(time.monotonic() + patience, answered, overdue)
        self._open.setdefault(patience, OrderedDict())[call] = None
        inbox = self._inbox

        def done(future: Future[Any]) -> None:
            at = time.monotonic()
            inbox.put(lambda: self._take(call, future, at))

        ref.future().add_done_callback(done)
        return call

    def drop(self, call: Call) -> None:
        """Forget a call: nobody wants to hear of it any more."""
        for calls in self._open.values():
            calls.pop(call, None)

    def post(self, action: Callable[[], None]) -> None:
        """Have something done by the next `wait`. Safe in other threads and signal handlers."""
        self._inbox.put(action)

    def wait(self, until: float) -> bool:
        """Take in one answer, or what has become of an overdue one; False if none can come.

        until: on the clock of `time.monotonic`.
        """
        first = min([until, *(next(iter(c)).deadline for c in self._open.values() if c)])
        if first == inf and self._inbox.empty():
            return False
        try:  # what has arrived is not overdue, however long nobody looked
            patience = min(max(first - time.monotonic(), 0.0), _LONGEST_WAIT)
            action = self._inbox.get(timeout=patience)
        except queue.Empty:
            self._expire()
        else:
            action()
        return True

    def _take(self, call: Call, future: Future[Any], at: float) -> None:
        self.waited = time.monotonic() - at
        for calls in self._open.values():
            if call in calls:
                del calls[call]
                call.answered(future)
                return  # answered before, or dropped, otherwise

    def _expire(self) -> None:
        now = time.monotonic()
        for patience, calls in list(self._open.items()):
            while calls and (call := next(iter(calls))).deadline <= now:
                del calls[call]
                if call.overdue():
                    call.deadline = now + patience
                    calls[call] = None
