"""Robust aggregation: rules that replace the mean and tolerate a few wrong results in a step.

`Trainer(robust=TrimmedMean(1))` replaces the mean by one of these rules. Of the k results of a
step, `bad` ones may have any value. A policy that waits for the fastest k of n may always get the
bad ones, so bounds are for k and not for n. If all workers are honest, the rules have a cost. They
drop correct results, and with different data on each worker they treat unusual results as wrong.
The rules protect the numbers, not the cluster; see docs/security.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from paceline.core.protocol import Stat, Want
from paceline.learners.base import Array, Layout, Places, Recipe, Saved, Server, Span, Sums

_NAME = "robust.center"


class Robust(Protocol):
    """A rule that combines several vectors into one."""

    def check(self, results: int) -> None:
        """Raise ValueError if the results of a step are too few to outvote the bad ones."""

    def aggregate(self, vectors: Array, weights: Array, center: Array | None) -> Array:
        """Return the robust replacement of the mean of the rows of `vectors`.

        weights: the weights of the rows, which add up to 1.
        center: the aggregate of the previous step; None at first.
        """


@dataclass(frozen=True)
class TrimmedMean:
    """Drops the `bad` largest and smallest values in each coordinate (Yin et al. 2018, arXiv
    1803.01498). Needs k > 2 * bad results in a step."""

    bad: int = 1

    def __post_init__(self) -> None:
        _at_least_one(self.bad)

    def check(self, results: int) -> None:
        _enough(results, 2 * self.bad + 1, self)

    def aggregate(self, vectors: Array, weights: Array, center: Array | None) -> Array:
        order = np.argsort(vectors, axis=0, kind="stable")[self.bad : len(vectors) - self.bad]
        kept = np.take_along_axis(vectors, order, axis=0)
        shares = weights[order]
        return np.asarray((kept * shares).sum(axis=0) / shares.sum(axis=0))


@dataclass(frozen=True)
class MultiKrum:
    """Averages the k - bad results that lie closest to their k - bad - 2 nearest neighbors
    (Blanchard et al. 2017, arXiv 1703.02757). Needs k > 2 * bad + 2 results in a step."""

    bad: int = 1

    def __post_init__(self) -> None:
        _at_least_one(self.bad)

    def check(self, results: int) -> None:
        _enough(results, 2 * self.bad + 3, self)

    def aggregate(self, vectors: Array, weights: Array, center: Array | None) -> Array:
        count = len(vectors)
        apart = np.array([((vectors - row) ** 2).sum(axis=1) for row in vectors])
        np.fill_diagonal(apart, np.inf)
        nearest = np.sort(apart, axis=1)[:, : count - self.bad - 2]
        chosen = np.sort(np.argsort(nearest.sum(axis=1), kind="stable")[: count - self.bad])
        shares = weights[chosen] / weights[chosen].sum()
        return np.asarray(shares @ vectors[chosen])


@dataclass(frozen=True)
class CenteredClip:
    """Starts from the previous step and adds each result's difference, clipped to `radius`.

    The rule is v <- v + sum of w_i (g_i - v) min(1, radius / |g_i - v|), `rounds` times
    (Karimireddy et al. 2021, arXiv 2012.10333).

    Its memory of the previous step keeps small errors from adding up over time. A bad result moves
    a step by at most rounds * w_i * radius. Choose a radius of a few times the distance between
    honest results.
    """

    radius: float
    rounds: int = 3

    def __post_init__(self) -> None:
        if not self.radius > 0 or self.rounds < 1:
            raise ValueError(
                f"radius={self.radius}, rounds={self.rounds}: use a radius > 0 and rounds >= 1"
            )

    def check(self, results: int) -> None:
        _enough(results, 2, self)

    def aggregate(self, vectors: Array, weights: Array, center: Array | None) -> Array:
        # Without a previous step, start from the median.
        current = np.median(vectors, axis=0) if center is None else center
        for _ in range(self.rounds):
            away = vectors - current
            lengths = np.maximum(np.linalg.norm(away, axis=1), np.finfo(vectors.dtype).tiny)
            clipped = weights * np.minimum(1.0, self.radius / lengths)
            current = current + clipped @ away
        return np.asarray(current, dtype=vectors.dtype)


def _at_least_one(bad: int) -> None:
    if bad < 1:
        raise ValueError(
            f"bad={bad}: give the number of results in a step that may be wrong, at least 1"
        )


def _enough(results: int, needed: int, rule: object) -> None:
    if results < needed:
        raise ValueError(
            f"{rule} needs {needed} results in every step, and there are {results}; wait for more, "
            "or allow for fewer bad ones"
        )


class RobustServer:
    """A learner's server that steps with a robust aggregate of the results."""

    needs_totals = False
    center_name = _NAME  # of the array saved in addition to those of the plain server

    def __init__(self, server: Server, rule: Robust) -> None:
        self.plain, self._rule = server, rule
        self._center: Array | None = None

    @property
    def vector(self) -> Array:
        return self.plain.vector

    @property
    def layout(self) -> Layout:
        return self.plain.layout

    def recipe(self, span: Span) -> Recipe:
        raise ValueError(
            f"robust={self._rule} compares whole results, and servers have slices of them; use "
            "Ray(servers='driver')"
        )

    def step(
        self,
        weights: Sequence[float],
        vectors: Sequence[Array],
        wants: frozenset[Want],
        lr_scale: float = 1.0,
    ) -> dict[Stat, float]:
        self._rule.check(len(vectors))
        total = sum(weights)
        shares = np.asarray(weights, dtype=vectors[0].dtype) / total
        made = self._rule.aggregate(np.stack(vectors), shares, self._center)
        self._center = made.astype(vectors[0].dtype)
        return self.plain.step([total], [self._center], wants, lr_scale)

    def reduce(
        self, weights: Sequence[float], vectors: Sequence[Array], wants: frozenset[Want]
    ) -> Sums:
        raise NotImplementedError("robust steps are not taken in slices")

    def apply(self, totals: Sums, lr_scale: float = 1.0) -> None:
        raise NotImplementedError("robust steps are not taken in slices")

    def model(self) -> Any:
        return self.plain.model()

    def export(self) -> Mapping[str, Any]:
        return self.plain.export()

    def places(self) -> Places | None:
        return self.plain.places()

    def save(self) -> Saved:
        saved = self.plain.save()
        if self._center is None:
            return saved
        return Saved({**saved.arrays, _NAME: self._center}, saved.data)

    def load(self, saved: Saved) -> None:
        arrays = dict(saved.arrays)
        center = arrays.pop(_NAME, None)
        self._center = None if center is None else center.copy()
        self.plain.load(Saved(arrays, saved.data))
