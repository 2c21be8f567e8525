"""Which connections of a process may send now, and how much."""

from __future__ import annotations

import time
from collections.abc import Collection
from math import inf

from paceline.engines.ray.transport.link import Link
from paceline.engines.ray.transport.window import Window

_STALLED = 0.1  # seconds without progress after which a connection no longer holds up others
# Of a connection that has enough on its way: bytes of room until it sends again, and the seconds
# until that is looked at.
_WORTH, _FULL = 2**14, 0.002


class Turns:
    """Lets the objects with the lowest order go first, and bounds what is on its way.

    host: of this process. Connections within it do not wait.
    """

    def __init__(self, host: str) -> None:
        self._host, self._window = host, Window()
        self._rooms: dict[Link, float] = {}

    def room(self, link: Link) -> float:
        """Return the bytes that a connection may send in this turn."""
        return self._rooms.get(link, inf)

    def take(self, links: Collection[Link]) -> tuple[dict[Link, bool], float]:
        """Return which connections are due, of those that have something to send, and the seconds
        until others may be."""
        now, waiting, full = time.monotonic(), False, False
        turns = {link: -1 if self.is_near(link) else link.order for link in links}
        far = [link for link in turns if link.opened and not self.is_near(link)]
        self._window.measure(far)
        self._rooms.clear()
        moving = [turn for link, turn in turns.items() if self._holds_up_others(link, now)]
        first = min((turn for turn in moving if turn >= 0), default=None)
        due = {}
        for link, turn in turns.items():
            due[link] = first is None or turn <= first or now - link.moved >= _STALLED
            if not due[link]:
                waiting, link.moved = True, now  # it is held up by others, and not by itself
            elif link in far:
                room = self._rooms[link] = self._window.room(link, len(far))
                if room < _WORTH:
                    due[link], full = False, True
        if full:
            return due, _FULL
        return due, _STALLED / 2 if waiting else 1.0

    def _holds_up_others(self, link: Link, now: float) -> bool:
        return now - link.moved < _STALLED and link not in self._window.slow

    def is_near(self, link: Link) -> bool:
        return link.address is not None and link.address[0] == self._host
