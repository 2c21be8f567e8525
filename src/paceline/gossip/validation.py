"""Validation of the messages of peers, before one changes the copy of its sender."""

from __future__ import annotations

from collections import deque
from math import isfinite
from statistics import median

from paceline.core.protocol import WorkerId
from paceline.engines.checks import FAR, KNOWN, NOT_FINITE, REMEMBERED


class MessageCheck:
    """Rejects messages that are not finite, or that move a copy far more than others do.

    A large move is rejected once. Its sender then sends the whole copy; if that is as far away,
    the move is no accident and the check accepts it.
    """

    def __init__(self) -> None:
        self._moves: deque[float] = deque(maxlen=REMEMBERED)
        self._rejected: set[WorkerId] = set()  # senders whose last message moved too far

    @property
    def usual(self) -> float:
        """The median distance by which messages move copies; 0 while too few are known."""
        return median(self._moves) if len(self._moves) >= KNOWN else 0.0

    def fault(self, sender: WorkerId, move: float) -> str | None:
        """Return the fault of a message that moves a copy by a distance; None if it is sound."""
        if not isfinite(move):
            return NOT_FINITE
        usual = self.usual
        if usual and move > FAR * usual and sender not in self._rejected:
            self._rejected.add(sender)
            return f"it moves a copy by {move:.3g}, and the median of other messages is {usual:.3g}"
        self._rejected.discard(sender)
        self._moves.append(move)
        return None

    def forget(self, sender: WorkerId) -> None:
        """Drop the state of a sender that left."""
        self._rejected.discard(sender)
