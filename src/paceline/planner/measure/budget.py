"""The time limit of a measurement, and its progress callback."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from typing import TypeAlias

OnProgress: TypeAlias = Callable[[str, float], None]
"""Callback with the name of the measurement, and the share of it that is done, from 0 to 1."""

_TRIAL, _TRIALS = 0.05, 2  # share of the time left for one trial run; number of trial runs


class Budget:
    """Seconds of wall-clock time, counted from its creation.

    on_progress: called with the share that is done.
    """

    def __init__(
        self,
        seconds: float = inf,
        on_progress: Callable[[float], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds, self._on_progress, self.clock = seconds, on_progress, clock
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        """The seconds that remain; below 0 once the time is over."""
        return self._end - self.clock()

    @property
    def is_over(self) -> bool:
        return self.left <= 0

    def affordable(
        self, number: int, least: int, run: Callable[[int], object], times: float
    ) -> tuple[int, float]:
        """Return the samples with which `times` runs fit the time left, and the seconds of a run.

        `number` is halved until the runs fit, down to `least`. A trial run is made only if it is
        expected to take a small part of the time left, extrapolated from a run of `least`.
        """
        least = min(number, least)
        run(least)  # the first call also loads and allocates
        shortest = self._timed(run, least)
        while number > least:
            if shortest * number / least <= _TRIAL * self.left:
                for _ in range(_TRIALS):  # another process may slow one trial
                    seconds = self._timed(run, number)
                    if times * seconds <= self.left:
                        return number, seconds
            number = max(number // 2, least)
        return least, shortest

    def _timed(self, run: Callable[[int], object], number: int) -> float:
        began = self.clock()
        run(number)
        return self.clock() - began

    def report(self, share: float) -> None:
        """Call the progress callback with the share that is done."""
        if self._on_progress is not None:
            self._on_progress(min(share, 1.0))


def halved(number: int, least: int, fits: Callable[[int], bool]) -> int:
    """Return the number, halved until it fits, down to `least`.

    >>> halved(512, 32, lambda samples: samples <= 100)
    64
    """
    while number > least and not fits(number):
        number = max(number // 2, least)
    return number
