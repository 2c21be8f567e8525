"""A quadratic with the measured figures of a loss, and SGD on it along given steps.

Each direction of the Hessian is a mode: x <- x - rate * (h x + noise). A step is told by which
versions of the model its results began from, and with which weights, and so the same steps can be
taken with many learning rates at once. Noise is the same for all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, log, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.planner.curvature import Spectrum
from paceline.planner.profile import Surface

Vector = NDArray[np.float64]

MODES = 10
"""Curvatures that a spectrum is summed up by."""
COPIES = 32
"""Directions of each curvature, at most: with more, only the scatter of the loss is smaller."""
UNEXPLAINED = 0.1
"""Of the squared gradient may be along curvatures <= 0 where the loss is taken for a quadratic."""
LOST = 1e3
"""Times the first excess loss: beyond, it has diverged."""
GROWN = 10.0
"""Times the first distance along the sharpest direction: beyond, it has diverged."""

_FLAT = 1e-6  # of the largest curvature: what is smaller is rounding, or nothing moves along it
_TILTS = 60  # bisections
_KEPT = 10**7  # numbers of earlier models, for results that come late


@dataclass(frozen=True, eq=False)
class Modes:
    """Directions: their curvature, where x begins, and the variance of one sample's gradient."""

    curvature: Vector
    start: Vector
    noise: Vector
    floor: float
    fades: bool = False  # the noise is in proportion to the loss
    sharpest: float = 0.0  # a curvature along which nothing is to be gained, and steps may diverge

    @property
    def excess(self) -> float:
        """The loss above its floor, at the start."""
        return float(0.5 * np.sum(self.curvature * self.start**2))

    def left(self, excess: Vector) -> Vector:
        """Return the share of its noise that is left: that of the loss, or of its excess if losses
        are below 0.
        """
        base = max(self.floor, 0.0)
        return np.asarray((excess + base) / (self.excess + base))


class Read(NamedTuple):
    """What a step takes of one version of the model.

    age: how many versions ago that was the newest.
    weight: of its results together.
    variance: of their mean gradient, in variances of one sample's.
    steps: that were taken locally.
    alone: the variance of one worker's gradient, which shakes the losses of its local models.
    """

    age: int
    weight: float
    variance: float
    steps: int = 1
    alone: float = 0.0


Reads = tuple[Read, ...]


def modes_of(surface: Surface, target: float = -inf, directions: int | None = None) -> Modes:
    """Fit a quadratic: the same spectrum, loss and noise, and to the target as fast a way.

    Curvature h has the share s of the directions, and c of the excess loss E, where c is in
    proportion to s h^q. The q is such that the loss is at the target, or at the last loss that was
    seen, after as many steps as it took when it was looked at; or if nobody looked such that the
    gradient has its measured norm, |g|² = 2 E Σ c h. If the gradient alone explains the loss by
    g.H⁻¹g / 2, its share w of each curvature is known, and c is in proportion to w h^q / h; for a
    quadratic q is 0.

    directions: in all, of each curvature equally many, whatever their shares; the more there are,
        the closer is the loss to what is expected of it.
    """
    values, shares = _grouped(surface.spectrum)
    excess = surface.loss - surface.floor
    of_noise = shares if surface.plain else shares * values
    of_noise = of_noise / of_noise.sum() * surface.noise
    copies = np.clip(np.round(shares * surface.parameters), 1, COPIES).astype(int)
    of_loss = np.zeros(values.size)
    if (pulled := _explained(surface)) is None:
        of_loss = _matched(values, shares, surface, target) * excess
    else:  # beside the others, which have the noise alone
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
    """Return shares of the excess loss with which it falls as it was seen to, or else with which
    the gradient has its measured norm.
    """
    excess = surface.loss - surface.floor
    wanted, speed = surface.gradient_norm**2 / (2 * excess), values
    rate, curve = surface.trained or (0.0, ())
    fallen = [(steps, loss) for steps, loss in curve if surface.floor < loss < surface.loss]
    if fallen:
        steps, loss = next((each for each in fallen if each[1] <= target), fallen[-1])
        wanted = 1 - (loss - surface.floor) / excess
        speed = 1 - np.minimum((1 - rate * values) ** 2, 1.0) ** steps  # what of it is gone
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
    """Sum a spectrum up by few curvatures, of which the largest is kept as it is."""
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
    """Take steps with several learning rates, yielding the loss that each step reports.

    It is that of the models which the results began from, as in a run, and `inf` once it has
    diverged.
    kept: the share of numbers that a codec sends; the rest is remembered and comes later.
    """
    rng = np.random.Generator(np.random.PCG64([seed, 2]))
    # The last direction is the sharpest, which is watched and not counted in the loss.
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
            own = local  # of one worker alone, by whom losses are reported
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
            for each in history:  # what has diverged stays where it is
                each[lost, :-1], each[lost, -1] = modes.start, 1.0
            rate[lost], memory[lost] = 0.0, 0.0
        yield np.where(lost, np.inf, loss + modes.floor)
