"""Backup tasks: which tasks are overdue, who redoes them, and what that saves."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import pytest

import paceline as pl
from paceline.core.protocol import Start, Task
from paceline.policies.backups import Backups
from paceline.report.samples import sample_fates


@dataclass(frozen=True)
class Stops:
    """About a second for each task; the task of this number takes longer."""

    number: float = inf
    longer: float = 1000.0
    usual: float = 1.0

    @property
    def mean(self) -> float:
        return self.usual

    def sample(self, rng: np.random.Generator, now: float, memory: dict[str, float]) -> float:
        memory["tasks"] = memory.get("tasks", 0) + 1
        return self.longer if memory["tasks"] == self.number else self.usual * rng.uniform(0.9, 1.1)


def train(policy: Any, delays: Any, steps: int = 30, **options: Any) -> Any:
    learner = pl.learners.Quadratic((1.0, 0.2), noise=0.5, batch_size=16)
    engine = pl.Simulator(workers=len(delays), delays=delays)
    return pl.Trainer(learner, policy, engine, progress=False, **options).fit(steps=steps)


def durations(run: Any) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = np.diff(run.metrics["seconds"], prepend=0.0)
    return found


def copies(run: Any) -> list[Task]:
    commands = [c for entry in run.journal for c in entry.commands]
    return [c.task for c in commands if isinstance(c, Start) and c.task.copy_of is not None]


@pytest.mark.parametrize("policy", [pl.sync(), pl.k_sync(8)], ids=["sync", "k_sync"])
def test_a_worker_that_stops_costs_one_longer_step(policy: Any) -> None:
    delays = [Stops()] * 7 + [Stops(12)]
    run = train(policy, delays, backups=True)
    seconds = durations(run)
    assert run.steps == 30 and len(copies(run)) == 1
    assert max(seconds) < 4 * float(np.median(seconds))  # overdue after about 2, and then redone
    used = [place for place in sample_fates(run.journal) if place.fate == "used"]
    assert sum(place.samples for place in used) == run.metrics["samples"].sum()
    assert max(durations(train(policy, delays))) > 900


def test_the_worker_is_used_again_once_it_answers() -> None:
    run = train(pl.sync(), [Stops()] * 3 + [Stops(12, longer=12.0)], steps=60, backups=True)
    tasks = [c.task for e in run.journal for c in e.commands if isinstance(c, Start)]
    mine = [task.since for task in tasks if task.worker == "w3"]
    gap = max(np.diff(mine))
    assert 11 < gap < 15 and mine[-1] > 50


def test_a_late_worker_does_not_change_what_sync_learns() -> None:
    """Each share of a batch stays what it was, whoever computes it."""
    calm, late = ([Stops()] * 3 + [Stops(number, longer=30.0)] for number in (inf, 12))
    run = train(pl.sync(), late, backups=True)
    assert copies(run)
    assert np.array_equal(run.model, train(pl.sync(), calm).model)


def test_a_slow_worker_is_not_overdue_by_its_own_measure() -> None:
    run = train(pl.sync(), [Stops()] * 3 + [Stops(usual=20.0)], steps=40, backups=True)
    late = [task.since for task in copies(run)]
    assert len(late) <= 2 and all(since < 0.3 * run.seconds for since in late)


def test_more_samples_take_longer() -> None:
    policy = Backups(pl.sync())
    policy._all = [[1.0, 10.0]] * 8
    assert policy.patience(Task(0, "w0", pl.protocol.Work(), 0, 0.0, 40, 0)) == 8.0
    assert policy.patience(Task(0, "w0", pl.protocol.Work(), 0, 0.0, 5, 0)) == 2.0


def test_simulated_tasks_are_redone_only_if_asked() -> None:
    plain = train(pl.sync(), [Stops()] * 4)
    assert "Backups" not in plain.journal.header.policy
    asked = train(pl.sync(), [Stops()] * 4, backups=True)
    assert "Backups" in asked.journal.header.policy


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"factor=0\.5: use 1 or more"):
        Backups(pl.sync(), factor=0.5)
    with pytest.raises(ValueError, match="floor"):
        Backups(pl.sync(), floor=-1.0)
