"""The learner of a run whose gradients users' own loops compute."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from torch import nn

from paceline.core.protocol import Work
from paceline.learners.optimize import MakeOptimizer, MakeScheduler
from paceline.learners.torch import TorchLearner
from paceline.learners.transforms import Transform


@dataclass(frozen=True)
class Recipe:
    """What the hub needs of a user's process to take the steps: the model and its rules."""

    model: nn.Module
    optimizer: MakeOptimizer
    scheduler: MakeScheduler | None = None
    transform: Transform | None = None
    buffers: Collection[str] = ()
    outer: MakeOptimizer | None = None


class Positions:
    """A dataset of which only the number of samples is known: users' processes have the rest."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        return index


def _in_the_loop(model: nn.Module, batch: Any) -> Any:
    raise RuntimeError("the loss is computed in the user's loop; this is a bug in Paceline")


@dataclass(frozen=True)
class LoopLearner(TorchLearner):
    """Has the server's side of `TorchLearner`; the other side is in the user's process."""

    knows_loss = False

    @property
    def _frozen(self) -> None:
        """Nothing is known of the frozen base, which only the users' processes have."""
        return None

    def for_workers(self) -> Any:
        """Return nothing: a client has its own model."""
        return None

    def check(self, work: Work) -> None:
        if work.parts is not None:
            raise ValueError(
                "a session cannot compute a coded batch, whose parts have gradients of their own; "
                "use k_sync, rennala or ringmaster, or coded(…) with pl.Trainer"
            )
        if work.budget < inf:
            raise ValueError(
                "a session cannot end a batch after a time: its loop belongs to the user; use "
                "k_sync, or deadline(…) with pl.Trainer"
            )
        if (work.steps > 1 or work.overlap) and self.outer is None:
            raise ValueError(
                "a session computes one gradient for each task; use pl.local_steps for local steps"
            )


def learner_of(recipe: Recipe, batch_size: int, examples: int) -> LoopLearner:
    """Make the hub's learner."""
    made = LoopLearner(
        recipe.model,
        _in_the_loop,
        recipe.optimizer,
        Positions(examples),  # type: ignore[arg-type]
        batch_size,
        outer=recipe.outer,
        buffers=recipe.buffers,
    )
    if recipe.outer is not None:
        return made
    return replace(made, scheduler=recipe.scheduler, transform=recipe.transform)
