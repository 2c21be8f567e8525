"""Loggers that say the same thing a few times a minute at most, and then how often it was.

A run in which workers fail all the time must not fill a disk with it: what matters is in the
journal. Nothing is kept back from ERROR on.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TypeAlias

MOST = 20
"""Records of one kind in a window; a kind is a level and a format string of one logger."""
WINDOW = 60.0
"""Seconds, from the first of them on."""

_Kind: TypeAlias = tuple[int, str]


@dataclass
class _Count:
    began: float
    seen: int = 0
    left_out: int = 0  # and not told of so far


class Quota(logging.Filter):
    """Lets through what is new, and of what is not the first `most` in so many seconds.

    The last one let through says that there may be more, and the first one of the next window how
    many there were; threads that log at the very same moment may be miscounted by one. To have all,
    take the filter off: `logging.getLogger(name).filters.clear()`.
    """

    def __init__(self, most: int = MOST, seconds: float = WINDOW) -> None:
        super().__init__()
        self._most, self._seconds = most, seconds
        self._counts: dict[_Kind, _Count] = {}  # as many as there are format strings in the source

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            return True
        kind = record.levelno, str(record.msg)
        count = self._counts.setdefault(kind, _Count(record.created))
        if not 0 <= record.created - count.began < self._seconds:  # or the clock was set back
            before, count = count, _Count(record.created)
            self._counts[kind] = count
            if before.left_out:
                more = f"; {before.left_out} like it were left out before"
                record.msg, record.args = record.getMessage() + more, ()
        count.seen += 1
        if count.seen > self._most:
            count.left_out += 1
            return False
        if count.seen == self._most:
            left = count.began + self._seconds - record.created
            more = f"; more like it are left out for {left:.0f} s"
            record.msg, record.args = record.getMessage() + more, ()
        return True

    def left_out(self) -> dict[_Kind, int]:
        """Return how many of each kind were left out and not told of, and count anew."""
        counts = list(self._counts.items())
        found = {kind: count.left_out for kind, count in counts if count.left_out}
        for _, count in counts:
            count.left_out = 0
        return found

    def clear(self) -> None:
        """Begin as if nothing had been logged."""
        self._counts.clear()


_quotas: dict[str, Quota] = {}


def logger_of(name: str) -> logging.Logger:
    """Return the logger of a module, with a quota of its own. It has no handler."""
    logger = logging.getLogger(name)
    if name not in _quotas:
        _quotas[name] = Quota()
        logger.addFilter(_quotas[name])
    return logger


def tell_left_out() -> None:
    """Say how many records were left out and not told of, a line for each kind: a run has ended."""
    for name, quota in list(_quotas.items()):
        for (level, text), count in quota.left_out().items():
            told = "%d more records like %r were left out; see the journal"
            logging.getLogger(name).log(level, told, count, text)


def clear() -> None:
    """Begin as if nothing had been logged."""
    for quota in _quotas.values():
        quota.clear()
