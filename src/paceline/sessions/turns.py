"""Turns: tasks that wait for the user's loop, which computes them in its own time.

The worker of a session runs in a thread, as that of an actor does. Its replica computes nothing: it
hands a task to the user's loop, and waits for the gradient.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np

from paceline.core.protocol import SHARED, Task
from paceline.data.partition.base import Partition
from paceline.data.seeding import generator
from paceline.learners.base import Array, Outcome, Proceed

_LOOK = 0.5  # seconds between two looks at whether a task is still wanted
_PATIENCE = 10.0  # seconds between two looks at whether anything can still come


class RunEnded(Exception):
    """The run has ended; no further turn comes.

    model: the last model as it is sent; None if there is none.
    step: its version.
    """

    def __init__(self, reason: str, failed: bool, model: Array | None, step: int = 0) -> None:
        super().__init__(reason)
        self.reason, self.failed, self.model, self.step = reason, failed, model, step


class Turn:
    """One task for the user's loop, and the model to compute it on."""

    def __init__(self, task: Task, model: Array, seed: int) -> None:
        self.task, self.model = task, model
        self.seed = seed  # of random layers, the same on every worker
        self.outcome: Outcome | None = None
        self.abandoned = False  # nobody waits for it any more


class Turns:
    """The replica of a session's worker, and the queue between it and the user's loop."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next: Turn | None = None
        self._current: Turn | None = None  # that the worker waits for
        self._end: RunEnded | None = None
        self._seed = 0  # of the run

    # --- for the worker, in its thread -----------------------------------------------------------

    def replica(self, seed: int, tiles: Partition | None = None) -> Turns:
        """Return the replica of a run with this seed; only random layers depend on it."""
        self._seed = seed
        return self

    def compute(self, model: Iterable[Array], task: Task, proceed: Proceed) -> Outcome:
        """Wait for the user's loop to compute a task."""
        seed = int(generator(self._seed, SHARED, task.offset).integers(2**63))
        turn = Turn(task, np.concatenate([*model]), seed)
        with self._changed:
            self._next = self._current = turn
            self._changed.notify_all()
            while turn.outcome is None:
                if turn.abandoned or not proceed(0) or self._end is not None:
                    turn.abandoned = True
                    if self._next is turn:
                        self._next = None
                    return Outcome(None, 0)
                self._changed.wait(timeout=_LOOK)
        return turn.outcome

    def wake(self) -> None:
        """Look now whether the task is still wanted."""
        with self._changed:
            self._changed.notify_all()

    def drop(self) -> None:
        """Abandon the task at hand: its run does not know of it any more."""
        with self._changed:
            if self._current is not None:
                self._current.abandoned = True
            self._changed.notify_all()

    def end(self, why: RunEnded) -> None:
        """Let no further turn come."""
        with self._changed:
            self._end = why
            self._changed.notify_all()

    # --- for the user's loop ---------------------------------------------------------------------

    def take(self) -> Turn:
        """Return the next turn; raise `RunEnded` if there is none.

        It waits as long as the connection lives, which has deadlines of its own.
        """
        with self._changed:
            while self._next is None:
                if self._end is not None:
                    raise self._end
                self._changed.wait(timeout=_PATIENCE)
            turn, self._next = self._next, None
            return turn

    @property
    def ready(self) -> bool:
        """Whether `take` would return at once."""
        with self._changed:
            return self._next is not None or self._end is not None

    def finish(self, turn: Turn, vector: Array | None, samples: int, stats: Any) -> bool:
        """Give a turn's gradient to the worker; return whether it was still wanted."""
        with self._changed:
            if turn.abandoned:
                return False
            turn.outcome = Outcome(vector, samples, stats)
            self._changed.notify_all()
            return True
