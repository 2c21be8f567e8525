"""Loggers that limit repeated messages to a few per minute and then log how many they omitted.

A run whose workers fail all the time must not fill a disk with log lines; the journal has all
events. Records of level ERROR and above are never omitted.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TypeAlias

MOST = 20
"""The limit of records of one kind (level and format string of one logger) in a window."""
WINDOW = 60.0
"""The seconds of a window, which begins with the first record of a kind."""

_Kind: TypeAlias = tuple[int, str]


@dataclass
class _Count:
    began: float
    seen: int = 0
    left_out: int = 0  # omitted, and not yet reported


class Quota(logging.Filter):
    """Passes the first `most` records of each kind in a window of `seconds`; drops the rest.

    The last record that passes says that more may follow. The first record of the next window says
    how many were dropped. Threads that log at the same moment may be miscounted by one. To get all
    records, remove the filter: `logging.getLogger(name).filters.clear()`.
    """

    def __init__(self, most: int = MOST, seconds: float = WINDOW) -> None:
        super().__init__()
        self._most, self._seconds = most, seconds
        self._counts: dict[_Kind, _Count] = {}  # one entry for each format string in the source

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
        """Return the unreported number of dropped records of each kind, and reset it."""
        counts = list(self._counts.items())
        found = {kind: count.left_out for kind, count in counts if count.left_out}
        for _, count in counts:
            count.left_out = 0
        return found

    def clear(self) -> None:
        """Reset all counts."""
        self._counts.clear()


_quotas: dict[str, Quota] = {}


def logger_of(name: str) -> logging.Logger:
    """Return the logger of a module, with its own quota and without a handler."""
    logger = logging.getLogger(name)
    if name not in _quotas:
        _quotas[name] = Quota()
        logger.addFilter(_quotas[name])
    return logger


def tell_left_out() -> None:
    """Log the unreported number of dropped records, one line for each kind, at a run's end."""
    for name, quota in list(_quotas.items()):
        for (level, text), count in quota.left_out().items():
            told = "%d more records like %r were left out; see the journal"
            logging.getLogger(name).log(level, told, count, text)


def clear() -> None:
    """Reset the counts of all loggers."""
    for quota in _quotas.values():
        quota.clear()
