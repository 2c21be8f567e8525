"""Work in a thread that yields to training, such as writing files."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

_LOWEST = 19  # of `nice`; Ray runs its workers at 15


def start(work: Callable[[], None], name: str) -> threading.Thread:
    """Start a thread of the lowest priority, where the system has a priority for each thread.

    An exception in it is the caller's business: `work` must not raise.
    """

    def run() -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
        work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
