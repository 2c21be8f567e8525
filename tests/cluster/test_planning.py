"""A real Ray is measured, planned for, and trained on as planned."""

from __future__ import annotations

from math import inf

import pytest

import paceline as pl
from tests.conftest import make_learner

pytestmark = [pytest.mark.cluster, pytest.mark.long]


def test_a_cluster_is_measured_and_planned_for(ray_workers: pl.Ray) -> None:
    learner = make_learner()
    profile = pl.profile(learner, ray_workers, seconds=6.0, tasks=20, warm=20)
    assert len(ray_workers.pids()) == 4  # the workers of the caller's `with` block are kept
    assert profile.optimizer is not None and profile.optimizer["name"] == "SGD"
    assert list(profile.workers) == ["w0", "w1", "w2", "w3"]
    for worker in profile.workers.values():
        assert 0 < worker.compute.mean < 1
        assert 0 < worker.seconds(16, learner.message_bytes, learner.message_bytes) < 5
    assert not profile.interruptible  # it has no micro-batches
    assert not profile.local_steps
    assert pl.planner.Profile.from_json(profile.to_json()) == profile
    plan = pl.plan(profile, target=0.6, learning_rate=0.1)
    assert 0 < plan.forecast.seconds < inf
    run = pl.Trainer(learner, plan, ray_workers, progress=False).fit(steps=5)
    assert run.steps == 5
    assert "  forecast  " in run.summary()
