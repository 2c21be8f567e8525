"""Validation of results: the right shape and type, finite, and not out of all proportion.

One number that is not finite makes a model worthless, and a step that is a million times too long
nearly so. The engine kills the worker of a refused result, and starts it again after a pause. If
the same samples fail on a second worker, the model is the cause: see `ResultCheck.is_again`.
"""

from __future__ import annotations

from collections import deque
from math import isfinite, sqrt
from statistics import median
from typing import Any

import numpy as np

from paceline.core.copies import samples_of
from paceline.core.protocol import Task, WorkerId
from paceline.learners.base import Array

FAR = 1e4
"""A result is refused if its norm exceeds this many times the usual norm. Gradients of sound runs
vary by factors of tens; a flipped bit of an exponent changes one by a factor of 1e9 and more."""
KNOWN = 3  # norms that must be known before a norm can count as unusual
REMEMBERED = 64  # norms of earlier results; their median is the usual norm
_IN_ROW = 3  # skipped results in a row of one worker; the next one replaces it
_SUSPECTS = 4096  # above the number of workers: a model that is not finite makes all fail


class Skipping:
    """Counts results that are not finite, and decides which of them to skip.

    limit: such results in a row, of all workers together, that end the run; 0: skip no result.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_row = 0
        self._of_worker: dict[WorkerId, int] = {}

    def may_skip(self, worker: WorkerId) -> bool:
        """Count a result that is not finite; return whether to skip it and keep its worker."""
        self._in_row += 1
        self._of_worker[worker] = self._of_worker.get(worker, 0) + 1
        if not self._limit or self._of_worker[worker] <= _IN_ROW:
            return self._limit > 0
        del self._of_worker[worker]  # a new process replaces the worker
        return False

    def finite(self, worker: WorkerId) -> None:
        """Count a result that is finite."""
        self._in_row = 0
        self._of_worker.pop(worker, None)

    def reason(self, task: Task) -> str | None:
        """Return why the run must end, or None if it continues."""
        if not self._limit or self._in_row < self._limit:
            return None
        return (
            f"{self._in_row} results in a row are not finite, the last one at version "
            f"{task.version} (skip_limit={self._limit}): look at the learning rate, the model and "
            "the samples"
        )


class Suspects:
    """Remembers which samples failed, and where."""

    def __init__(self) -> None:
        self._failed: dict[tuple[object, ...], list[tuple[str, ...]]] = {}

    def add(self, task: Task, where: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
        """Count a failure of a task's samples; return where they failed before."""
        places = self._failed.setdefault(samples_of(task), [])
        before = list(places)
        if where not in places:
            places.append(where)
        while len(self._failed) > _SUSPECTS:
            del self._failed[next(iter(self._failed))]
        return before


class ResultCheck:
    """Validates every result before a step can use it.

    size, dtype: of the model's vector; a coded result is `messages` times shorter.
    """

    def __init__(self, size: int, dtype: Any) -> None:
        self._size, self._dtype = size, np.dtype(dtype)
        self._norms: deque[float] = deque(maxlen=REMEMBERED)
        self._refused = Suspects()

    def fault(
        self,
        task: Task,
        vector: Array | None,
        samples: object,
        stats: object,
        norm: float | None = None,
    ) -> str | None:
        """Return what is wrong with a result, or None if it is sound.

        norm: the norm that the worker reports, if the vector itself is elsewhere.
        """
        most = task.computed
        if type(samples) is not int or not 0 <= samples <= most:
            return f"it reports {samples!r} samples, and its task has {most}"
        if not isinstance(stats, dict) or not all(type(v) is float for v in stats.values()):
            return "its statistics are not numbers"
        count = stats.get("count", 1.0)
        if not isfinite(count) or (count < 0 and task.work.parts is None):
            return f"its loss counts {count:g} per sample"
        if vector is None:
            return None if norm is None or not samples else self._far(task, norm)
        expected = -(-self._size // task.work.messages)
        if not isinstance(vector, np.ndarray) or vector.shape != (expected,):
            shape = getattr(vector, "shape", type(vector).__name__)
            return f"it has the shape {shape} instead of ({expected},)"
        if vector.dtype != self._dtype:
            return f"its type is {vector.dtype} instead of {self._dtype}"
        if not samples:
            return None
        return self._far(task, norm_of(vector))

    def _far(self, task: Task, norm: float) -> str | None:
        if not isfinite(norm):
            return NOT_FINITE
        usual = median(self._norms) if len(self._norms) >= KNOWN else 0.0
        if usual and norm > FAR * usual and not self.is_again(task):
            return f"its norm is {norm:.3g}, and the median of other results is {usual:.3g}"
        self._norms.append(norm)
        return None

    def let_in(self, vector: Array | None) -> None:
        """Count the norm of a refused result as usual, if finite: the model itself causes it."""
        if vector is not None and isfinite(norm := norm_of(vector)):
            self._norms.append(norm)

    def is_again(self, task: Task) -> bool:
        """Record a refusal; return whether the same samples failed before: a fault of the model.

        After a refusal another process computes the same samples. If they fail again, a large
        result is accepted, and a result that is not finite ends the run. In a coded batch the same
        parts must fail again, since each part may fail by itself.
        """
        return bool(self._refused.add(task))


NOT_FINITE = "it is not finite"


def norm_of(vector: Array) -> float:
    """Return the norm, which is not finite exactly if some value is not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        square = float(np.dot(vector, vector))
    if isfinite(square):
        return sqrt(square)
    largest = float(np.abs(vector).max())  # the sum may overflow where no value does
    return largest * float(np.linalg.norm(vector / largest)) if isfinite(largest) else largest
