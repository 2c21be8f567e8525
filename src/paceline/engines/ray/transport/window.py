"""How much of what a process sends may be on its way at a time, and which connections are slow.

TCP sends until a queue on the way overflows. Several connections at once then lose packets, share
the link unevenly, and delay all other messages of the host by what waits in the queue. The way
itself holds its rate times its shortest round trip. Twice that is enough to keep it full, and is
the bound of BBR (Cardwell et al., ACM Queue 14(5), 2016). The rate is the largest at which the
other ends acknowledged bytes of this process lately.

A connection is slow if it gets a quarter of what another connection of this process got lately, or
less. Then the limit is on its own way, and others can use the rest of the link of this host.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from math import inf
from typing import Protocol

GAIN = 2.0
"""In units of what the way holds."""
LEAST = 2**17
"""Bytes that every connection may have on its way."""
SHORT = 0.004
"""Seconds of a round trip below which there is no bound: the process does not wake up that often,
and so short a way holds little."""
SAMPLE, KEPT = 0.1, 100
"""Seconds of a measurement of the rate, and the number of measurements that count."""
SLOW, LATELY = 0.25, 10.0
"""The part of the fastest connection's rate at which one is slow, and the seconds that rates count.
"""


class Connection(Protocol):
    """What a window needs to know of a connection."""

    @property
    def on_its_way(self) -> int: ...

    @property
    def acknowledged(self) -> int: ...

    @property
    def round_trip(self) -> float: ...


class Window:
    """Measures the rate of a process, and bounds what each of its connections has on its way."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rates: deque[float] = deque(maxlen=KEPT)
        self._at = -inf  # when a measurement began
        self._before: dict[Connection, int] = {}  # the bytes acknowledged until then
        self._each: dict[Connection, tuple[float, float]] = {}  # its last rate, and since when
        self.slow: set[Connection] = set()

    def measure(self, sending: Collection[Connection]) -> None:
        """Note what the connections have sent that send to other hosts now."""
        now = self._clock()
        if not sending:
            self._before = {}
        elif not self._before or now - self._at >= SAMPLE:
            acknowledged = {each: each.acknowledged for each in sending}
            if self._before:
                self._note(now, acknowledged)
            self._at, self._before = now, acknowledged

    def _note(self, now: float, acknowledged: Mapping[Connection, int]) -> None:
        """Note the rates since the measurement began. Only connections that had something to send
        all the time, and sent some of it, tell how fast they are."""
        moved = {
            e: acknowledged[e] - count for e, count in self._before.items() if e in acknowledged
        }
        self._rates.append(sum(moved.values()) / (now - self._at))
        known = {e: (at, rate) for e, (at, rate) in self._each.items() if now - at < LATELY}
        rates = {e: (now, count / (now - self._at)) for e, count in moved.items() if count}
        self._each = known | rates
        fastest = max((rate for _, rate in self._each.values()), default=0.0)
        self.slow = {e for e, (_, rate) in self._each.items() if rate <= SLOW * fastest}

    def room(self, connection: Connection, active: int) -> float:
        """Return the bytes that a connection may send now, one of several that are active."""
        trip = connection.round_trip
        if trip < SHORT:
            return inf
        if connection in self.slow:  # its own way is the limit: as much as that one holds
            share = self._each[connection][1]
        else:
            share = max(self._rates, default=0.0) / active
        return max(GAIN * share * trip, LEAST) - connection.on_its_way
