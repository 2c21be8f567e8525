"""The triggers of EventGraD, as published, beside those that `Lazy` and gossip share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite

from paceline.codecs.triggers import Always, Lag, OnChange, Trigger
from paceline.core.protocol import Figure, Figures
from paceline.core.schema import Schema

__all__ = ["Always", "EventGrad", "EventGradStatic", "Lag", "OnChange", "Trigger"]


@dataclass
class EventGrad:
    """Sends a tensor when its norm differs by a threshold from the norm last sent.

    Every pass multiplies the threshold by `horizon`. After a message the threshold is the mean of
    the last `history` slopes, |v - v_last| / (passes between), which begin as zeros. Ghosh,
    Aquino and Gupta (2021, arXiv 2103.07454), as in the authors' code.

    Limits: the trigger does not see a tensor that turns while its norm stays. A tensor that
    stands still has a threshold of 0 and is sent in every pass. A horizon above 1 compounds, so
    that eventually nothing is sent again. Use horizon <= 1, or `OnChange`.

    warm: passes before this number send everything. Fewer than 3 such passes leave a threshold
        as large as the norm itself.
    """

    horizon: float
    warm: int = 30
    history: int = 2
    thresholds: list[float] = field(default_factory=list, init=False, repr=False)
    _norms: list[float] = field(default_factory=list, init=False, repr=False)  # last sent
    _last: list[int] = field(default_factory=list, init=False, repr=False)  # pass it was sent in
    _slopes: list[list[float]] = field(default_factory=list, init=False, repr=False)
    schema = Schema(
        "event_grad",
        1,
        {"thresholds": "thresholds", "norms": "_norms", "last": "_last", "slopes": "_slopes"},
    )

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

    The variant of EventGraD's code with a fixed threshold; `EventGrad` states its limits.
    """

    threshold: float
    warm: int = 30
    _norms: list[float] = field(default_factory=list, init=False, repr=False)  # last sent
    schema = Schema("event_grad_static", 1, {"norms": "_norms"})

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


def _plain(figures: Sequence[float]) -> list[float]:
    return [float(figure) for figure in figures]  # the state holds no NumPy floats
