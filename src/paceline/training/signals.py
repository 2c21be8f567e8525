"""Ctrl-C and SIGTERM as events of a run."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

_SIGNALS: dict[signal.Signals, tuple[str, Any]] = {
    signal.SIGINT: ("interrupted by the user", signal.default_int_handler),
    signal.SIGTERM: ("terminated by SIGTERM", signal.SIG_DFL),
}
"""For each signal: the reason for the end of the run, and the handler if Python knows none."""


@contextlib.contextmanager
def signals(interrupt: Callable[[str], None], caught: list[int]) -> Iterator[None]:
    """Turn the first Ctrl-C or SIGTERM into an event, so that it interrupts no other event.

    The previous handlers get the second signal. Ray sets a handler of its own when it starts, so
    enter this after the engine is open. Threads other than the main one get no signals.

    caught: a list to which the signal's number is appended.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) or usual for number, (_, usual) in _SIGNALS.items()}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handle(number: int, frame: object) -> None:
        restore()
        caught.append(number)
        interrupt(_SIGNALS[signal.Signals(number)][0])

    for number in _SIGNALS:
        signal.signal(number, handle)
    try:
        yield
    finally:
        restore()
