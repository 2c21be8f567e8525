"""What an engine needs to know of a learner: a recipe with a worker's and a server's side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.core.protocol import Stat, Stats, Task, Work

Array: TypeAlias = NDArray[Any]
Proceed: TypeAlias = Callable[[int], bool]
"""Asked between pieces of work, with the samples done so far: shall I go on?"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a worker made of a task. `samples` may be fewer than asked for, even none."""

    vector: Array | None
    samples: int
    stats: Stats = field(default_factory=dict)


class Replica(Protocol):
    """The worker's side. It keeps nothing from one task to the next that could change a result."""

    def compute(self, model: Array, task: Task, proceed: Proceed) -> Outcome: ...


@dataclass(frozen=True, slots=True)
class Saved:
    """The state of a thing: arrays by name, and the rest as plain JSON data."""

    arrays: Mapping[str, Array]
    data: Mapping[str, Any]


class Server(Protocol):
    """The coordinator's side: it owns the model and the optimizer's state."""

    @property
    def vector(self) -> Array:
        """The model as it travels; changed in place by `step`."""

    def step(
        self, weights: Sequence[float], vectors: Sequence[Array], wants: frozenset[Stat]
    ) -> dict[Stat, float]:
        """Add up the results in the order given and let the optimizer step along the sum."""

    def model(self) -> Any:
        """Return the model for the user, apart from the one in training."""

    def export(self) -> dict[str, Array]:
        """Return the model's tensors by the names its users know."""

    def save(self) -> Saved: ...
    def load(self, saved: Saved) -> None: ...


class Learner(Protocol):
    """A recipe for both sides. The same recipe may be used by many runs."""

    @property
    def batch_size(self) -> int:
        """The global batch: samples per step, constant whatever the workers do."""

    @property
    def examples(self) -> int | None:
        """The samples of one epoch, where there is such a thing."""

    @property
    def message_bytes(self) -> int:
        """The size of the model, and of a result, on the wire."""

    def replica(self, seed: int) -> Replica: ...
    def server(self) -> Server: ...
    def check(self, work: Work) -> None:
        """Refuse work that this learner cannot do."""

    def about(self) -> dict[str, Any]:
        """Describe what a resumed run must have in common with the first."""


class Direction:
    """The steps' statistics that need the vectors themselves."""

    def __init__(self) -> None:
        self._previous: Array | None = None

    def stats(self, direction: Array, wants: frozenset[Stat]) -> dict[Stat, float]:
        """Return the norm, and the inner product with the step before (0.0 for the first)."""
        stats: dict[Stat, float] = {}
        if "norm" in wants:
            stats["norm"] = float(np.linalg.norm(direction))
        if "dot" in wants:
            previous = self._previous
            stats["dot"] = 0.0 if previous is None else float(previous @ direction)
            self._previous = direction.copy()
        return stats

    def save(self) -> dict[str, Array]:
        return {} if self._previous is None else {"previous": self._previous}

    def load(self, arrays: Mapping[str, Array]) -> None:
        previous = arrays.get("previous")
        self._previous = None if previous is None else previous.copy()


def mean_loss(weights: Sequence[float], losses: Sequence[float | None]) -> dict[Stat, float]:
    """Average the workers' losses as the step averages their results."""
    known = [(w, loss) for w, loss in zip(weights, losses, strict=True) if loss is not None]
    total = sum(abs(w) for w, _ in known)
    return {"loss": sum(abs(w) * loss for w, loss in known) / total} if total else {}
