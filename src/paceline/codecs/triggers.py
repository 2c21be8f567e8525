"""Triggers decide when a tensor is worth sending: for lazily sent results, and for gossip.

Each pass shows a trigger a few statistics of each tensor. The trigger returns the tensors to
send. A statistic that is not a number always fires, so that receivers see the fault too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import fsum, isfinite, sqrt
from typing import Protocol

from paceline.core.protocol import Figure, Figures
from paceline.core.schema import Schema


class Trigger(Protocol):
    """Decides which tensors to send. Its fields are plain data of one node."""

    @property
    def wants(self) -> frozenset[Figure]:
        """The statistics of each tensor that `fires` reads."""

    def fires(self, number: int, figures: Figures, sizes: Sequence[int], rate: float) -> list[bool]:
        """Return which tensors to send in this pass; passes are numbered from 1.

        sizes: the number of elements of each tensor.
        rate: the learning rate of the next step.
        """


@dataclass(frozen=True)
class Always:
    """Sends everything in every pass."""

    schema = Schema("always", 1)

    @property
    def wants(self) -> frozenset[Figure]:
        return frozenset()

    def fires(self, number: int, figures: Figures, sizes: Sequence[int], rate: float) -> list[bool]:
        return [True] * len(sizes)


@dataclass
class OnChange:
    """Sends a tensor when |x_i - x̂_i| >= scale * rate * sqrt(size_i) * pass^growth.

    The threshold is proportional to the learning rate: one that is not o(rate) stops or biases
    training. The squared thresholds of all tensors add up to that of the whole model. With one
    tensor and growth = (1 - e) / 2 this is the rule of SPARQ-SGD (Singh et al., 2019, arXiv
    1910.14280). That rule is |x - x̂|^2 >= c_t rate^2, c_t = c_0 t^(1 - e), c_0 = scale^2 size.

    every: the maximum of passes between two messages of a tensor, for peers that missed one.
    """

    scale: float
    every: int | None = None
    growth: float = 0.0
    _last: list[int] = field(default_factory=list, init=False, repr=False)  # pass it was sent in
    schema = Schema("on_change", 1, {"last": "_last"})

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
            self._last = [number - 1] * len(sizes)  # all nodes start from the same model
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


@dataclass
class Lag:
    """Sends the whole gradient when it has changed more than the model has moved recently.

    |g - ĝ|^2 > xi / (rate^2 workers^2) * (sum of |move|^2 over the last `memory` steps), ĝ the
    gradient last sent: the rule WK of lazily aggregated gradients, LAG (Chen, Giannakis, Sun and
    Yin, 2018, arXiv 1805.09965). Use it with full gradients: the noise of samples always fires it.

    xi: by default 1 / memory, as in the authors' code.
    """

    workers: int
    memory: int = 10
    xi: float | None = None
    _moves: list[float] = field(default_factory=list, init=False, repr=False)  # squared
    schema = Schema("lag", 1, {"moves": "_moves"})

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
