"""Rules that a few wrong results cannot spoil: their definitions, their bounds, their price."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

import paceline as pl
from paceline.core.protocol import Task
from paceline.learners.base import Array, Outcome, Proceed
from paceline.learners.robust import RobustServer

RULES = [pl.robust.TrimmedMean(2), pl.robust.MultiKrum(2), pl.robust.CenteredClip(3.0)]
EQUAL = np.full(8, 1 / 8)


def honest(seed: int = 0, dimensions: int = 50) -> Array:
    """Draw eight gradients around a true one, at a distance of about 1."""
    rng = np.random.default_rng(seed)
    truth = rng.standard_normal(dimensions)
    found: Array = truth + rng.standard_normal((8, dimensions)) / dimensions**0.5
    return found


def test_a_trimmed_mean_is_what_is_left_in_each_coordinate() -> None:
    vectors = honest()
    found = pl.robust.TrimmedMean(2).aggregate(vectors, EQUAL, None)
    expected = [np.mean(sorted(column)[2:-2]) for column in vectors.T]
    assert np.allclose(found, expected)


def test_a_trimmed_mean_weighs_what_is_left() -> None:
    vectors = np.array([[0.0], [1.0], [3.0], [100.0]])
    weights = np.array([0.1, 0.2, 0.6, 0.1])
    assert pl.robust.TrimmedMean(1).aggregate(vectors, weights, None) == pytest.approx(
        (0.2 + 1.8) / 0.8
    )


def test_multi_krum_averages_those_with_the_nearest_neighbors() -> None:
    vectors = honest(1)
    vectors[3] += 2.0
    found = pl.robust.MultiKrum(1).aggregate(vectors, EQUAL, None)
    scores = []
    for i in range(8):
        apart = sorted(np.sum((vectors[i] - vectors[j]) ** 2) for j in range(8) if j != i)
        scores.append(sum(apart[: 8 - 1 - 2]))
    best = sorted(range(8), key=lambda i: scores[i])[:7]
    assert 3 not in best
    assert np.allclose(found, vectors[best].mean(axis=0))


def test_centered_clipping_is_its_formula() -> None:
    vectors, center = honest(2), honest(3)[0]
    current = center
    for _ in range(3):
        moves = [
            (g - current) * min(1.0, 2.0 / float(np.linalg.norm(g - current))) for g in vectors
        ]
        current = current + np.mean(moves, axis=0)
    assert np.allclose(pl.robust.CenteredClip(2.0).aggregate(vectors, EQUAL, center), current)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("attack", [1e6, -4.0, 0.0, np.nan])
def test_two_bad_results_of_eight_do_not_spoil_a_step(rule: object, attack: float) -> None:
    """Off by less than three times what honest results are apart; the mean is off by 1e5."""
    for seed in range(10):
        vectors = honest(seed)
        mean = vectors[2:].mean(axis=0)
        vectors[:2] *= 1e6 if np.isnan(attack) else attack
        if np.isnan(attack):
            vectors[1] *= -1
        found = rule.aggregate(vectors, EQUAL, mean)  # type: ignore[attr-defined]
        assert np.linalg.norm(found - mean) < 3.0
    if attack == 1e6:
        assert np.linalg.norm(vectors.mean(axis=0) - mean) > 1e5


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_where_all_agree_nothing_is_changed(rule: object) -> None:
    vectors = np.tile(honest()[0], (8, 1))
    found = rule.aggregate(vectors, EQUAL, None)  # type: ignore[attr-defined]
    assert np.allclose(found, vectors[0])


# --- in training ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lying(pl.learners.Quadratic):
    """A problem on which w0 returns the opposite of its gradient, ten times as long."""

    def replica(self, seed: int, tiles: object = None) -> Liar:  # type: ignore[override]
        return Liar(super().replica(seed))


@dataclass
class Liar:
    inner: object

    def compute(self, model: object, task: Task, proceed: Proceed) -> Outcome:
        outcome: Outcome = self.inner.compute(model, task, proceed)  # type: ignore[attr-defined]
        if task.worker != "w0" or outcome.vector is None:
            return outcome
        return replace(outcome, vector=-10 * outcome.vector)


LEARNER = Lying((1.0, 0.5, 0.2), noise=0.1, lr=0.1, batch_size=24)
FLEET = pl.Simulator(8, pl.delays.Exponential(1.0))


def distance(**options: object) -> float:
    trainer = pl.Trainer(LEARNER, pl.k_sync(6), FLEET, progress=False, **options)  # type: ignore[arg-type]
    return float(np.linalg.norm(trainer.fit(steps=150).model))


def test_a_worker_who_lies_ruins_the_mean_and_no_robust_step() -> None:
    assert distance() > 10
    for rule in (pl.robust.TrimmedMean(1), pl.robust.MultiKrum(1), pl.robust.CenteredClip(0.1)):
        assert distance(robust=rule) < 0.1, rule


@pytest.mark.parametrize("rule", [pl.robust.TrimmedMean(1), pl.robust.CenteredClip(0.5)], ids=str)
def test_resumed_it_is_the_same_run(rule: object, tmp_path: Path) -> None:
    def trainer() -> pl.Trainer:
        saves = pl.Checkpoints(tmp_path, every=10)
        return pl.Trainer(LEARNER, pl.sync(), FLEET, robust=rule, checkpoints=saves, progress=False)  # type: ignore[arg-type]

    whole = pl.Trainer(LEARNER, pl.sync(), FLEET, robust=rule, progress=False).fit(steps=30)  # type: ignore[arg-type]
    trainer().fit(steps=20)
    again = trainer().resume(tmp_path).fit(steps=30)
    assert np.array_equal(whole.model, again.model)


def test_what_cannot_outvote_the_bad_is_refused() -> None:
    for rule, policy, told in (
        (pl.robust.TrimmedMean(3), pl.k_sync(6), "needs 7 results in every step, and there are 6"),
        (pl.robust.MultiKrum(2), pl.k_sync(6), "needs 7 results in every step, and there are 6"),
        (
            pl.robust.TrimmedMean(1),
            pl.ringmaster(4),
            "needs 3 results in every step, and there are 1",
        ),
        (pl.robust.TrimmedMean(1), pl.coded(1), "a gradient code decodes"),
        (
            pl.robust.TrimmedMean(1),
            pl.gossip.Gossip(pl.gossip.ring(8), pl.gossip.Averaging()),
            "needs a central coordinator",
        ),
    ):
        with pytest.raises(ValueError, match=told):
            pl.Trainer(LEARNER, policy, FLEET, robust=rule, progress=False)
    with pytest.raises(ValueError, match="bad=0: give the number"):
        pl.robust.TrimmedMean(0)
    with pytest.raises(ValueError, match="use a radius > 0"):
        pl.robust.CenteredClip(0.0)


def test_servers_of_slices_are_refused() -> None:
    with pytest.raises(ValueError, match="servers have slices"):
        RobustServer(LEARNER.server(), pl.robust.TrimmedMean(1)).recipe((0, 1))
