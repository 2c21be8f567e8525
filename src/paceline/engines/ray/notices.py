"""Notices of nodes that will be taken away: `ray drain-node`, and clouds that reclaim machines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from paceline.core.logs import logger_of

logger = logger_of(__name__)

_EVERY = 1.0  # seconds between two looks


class Notices:
    """Looks in a thread which nodes Ray drains, and tells of each change.

    draining: returns the nodes that Ray drains now.
    tell: is called in the thread with all of them, when there are others than before.
    """

    def __init__(
        self, draining: Callable[[], Collection[str]], tell: Callable[[frozenset[str]], None]
    ) -> None:
        self._draining, self._tell = draining, tell
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True, name="paceline notices")
        self._thread.start()

    def end(self) -> None:
        """Stop looking."""
        self._ended.set()
        self._thread.join(timeout=10.0)

    def _look(self) -> None:
        known: frozenset[str] = frozenset()
        while not self._ended.wait(timeout=_EVERY):
            try:
                found = frozenset(self._draining())
            except Exception as error:  # Ray may be shutting down; the run must not end by it
                logger.debug("cannot ask Ray which nodes it drains: %s", error)
                continue
            if found != known and not self._ended.is_set():
                known = found
                self._tell(found)
