"""Evaluation in parts on a real Ray: the value of one process, also if a process dies."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline as pl
from paceline.engines.ray.spread import spread
from paceline.training.evaluate import Evaluate

pytestmark = pytest.mark.cluster
ROWS = 1003
DATA = np.random.default_rng(0).normal(size=(ROWS, 3))
LEARNER = pl.learners.Quadratic((1.0, 0.25, 0.5), noise=0.1, batch_size=8)


def scored(model: Any, indices: Any) -> dict[str, tuple[float, float]]:
    chosen = DATA[indices.start : indices.stop]
    errors = ((chosen - model) ** 2).sum(axis=1)
    return {"error": (float(errors.sum()), len(chosen)), "far": (float((errors > 3).sum()), 2.0)}


def test_a_run_is_evaluated_in_parts_and_a_lost_one_begins_again(
    ray_workers: pl.Ray, tmp_path: Path
) -> None:
    lost, driver = tmp_path / "lost", os.getpid()

    def score(model: Any, indices: range) -> dict[str, tuple[float, float]]:
        assert os.getpid() != driver
        if indices.start and not lost.exists():
            lost.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return scored(model, indices)

    models: list[Any] = []
    whole = spread(score, DATA, parts=3, timeout=120)

    def evaluate(model: Any) -> dict[str, float]:
        models.append(model)
        return whole(model)

    evaluation = Evaluate(evaluate, every=5)
    options: dict[str, Any] = {"progress": False, "callbacks": [evaluation]}
    run = pl.Trainer(LEARNER, pl.sync(), ray_workers, **options).fit(steps=10)
    assert lost.exists() and int(lost.read_text()) != driver
    assert [done.step for done in run.evaluations] == [5, 10]
    for model, done in zip(models, run.evaluations, strict=True):
        once = scored(model, range(ROWS))
        assert done.metrics["error"] == pytest.approx(once["error"][0] / ROWS, rel=1e-12, abs=0)
        assert done.metrics["far"] == pytest.approx(once["far"][0] / 6.0, rel=1e-12, abs=0)

    def stuck(model: Any, indices: range) -> tuple[float, float]:
        return float(threading.Event().wait(timeout=300)), 1.0

    with pytest.raises(TimeoutError, match="2 parts took more than 3 s"):
        spread(stuck, ROWS, parts=2, timeout=3)(models[0])
    with pytest.raises(ValueError, match="counted nothing for 'evaluation'"):
        spread(lambda model, indices: (0.0, 0.0), ROWS)(models[0])
