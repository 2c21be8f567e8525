"""The server's optimizers for local steps."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.learners import DelayedNesterov
from paceline.learners.optimize import check_elementwise


def stepped(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, gradient: Tensor) -> None:
    parameter.grad = gradient.clone()
    optimizer.step()


@pytest.mark.parametrize("every", [1, 3])
def test_changes_that_are_not_stale_make_steps_of_nesterov(every: int) -> None:
    """After each `every` changes, the model is that of SGD along their mean."""
    random = torch.Generator().manual_seed(0)
    one, other = (nn.Parameter(torch.ones(5, dtype=torch.float64)) for _ in range(2))
    delayed = DelayedNesterov([one], lr=0.3, momentum=0.8, every=every)
    usual = torch.optim.SGD([other], lr=0.3, momentum=0.8, nesterov=True)
    for _ in range(10):
        changes = torch.randn(every, 5, generator=random, dtype=torch.float64)
        for change in changes:
            stepped(delayed, one, change)
        stepped(usual, other, changes.mean(0))
        torch.testing.assert_close(one, other)


def stale(optimizer: torch.optim.Optimizer, x: nn.Parameter, workers: int, rounds: int) -> float:
    """Step along changes of models that are `workers - 1` versions old; return the last size."""
    seen = [x.detach().clone() for _ in range(workers)]
    for t in range(workers * rounds):
        change = 0.5 * seen[t % workers]  # local steps half way to the optimum 0
        stepped(optimizer, x, change)
        seen[t % workers] = x.detach().clone()
    return float(x.detach().norm())


def test_stale_changes_diverge_with_usual_momentum_and_not_with_the_delayed_one() -> None:
    workers = 4
    x = nn.Parameter(torch.ones(3))
    usual = torch.optim.SGD([x], lr=0.7 / workers, momentum=0.9, nesterov=True)
    assert stale(usual, x, workers, 40) > 10
    x = nn.Parameter(torch.ones(3))
    assert stale(DelayedNesterov([x], lr=0.7, momentum=0.9, every=workers), x, workers, 40) < 0.3


def test_it_can_be_cut_into_slices_saved_and_loaded() -> None:
    check_elementwise(partial(DelayedNesterov, lr=0.5), {"weight": torch.Size([4, 3])})
    random = torch.Generator().manual_seed(1)
    one, other = (nn.Parameter(torch.ones(4)) for _ in range(2))
    first, second = DelayedNesterov([one], every=3), DelayedNesterov([other], every=3)
    changes = torch.randn(9, 4, generator=random)
    for change in changes[:4]:
        stepped(first, one, change)
    other.data.copy_(one.data)
    second.load_state_dict(deepcopy(first.state_dict()))  # torch shares its tensors
    for change in changes[4:]:
        stepped(first, one, change)
        stepped(second, other, change)
    assert torch.equal(one, other)


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"momentum": 1.0}, {"every": 0}])
def test_what_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="use lr >= 0"):
        DelayedNesterov([nn.Parameter(torch.ones(1))], **wrong)  # type: ignore[arg-type]


def test_asynchronous_local_steps_learn_on_unequal_workers() -> None:
    torch.manual_seed(0)
    x = torch.randn(512, 6)
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(model(inputs), targets)

    learner = pl.TorchLearner(
        nn.Linear(6, 1), loss, partial(torch.optim.SGD, lr=0.05), data, 8,
        outer=partial(DelayedNesterov, lr=0.7, momentum=0.9, every=4),
    )  # fmt: skip
    delays = [pl.delays.Exponential(1 / speed) for speed in (1, 1, 2, 4)]
    policy = pl.policies.async_local_sgd(5)
    run = pl.Trainer(
        learner, policy, pl.Simulator(4, delays), placement=pl.BySpeed(), progress=False
    ).fit(steps=200)
    assert run.metrics["loss"][-1] < 0.01 * run.metrics["loss"][0]
    assert max(run.metrics["staleness"]) > 0
