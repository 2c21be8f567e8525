"""A smaller learning rate when evaluations stop improving, as torch's `ReduceLROnPlateau`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from paceline.core.checks import check_whole
from paceline.report.evaluations import Mode

_LEAST_CHANGE = 1e-8  # a smaller one is left out, as by torch's eps


@dataclass(frozen=True)
class Plateau:
    """Multiplies the learning rate by `factor` after more than `patience` evaluations in a row
    that are no better.

    smallest: the smallest scale of the learning rate, as a part of the schedule's own.
    threshold: the part of the best value by which a better one must differ from it.
    """

    factor: float = 0.5
    patience: int = 3
    smallest: float = 1e-3
    threshold: float = 1e-4

    def __post_init__(self) -> None:
        if not 0 < self.factor < 1:
            raise ValueError(f"factor={self.factor}: use a number between 0 and 1, such as 0.5")
        check_whole("patience", self.patience, 0)
        if not 0 < self.smallest <= 1:
            raise ValueError(f"smallest={self.smallest}: use a part of 1, such as 1e-3")
        if not 0 <= self.threshold < 1:
            raise ValueError(f"threshold={self.threshold}: use a number from 0 to 1, such as 1e-4")


class PlateauScale:
    """The scale of the learning rate after each evaluation."""

    def __init__(self, settings: Plateau, mode: Mode) -> None:
        self._on, self._mode = settings, mode
        self._best = inf if mode == "min" else -inf
        self._bad = 0
        self.scale = 1.0

    def evaluate(self, value: float) -> bool:
        """Take the next value of the first metric; return whether the scale has changed."""
        if self._is_better(value):
            self._best, self._bad = value, 0
        else:
            self._bad += 1
        if self._bad <= self._on.patience:
            return False
        self._bad = 0
        before, new = self.scale, max(self.scale * self._on.factor, self._on.smallest)
        if before - new <= _LEAST_CHANGE:
            return False
        self.scale = new
        return True

    def _is_better(self, value: float) -> bool:
        if self._mode == "min":
            return value < self._best * (1 - self._on.threshold)
        return value > self._best * (1 + self._on.threshold)

    def state(self) -> dict[str, Any]:
        return {"best": self._best, "bad": self._bad, "scale": self.scale}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._best, self._bad = float(state["best"]), int(state["bad"])
        self.scale = float(state["scale"])
