"""Formatting of times, counts and long texts."""

from __future__ import annotations

TIMES = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3))
"""Units of time, and their lengths in seconds."""
LONGEST = 120
"""The most characters shown of the text of a policy or an engine."""


def in_time(seconds: float) -> str:
    """Return a time with a readable unit, for sentences and tables.

    >>> in_time(0.0123), in_time(135.2), in_time(4000), in_time(90000), in_time(1e6)
    ('12.3 ms', '135 s', '66.7 min', '25 h', '11.6 days')
    """
    for (unit, size), least in zip(TIMES, (3, 2, 5, 1), strict=False):
        if seconds >= least * size:
            return f"{seconds / size:.3g} {'days' if unit == 'd' else unit}"
    return f"{seconds * 1000:.3g} ms" if seconds else "0 s"


def in_seconds(seconds: float) -> str:
    """Return a time in six characters or fewer, for views that are redrawn all the time.

    >>> [in_seconds(each) for each in (0.04, 9.96, 599, 600, 7200, 86400 * 12)]
    ['0.0 s', '10 s', '599 s', '10 min', '2.0 h', '288 h']
    """
    if seconds >= 99.5 * 60:
        count, unit = seconds / 3600, "h"
    elif seconds >= 599.5:
        count, unit = seconds / 60, "min"
    else:
        count, unit = seconds, "s"
    return f"{count:.1f} {unit}" if count < 9.95 else f"{count:.0f} {unit}"


def number(count: int, name: str) -> str:
    """Return a count with its noun.

    >>> number(1, "step"), number(12_000, "step")
    ('1 step', '12,000 steps')
    """
    return f"{count:,} {name}" + ("" if count == 1 else "s")


def shortened(text: str, most: int = LONGEST) -> str:
    """Return a text, cut to at most so many characters.

    >>> shortened("k_sync(6)"), shortened("k_sync(6)", 7)
    ('k_sync(6)', 'k_sync…')
    """
    return text if len(text) <= most else f"{text[: most - 1]}…"
