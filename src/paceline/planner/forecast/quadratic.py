"""A quadratic with the measured loss, gradient and noise, and SGD on it along given steps.

Each direction of the Hessian is a mode: x <- x - rate * (h x + noise). A step is described by the
versions of the model that its results began from, and by their weights. The same steps can thus
be taken with many learning rates at once; all of them get the same noise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, log, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.planner.measure.curvature import Spectrum
from paceline.planner.measure.profile import Surface
from paceline.planner.measure.stale_training import steps_to

Vector = NDArray[np.float64]

MODES = 10
"""Curvatures into which a spectrum is grouped."""
COPIES = 32
"""Limit of directions of each curvature: more of them only reduce the scatter of the loss."""
UNEXPLAINED = 0.1
"""Share of the squared gradient along curvatures <= 0 up to which a quadratic explains the loss."""
LOST = 1e3
"""Multiple of the first excess loss beyond which a run has diverged."""
GROWN = 10.0
"""Multiple of the first distance along the sharpest direction beyond which a run has diverged."""

_FLAT = 1e-6  # relative to the largest curvature: smaller ones are rounding, or hardly move
_TILTS = 60  # bisections
_KEPT = 10**7  # limit of numbers of earlier models that are kept for stale results


@dataclass(frozen=True, eq=False)
class Modes:
    """Directions with their curvature, start of x, and variance of one sample's gradient."""

    curvature: Vector
    start: Vector
    noise: Vector
    floor: float
    fades: bool = False  # the noise is in proportion to the loss
    sharpest: float = 0.0  # curvature that adds no loss, but may make steps diverge

    @property
    def excess(self) -> float:
        """The loss above its floor, at the start."""
        return float(0.5 * np.sum(self.curvature * self.start**2))

    def left(self, excess: Vector) -> Vector:
        """Return the share of the noise that is left: that of the loss that is left.

        If the floor is below 0, it is that of the excess loss.
        """
        base = max(self.floor, 0.0)
        return np.asarray((excess + base) / (self.excess + base))


class Read(NamedTuple):
    """The results of a step that were computed on one version of the model.

    age: their staleness, in versions.
    weight: the sum of their weights.
    variance: of their mean gradient, relative to that of one sample.
    steps: local steps of each result.
    alone: the variance of one worker's gradient, which adds noise to the losses of local models.
    """

    age: int
    weight: float
    variance: float
    steps: int = 1
    alone: float = 0.0


Reads = tuple[Read, ...]


def modes_of(surface: Surface, target: float = -inf, directions: int | None = None) -> Modes:
    """Fit a quadratic with the same spectrum, loss and noise, that reaches the target as fast.

    Curvature h has the share s of the directions, and c of the excess loss E, where c is in
    proportion to s h^q. If training was observed, q lets the loss fall to the target (or to the
    last observed loss) in as many steps as observed. Steps between two points are interpolated.
    Otherwise q gives the gradient its measured norm, |g|² = 2 E Σ c h. If the gradient alone
    explains the loss by g.H⁻¹g / 2, its share w of each curvature is known. Then c is in proportion
    to w h^q / h; for a quadratic q is 0.

    directions: their total number, equally many of each curvature whatever its share; more of
        them bring the loss closer to its expectation.
    """
    values, shares = _grouped(surface.spectrum)
    excess = surface.loss - surface.floor
    of_noise = shares if surface.plain else shares * values
    of_noise = of_noise / of_noise.sum() * surface.noise
    copies = np.clip(np.round(shares * surface.parameters), 1, COPIES).astype(int)
    of_loss = np.zeros(values.size)
    if (pulled := _explained(surface)) is None:
        of_loss = _matched(values, shares, surface, target) * excess
    else:  # the other modes get the noise alone
        of_loss = np.concatenate([of_loss, _matched(*pulled, surface, target) * excess])
        of_noise = np.concatenate([of_noise, np.zeros(pulled[0].size)])
        each = int(np.clip(surface.parameters // pulled[0].size, 1, COPIES))
        copies = np.concatenate([copies, np.full(pulled[0].size, each)])
        values = np.concatenate([values, pulled[0]])
    if directions is not None:
        copies = np.full(values.size, max(directions // values.size, 1))
    h = np.repeat(values, copies)
    start = np.sqrt(2 * np.repeat(of_loss / copies, copies) / h)
    noise = np.repeat(of_noise / copies, copies)
    return Modes(h, start, noise, surface.floor, not surface.plain, surface.sharpest)


def _explained(surface: Surface) -> tuple[Vector, Vector] | None:
    """Return the gradient's curvatures with their shares of the loss, if they account for it."""
    rising = [(value, share) for value, share in surface.pull if value > _FLAT * surface.top]
    if sum(share for _, share in rising) < 1 - UNEXPLAINED:
        return None
    values, shares = (np.array(each) for each in zip(*rising, strict=True))
    newton = 0.5 * surface.gradient_norm**2 * float(np.sum(shares / values))
    if not 0.5 < newton / (surface.loss - surface.floor) < 2:
        return None
    return values, shares / values


def _matched(values: Vector, shares: Vector, surface: Surface, target: float) -> Vector:
    """Return shares of the excess loss by curvature.

    They reproduce the observed fall of the loss, or else the measured norm of the gradient.
    """
    excess = surface.loss - surface.floor
    wanted, speed = surface.gradient_norm**2 / (2 * excess), values
    rate, curve = surface.trained or (0.0, ())
    fallen = [(steps, loss) for steps, loss in curve if surface.floor < loss < surface.loss]
    if fallen:
        steps, loss = float(fallen[-1][0]), fallen[-1][1]
        if fallen[-1][1] < target < surface.loss:
            steps, loss = steps_to(((0, surface.loss), *curve), target), target
        wanted = 1 - (loss - surface.floor) / excess
        speed = 1 - np.minimum((1 - rate * values) ** 2, 1.0) ** steps  # share lost by then
    low, high = -8.0, 8.0
    for _ in range(_TILTS):
        middle = (low + high) / 2
        if float(_tilted(values, shares, middle) @ speed) < wanted:
            low = middle
        else:
            high = middle
    return _tilted(values, shares, (low + high) / 2)


def _tilted(values: Vector, shares: Vector, power: float) -> Vector:
    found = np.log(shares) + power * np.log(values)
    found = np.exp(found - found.max())
    return np.asarray(found / found.sum())


def _grouped(spectrum: Spectrum) -> tuple[Vector, Vector]:
    """Group a spectrum into few curvatures; the largest is kept exactly."""
    top = max(value for value, _ in spectrum)
    found = sorted((v, s) for v, s in spectrum if v > _FLAT * top and s > 0)
    if len(found) <= MODES:
        groups = [[each] for each in found]
    else:
        width = log(top / found[0][0]) / (MODES - 1) or 1.0
        by_place: dict[int, list[tuple[float, float]]] = {}
        for value, share in found:
            place = MODES if value == top else int(log(value / found[0][0]) / width)
            by_place.setdefault(place, []).append((value, share))
        groups = list(by_place.values())
    shares = np.array([sum(s for _, s in group) for group in groups])
    values = np.array([sum(v * s for v, s in group) for group in groups]) / shares
    return values, shares


def descend(
    modes: Modes, rates: Sequence[float], steps: Iterable[Reads], seed: int, kept: float = 1.0
) -> Iterator[Vector]:
    """Take steps with several learning rates, and yield the loss that each step reports.

    As in a run, it is the loss of the models that the results began from; `inf` after divergence.
    kept: the share of numbers that a codec sends; error feedback sends the rest later.
    """
    rng = np.random.Generator(np.random.PCG64([seed, 2]))
    # The last direction is the sharpest: it shows divergence, and does not count in the loss.
    h, spread = np.append(modes.curvature, modes.sharpest), np.sqrt(np.append(modes.noise, 0.0))
    counted = np.append(modes.curvature, 0.0)
    noisy = bool(spread.any())
    rate = np.asarray(rates, dtype=np.float64)[:, None].copy()
    x = np.repeat(np.append(modes.start, 1.0)[None, :], len(rates), axis=0)
    last = LOST * modes.excess
    lost = np.zeros(len(rates), dtype=bool)
    history: deque[Vector] = deque([x])
    memory = np.zeros_like(x)

    def scale(excess: Vector) -> Vector:
        if not modes.fades:
            return np.asarray(spread)
        return np.asarray(np.multiply.outer(np.sqrt(modes.left(excess)), spread))

    for reads in steps:
        needed = max(read.age for read in reads) + 1
        change, loss, total = np.zeros_like(x), np.zeros(len(rates)), 0.0
        for read in reads:
            local = history[max(len(history) - 1 - read.age, 0)]
            own = local  # the model of a single worker, whose loss is reported
            for step in range(read.steps):
                excess = 0.5 * ((own * own) @ counted)
                loss += read.weight / read.steps * excess
                gradient = local * h
                if noisy:
                    drawn = scale(excess) * rng.standard_normal(h.size)
                    gradient = gradient + sqrt(read.variance) * drawn
                change += read.weight * gradient
                if step + 1 == read.steps:
                    break
                local = local - rate * gradient
                if noisy:
                    gradient = own * h + sqrt(read.alone) * scale(excess) * rng.standard_normal(
                        h.size
                    )
                own = own - rate * gradient
            total += read.weight
        change = rate * change
        if kept < 1:
            memory = memory + change
            change = np.where(rng.random(h.size) < kept, memory, 0.0)
            memory = memory - change
        x = x - change
        history.append(x)
        while len(history) > max(4 * needed, 64, _KEPT // x.size):
            history.popleft()
        loss /= total
        news = ~lost & (~(loss < last) | ~(abs(x[:, -1]) < GROWN))
        if news.any():
            lost |= news
            for each in history:  # diverged runs stay at the start
                each[lost, :-1], each[lost, -1] = modes.start, 1.0
            rate[lost], memory[lost] = 0.0, 0.0
        yield np.where(lost, np.inf, loss + modes.floor)
