"""Parts of a gradient that are reported while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.core.protocol import Task, Work
from paceline.learners.base import Array, Changed, EarlyReplica, Span
from paceline.learners.early import BUCKET

WIDE = 300  # its layers have more values than a bucket
X = torch.randn(32, WIDE, generator=torch.Generator().manual_seed(3))


def loss(model: nn.Module, batch: Any) -> Any:
    return model(batch[0]).square().mean()


class Twice(nn.Module):
    """Gets its gradient in two additions of one backward pass, from `turn` passes on."""

    def __init__(self, turn: int = 0) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDE, WIDE)
        self.passes, self.turn = 0, turn

    def forward(self, x: Tensor) -> Any:
        self.passes += 1
        if self.passes <= self.turn:
            return self.layer(self.layer(x))
        again = partial(checkpoint, self.layer, use_reentrant=True)
        return again(again(x.requires_grad_()))


def replica_of(model: Callable[[], nn.Module], **more: Any) -> tuple[Any, Array]:
    torch.manual_seed(1)
    recipe = pl.TorchLearner(
        model(),
        loss,
        partial(torch.optim.SGD, lr=0.1),
        TensorDataset(X),
        batch_size=16,
        **more,
    )
    return recipe.replica(0), recipe.server().vector.copy()


def task(id: int, **work: Any) -> Task:
    return Task(id, "w0", Work(samples=16, **work), 0, 0.0, 16, 16 * id)


def layers() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDE, WIDE), nn.BatchNorm1d(WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 2)
    )


def run(replica: Any, model: Array, tasks: int) -> list[tuple[dict[Span, Array], Array]]:
    """Return the parts that each task reports, as they were then, and its vector in the end."""
    found = []
    for id in range(tasks):
        told: dict[Span, Array] = {}
        replica.final = lambda vector, span, told=told: told.setdefault(
            span, vector[span[0] : span[1]].copy()
        )
        outcome = replica.compute([model], task(id), lambda done: True)
        found.append((told, outcome.vector.copy()))
    return found


@pytest.mark.parametrize("micro_batch", [None, 6, 8])
def test_parts_are_final_from_the_second_task_on(micro_batch: int | None) -> None:
    replica, model = replica_of(layers, micro_batch=micro_batch)
    assert isinstance(replica, EarlyReplica)
    (first, _), *others = run(replica, model, 4)
    assert not first  # the first pass only counts
    plain, _ = replica_of(layers, micro_batch=micro_batch)
    for id, (told, vector) in enumerate(others, start=1):
        expected = plain.compute([model], task(id), lambda done: True).vector
        assert np.array_equal(vector, expected)
        assert len(told) == 2  # the second wide layer with the last one; the first one
        assert all(stop - start >= BUCKET for start, stop in told)
        for (start, stop), part in told.items():
            assert np.array_equal(part, vector[start:stop])


def test_nothing_is_reported_if_the_first_pass_adds_twice() -> None:
    replica, model = replica_of(Twice)
    assert not any(told for told, _ in run(replica, model, 3))


def test_a_part_that_changes_later_is_noticed_and_then_no_more_is_reported() -> None:
    replica, model = replica_of(partial(Twice, 1))
    run(replica, model, 1)
    with pytest.raises(Changed):
        run(replica, model, 1)
    ((told, vector),) = run(replica, model, 1)
    plain, _ = replica_of(Twice)
    assert not told
    assert np.array_equal(vector, plain.compute([model], task(0), lambda done: True).vector)


def test_an_incomplete_gradient_and_local_steps_report_nothing() -> None:
    told: list[Span] = []
    replica, model = replica_of(layers, micro_batch=8)
    run(replica, model, 1)
    replica.final = lambda vector, span: told.append(span)
    outcome = replica.compute([model], task(1), lambda done: done < 8)
    assert outcome.samples == 8 and not told
    local, model = replica_of(layers, outer=partial(torch.optim.SGD, lr=1.0))
    local.final = replica.final
    for id in range(2):
        local.compute([model], task(id, steps=2), lambda done: True)
    assert not told
