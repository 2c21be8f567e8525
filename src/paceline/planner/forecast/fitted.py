"""The fitted quadratic as a learner, for policies that use statistics of the results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.core.protocol import SHARED, Task, Work
from paceline.data.partition.base import Partition
from paceline.data.seeding import generator
from paceline.learners.arrays import ArrayServer, Vector
from paceline.learners.base import Array, Outcome, Proceed
from paceline.planner.forecast.quadratic import Modes


@dataclass(frozen=True, eq=False)
class Fitted:
    """SGD on a quadratic of given modes, with messages as long as those of the real model."""

    modes: Modes
    lr: float
    batch_size: int
    message_bytes: int = 0
    examples: None = field(default=None, init=False)

    def replica(self, seed: int, tiles: Partition | None = None) -> FittedReplica:
        return FittedReplica(self.modes, self.lr, seed)

    def server(self) -> ArrayServer:
        return ArrayServer(self.modes.start, self.lr)

    def rate(self, version: int) -> float:
        return self.lr

    def check(self, work: Work) -> None:
        if work.parts is not None:
            raise ValueError("codes are forecast by their time alone: decoded, they are exact")

    def about(self) -> dict[str, Any]:
        return {"learner": "Fitted", "batch_size": self.batch_size}


class FittedReplica:
    """Computes gradients of the modes, whose noise is a pure function of the seed and the task."""

    def __init__(self, modes: Modes, lr: float, seed: int) -> None:
        self._modes, self._lr, self._seed = modes, lr, seed
        self._spread = np.sqrt(modes.noise)

    def compute(self, model: Iterable[Array], task: Task, proceed: Proceed) -> Outcome:
        modes, rng = self._modes, generator(self._seed, SHARED, task.offset)
        x: Vector = np.concatenate(list(model))
        total, loss = np.zeros_like(x), 0.0
        for _ in range(task.work.steps):
            excess = float(0.5 * (modes.curvature @ (x * x)))
            noise = self._spread * rng.standard_normal(x.size) / np.sqrt(task.samples)
            if modes.fades:
                noise *= np.sqrt(modes.left(np.array(excess)))
            gradient = modes.curvature * x + noise
            loss += excess / task.work.steps
            total += gradient
            x = x - self._lr * gradient
        return Outcome(total, task.computed, {"loss": loss + modes.floor})
