"""Tasks that wait for a user's loop."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from paceline.core.protocol import Task, Work
from paceline.learners.base import Outcome
from paceline.sessions.turns import RunEnded, Turns

TASK = Task(3, "w0", Work(samples=4), 0, 0.0, 4, 8)
MODEL = np.arange(3, dtype=np.float32)


class Computing:
    """A worker's thread that waits for the loop."""

    def __init__(self, turns: Turns) -> None:
        self.turns, self.wanted = turns, True
        self.found: list[Outcome] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        outcome = self.turns.compute([MODEL[:1], MODEL[1:]], TASK, lambda done: self.wanted)
        self.found.append(outcome)

    def outcome(self) -> Outcome:
        self.thread.join(timeout=10)
        return self.found[0]


def turns() -> Turns:
    made = Turns()
    made.replica(seed=0)
    return made


def test_a_turn() -> None:
    made = turns()
    worker = Computing(made)
    turn = made.take()
    assert not made.ready
    assert turn.task == TASK and turn.model.tolist() == [0, 1, 2]
    assert made.finish(turn, MODEL, 4, {"loss": 1.0})
    found = worker.outcome()
    assert found.samples == 4 and found.vector is MODEL


def test_a_task_that_is_cancelled_while_the_loop_computes() -> None:
    made = turns()
    worker = Computing(made)
    turn = made.take()
    worker.wanted = False
    made.wake()
    assert worker.outcome().samples == 0
    assert turn.abandoned and not made.finish(turn, MODEL, 4, {})


def test_a_task_that_is_cancelled_before_the_loop_takes_it() -> None:
    made = turns()
    worker = Computing(made)
    while not made.ready:
        threading.Event().wait(timeout=0.01)
    made.drop()
    assert worker.outcome().samples == 0
    assert not made.ready


def test_the_end_of_the_run() -> None:
    made = turns()
    worker = Computing(made)
    made.take()
    made.end(RunEnded("10 steps taken", False, MODEL))
    assert worker.outcome().samples == 0
    with pytest.raises(RunEnded, match="10 steps"):
        made.take()


def test_the_same_samples_have_the_same_seed() -> None:
    seeds = []
    for _ in range(2):
        made = turns()
        worker = Computing(made)
        turn = made.take()
        seeds.append(turn.seed)
        made.finish(turn, None, 0, {})
        worker.outcome()
    assert seeds[0] == seeds[1]
