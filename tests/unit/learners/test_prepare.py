"""`prepare=` is called once in each worker, and its module trains the same parameters."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import paceline as pl
from paceline.core.errors import CheckpointError
from tests.conftest import flat, make_learner

CALLS: list[nn.Module] = []


def compiled(model: nn.Module) -> nn.Module:
    CALLS.append(model)
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def in_place(model: nn.Module) -> None:
    model.compile(backend="eager")


def recomputed(model: Any) -> None:
    """Recompute the first two layers in the backward pass."""
    first = nn.Sequential(*model[:2])

    def forward(inputs: Tensor) -> Any:
        return model[2](checkpoint(first, inputs, use_reentrant=False))

    model.forward = forward


def fit(steps: int = 5, **options: Any) -> pl.Run:
    engine = pl.Simulator(3)
    return pl.Trainer(make_learner(**options), pl.sync(), engine, progress=False).fit(steps=steps)


@pytest.mark.parametrize("prepare", [compiled, in_place, recomputed])
def test_the_prepared_module_trains_with_the_same_bits(prepare: Any) -> None:
    assert torch.equal(flat(fit(prepare=prepare).model), flat(fit().model))


def test_it_is_called_once_and_not_for_the_server() -> None:
    """Simulated workers share a module; tests/cluster has processes."""
    CALLS.clear()
    run = fit(prepare=compiled)
    assert len(CALLS) == 1 and type(run.model) is nn.Sequential


def test_it_works_with_local_steps_and_a_function_for_the_model() -> None:
    plain: Any = make_learner()
    recipe = partial(
        pl.TorchLearner, partial(nn.Linear, 20, 3), plain.loss, plain.optimizer, plain.dataset, 64,
        outer=partial(torch.optim.SGD, lr=1.0),
    )  # fmt: skip
    runs = [
        pl.Trainer(made, pl.local_sgd(3), pl.Simulator(2), progress=False).fit(steps=3)
        for made in (recipe(), recipe(prepare=compiled))
    ]
    assert torch.equal(flat(runs[0].model), flat(runs[1].model))


def test_the_loss_is_given_the_returned_module() -> None:
    class Doubled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, inputs: Tensor) -> Tensor:
            return torch.as_tensor(2 * self.inner(inputs))

    assert fit(prepare=Doubled).metrics["loss"][0] != fit().metrics["loss"][0]


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (lambda model: model.half(), r"moved parameter 0\.weight or changed its dtype"),
        (lambda model: nn.Linear(20, 3), "with other trained parameters"),
        (lambda model: model.requires_grad_(False), "with other trained parameters"),
        (lambda model: "fast", "returned str; return an nn.Module"),
    ],
)
def test_a_module_that_would_not_be_trained_is_refused(prepare: Any, why: str) -> None:
    with pytest.raises(ValueError, match=f"prepare= .*{why}|prepare= {why}"):
        fit(prepare=prepare)


def test_a_resume_with_another_is_refused(tmp_path: Path) -> None:
    def trainer(**options: Any) -> pl.Trainer:
        saves = pl.Checkpoints(tmp_path, every=1)
        recipe = make_learner(**options)
        return pl.Trainer(recipe, pl.sync(), pl.Simulator(2), progress=False, checkpoints=saves)

    trainer(prepare=in_place).fit(steps=2)
    assert trainer(prepare=in_place).resume(tmp_path).fit(steps=3).steps == 3
    with pytest.raises(CheckpointError, match="prepare was 'in_place' and is 'compiled'"):
        trainer(prepare=compiled).resume(tmp_path)
