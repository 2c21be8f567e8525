"""What all trackers have in common: when they write, and what becomes of their errors."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable

from paceline.callbacks import Callback, Live, Progress
from paceline.trackers.figures import values, worker_values

logger = logging.getLogger(__name__)

FAILED = "failed"
"""The reason of a run that was ended by an error."""


class Tracker(Callback, ABC):
    """Sends figures somewhere, every so many steps and of the last step always.

    An error when it is opened reaches the user, before anything is trained. An error of a later
    write is logged once, as a warning, and nothing more is sent: a run is worth more than its
    curves.
    """

    def __init__(self, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"every={every}: the steps between two writes; use 1 or more")
        self._every = every
        self._live: Live | None = None
        self._held: Progress | None = None  # the newest, if it was not sent
        self._opened = self._silent = False

    def started(self, live: Live) -> None:
        self._live, self._held = live, None
        self._opened = self._silent = False
        self._open(live)
        self._opened = True

    def stepped(self, progress: Progress) -> None:
        self._held = progress
        if progress.step % self._every == 0:
            self._send()

    def ended(self, reason: str) -> None:
        live, opened = self._live, self._opened
        if live is not None and opened:  # otherwise it was never started, or could not be opened
            self._send()
            self._attempt(lambda: self._close(live, reason), "could not be closed")
        self._live, self._opened = None, False

    def _send(self) -> None:
        progress, live = self._held, self._live
        if progress is not None and live is not None and not self._silent:
            self._held = None
            self._attempt(lambda: self._write(progress, live), f"failed at step {progress.step}")

    def _attempt(self, act: Callable[[], None], told: str) -> None:
        try:
            act()
        except Exception as error:  # of whatever kind: it is another library's
            level = logging.DEBUG if self._silent else logging.WARNING
            self._silent = True
            logger.log(
                level, "%s %s and is sent no more figures; the run goes on (%s: %s)",
                type(self).__name__, told, type(error).__name__, error,
            )  # fmt: skip

    @abstractmethod
    def _open(self, live: Live) -> None:
        """Begin, and send what the run is of."""

    @abstractmethod
    def _write(self, progress: Progress, live: Live) -> None:
        """Send the figures of a step."""

    @abstractmethod
    def _close(self, live: Live, reason: str) -> None:
        """Send why it ended and what came of it, and let go of everything."""


def named_values(progress: Progress, live: Live) -> dict[str, float]:
    """Return all figures by name; those of worker w0 are named as `worker_speed/w0`."""
    of_workers = worker_values(progress, live).items()
    return {
        **values(progress, live),
        **{f"{figure.name}/{worker}": value for (figure, worker), value in of_workers},
    }
