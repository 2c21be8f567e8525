"""Shards of unequal sizes: nodes minimize the mean loss of all samples, as `sync` does."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.core.protocol import Step
from tests.conftest import flat

SIZES = (10, 10, 10, 70)
TILES = pl.partition.Partition(np.repeat(range(4), SIZES))
PLACED = pl.policies.Placed(TILES, move=False)
RULES = {
    "d-psgd": pl.gossip.Gossip(pl.gossip.complete(4), pl.gossip.Averaging()),
    "differences": pl.gossip.Gossip(pl.gossip.ring(4), pl.gossip.Difference(0.5)),
    "events": pl.gossip.Gossip(
        pl.gossip.ring(4), pl.gossip.Difference(0.4), pl.gossip.OnChange(0.3, every=5)
    ),
}
rules = pytest.mark.parametrize("policy", RULES.values(), ids=RULES)


def mean_estimation(lr: float = 0.1) -> pl.learners.LeastSquares:
    """Return the problem whose optimum is the mean of its targets, 0.7: those of node 3 are 1."""
    return pl.learners.LeastSquares(np.ones((100, 1)), (TILES.of == 3) * 1.0, lr, batch_size=40)


def fit(policy: Any, learner: Any, steps: int, delays: Any = pl.delays.Fixed(1.0)) -> pl.Run:
    engine = pl.Simulator(4, delays)
    return pl.Trainer(learner, policy, engine, placement=PLACED, progress=False).fit(steps=steps)


@rules
def test_a_mean_is_that_of_all_samples(policy: pl.gossip.Gossip) -> None:
    central = fit(pl.sync(), mean_estimation(), 100)
    assert central.model[0] == pytest.approx(0.7, abs=0.01)
    run = fit(policy, mean_estimation(), 120)
    assert run.model[0] == pytest.approx(0.7, abs=0.005)
    for node, journal in run.journals.items():
        weights = {w for e in journal for c in e.commands if isinstance(c, Step)
                   for w in c.weights.values()}  # fmt: skip
        assert weights == {2.8 if node == "w3" else 0.4}
        assert pl.protocol.replay(run.driven_policy, journal) == journal


@rules
def test_different_parts_reach_the_optimum_in_closed_form(policy: pl.gossip.Gossip) -> None:
    """Every node has other features and another best model; steps are full gradients of parts."""
    random = np.random.default_rng(4)
    features = random.standard_normal((100, 3)) + TILES.of[:, None] * [0.2, -0.1, 0.0]
    own = np.array([[1, 0, 2], [0, 3, 1], [2, 2, 0], [-1, 1, 1.0]])
    targets = np.einsum("ij,ij->i", features, own[TILES.of])
    best = np.linalg.lstsq(features, targets, rcond=None)[0]
    equal = np.mean([np.linalg.lstsq(features[TILES.of == i], targets[TILES.of == i], rcond=None)[0]
                     for i in range(4)], axis=0)  # fmt: skip
    learner = pl.learners.LeastSquares(features, targets, 0.03, batch_size=40)
    model = fit(policy, learner, 150).model
    assert np.linalg.norm(model - best) < 0.05 * np.linalg.norm(equal - best)


def test_a_logistic_regression_reaches_the_optimum_of_scipy() -> None:
    random = np.random.default_rng(5)
    features = random.standard_normal((100, 2))
    labels = np.where(features @ [1.0, 0.5] + 0.5 * random.standard_normal(100) > 0, 1.0, -1.0)
    labels[TILES.of == 1] *= -1
    learner = pl.learners.Logistic(features, labels, 0.05, lr=0.15, batch_size=40)
    whole = np.arange(100)
    best = minimize(lambda x: learner.gradient(x, whole), np.zeros(2), jac=True, tol=1e-12).x
    model = fit(RULES["differences"], learner, 200).model
    assert np.linalg.norm(model - best) < 0.08 * np.linalg.norm(best)  # batches of 10
    parts = [TILES.indices(i) for i in range(4)]
    alike = minimize(
        lambda x: np.mean([learner.gradient(x, part)[0] for part in parts]), np.zeros(2)
    ).x
    assert np.linalg.norm(alike - best) > 0.3 * np.linalg.norm(best)  # parts counted alike


def squared(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs)[:, 0], targets)


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.SGD, lr=0.02, momentum=0.8),
        partial(torch.optim.SGD, lr=0.03, weight_decay=0.5),
    ],
    ids=["momentum", "weight decay"],
)
def test_the_optimum_of_a_linear_optimizer_is_that_of_all_samples(optimizer: Any) -> None:
    """All parts have one Hessian, so the mean by samples has no error of its own.

    The decay is of the mixed model, and so off by the order of the learning rate.
    """
    inputs, targets = torch.ones(100, 1), torch.from_numpy((TILES.of == 3) * 1.0).float()
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    learner = pl.TorchLearner(layer, squared, optimizer, TensorDataset(inputs, targets), 40)
    decay = optimizer.keywords.get("weight_decay", 0.0)
    expected = 2 * 0.7 / (2 + decay)
    run = fit(RULES["differences"], learner, 90)
    assert float(flat(run.model)[0]) == pytest.approx(expected, abs=0.01)


def test_adam_moves_by_the_weight_too() -> None:
    """Adam ignores the length of a gradient, so the weight multiplies its change of the model."""
    inputs, targets = torch.ones(100, 1), torch.full((100,), 9.0)
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    adam = partial(torch.optim.Adam, lr=0.01)
    learner = pl.TorchLearner(layer, squared, adam, TensorDataset(inputs, targets), 40)
    alone = pl.gossip.Gossip(pl.gossip.complete(4), pl.gossip.Averaging(), local_steps=1000)
    run = fit(alone, learner, 5)
    models = {node: float(flat(model)[0]) for node, model in run.models.items()}
    assert models["w0"] == pytest.approx(0.4 * 5 * 0.01, rel=1e-3)
    assert models["w3"] == pytest.approx(2.8 * 5 * 0.01, rel=1e-3)


def test_the_rest_goes_on_with_its_own_optimum_after_a_death() -> None:
    learner = pl.learners.LeastSquares(
        np.ones((100, 1)), TILES.of.astype(np.float64), 0.1, batch_size=40
    )
    engine = pl.Simulator(4, pl.delays.Fixed(1.0), schedule=[(30.0, pl.protocol.Left("w2"))])
    run = pl.Trainer(
        learner, RULES["differences"], engine, placement=PLACED, progress=False
    ).fit(steps=150)  # fmt: skip
    assert set(run.models) == {"w0", "w1", "w3"}
    assert run.model[0] == pytest.approx((10 * 0 + 10 * 1 + 70 * 3) / 90, abs=0.01)


def test_equal_parts_have_no_weights() -> None:
    run = pl.Trainer(
        mean_estimation(), RULES["differences"], pl.Simulator(4), progress=False
    ).fit(steps=3)  # fmt: skip
    assert run.driven_policy.step_weights is None  # type: ignore[attr-defined]


def test_shards_by_speed_need_no_weights(caplog: pytest.LogCaptureFixture) -> None:
    """A node with seven times the samples and the steps counts for as much without weights."""
    delays = [pl.delays.Fixed(7.0)] * 3 + [pl.delays.Fixed(1.0)]
    even = pl.gossip.Gossip(
        pl.gossip.complete(4), pl.gossip.Difference(0.5), step_weights=dict.fromkeys(
            pl.gossip.complete(4).nodes, 1.0),
    )  # fmt: skip
    run = fit(even, mean_estimation(0.05), 150, delays)
    assert run.model[0] == pytest.approx(0.7, abs=0.03) and not caplog.records
    fit(RULES["differences"], mean_estimation(), 50, delays)
    assert "a sample of w0 counted 0.19 times as much as it should" in caplog.text


def test_wrong_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="a finite number above 0 for each node, w0 to w3"):
        pl.gossip.Gossip(pl.gossip.ring(4), step_weights={"w0": 1.0})
