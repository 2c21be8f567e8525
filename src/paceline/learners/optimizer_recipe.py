"""Recipes from an existing optimizer and its schedules, to make the same ones for other tensors.

Scripts of other frameworks make their optimizer from their own copy of a model. The server has
another copy, or slices of it, so it makes optimizer and schedules again: same groups and settings.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from paceline.learners.optimize import made_alike, options_of


@dataclass(frozen=True)
class Group:
    """A group's trained tensors, by their index in the model, and its settings."""

    places: tuple[int, ...]
    options: dict[str, Any]


class RemadeOptimizer:
    """Makes an optimizer like a given one, with the same groups.

    A group is stored as the indices of its tensors in the model, without frozen tensors.
    """

    def __init__(self, optimizer: Optimizer, trained: Sequence[nn.Parameter]) -> None:
        place = {id(parameter): index for index, parameter in enumerate(trained)}
        self._kind, self._defaults = type(optimizer), dict(optimizer.defaults)
        self._tensors, self._groups = len(trained), tuple(_groups(optimizer, place))
        self._try(trained)

    def __call__(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        given = list(parameters)
        if len(given) != self._tensors:
            raise ValueError(
                f"got {len(given)} tensors for an optimizer of {self._tensors}; give all trained "
                "tensors of the model"
            )
        groups = [
            {**copy.deepcopy(group.options), "params": [given[place] for place in group.places]}
            for group in self._groups
        ]
        return made_alike(self._kind, self._defaults, groups)

    def _try(self, trained: Sequence[nn.Parameter]) -> None:
        """Raise ValueError if the optimizer cannot be made again with the same settings."""
        name = self._kind.__name__
        try:
            small = [torch.zeros([min(length, 3) for length in p.shape]) for p in trained]
            made = self([nn.Parameter(tensor) for tensor in small])
        except Exception as error:
            raise ValueError(
                f"{name} cannot be copied from its groups and defaults ({error}); give optimizer= "
                "a function that makes it from parameters"
            ) from error
        for mine, theirs in zip(made.param_groups, self._groups, strict=True):
            if options_of(mine) != theirs.options:
                raise ValueError(
                    f"a copy of {name} has other settings than the one given; give optimizer= a "
                    "function that makes it from parameters"
                )

    def __repr__(self) -> str:
        told = []
        for group in self._groups:
            settings = [f"{k}={v!r}" for k, v in group.options.items() if v not in (None, False)]
            told.append(f"{len(group.places)} tensors: {', '.join(settings)}")
        return f"{self._kind.__name__}({'; '.join(told)})"


@dataclass(frozen=True)
class Pace:
    """A schedule and its interval: it advances every `frequency` steps or epochs."""

    scheduler: LRScheduler
    interval: Literal["step", "epoch"] = "epoch"
    frequency: int = 1

    def is_due(self, step: int, steps_per_epoch: int) -> bool:
        """Return whether it advances after this step (from 1); steps count anew in each epoch."""
        epoch, place = divmod(step, steps_per_epoch)
        if self.interval == "epoch":
            return place == 0 and epoch % self.frequency == 0
        return (place or steps_per_epoch) % self.frequency == 0

    def __repr__(self) -> str:
        settings = [
            f"{name}={value!r}"
            for name, value in vars(self.scheduler).items()
            if isinstance(value, int | float | str) and not name.startswith("_")
        ]
        every = f"{self.frequency} {self.interval}{'s' if self.frequency > 1 else ''}"
        return f"{type(self.scheduler).__name__}({', '.join(settings)}) every {every}"


class Schedules:
    """The schedules of one optimizer; `step` is called after every training step."""

    def __init__(self, paces: Sequence[Pace], steps_per_epoch: int) -> None:
        self._paces, self._steps_per_epoch = paces, steps_per_epoch
        self._step = 0

    def step(self) -> None:
        self._step += 1
        for pace in self._paces:
            if pace.is_due(self._step, self._steps_per_epoch):
                pace.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "each": [p.scheduler.state_dict() for p in self._paces]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._step = state["step"]
        for pace, saved in zip(self._paces, state["each"], strict=True):
            pace.scheduler.load_state_dict(saved)


class RemadeSchedules:
    """Makes schedules like the given ones, for an optimizer like theirs.

    It keeps and sends a copy that is bound to a small optimizer with one value per group.
    """

    def __init__(self, optimizer: Optimizer, paces: Sequence[Pace], steps_per_epoch: int) -> None:
        groups = []
        for group in optimizer.param_groups:
            dimensions = group["params"][0].ndim if group["params"] else 1  # some need matrices
            one = nn.Parameter(torch.zeros([1] * dimensions))
            groups.append({**options_of(group), "params": [one]})
        self._bound_to = made_alike(type(optimizer), optimizer.defaults, copy.deepcopy(groups))
        self._steps_per_epoch = steps_per_epoch
        try:
            self._paces = _rebound(paces, optimizer, self._bound_to)
        except Exception as error:
            names = ", ".join(type(pace.scheduler).__name__ for pace in paces)
            raise ValueError(
                f"{names} cannot be copied for another optimizer ({error}); give scheduler= a "
                "function that makes it from an optimizer"
            ) from error

    def __call__(self, optimizer: Optimizer) -> Schedules:
        theirs, mine = self._bound_to.param_groups, optimizer.param_groups
        if type(optimizer) is not type(self._bound_to) or len(theirs) != len(mine):
            raise ValueError(
                f"schedules of {type(self._bound_to).__name__} with {len(theirs)} groups cannot "
                f"be those of {type(optimizer).__name__} with {len(mine)}; give scheduler= a "
                "function that makes one for it, or None"
            )
        before = [options_of(group) for group in mine]
        LambdaLR(optimizer, lambda _: 1.0)  # hooks the optimizer's step, as every schedule does
        for group, options in zip(mine, before, strict=True):
            group.update(options)
        return Schedules(_rebound(self._paces, self._bound_to, optimizer), self._steps_per_epoch)

    def __repr__(self) -> str:
        return " and ".join(map(repr, self._paces))


def _rebound(paces: Sequence[Pace], old: Optimizer, new: Optimizer) -> tuple[Pace, ...]:
    """Copy schedules deeply, so that the copies control the new optimizer."""
    schedulers = copy.deepcopy([pace.scheduler for pace in paces], {id(old): new})
    return tuple(replace(p, scheduler=s) for p, s in zip(paces, schedulers, strict=True))


def _groups(optimizer: Optimizer, place: Mapping[int, int]) -> Iterable[Group]:
    for group in optimizer.param_groups:
        trained = [parameter for parameter in group["params"] if parameter.requires_grad]
        if strangers := [p for p in trained if id(p) not in place]:
            raise ValueError(
                f"{type(optimizer).__name__} has {len(strangers)} trained tensors that are not the "
                "module's; register them as its parameters or submodules"
            )
        yield Group(tuple(place[id(p)] for p in trained), copy.deepcopy(options_of(group)))
