"""The base class of all trackers: when they write, and how they handle errors."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress

from paceline.core.logs import logger_of
from paceline.integrations.trackers.figures import values, worker_values
from paceline.report.callbacks import Callback, Live, Progress

logger = logger_of(__name__)


class Tracker(Callback, ABC):
    """Sends metrics to a tracker, every so many steps and always at the last step.

    The metrics of each worker are sent less often, since there may be thousands.

    An error on opening reaches the user before training begins. An error on a later write is
    logged once, as a warning, and nothing more is sent: the run matters more than its curves.
    """

    def __init__(self, every: int = 1, workers_every: int = 10) -> None:
        for name, given in (("every", every), ("workers_every", workers_every)):
            if given < 1:
                raise ValueError(f"{name}={given}: the steps between two writes; use 1 or more")
        self._every, self._workers_every = every, workers_every
        self._live: Live | None = None
        self._latest: Progress | None = None
        self._sent = self._workers_sent = 0  # the steps of the newest metrics sent
        self._opened = self._silent = False

    def started(self, live: Live) -> None:
        self._live, self._latest, self._sent, self._workers_sent = live, None, 0, 0
        self._opened = self._silent = False
        try:
            self._open(live)
        except BaseException:
            with suppress(Exception):  # the first error says more
                self._abandon()
            raise
        self._opened = True

    def stepped(self, progress: Progress) -> None:
        self._latest = progress
        if progress.step % self._every == 0:
            first = not self._workers_sent
            due = progress.step - self._workers_sent >= self._workers_every
            self._send(workers=first or due)

    def ended(self, reason: str) -> None:
        live, opened = self._live, self._opened
        if live is not None and opened:  # else it was not started or opened
            self._send(workers=True)
            self._attempt(lambda: self._close(live, reason), "could not be closed")
        self._live, self._opened = None, False

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Send metrics of your own; `Evaluate(log=tracker.log)` sends those of evaluations."""
        if self._opened and not self._silent:
            self._attempt(lambda: self._write(step, dict(figures)), f"failed at step {step}")

    def _send(self, workers: bool) -> None:
        """Send the metrics of the newest step, unless they were sent already."""
        progress, live = self._latest, self._live
        if progress is None or live is None or self._silent:
            return
        step = progress.step
        figures: dict[str, float] = {}
        if step != self._sent:
            figures |= values(progress, live)
        if workers and step != self._workers_sent:
            figures |= worker_values(progress, live)
            self._workers_sent = step
        self._sent = step
        if figures:
            self._attempt(lambda: self._write(step, figures), f"failed at step {step}")

    def _attempt(self, act: Callable[[], None], told: str) -> None:
        try:
            act()
        except Exception as error:  # of any type, from another library
            level = logging.DEBUG if self._silent else logging.WARNING
            self._silent = True
            logger.log(
                level, "%s %s and gets no more metrics; the run continues (%s: %s)",
                type(self).__name__, told, type(error).__name__, error,
            )  # fmt: skip

    @abstractmethod
    def _open(self, live: Live) -> None:
        """Open the tracker and send the configuration of the run."""

    def _abandon(self) -> None:
        """Release all resources after opening failed."""

    @abstractmethod
    def _write(self, step: int, figures: Mapping[str, float]) -> None:
        """Send metrics of a step; those of worker w0 have names such as `worker_speed/w0`."""

    @abstractmethod
    def _close(self, live: Live, reason: str) -> None:
        """Send the reason for the end and a summary, and release all resources."""
