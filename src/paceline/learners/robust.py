"""Steps that a few wrong results cannot spoil, for those who cannot trust every worker's numbers.

`Trainer(robust=TrimmedMean(1))` puts one of these rules in the place of the mean. Of the k results
that a step uses, so many may be anything at all; with a policy that waits for the fastest k of n
the bad ones may always be among them, so that bounds are for k and not for n. A price is paid where
all are honest: what is left out is lost, and with data that differ from worker to worker the rules
take the unusual for the wrong. They protect the numbers, not the cluster; see docs/security.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from paceline.core.protocol import Stat, Want
from paceline.learners.base import Array, Layout, Recipe, Saved, Server, Span, Sums

_NAME = "robust.center"


class Robust(Protocol):
    """A rule that makes one vector of several."""

    def check(self, results: int) -> None:
        """Refuse if so few results cannot outvote the bad ones."""

    def aggregate(self, vectors: Array, weights: Array, center: Array | None) -> Array:
        """Return what stands for the mean of the rows of `vectors`.

        weights: of the rows, which add up to 1.
        center: the vector before, None at first.
        """


@dataclass(frozen=True)
class TrimmedMean:
    """In each coordinate, leaves out the `bad` largest and smallest values (Yin et al. 2018, arXiv
    1803.01498). Holds for k > 2 * bad results in a step."""

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
    (Blanchard et al. 2017, arXiv 1703.02757). Holds for k > 2 * bad + 2 results in a step."""

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
    """Moves from the step before by what each result differs from it, no further than `radius`:
    v <- v + sum of w_i (g_i - v) min(1, radius / |g_i - v|), `rounds` times (Karimireddy et al.
    2021, arXiv 2012.10333).

    It remembers, so that small lies which add up over time do not; a bad result moves a step by
    rounds * w_i * radius at most. The radius is to be some times the distance of honest results.
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
        # Without a step before, from where most are.
        current = np.median(vectors, axis=0) if center is None else center
        for _ in range(self.rounds):
            away = vectors - current
            lengths = np.maximum(np.linalg.norm(away, axis=1), np.finfo(vectors.dtype).tiny)
            clipped = weights * np.minimum(1.0, self.radius / lengths)
            current = current + clipped @ away
        return np.asarray(current, dtype=vectors.dtype)


def _at_least_one(bad: int) -> None:
    if bad < 1:
        raise ValueError(f"bad={bad}: say how many results of a step may be wrong, at least 1")


def _enough(results: int, needed: int, rule: object) -> None:
    if results < needed:
        raise ValueError(
            f"{rule} needs {needed} results in every step, and there are {results}; wait for more, "
            "or allow for fewer bad ones"
        )


class RobustServer:
    """A learner's server whose steps go along what a rule makes of the results."""

    needs_totals = False
    center_name = _NAME  # of the array that is saved beside those of the plain server

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
        self, weights: Sequence[float], vectors: Sequence[Array], wants: frozenset[Want]
    ) -> dict[Stat, float]:
        self._rule.check(len(vectors))
        total = sum(weights)
        shares = np.asarray(weights, dtype=vectors[0].dtype) / total
        made = self._rule.aggregate(np.stack(vectors), shares, self._center)
        self._center = made.astype(vectors[0].dtype)
        return self.plain.step([total], [self._center], wants)

    def reduce(
        self, weights: Sequence[float], vectors: Sequence[Array], wants: frozenset[Want]
    ) -> Sums:
        raise NotImplementedError("robust steps are not taken in slices")

    def apply(self, totals: Sums) -> None:
        raise NotImplementedError("robust steps are not taken in slices")

    def model(self) -> Any:
        return self.plain.model()

    def export(self) -> dict[str, Array]:
        return self.plain.export()

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
