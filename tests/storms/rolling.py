"""A small problem whose steps remember: what a server forgets or does twice shows in the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from paceline.core.protocol import Want
from paceline.learners.arrays import ArrayServer, Quadratic, Vector
from paceline.learners.base import Array, Recipe, Saved, Span, Sums

_MOMENTUM = 0.5


@dataclass(frozen=True)
class Rolling(Quadratic):
    """A quadratic that is descended with momentum.

    totals: whether a step also depends on a sum over the whole vector. It is of whole numbers, so
        that it has the same bits however the model is cut.
    """

    totals: bool = False

    def server(self) -> RollingServer:
        return RollingServer(np.full(len(self.curvature), self.start), self.lr, self.totals)


class RollingServer(ArrayServer):
    """SGD with momentum: v <- m v + c g, x <- x - lr v."""

    def __init__(self, start: Vector, lr: float, totals: bool) -> None:
        super().__init__(start, lr)
        self.needs_totals = totals
        self._velocity = np.zeros_like(self.vector)

    def recipe(self, span: Span) -> Recipe:
        return partial(_zeros, span[1] - span[0], self._lr, self.needs_totals)

    def reduce(
        self, weights: Sequence[float], vectors: Sequence[Array], wants: frozenset[Want]
    ) -> Sums:
        sums = super().reduce(weights, vectors, wants)
        if self.needs_totals:
            sums["uphill"] = float(np.count_nonzero(self._sum > 0))
        return sums

    def apply(self, totals: Sums, lr_scale: float = 1.0) -> None:
        factor = 1.0 + totals["uphill"] / 16 if self.needs_totals else 1.0
        self._velocity = _MOMENTUM * self._velocity + factor * self._sum
        self.vector -= self._lr * lr_scale * self._velocity

    def save(self) -> Saved:
        saved = super().save()
        return Saved({**saved.arrays, "velocity": self._velocity}, saved.data)

    def load(self, saved: Saved) -> None:
        super().load(saved)
        self._velocity = saved.arrays["velocity"].copy()


def _zeros(size: int, lr: float, totals: bool) -> RollingServer:
    return RollingServer(np.zeros(size), lr, totals)
