"""The evaluations of a run: metrics of the model after some of its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Literal, TypeAlias

from paceline.core.protocol import Evaluated

Metrics: TypeAlias = Mapping[str, float]
Mode: TypeAlias = Literal["min", "max"]


@dataclass(frozen=True)
class Evaluation:
    """The metrics of a model: after which step, and how long into the run."""

    step: int
    seconds: float
    metrics: Metrics
    mode: Mode = "min"  # whether the smallest or the largest first metric is best

    @property
    def first(self) -> tuple[str, float]:
        """The name and value of the first metric, which decides what is best."""
        return next(iter(self.metrics.items()))

    def is_better(self, best: Evaluation | None) -> bool:
        """Return whether this is better than the best so far; nan never is."""
        new = self.first[1]
        if best is None or isnan(new):
            return not isnan(new)
        old = best.first[1]
        return new < old if self.mode == "min" else new > old


def timed(event: Evaluated, columns: Mapping[str, Sequence[float]], now: float) -> Evaluation:
    """Return an evaluation with the time of its step, by the metrics of the steps so far."""
    steps = columns["step"]
    place = event.step - int(steps[0]) if steps else -1
    at = columns["seconds"][place] if 0 <= place < len(steps) else now
    return Evaluation(event.step, at, event.metrics, event.mode)


def best_of(evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """Return the first of the best evaluations; None if no number is one."""
    best: Evaluation | None = None
    for each in evaluations:
        if each.is_better(best):
            best = each
    return best


def leading(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Return the evaluations by the first metric of the first one.

    Several callbacks may evaluate, each with metrics of its own.
    """
    if not evaluations:
        return []
    name, _ = evaluations[0].first
    return [each for each in evaluations if each.first[0] == name]


def evaluations_line(evaluations: Sequence[Evaluation]) -> str:
    """Return a line on the last and best value of the first metric.

    >>> evaluations_line([Evaluation(10, 1.0, {"loss": 0.5}), Evaluation(20, 2.0, {"loss": 0.7})])
    '  evaluated 2 times; loss 0.7 at step 20, best 0.5 at step 10'
    """
    found = leading(evaluations)
    last, best = found[-1], best_of(found)
    name, value = last.first
    times = "once" if len(found) == 1 else f"{len(found)} times"
    line = f"  evaluated {times}; {name} {value:.4g} at step {last.step}"
    if best is not None and best is not last:
        line += f", best {best.first[1]:.4g} at step {best.step}"
    return line
