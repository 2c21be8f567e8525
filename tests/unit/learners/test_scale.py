"""Loss scaling: float16 gradients that would underflow, overflow, or skip a local step."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

import paceline as pl
from paceline.data.sampling import Stream

SGD = partial(torch.optim.SGD, lr=1.0)


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def rows() -> TensorDataset:
    random = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(64, 8, generator=random), torch.randn(64, 4, generator=random))


def loss(model: nn.Module, batch: Any, factor: float = 1.0, half: bool = True) -> Tensor:
    """Return squared errors times a factor; gradients inside the model are float16."""
    with torch.autocast("cpu", torch.float16, enabled=half):
        found = model(batch[0])
    return torch.as_tensor((found.float() - batch[1]).square().mean() * factor)


def tokens(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    return loss(model, batch, 1e-7) * len(batch[0]) * 5, 5 * len(batch[0])


def changed(compute: Any, policy: Any = None, **options: Any) -> Tensor:
    """Return the gradient of the first step of three workers."""
    before, options = module(), {"loss_scale": "auto", **options}
    learner = pl.TorchLearner(before, compute, SGD, rows(), 32, **options)
    policy = pl.sync() if policy is None else policy
    run = pl.Trainer(learner, policy, pl.Simulator(3), progress=False).fit(steps=1)
    assert run.metrics["samples"][-1] == 32
    return flat(before) - flat(run.model)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("micro_batch", [None, 4])
@pytest.mark.parametrize("counted", [False, True])
def test_gradients_too_small_for_float16_are_found(micro_batch: int | None, counted: bool) -> None:
    compute = tokens if counted else partial(loss, factor=1e-7)
    exact = partial(loss, factor=1e-7, half=False)
    wanted, found, without = (
        gradient(each, micro_batch, scale)
        for each, scale in ((exact, None), (compute, "auto"), (compute, None))
    )
    assert (found - wanted).norm() < 0.01 * wanted.norm()
    assert (without - wanted).norm() > 0.1 * wanted.norm()


def gradient(compute: Any, micro_batch: int | None, loss_scale: Any) -> Tensor:
    """Return the gradient of 32 samples, times a factor that makes it visible in float32."""
    model = module()
    large = partial(torch.optim.SGD, lr=1e7)
    learner = pl.TorchLearner(
        model, compute, large, rows(), 32, micro_batch=micro_batch, loss_scale=loss_scale
    )
    run = pl.Trainer(learner, pl.sync(), pl.Simulator(3), progress=False).fit(steps=1)
    return flat(model) - flat(run.model)


@pytest.mark.parametrize("policy", [pl.sync(), pl.coded(stragglers=1)])
def test_gradients_that_overflow_are_computed_again(policy: Any) -> None:
    """The scale of 65,536 overflows float16. Powers of two do not change the bits."""
    large = partial(loss, factor=100.0)
    assert torch.equal(changed(large, policy), changed(large, policy, loss_scale=None))


def test_a_loss_that_is_not_finite_stays_so() -> None:
    compute = partial(loss, factor=float("inf"))
    learner = pl.TorchLearner(module(), compute, SGD, rows(), 32, loss_scale="auto")
    run = pl.Trainer(learner, pl.sync(), pl.Simulator(3), progress=False).fit(steps=2)
    assert run.reason == "the loss is inf at step 1"


def test_local_steps_are_those_of_a_loop_with_grad_scaler() -> None:
    """The first steps overflow and are left out, in both."""
    compute, adam = partial(loss, factor=50.0), partial(torch.optim.Adam, lr=0.01)
    model, data = module(), rows()
    learner = pl.TorchLearner(
        model, compute, adam, data, 16, outer=SGD, inner="kept", loss_scale="auto"
    )
    run = pl.Trainer(learner, pl.local_sgd(8), pl.Simulator(1), progress=False).fit(steps=3)

    plain = copy.deepcopy(model)
    optimizer, scaler = adam(plain.parameters()), torch.amp.GradScaler("cpu")
    stream, left_out = Stream(len(data), 0), 0
    for step in range(24):
        batch = default_collate([data[i] for i in stream.indices(16 * step, 16).tolist()])
        optimizer.zero_grad()
        scaler.scale(compute(plain, batch)).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        left_out += scaler.get_scale() < before
    assert 0 < left_out < 12
    assert torch.allclose(flat(run.model), flat(plain), atol=1e-6)


def test_other_scales_are_refused() -> None:
    with pytest.raises(ValueError, match='use "auto", or None'):
        changed(loss, loss_scale=1024.0)
