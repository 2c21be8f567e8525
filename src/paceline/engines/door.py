"""What is let in: a result of the right shape and type, finite, and not out of all proportion.

One number that is not finite makes a model worthless, and a step that is a million times too long
nearly so. A worker whose result is refused is ended and started again after a pause. Where two
workers fail alike it is not the workers: then the run ends, and says so. Letters of peers are
looked at in the same way, and one that is refused is followed by a whole copy.
"""

from __future__ import annotations

from collections import deque
from math import isfinite, sqrt
from statistics import median
from typing import Any

import numpy as np

from paceline.core.protocol import Task, WorkerId
from paceline.learners.base import Array

FAR = 1e4
"""Times the usual norm from which on a result is refused. Gradients of sound runs vary by factors
of tens; what a flipped bit of an exponent makes of one is off by 1e9 and more."""
KNOWN = 3  # norms that must be known before one is called unusual
_REMEMBERED = 64
_SUSPECTS = 4096  # more than there are workers: a model that is not finite makes all of them so


class Door:
    """Looks at every result before it is held.

    size, dtype: of the model's vector; a coded result is `messages` times shorter.
    """

    def __init__(self, size: int, dtype: Any) -> None:
        self._size, self._dtype = size, np.dtype(dtype)
        self._norms: deque[float] = deque(maxlen=_REMEMBERED)
        self._refused: dict[tuple[object, ...], None] = {}  # what refused results were of

    def fault(
        self,
        task: Task,
        vector: Array | None,
        samples: object,
        stats: object,
        norm: float | None = None,
    ) -> str | None:
        """Say what is wrong with a result; None: nothing.

        norm: as the worker says, where the vector itself is elsewhere.
        """
        most = task.computed
        if type(samples) is not int or not 0 <= samples <= most:
            return f"it claims {samples!r} samples of {most}"
        if not isinstance(stats, dict) or not all(type(v) is float for v in stats.values()):
            return "its statistics are not numbers"
        if vector is None:
            return None if norm is None or not samples else self._far(task, norm)
        expected = -(-self._size // task.work.messages)
        if not isinstance(vector, np.ndarray) or vector.shape != (expected,):
            shape = getattr(vector, "shape", type(vector).__name__)
            return f"it has the shape {shape} instead of ({expected},)"
        if vector.dtype != self._dtype:
            return f"it is of {vector.dtype} instead of {self._dtype}"
        if not samples:
            return None
        return self._far(task, norm_of(vector))

    def _far(self, task: Task, norm: float) -> str | None:
        if not isfinite(norm):
            return NOT_FINITE
        usual = median(self._norms) if len(self._norms) >= KNOWN else 0.0
        if usual and norm > FAR * usual and not self.is_again(task):
            return f"its norm is {norm:.3g}, that of others {usual:.3g}"
        self._norms.append(norm)
        return None

    def let_in(self, vector: Array | None) -> None:
        """Count a result as usual, whatever it is: it is the model's doing."""
        if vector is not None and isfinite(norm := norm_of(vector)):
            self._norms.append(norm)

    def is_again(self, task: Task) -> bool:
        """Tell whether a refused result is the model's doing, and no worker's fault.

        It is if the result of the same samples is so again, which are given to another process when
        the first is ended: then a large one is let in, and one that is not finite ends the run. Of
        a coded batch the same parts have to be so again: each may be spoiled for itself.
        """
        samples = samples_of(task)
        again = samples in self._refused
        self._refused[samples] = None
        while len(self._refused) > _SUSPECTS:
            del self._refused[next(iter(self._refused))]
        return again


def samples_of(task: Task) -> tuple[object, ...]:
    """Name the samples that a task computes: the same name, the same samples."""
    return task.draw, *task.stretches(), *sorted(task.work.parts or ())


class Slot:
    """Looks at every letter of a peer before its copy is moved.

    One that would move a copy out of all proportion is refused once: if the whole copy that its
    sender then sends says the same, it is no accident.
    """

    def __init__(self) -> None:
        self._moves: deque[float] = deque(maxlen=_REMEMBERED)
        self._refused: set[WorkerId] = set()  # whose last letter was out of all proportion

    @property
    def usual(self) -> float:
        """How far letters move copies; 0 as long as that is not known."""
        return median(self._moves) if len(self._moves) >= KNOWN else 0.0

    def fault(self, sender: WorkerId, move: float) -> str | None:
        """Say what is wrong with a letter that moves a copy so far; None: nothing."""
        if not isfinite(move):
            return NOT_FINITE
        usual = self.usual
        if usual and move > FAR * usual and sender not in self._refused:
            self._refused.add(sender)
            return f"it moves a copy by {move:.3g}, others do by {usual:.3g}"
        self._refused.discard(sender)
        self._moves.append(move)
        return None

    def forget(self, sender: WorkerId) -> None:
        self._refused.discard(sender)


NOT_FINITE = "it is not finite"


def norm_of(vector: Array) -> float:
    """Return the norm; not finite exactly if a value is not."""
    with np.errstate(over="ignore", invalid="ignore"):
        square = float(np.dot(vector, vector))
    if isfinite(square):
        return sqrt(square)
    largest = float(np.abs(vector).max())  # the sum may be too large where no value is
    return largest * float(np.linalg.norm(vector / largest)) if isfinite(largest) else largest
