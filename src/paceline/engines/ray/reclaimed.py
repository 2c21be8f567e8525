"""What a worker learns of its end: SIGTERM to its process, and notices of a cloud."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import NamedTuple

from paceline.core.logs import logger_of
from paceline.engines.ray.clouds import notice

logger = logger_of(__name__)

GRACE = 30.0
"""Seconds that a process has after SIGTERM; a second SIGTERM ends it at once."""
_EVERY = 2.0  # seconds between two questions to a cloud; AWS recommends 5 at most


class Notice(NamedTuple):
    """Why a worker will be taken away.

    machine: whether its whole machine is.
    """

    why: str
    machine: bool


class Reclaimed:
    """Waits for the notice that this process or its machine will be taken away.

    cloud: "aws", "gcp" or "azure", whose metadata service is asked; None for none.

    Ray runs its own code in the main thread of an actor, where Python's signal handlers have to
    wait for it. The wakeup file descriptor is written in the signal itself. It can be set in the
    main thread only, in which Ray makes an actor.
    """

    def __init__(self, cloud: str | None = None) -> None:
        self._notice: Notice | None = None
        self._told = threading.Event()
        try:
            signal.signal(signal.SIGTERM, lambda number, frame: None)
        except ValueError as error:
            logger.debug("SIGTERM ends this process at once: %s", error)
        else:
            signals, writes = os.pipe()
            os.set_blocking(writes, False)
            signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
            os.register_at_fork(after_in_child=_end_at_sigterm)
            self._start(self._hear, signals)
        if cloud is not None:
            self._start(self._poll, cloud)

    def wait(self, seconds: float) -> Notice | None:
        """Wait for a notice; it stays once it is there."""
        self._told.wait(timeout=seconds)
        return self._notice

    def _start(self, loop: Callable[..., None], given: object) -> None:
        threading.Thread(target=loop, args=(given,), daemon=True, name="notices").start()

    def _hear(self, signals: int) -> None:
        """Report the first SIGTERM; end the process at the second, or after the time of grace."""
        self._await_sigterm(signals)
        self._tell(Notice("its process got SIGTERM", machine=False))
        late = threading.Timer(GRACE, os._exit, (128 + signal.SIGTERM,))
        late.daemon = True
        late.start()
        self._await_sigterm(signals)
        os._exit(128 + signal.SIGTERM)

    def _await_sigterm(self, signals: int) -> None:
        while os.read(signals, 1) != bytes([signal.SIGTERM]):
            pass  # another signal

    def _poll(self, cloud: str) -> None:
        while (why := notice(cloud)) is None:
            if self._told.wait(timeout=_EVERY):
                return
        self._tell(Notice(why, machine=True))

    def _tell(self, notice: Notice) -> None:
        self._notice = self._notice or notice
        self._told.set()


def _end_at_sigterm() -> None:
    """Let SIGTERM end a forked process, such as one of a DataLoader, and leave its parent alone."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
