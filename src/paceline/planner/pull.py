"""Along which curvatures the gradient points: what decides how fast the loss falls.

The spectrum of the Hessian counts all directions alike, and most of them matter little. Lanczos's
method begun at the gradient gives the curvatures that matter, each with its share of the squared
gradient. Products with the Hessian are differences of gradients on the same samples, which the
learner's own replica computes, whatever its kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from paceline.core.protocol import Task, Work
from paceline.learners.base import Learner
from paceline.planner.curvature import Spectrum

Vector = NDArray[np.float64]

STEP = 5e-3
"""Of the model's length: far enough for single precision, near enough for the curvature."""


def gradient_spectrum(
    learner: Learner, *, samples: int = 512, steps: int = 12, seed: int = 0
) -> Spectrum:
    """Return curvatures in their order, each with its share of the squared gradient.

    It takes as long as samples * (1 + 2 * steps) gradients of one sample.
    """
    if samples < 1 or steps < 1:
        raise ValueError(f"samples={samples}, steps={steps}: use at least 1 of each")
    if getattr(learner, "outer", None) is not None:  # whose results are changes, not gradients
        learner = replace(learner, outer=None)  # type: ignore[type-var]
    server = learner.server()
    model, size = np.array(server.vector), server.layout.trained
    samples = min(samples, learner.examples or samples)
    replica = learner.replica(seed)
    length = STEP * max(float(np.linalg.norm(model[:size])), 1.0)

    def gradient(shift: Vector) -> Vector:
        at = model.copy()
        at[:size] += shift.astype(model.dtype)
        task = Task(0, "", Work(), 0, 0.0, samples, 0)
        outcome = replica.compute([at], task, lambda done: True)
        assert outcome.vector is not None
        return np.array(outcome.vector[:size], dtype=np.float64)

    def product(v: Vector) -> Vector:
        return (gradient(length * v) - gradient(-length * v)) / (2 * length)

    first = gradient(np.zeros(size))
    norm = float(np.linalg.norm(first))
    if not norm > 0 or not np.isfinite(norm):
        raise ValueError(
            f"the gradient has the length {norm} here, so that it points nowhere; measure where "
            "the loss still falls"
        )
    return _lanczos(product, first / norm, min(steps, size))


def _lanczos(product: Callable[[Vector], Vector], vector: Vector, steps: int) -> Spectrum:
    basis: list[Vector] = []
    diagonal: list[float] = []
    beside: list[float] = []
    for _ in range(steps):
        basis.append(vector)
        found = product(vector)
        diagonal.append(float(vector @ found))
        known = np.stack(basis)
        for _ in range(2):  # rounding brings back what has converged
            found = found - known.T @ (known @ found)
        left = sqrt(float(found @ found))
        if left <= 1e-6 * max(map(abs, [*diagonal, *beside])):
            break
        beside.append(left)
        vector = found / left
    off = beside[: len(diagonal) - 1]
    values, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(off, 1) + np.diag(off, -1))
    return tuple((float(v), float(w)) for v, w in zip(values, vectors[0] ** 2, strict=True))
