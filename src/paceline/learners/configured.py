"""What `configure_optimizers` of a LightningModule returns, as arguments of a learner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.learners.remade import Pace, RemadeOptimizer, RemadeSchedules


def rules(module: Any, steps_per_epoch: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `optimizer` and `scheduler` for TorchLearner, whose other arguments are given."""
    optimizer, paces = _configured(module)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    rules: dict[str, Any] = {"optimizer": RemadeOptimizer(optimizer, trained)}
    if paces and "scheduler" not in options:
        if options.get("outer") is not None:
            raise ValueError(
                f"with outer= the schedule is that of the outer optimizer, and "
                f"{type(module).__name__} has one for its own; give scheduler= for the outer, or "
                "scheduler=None"
            )
        rules["scheduler"] = RemadeSchedules(optimizer, paces, steps_per_epoch)
    return rules


def _configured(module: Any) -> tuple[Optimizer, list[Pace]]:
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
            f"configure_optimizers of {name} returned these optimizers: {told}; one is possible, "
            "with as many groups as you like: give optimizer= of lightning_learner, or use "
            "TorchLearner with one loss"
        )
    return optimizers[0], [_pace(each, optimizers[0], name) for each in schedulers]


def _both(found: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return optimizers and schedules from any of the forms that Lightning knows."""
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


def _pace(given: Any, optimizer: Optimizer, name: str) -> Pace:
    """Read a schedule, alone or in a dict that says when it advances."""
    config = dict(given) if isinstance(given, Mapping) else {"scheduler": given}
    scheduler = config.get("scheduler")
    kind = type(scheduler).__name__
    if isinstance(scheduler, ReduceLROnPlateau) or config.get("reduce_on_plateau"):
        raise ValueError(
            f"{kind} of {name} watches a metric, and no validation is run here; use a schedule "
            "that depends on steps or epochs alone, or give scheduler=None"
        )
    if not isinstance(scheduler, LRScheduler):
        raise ValueError(
            f"{kind} of {name} is no LRScheduler of torch; give scheduler= a function that makes "
            "a schedule from an optimizer"
        )
    if scheduler.optimizer is not optimizer:
        raise ValueError(f"{kind} of {name} is bound to another optimizer than the one returned")
    interval, frequency = config.get("interval", "epoch"), config.get("frequency", 1)
    if interval not in ("step", "epoch") or not (isinstance(frequency, int) and frequency >= 1):
        raise ValueError(
            f'interval={interval!r}, frequency={frequency!r}: use "step" or "epoch", and a whole '
            "number from 1 on"
        )
    return Pace(scheduler, interval, frequency)
