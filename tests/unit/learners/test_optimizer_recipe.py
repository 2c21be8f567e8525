"""Optimizers made anew have the groups of the first, and schedules set the new one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR

from paceline.learners.optimize import Rates
from paceline.learners.optimizer_recipe import Pace, RemadeOptimizer, RemadeSchedules


def tensors() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for shape in [(3, 2), (2,), (2, 4)]]


def grouped(parameters: list[nn.Parameter], kind: Any = optim.AdamW) -> optim.Optimizer:
    first, second, third = parameters
    made = kind([{"params": [third, first]}, {"params": [second], "lr": 0.5}], lr=0.25)
    assert isinstance(made, optim.Optimizer)
    return made


def test_groups_are_kept_by_place() -> None:
    given, others = tensors(), tensors()
    made = RemadeOptimizer(grouped(given), given)(others)
    assert [[*map(id, group["params"])] for group in made.param_groups] == [
        [id(others[2]), id(others[0])],
        [id(others[1])],
    ]
    assert [group["lr"] for group in made.param_groups] == [0.25, 0.5]


def test_named_and_fused_ones_and_those_of_matrices_can_be_made() -> None:
    layer = nn.Linear(2, 2)
    named = optim.Adam([*layer.named_parameters()], lr=0.1, fused=True)
    recipe = RemadeOptimizer(named, [*layer.parameters()])
    made = recipe(layer.parameters())
    assert made.param_groups[0]["fused"] and len(made.param_groups[0]["params"]) == 2
    if hasattr(optim, "Muon"):
        matrix = [nn.Parameter(torch.ones(4, 4))]
        muon = optim.Muon(matrix, lr=0.1)
        pace = Pace(ExponentialLR(muon, 0.5))
        again = RemadeOptimizer(muon, matrix)([nn.Parameter(torch.ones(4, 4))])
        running = RemadeSchedules(muon, [pace], 1)(again)
        again.step()
        running.step()
        assert again.param_groups[0]["lr"] == 0.05


def test_the_settings_of_the_first_group_can_be_had() -> None:
    given = tensors()
    recipe = RemadeOptimizer(grouped(given), given)
    shapes = {str(i): tuple(parameter.shape) for i, parameter in enumerate(given)}
    assert Rates(recipe, None, shapes).groups(0)[0]["lr"] == 0.25
    with pytest.raises(ValueError, match="got 2 tensors for an optimizer of 3"):
        recipe(given[:2])


class Fixed(optim.SGD):
    """Cannot be made with a learning rate for each group."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__([p for group in params for p in group["params"]], lr=0.1)


class Needy(optim.SGD):
    def __init__(self, params: Iterable[Any], secret: int) -> None:
        super().__init__(params, lr=0.1)


def test_what_cannot_be_made_anew_is_refused() -> None:
    given = tensors()
    other = Fixed([{"params": given}])
    other.param_groups[0]["lr"] = 0.3
    with pytest.raises(ValueError, match="a copy of Fixed has other settings"):
        RemadeOptimizer(other, given)
    with pytest.raises(ValueError, match=r"Needy cannot be copied.*secret.*give optimizer="):
        RemadeOptimizer(Needy(given, 1), given)


def test_the_given_optimizer_and_schedule_stay_as_they_are() -> None:
    given = tensors()
    first = grouped(given)
    schedule = LambdaLR(first, lambda step: 1 / (step + 1))
    recipe = RemadeSchedules(first, [Pace(schedule, "step")], 1)
    for _ in range(2):  # as often as servers are made
        made = RemadeOptimizer(first, given)(tensors())
        running = recipe(made)
        for _ in range(3):
            made.step()
            running.step()
        assert [group["lr"] for group in made.param_groups] == [0.25 / 4, 0.5 / 4]
    assert first.param_groups[0]["lr"] == 0.25 and schedule.last_epoch == 0


def test_a_schedule_of_another_optimizer_is_refused() -> None:
    first = grouped(tensors())
    recipe = RemadeSchedules(first, [Pace(ExponentialLR(first, 0.5))], 1)
    with pytest.raises(ValueError, match="AdamW with 2 groups cannot be those of SGD with 1"):
        recipe(optim.SGD(tensors(), lr=0.1))


@pytest.mark.parametrize(
    ("interval", "frequency", "due"),
    [
        ("step", 1, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        ("step", 2, [2, 4, 7, 9]),  # five steps an epoch, and each counts anew
        ("epoch", 1, [5, 10]),
        ("epoch", 2, [10]),
    ],
)
def test_when_a_schedule_advances(interval: Any, frequency: int, due: list[int]) -> None:
    optimizer = grouped(tensors())
    pace = Pace(ExponentialLR(optimizer, 0.5), interval, frequency)
    assert [step for step in range(1, 11) if pace.is_due(step, 5)] == due


def test_recipes_describe_themselves() -> None:
    given = tensors()
    optimizer = grouped(given, optim.SGD)
    told = repr(RemadeOptimizer(optimizer, given))
    assert told == "SGD(2 tensors: lr=0.25; 1 tensors: lr=0.5)"
    paces = [Pace(ExponentialLR(optimizer, 0.5), "step", 3)]
    schedules = repr(RemadeSchedules(optimizer, paces, 1))
    assert schedules == "ExponentialLR(gamma=0.5, last_epoch=0) every 3 steps"
