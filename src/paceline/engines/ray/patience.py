"""How long a task may take: learned from earlier tasks, at most what the user allows."""

from __future__ import annotations

from collections import deque
from math import ceil, log2

_KNOWN = 16  # response times that must be known
_REMEMBERED = 256
_FACTOR = 20.0  # of the longest response time of late
_LEAST = 60.0  # seconds


class Patience:
    """The seconds after which a silent worker counts as lost.

    Once 16 response times are known, 20 times the longest of the last 256 of all workers, and at
    least 60 seconds. The values are 60 seconds times a power of two, so there are few.

    >>> patience = Patience(600.0)
    >>> patience.of(proven=True)
    600.0
    >>> for _ in range(16):
    ...     patience.learn(0.5)
    >>> patience.of(proven=True), patience.of(proven=False)
    (60.0, 600.0)
    >>> patience.learn(4.0)
    >>> patience.of(proven=True)
    120.0
    """

    def __init__(self, most: float, learns: bool = True) -> None:
        self._most, self._learns = most, learns
        self._times: deque[float] = deque(maxlen=_REMEMBERED)

    def learn(self, seconds: float) -> None:
        """Note how long a worker took to answer."""
        self._times.append(seconds)

    def of(self, proven: bool) -> float:
        """Return how long to wait for a worker; its first task may take as long as allowed."""
        if not (proven and self._learns) or len(self._times) < _KNOWN:
            return self._most
        doublings = ceil(log2(max(_FACTOR * max(self._times) / _LEAST, 1.0)))
        return float(min(_LEAST * 2**doublings, self._most))
