"""Curvature, gradient and noise against full Hessians and gradients of single samples."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import replace
from functools import partial
from math import inf, sqrt

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.planner.measure.curvature import (
    PRODUCT,
    Curvature,
    NoCurvature,
    lanczos,
    measure_curvature,
)
from tests.conftest import make_learner, module_of

SGD = partial(torch.optim.SGD, lr=0.1)


def small(
    samples: int = 64, layers: list[nn.Module] | None = None, **more: object
) -> pl.TorchLearner:
    """Make a net of 4 inputs and 3 classes, with 131 parameters unless told otherwise."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 4, generator=generator)
    labels = torch.randint(0, 3, (samples,), generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = nn.Sequential(*(layers or [nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)]))
    data = TensorDataset(inputs, labels)
    return pl.TorchLearner(model, cross_entropy, SGD, data, samples, **more)  # type: ignore[arg-type]


def cross_entropy(model: nn.Module, batch: list[Tensor]) -> Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def full_hessian(learner: pl.TorchLearner) -> np.ndarray:
    """Return the Hessian of the loss on all data, by torch.func."""
    model = copy.deepcopy(module_of(learner)).double()
    inputs, labels = learner.dataset.tensors  # type: ignore[union-attr]
    names = {name: p.detach() for name, p in model.named_parameters()}
    sizes = [p.numel() for p in names.values()]

    def loss(flat: Tensor) -> Tensor:
        values = [v.view_as(p) for v, p in zip(flat.split(sizes), names.values(), strict=True)]
        out = torch.func.functional_call(
            model, dict(zip(names, values, strict=True)), (inputs.double(),)
        )
        return nn.functional.cross_entropy(out, labels)

    flat = torch.cat([p.reshape(-1) for p in names.values()])
    # Not torch.func.hessian, whose forward mode warns of torch's own use of torch.jit.
    found: np.ndarray = torch.func.jacrev(torch.func.jacrev(loss))(flat).numpy()
    return found


def sample_gradients(learner: pl.TorchLearner) -> np.ndarray:
    """Return each sample's gradient as a row."""
    model = copy.deepcopy(module_of(learner))
    rows = []
    for inputs, labels in learner.dataset:  # type: ignore[union-attr]
        loss = learner.loss(model, [inputs[None], labels[None]])
        assert isinstance(loss, Tensor)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        rows.append(torch.cat([g.reshape(-1) for g in gradients]).numpy())
    return np.array(rows, dtype=np.float64)


# --- Lanczos -------------------------------------------------------------------------------------


def matrix_with(values: np.ndarray, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.standard_normal((values.size, values.size)))[0]
    found: np.ndarray = basis @ np.diag(values) @ basis.T
    return found


@pytest.mark.parametrize(
    "values",
    [
        np.linspace(-1.0, 3.0, 30),
        np.concatenate([np.geomspace(1e-6, 0.1, 200), [1.0, 4.0, 9.0]]),
        np.concatenate([np.zeros(200), [-2.0, 5.0]]),
        np.ones(20),
    ],
    ids=["both signs", "outliers", "singular", "identity"],
)
def test_ends_of_spectra(values: np.ndarray) -> None:
    matrix = matrix_with(values)
    found, shares, errors = lanczos(lambda v: matrix @ v, values.size, 40, np.random.default_rng(0))
    scale = abs(values).max()
    assert found[-1] == pytest.approx(values.max(), abs=1e-3 * scale)
    assert found[0] == pytest.approx(values.min(), abs=1e-3 * scale)
    assert shares.sum() == pytest.approx(1.0)
    for value, error in zip(found, errors, strict=True):  # one eigenvalue is that near
        assert abs(values - value).min() <= error + 1e-9


def test_all_of_a_small_spectrum() -> None:
    values = np.geomspace(1e-3, 10.0, 25)
    matrix = matrix_with(values)
    found, _, errors = lanczos(lambda v: matrix @ v, 25, 25, np.random.default_rng(2))
    np.testing.assert_allclose(found, values, rtol=1e-6)
    assert errors.max() < 1e-6


def test_shares_are_those_of_the_spectrum() -> None:
    """Of 2000 eigenvalues a fifth is near 5, and the rest near 1."""
    rng = np.random.default_rng(0)
    values = np.where(np.arange(2000) < 400, 5.0, 1.0) + 0.1 * rng.standard_normal(2000)
    total = 0.0
    for seed in range(20):
        found, shares, _ = lanczos(lambda v: values * v, 2000, 20, np.random.default_rng(seed))
        total += shares[found > 3].sum()
    # Of a single start the standard deviation is sqrt(2 * 0.2 * 0.8 / 2000) = 0.013.
    assert total / 20 == pytest.approx(0.2, abs=0.01)


def test_the_typical_curvature_lies_between_neighbors() -> None:
    """A logarithmic spectrum of 300 eigenvalues, seen through 20 steps."""
    rows = np.diag(np.sqrt(300 * np.geomspace(1e-2, 10.0, 300)))
    problem = pl.learners.LeastSquares(rows, np.ones(300))
    exact = measure_curvature(problem)
    assert exact.typical == pytest.approx(sqrt(1e-2 * 10.0), rel=0.02)
    assert exact.intervals["typical"] == (exact.typical, exact.typical)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.planner.measure.curvature._DENSE", 0)
        found = measure_curvature(problem, steps=20)
    low, high = found.intervals["typical"]
    assert low < exact.typical < high
    assert found.typical == pytest.approx(exact.typical, rel=0.5)
    assert found.top == pytest.approx(10.0, rel=1e-2)


# --- numpy's problems ----------------------------------------------------------------------------


def test_quadratic_is_exact() -> None:
    problem = pl.learners.Quadratic((4.0, 1.0, 0.25, 0.5), optimum=1.0, start=3.0, noise=0.5)
    found = measure_curvature(problem)
    assert (found.top, found.bottom, found.typical) == (4.0, 0.25, 0.5)
    assert found.quantile(0.0) == 0.25 and found.quantile(1.0) == 4.0
    gradient = 2 * np.array(problem.curvature)
    assert found.gradient_norm == pytest.approx(np.linalg.norm(gradient))
    assert found.noise == pytest.approx(4 * 0.25)
    assert found.noise_scale == pytest.approx(1.0 / (gradient @ gradient))
    assert found.loss == pytest.approx(0.5 * 4 * sum(problem.curvature))
    assert found.cost == 0
    at = measure_curvature(problem, at=np.full(4, 1.0))
    assert at.gradient_norm == at.loss == 0.0
    assert at.noise_scale == inf
    assert measure_curvature(replace(problem, noise=0.0), at=np.full(4, 1.0)).noise_scale == 0.0


def test_the_noise_of_a_quadratic_is_what_its_gradients_have() -> None:
    problem = pl.learners.Quadratic((4.0, 1.0, 0.25), noise=0.5)
    rng = np.random.default_rng(0)
    draws = np.array([problem.gradient(np.ones(3), 8, rng)[1] for _ in range(4000)])
    assert 8 * draws.var(axis=0).sum() == pytest.approx(measure_curvature(problem).noise, rel=0.05)


@pytest.mark.parametrize("kind", ["logistic", "least squares"])
@pytest.mark.parametrize("dense", [True, False])
def test_linear_models_are_exact(kind: str, dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    features = rng.standard_normal((300, 12)) * np.geomspace(0.3, 3.0, 12)
    x = 0.3 * rng.standard_normal(12)
    problem: pl.learners.Logistic | pl.learners.LeastSquares
    if kind == "logistic":
        problem = pl.learners.Logistic(
            features, np.sign(features @ rng.standard_normal(12)), l2=0.1
        )
    else:
        problem = pl.learners.LeastSquares(features, rng.standard_normal(300))
    if not dense:
        monkeypatch.setattr("paceline.planner.measure.curvature._DENSE", 0)
    found = measure_curvature(problem, at=x)
    gradients = np.array([problem.gradient(x, np.array([i]))[1] for i in range(300)])
    width = 1e-5
    numeric = np.array(
        [
            problem.gradient(x + width * unit, np.arange(300))[1]
            - problem.gradient(x - width * unit, np.arange(300))[1]
            for unit in np.eye(12)
        ]
    ) / (2 * width)
    values = np.linalg.eigvalsh(numeric)
    assert found.top == pytest.approx(values[-1], rel=1e-6)
    assert found.bottom == pytest.approx(values[0], rel=1e-6)
    assert found.gradient_norm == pytest.approx(np.linalg.norm(gradients.mean(axis=0)))
    assert found.noise == pytest.approx(gradients.var(axis=0).sum())
    assert (found.samples, found.parameters) == (300, 12)


# --- torch ---------------------------------------------------------------------------------------


def test_a_net_against_its_full_hessian() -> None:
    """131 parameters at 64 samples: both ends, one of which is negative, within 1e-3."""
    learner = small()
    hessian = full_hessian(learner)
    values = np.linalg.eigvalsh(hessian)
    found = measure_curvature(learner, samples=64, pieces=8, steps=40)
    assert found.parameters == len(values) == 131
    assert found.samples == 64
    assert found.top == pytest.approx(values[-1], rel=1e-3)
    assert values[0] < 0
    assert found.bottom == pytest.approx(values[0], abs=1e-3 * values[-1])
    low, high = found.intervals["top"]
    assert low - 1e-6 <= values[-1] <= high + 1e-6
    assert found.cost == 64 * (1 + PRODUCT * 40)


def test_few_steps_suffice_for_the_top() -> None:
    learner = small()
    values = np.linalg.eigvalsh(full_hessian(learner))
    assert measure_curvature(learner, steps=12).top == pytest.approx(values[-1], rel=0.01)


def test_no_more_parameters_than_steps_is_the_whole_hessian() -> None:
    learner = small(layers=[nn.Linear(4, 3)])
    values = np.linalg.eigvalsh(full_hessian(learner))
    found = measure_curvature(learner, steps=15)
    np.testing.assert_allclose([v for v, _ in found.spectrum], values, atol=1e-6)
    assert {share for _, share in found.spectrum} == {1 / 15}
    positive = values[values > 1e-6 * values[-1]]
    assert found.typical == pytest.approx(positive[(len(positive) - 1) // 2], rel=1e-3)
    assert found.cost == 64 * (1 + PRODUCT * 15)


def test_noise_of_single_samples_is_exact() -> None:
    """With pieces of one sample, on all data, nothing is left to chance."""
    learner = small()
    rows = sample_gradients(learner)
    found = measure_curvature(learner, samples=64, pieces=64, steps=2)
    assert found.noise == pytest.approx(rows.var(axis=0, ddof=1).sum(), rel=1e-4)
    assert found.gradient_norm == pytest.approx(np.linalg.norm(rows.mean(axis=0)), rel=1e-4)
    square = found.gradient_norm**2
    assert found.noise_scale == pytest.approx(found.noise / square)
    with torch.no_grad():
        inputs, labels = learner.dataset.tensors  # type: ignore[union-attr]
        loss = cross_entropy(module_of(learner), [inputs, labels])
    assert found.loss == pytest.approx(float(loss), rel=1e-5)


def test_noise_of_a_part_of_the_data_has_no_bias() -> None:
    """Over 40 seeds, with 96 of 512 samples: the mean of the estimates within its own error."""
    learner = make_learner()
    rows = sample_gradients(learner)
    noise = rows.var(axis=0, ddof=1).sum()
    square = float(np.sum(rows.mean(axis=0) ** 2))
    found = [
        measure_curvature(learner, samples=96, pieces=8, steps=2, seed=seed) for seed in range(40)
    ]
    noises = np.array([each.noise for each in found])
    squares = np.array([each.gradient_norm**2 for each in found])
    assert abs(noises.mean() - noise) < 3 * noises.std() / np.sqrt(40)
    assert abs(squares.mean() - square) < 3 * squares.std() / np.sqrt(40)
    held = [each.intervals["noise"][0] <= noise <= each.intervals["noise"][1] for each in found]
    assert np.mean(held) >= 0.75
    # The plain square of the mean gradient, which is what one would take, is too large.
    assert squares.mean() < square + 0.5 * noise / 96


def test_the_same_seed_measures_the_same() -> None:
    learner = small(layers=[nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3)])
    torch.manual_seed(0)
    first = measure_curvature(learner, samples=32, pieces=4, steps=6, seed=5)
    state = torch.get_rng_state()
    again = measure_curvature(learner, samples=32, pieces=4, steps=6, seed=5)
    assert first == again
    assert first.spectrum == again.spectrum
    assert torch.equal(state, torch.get_rng_state())  # and nobody else's randomness is used
    other = measure_curvature(learner, samples=32, pieces=4, steps=6, seed=6)
    assert other.loss != first.loss and other.top != first.top


def test_random_layers_are_one_and_the_same_function() -> None:
    """With masks that changed from product to product, nothing symmetric would be measured."""
    layers = [nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3)]
    found = measure_curvature(small(layers=layers), pieces=4, steps=40)
    assert found.intervals["top"][1] - found.top < 1e-3 * found.top


def test_batch_norm_is_in_training_and_the_module_stays_as_it_is() -> None:
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)]
    learner = small(layers=layers)
    model = module_of(learner).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = measure_curvature(learner, samples=64, pieces=4, steps=8)
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    # Its statistics are those of the batch: the scale of what it is given does not matter.
    scaled = copy.deepcopy(model)
    with torch.no_grad():
        scaled.get_parameter("0.weight").mul_(10.0)
        scaled.get_parameter("0.bias").mul_(10.0)
    other = measure_curvature(replace(learner, model=scaled), samples=64, pieces=4, steps=8)
    assert other.loss == pytest.approx(found.loss, rel=1e-3)


def test_frozen_and_unused_parameters() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(2, 2)
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(self.frozen(x))  # type: ignore[no-any-return]

    found = measure_curvature(small(layers=[Odd()]), steps=30)
    assert found.parameters == 15 + 6
    zeros = sum(share for value, share in found.spectrum if abs(value) < 1e-6)
    assert zeros >= 6 / 21


def test_a_linear_loss_has_no_curvature() -> None:
    learner = replace(
        small(layers=[nn.Linear(4, 3)]), loss=lambda model, batch: model(batch[0]).mean()
    )
    found = measure_curvature(learner, pieces=4, steps=5)
    assert found.top == found.bottom == found.typical == 0.0
    assert found.noise > 0


def test_local_steps_and_micro_batches_change_nothing() -> None:
    plain = measure_curvature(small(), pieces=4, steps=6)
    other = measure_curvature(small(outer=SGD, micro_batch=5), pieces=4, steps=6)
    assert other.top == pytest.approx(plain.top, rel=1e-4)
    assert other.noise == pytest.approx(plain.noise, rel=1e-3)


def test_at_another_model() -> None:
    learner = small()
    server = learner.server()
    there = server.vector * 3
    found = measure_curvature(learner, at=there, samples=64, pieces=4, steps=20)
    moved = copy.deepcopy(module_of(learner))
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.mul_(3)
    other = measure_curvature(replace(learner, model=moved), samples=64, pieces=4, steps=20)
    assert found.top == pytest.approx(other.top, rel=1e-5)
    assert found.loss == pytest.approx(other.loss, rel=1e-6)


def test_gradients_lost_in_the_noise() -> None:
    """Random labels at a model that says nothing: the square may come out below 0."""
    learner = small(samples=512)
    with torch.no_grad():
        for parameter in module_of(learner).parameters():
            parameter.zero_()
    found = [
        measure_curvature(learner, samples=16, pieces=4, steps=2, seed=seed) for seed in range(6)
    ]
    assert all(each.intervals["gradient_norm"][0] <= each.gradient_norm for each in found)
    assert all(each.noise_scale > 5 for each in found)


def test_refusals() -> None:
    learner = small()
    with pytest.raises(ValueError, match=r"samples=512, pieces=1, steps=24: use pieces >= 2"):
        measure_curvature(learner, pieces=1)
    with pytest.raises(ValueError, match=r"at has shape \(3,\); .* shape \(131,\)"):
        measure_curvature(learner, at=np.zeros(3))
    with pytest.raises(
        NoCurvature, match="TimingOnly has no curvature to measure; give a TorchLearner"
    ):
        measure_curvature(pl.learners.TimingOnly())
    with pytest.raises(ValueError, match="the dataset has 1 samples"):
        measure_curvature(small(samples=1))
    with pytest.raises(ValueError, match=r"share=1.5: a share of the spectrum is from 0 to 1"):
        measure_curvature(pl.learners.Quadratic()).quantile(1.5)
    with pytest.raises(ValueError, match="no finite values here"):
        lanczos(lambda v: v * np.nan, 3, 3, np.random.default_rng(0))


def test_is_imported_without_torch() -> None:
    code = "import sys, paceline.planner.measure.curvature; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert isinstance(measure_curvature(pl.learners.Quadratic()), Curvature)
