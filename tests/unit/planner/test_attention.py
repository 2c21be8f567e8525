"""Nets with attention, and with functions that have no second derivative, are measured too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from paceline.planner.measure.curvature import measure_curvature

VOCABULARY, LENGTH, WIDTH = 11, 8, 16


class Block(nn.Module):
    """Causal self-attention through the fused kernel, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inner(self.first(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.outer(attended.transpose(1, 2).flatten(2))
        found: Tensor = x + self.mlp(self.second(x))
        return found


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        logits: Tensor = self.head(self.blocks(x))
        return logits


def next_token(module: nn.Module, ids: Tensor) -> Tensor:
    logits = module(ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def learner_of(module: nn.Module, loss: Any = next_token, **more: Any) -> pl.TorchLearner:
    rows = torch.randint(0, VOCABULARY, (16, LENGTH), generator=torch.Generator().manual_seed(1))
    sgd = partial(torch.optim.SGD, lr=0.1)
    return pl.TorchLearner(
        module, loss, **{"optimizer": sgd, "dataset": rows, **more}, batch_size=8
    )


@pytest.fixture
def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT()


def test_a_small_gpt_is_profiled(gpt: GPT) -> None:
    engine = pl.Simulator(2, pl.delays.Fixed(0.1), unit=1)
    found = pl.profile(learner_of(gpt), engine, seconds=20.0, tasks=2, warm=2, sizes=False)
    assert found.known().top > 0


def test_a_model_of_transformers_is_measured() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=2,
        n_head=2,
        attn_pdrop=0.0,
    )
    model = transformers.GPT2LMHeadModel(config)

    def loss(module: nn.Module, ids: Tensor) -> Tensor:
        found: Tensor = module(input_ids=ids, labels=ids).loss
        return found

    found = measure_curvature(learner_of(model, loss), samples=16, pieces=4, steps=4)
    assert found.top > 0


class Cube(torch.autograd.Function):
    """x ** 3, of which the second derivative is missing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return 3 * x**2 * gradient


def test_without_a_second_derivative_gradients_are_compared() -> None:
    """The loss sum(x ** 3) has the Hessian diag(6 x)."""
    values = [0.5, 1.0, 2.0]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.tensor(values))

    def loss(module: nn.Module, rows: Tensor) -> Tensor:
        cube: Any = Cube.apply
        found: Tensor = cube(module.x).sum()
        return found

    found = measure_curvature(learner_of(Model(), loss), samples=8, pieces=2)
    assert found.by == "differences of gradients"
    assert [v for v, _ in found.spectrum] == pytest.approx([6 * v for v in values], rel=1e-3)


def test_both_ways_agree_on_a_gpt(gpt: GPT) -> None:
    def cubed(module: nn.Module, ids: Tensor, cube: Callable[[Tensor], Tensor]) -> Tensor:
        return F.cross_entropy(cube(module(ids))[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    exact, near = (
        measure_curvature(learner_of(gpt, partial(cubed, cube=cube)), samples=16, pieces=2, steps=6)
        for cube in (lambda x: x**3, Cube.apply)
    )
    assert (exact.by, near.by) == ("double backward", "differences of gradients")
    assert near.top == pytest.approx(exact.top, rel=0.05)
