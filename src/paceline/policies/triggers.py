"""Whether a message is worth sending.

A trigger is shown a few numbers of each tensor, once in each pass, and tells which tensors to
send. What is not a number is always sent: then others see it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import fsum, isfinite, sqrt
from typing import Protocol

from paceline.core.protocol import Figure, Figures


class Trigger(Protocol):
    """Decides which tensors to send. Its fields are plain data, and of one node."""

    @property
    def wants(self) -> frozenset[Figure]:
        """The figures that it has to be shown."""

    def fires(self, number: int, figures: Figures, sizes: Sequence[int], rate: float) -> list[bool]:
        """Return which tensors to send in this pass; passes are numbered from 1.

        sizes: how many numbers each tensor has.
        rate: the learning rate of the step that follows.
        """


@dataclass(frozen=True)
class Always:
    """Sends everything in every pass."""

    @property
    def wants(self) -> frozenset[Figure]:
        return frozenset()

    def fires(self, number: int, figures: Figures, sizes: Sequence[int], rate: float) -> list[bool]:
        return [True] * len(sizes)


# --- ours ----------------------------------------------------------------------------------------


@dataclass
class OnChange:
    """Sends a tensor when |x_i - x̂_i| >= scale * rate * sqrt(size_i) * pass^growth.

    In proportion to the learning rate, since a threshold that is not o(rate) stops training or
    biases it. The squares of all thresholds add up to that of the whole model, so with growth =
    (1 - e) / 2 and one tensor it is the rule |x - x̂|^2 >= c_t rate^2, c_t = c_0 t^(1 - e), of
    SPARQ-SGD (Singh et al., 2019, arXiv 1910.14280), c_0 = scale^2 size.

    every: the most passes between two messages of a tensor, for peers that missed one.
    """

    scale: float
    every: int | None = None
    growth: float = 0.0
    _last: list[int] = field(default_factory=list, init=False, repr=False)  # pass it was sent in

    def __post_init__(self) -> None:
        if not (isfinite(self.scale) and self.scale >= 0):
            raise ValueError(f"scale={self.scale}: use a finite scale >= 0; 0 sends every pass")
        if self.every is not None and self.every < 1:
            raise ValueError(f"every={self.every}: a number of passes; use every >= 1, or None")
        if not 0 <= self.growth < 0.5:
            raise ValueError(f"growth={self.growth}: convergence needs 0 <= growth < 0.5")

    @property
    def wants(self) -> frozenset[Figure]:
        return frozenset({"change"})

    def fires(self, number: int, figures: Figures, sizes: Sequence[int], rate: float) -> list[bool]:
        if not self._last:
            self._last = [number - 1] * len(sizes)  # all know what all began with
        factor = self.scale * rate * number**self.growth
        fired = [
            not change < factor * sqrt(size) or self._is_due(number - last)
            for change, size, last in zip(figures["change"], sizes, self._last, strict=True)
        ]
        self._last = [
            number if fire else last for fire, last in zip(fired, self._last, strict=True)
        ]
        return fired

    def _is_due(self, passes: int) -> bool:
        return self.every is not None and passes >= self.every


# --- as published --------------------------------------------------------------------------------


@dataclass
class EventGrad:
    """Sends a tensor when its norm differs by a threshold from the norm last sent.

    The threshold is multiplied by `horizon` in every pass, and after a message it is the mean
    of the last `history` slopes, |v - v_last| / (passes between), which begin as zeros. Ghosh,
    Aquino and Gupta (2021, arXiv 2103.07454), as in the authors' code.

    What to expect of it: a tensor that turns while its norm stays is not seen to change. One that
    stands still is sent in every pass, its threshold being 0. A horizon above 1 compounds, and
    sooner or later nothing is sent again. Use horizon <= 1, or `OnChange`.

    warm: passes before this number send everything; fewer than 3 such passes leave a threshold
        as large as the norm itself.
    """

    horizon: float
    warm: int = 30
    history: int = 2
    thresholds: list[float] = field(default_factory=list, init=False, repr=False)
    _norms: list[float] = field(default_factory=list, init=False, repr=False)  # last sent
    _last: list[int] = field(default_factory=list, init=False, repr=False)  # pass it was sent in
    _slopes: list[list[float]] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if not (isfinite(self.horizon) and self.horizon >= 0):
            raise ValueError(f"horizon={self.horizon}: use a finite horizon >= 0, best 0.9 to 1")
        if self.history < 1:
            raise ValueError(f"history={self.history}: a mean is of slopes; use history >= 1")

    @property
    def wants(self) -> frozenset[Figure]:
        return frozenset({"norm"})

    def fires(self, number: int, figures: Figures, sizes: Sequence[int], rate: float) -> list[bool]:
        if not self.thresholds:
            self.thresholds, self._norms = [0.0] * len(sizes), [0.0] * len(sizes)
            self._last = [0] * len(sizes)
            self._slopes = [[0.0] * self.history for _ in sizes]
        fired = []
        for i, (norm, last) in enumerate(zip(_plain(figures["norm"]), self._norms, strict=True)):
            change = abs(norm - last)
            self.thresholds[i] *= self.horizon
            fired.append(number < self.warm or not change < self.thresholds[i])
            if fired[i]:
                slope = change / (number - self._last[i])
                self._slopes[i] = [*self._slopes[i][1:], slope]
                self.thresholds[i] = sum(self._slopes[i]) / self.history
                self._norms[i], self._last[i] = norm, number
        return fired


@dataclass
class EventGradStatic:
    """Sends a tensor when its norm differs by a constant from the norm last sent.

    The variant of EventGraD's code with a fixed threshold; see `EventGrad` for what to expect.
    """

    threshold: float
    warm: int = 30
    _norms: list[float] = field(default_factory=list, init=False, repr=False)  # last sent

    def __post_init__(self) -> None:
        if not (isfinite(self.threshold) and self.threshold >= 0):
            raise ValueError(f"threshold={self.threshold}: use a finite threshold >= 0")

    @property
    def wants(self) -> frozenset[Figure]:
        return frozenset({"norm"})

    def fires(self, number: int, figures: Figures, sizes: Sequence[int], rate: float) -> list[bool]:
        norms, self._norms = _plain(figures["norm"]), self._norms or [0.0] * len(sizes)
        fired = [
            number < self.warm or not abs(norm - last) < self.threshold
            for norm, last in zip(norms, self._norms, strict=True)
        ]
        self._norms = [
            norm if fire else last
            for fire, norm, last in zip(fired, norms, self._norms, strict=True)
        ]
        return fired


@dataclass
class Lag:
    """Sends a gradient, all of it, when it has changed more than the model has moved of late.

    |g - ĝ|^2 > xi / (rate^2 workers^2) * (sum of |move|^2 over the last `memory` steps), ĝ the
    gradient last sent: the rule WK of lazily aggregated gradients, LAG (Chen, Giannakis, Sun and
    Yin, 2018, arXiv 1805.09965). For whole gradients: with samples the noise fires every time.

    xi: by default 1 / memory, as in the authors' code.
    """

    workers: int
    memory: int = 10
    xi: float | None = None
    _moves: list[float] = field(default_factory=list, init=False, repr=False)  # squared

    def __post_init__(self) -> None:
        if self.workers < 1 or self.memory < 1:
            raise ValueError(
                f"workers={self.workers}, memory={self.memory}: numbers of workers and of steps; "
                "use both >= 1"
            )
        if self.xi is not None and not (isfinite(self.xi) and self.xi >= 0):
            raise ValueError(f"xi={self.xi}: use a finite xi >= 0; 0 sends every change")

    @property
    def wants(self) -> frozenset[Figure]:
        return frozenset({"change", "move"})

    def fires(self, number: int, figures: Figures, sizes: Sequence[int], rate: float) -> list[bool]:
        move, change = (fsum(x * x for x in figures[name]) for name in ("move", "change"))
        first = not self._moves
        self._moves = [*self._moves, move][-self.memory :]
        xi = 1 / self.memory if self.xi is None else self.xi
        fires = first or not change * (rate * self.workers) ** 2 <= xi * fsum(self._moves)
        return [fires] * len(sizes)


def _plain(figures: Sequence[float]) -> list[float]:
    return [float(figure) for figure in figures]  # NumPy's own floats cannot be saved
