"""A coded run that is resumed: the same steps, also with other workers than before."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import paceline as pl
from paceline.codes.generators import repetition
from paceline.codes.groups import Grouped
from paceline.core.coordinator import Coordinator
from paceline.core.protocol import Finished, Joined, Left, Start, Step, Task
from paceline.core.schema import load_state, save_state

RNG = np.random.default_rng(0)
FEATURES, LABELS = RNG.normal(size=(200, 13)), RNG.choice([-1.0, 1.0], 200)
AWAY: list[tuple[float, Joined | Left]] = [
    (5.0, Left("w1")),
    (9.0, Left("w2")),
    (30.0, Joined("w1")),
]


def trainer(folder: Path) -> pl.Trainer:
    learner = pl.learners.Logistic(FEATURES, LABELS, l2=0.1, lr=0.5, batch_size=32)
    engine = pl.Simulator(8, pl.delays.ShiftedExponential(0.8, 0.2), schedule=AWAY)
    saves = pl.Checkpoints(folder, every=100)
    return pl.Trainer(learner, pl.coded(2, 1), engine, checkpoints=saves, progress=False)


@pytest.mark.parametrize("interrupted", [1, 12, 39])
def test_a_resumed_run_takes_the_steps_of_one_without_the_interruption(
    tmp_path: Path, interrupted: int
) -> None:
    """With all workers there, with two of them away, and with one of them back."""
    expected = trainer(tmp_path / "whole").fit(steps=40)
    trainer(tmp_path / "cut").fit(steps=interrupted)
    run = trainer(tmp_path / "cut").resume(tmp_path / "cut").fit(steps=40)
    np.testing.assert_array_equal(run.model, expected.model)
    rest = slice(interrupted, None)
    assert run.metrics["loss"].tolist() == expected.metrics["loss"][rest].tolist()
    assert run.metrics["samples"].tolist() == [32] * (40 - interrupted)


def coordinator() -> Coordinator:
    """Return one for two groups of two equal rows: one answer of each group is enough."""
    code = pl.policies.Coded(Grouped(4, repetition(2)))
    return Coordinator(pl.policies.MinWorkers(4, code), batch=8)


def began(on: Coordinator, *workers: str) -> dict[str, Task]:
    """Let workers join; return the task that each got."""
    entries = [on.handle(0.0, Joined(worker)) for worker in workers]
    started = [c.task for entry in entries for c in entry.commands if isinstance(c, Start)]
    return {task.worker: task for task in started}


def resumed(before: Coordinator) -> Coordinator:
    """Return the policy of a dead driver with the empty ledger of a new engine."""
    after = coordinator()
    load_state(after.policy, json.loads(json.dumps(save_state(before.policy))))
    return after


def test_an_answer_to_the_dead_driver_is_in_no_step() -> None:
    """A group that had answered before the driver died must answer again."""
    before = coordinator()
    tasks = began(before, "w0", "w1", "w2", "w3")
    assert before.handle(1.0, Finished(tasks["w0"].id, 8)).commands == ()
    after = resumed(before)
    tasks = began(after, "w0", "w1", "w2", "w3")
    rows = {task.work.tag: task for task in tasks.values()}
    assert after.handle(1.0, Finished(rows[2].id, 8)).commands == ()
    commands = after.handle(2.0, Finished(rows[0].id, 8)).commands
    (step,) = [c for c in commands if isinstance(c, Step)]
    assert set(step.weights) == {rows[0].id, rows[2].id}


def test_all_rows_have_a_worker_when_one_did_not_come_back() -> None:
    before = coordinator()
    began(before, "w0", "w1", "w2", "w3")
    tasks = began(resumed(before), "w0", "w1", "w3", "w9")
    assert {task.work.tag for task in tasks.values()} == {0, 1, 2, 3}
    assert set(tasks) == {"w0", "w1", "w3", "w9"}
