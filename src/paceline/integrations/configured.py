"""Converts the result of a LightningModule's `configure_optimizers` to learner arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from paceline.learners.optimizer_recipe import Pace, RemadeOptimizer, RemadeSchedules


def rules(module: Any, steps_per_epoch: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `optimizer` and its schedule for TorchLearner; `options` are its other arguments.

    With `outer=`, the module's optimizer and schedule are used for the local steps.
    """
    optimizer, schedules = _configured(module)
    name = type(module).__name__
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    keyword = "scheduler" if options.get("outer") is None else "inner_scheduler"
    if "scheduler" in options or keyword in options:  # drop the module's schedules
        if schedules:
            restore(optimizer, schedules, name)
        return {"optimizer": RemadeOptimizer(optimizer, trained)}
    paces = [_pace(each, optimizer, name) for each in schedules]
    rules: dict[str, Any] = {"optimizer": RemadeOptimizer(optimizer, trained)}
    if paces:
        rules[keyword] = RemadeSchedules(optimizer, paces, steps_per_epoch)
    return rules


def restore(optimizer: Optimizer, schedules: Sequence[Any], name: str) -> None:
    """Restore the learning rates that the optimizer had before the schedules changed them."""
    if lost := [kind for each in schedules for kind in _cycles(_scheduler(each))]:
        raise ValueError(
            f"{lost[0]} of {name} has replaced the learning rate of its optimizer, and perhaps "
            "its momentum: their values without the schedule are unknown; give optimizer= as well"
        )
    for group in optimizer.param_groups:
        group["lr"] = group.pop("initial_lr", group["lr"])


def _cycles(scheduler: Any) -> list[str]:
    """Return the names of its schedules that ignore the learning rate of the optimizer."""
    within = [kind for each in getattr(scheduler, "_schedulers", ()) for kind in _cycles(each)]
    own = isinstance(scheduler, CyclicLR | OneCycleLR)
    return [type(scheduler).__name__, *within] if own else within


def _configured(module: Any) -> tuple[Optimizer, Sequence[Any]]:
    name = type(module).__name__
    try:
        found = module.configure_optimizers()
    except RuntimeError as error:
        if "attached to a `Trainer`" not in str(error):
            raise
        raise ValueError(
            f"configure_optimizers of {name} asks for a Lightning trainer, and there is none; give "
            "the module what it needs (such as the number of steps) as an argument"
        ) from error
    optimizers, schedulers = _both(found)
    if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer):
        told = ", ".join(type(each).__name__ for each in optimizers) or "none"
        raise ValueError(
            f"configure_optimizers of {name} returned these optimizers: {told}; return exactly "
            "one, with any number of groups: give optimizer= of lightning_learner, or use "
            "TorchLearner with one loss"
        )
    return optimizers[0], schedulers


def _both(found: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return optimizers and schedules from any of the forms that Lightning accepts."""
    match found:
        case None:
            return [], []
        case {"optimizer": optimizer}:
            scheduler = found.get("lr_scheduler")
            return [optimizer], [] if scheduler is None else [scheduler]
        case [list(optimizers), schedulers]:
            return optimizers, schedulers if isinstance(schedulers, list) else [schedulers]
        case [{"optimizer": _}]:
            return _both(found[0])
        case list() | tuple():
            return found, []
        case _:
            return [found], []


def _scheduler(given: Any) -> Any:
    return given.get("scheduler") if isinstance(given, Mapping) else given


def _pace(given: Any, optimizer: Optimizer, name: str) -> Pace:
    """Read a schedule, alone or in a dict that says when it advances."""
    config = given if isinstance(given, Mapping) else {}
    scheduler = _scheduler(given)
    kind = type(scheduler).__name__
    if isinstance(scheduler, ReduceLROnPlateau) or config.get("reduce_on_plateau"):
        raise ValueError(
            f"{kind} of {name} watches a metric, and no validation is run here; use a schedule "
            "that depends on steps or epochs alone, or give scheduler=None"
        )
    if not isinstance(scheduler, LRScheduler):
        raise ValueError(
            f"{kind} of {name} is no LRScheduler of torch; give scheduler= a function that makes "
            "a schedule from an optimizer, or None"
        )
    if scheduler.optimizer is not optimizer:
        raise ValueError(
            f"{kind} of {name} is bound to another optimizer than the one returned; return the "
            "optimizer of the schedule"
        )
    interval, frequency = config.get("interval", "epoch"), config.get("frequency", 1)
    if interval not in ("step", "epoch") or not (isinstance(frequency, int) and frequency >= 1):
        raise ValueError(
            f'interval={interval!r}, frequency={frequency!r}: use "step" or "epoch", and a whole '
            "number from 1 on"
        )
    return Pace(scheduler, interval, frequency)
