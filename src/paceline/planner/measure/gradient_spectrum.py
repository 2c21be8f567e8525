"""The curvatures along the gradient, which decide how fast the loss falls.

The spectrum of the Hessian gives all directions equal weight, and most of them matter little.
Lanczos's method, started at the gradient, gives the curvatures that matter, each with its share of
the squared gradient. Products with the Hessian are differences of gradients on the same samples,
which the learner's own replica computes, for any kind of learner.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, sqrt

import numpy as np
from numpy.typing import NDArray

from paceline.core.protocol import Task, Work
from paceline.learners.base import Learner
from paceline.planner.measure.budget import Budget
from paceline.planner.measure.curvature import NoCurvature, Spectrum

Vector = NDArray[np.float64]

STEP = 5e-3
"""Relative to the model's length: large enough for single precision, small for the curvature."""

_FEW = 16  # minimum of samples
_FEW_STEPS = 4


def gradient_spectrum(
    learner: Learner,
    *,
    samples: int = 512,
    steps: int = 12,
    seed: int = 0,
    budget: Budget | None = None,
) -> Spectrum:
    """Return curvatures in ascending order, each with its share of the squared gradient.

    It takes as long as samples * (1 + 2 * steps) gradients of one sample, or less with a budget.
    It raises `NoCurvature` if the budget is too small.
    """
    if samples < 1 or steps < 1:
        raise ValueError(f"samples={samples}, steps={steps}: use at least 1 of each")
    if getattr(learner, "outer", None) is not None:  # its results are changes, not gradients
        learner = learner.without_local_steps()  # type: ignore[attr-defined]
    server = learner.server()
    model, size = np.array(server.vector), server.layout.trained
    samples = min(samples, learner.examples or samples)
    replica = learner.replica(seed)
    length = STEP * max(float(np.linalg.norm(model[:size])), 1.0)

    def gradient(shift: Vector, samples: int) -> Vector:
        at = model.copy()
        at[:size] += shift.astype(model.dtype)
        task = Task(0, "", Work(), 0, 0.0, samples, 0)
        outcome = replica.compute([at], task, lambda done: True)
        assert outcome.vector is not None
        return np.array(outcome.vector[:size], np.float64) / (outcome.stats.get("count") or 1.0)

    if budget is not None and budget.seconds < inf:
        start = np.zeros(size)
        samples, _ = budget.affordable(samples, _FEW, lambda n: gradient(start, n), 1 + 2 * steps)

    def product(v: Vector) -> Vector:
        ahead, behind = (gradient(sign * length * v, samples) for sign in (1, -1))
        return (ahead - behind) / (2 * length)

    first = gradient(np.zeros(size), samples)
    norm = float(np.linalg.norm(first))
    if not norm > 0 or not np.isfinite(norm):
        raise ValueError(
            f"the gradient has the norm {norm} here, so it has no direction; measure where the "
            "loss still falls"
        )
    return _lanczos(product, first / norm, min(steps, size), budget)


def _lanczos(
    product: Callable[[Vector], Vector], vector: Vector, steps: int, budget: Budget | None
) -> Spectrum:
    basis: list[Vector] = []
    diagonal: list[float] = []
    beside: list[float] = []
    for step in range(steps):
        if budget is not None and budget.is_over:
            if step < _FEW_STEPS:
                raise NoCurvature(
                    "there was not enough time to measure the direction of the gradient"
                )
            break
        if budget is not None:
            budget.report(step / steps)
        basis.append(vector)
        found = product(vector)
        diagonal.append(float(vector @ found))
        known = np.stack(basis)
        for _ in range(2):  # rounding brings converged directions back
            found = found - known.T @ (known @ found)
        left = sqrt(float(found @ found))
        if left <= 1e-6 * max(map(abs, [*diagonal, *beside])):
            break
        beside.append(left)
        vector = found / left
    off = beside[: len(diagonal) - 1]
    values, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(off, 1) + np.diag(off, -1))
    return tuple((float(v), float(w)) for v, w in zip(values, vectors[0] ** 2, strict=True))
