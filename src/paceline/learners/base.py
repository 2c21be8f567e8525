"""What an engine needs to know of a learner: a recipe with a worker's and a server's side.

The server's side may be cut: the flat vector of the model into slices, each with the part of the
optimizer's state that belongs to it. A step is then taken slice by slice; what it needs of the
whole vector, such as a norm, are sums that the slices add up first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import sqrt
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.core.protocol import Coefficients, Stat, Stats, Task, Want, Work, magnitude
from paceline.data.partition.base import Partition

Array: TypeAlias = NDArray[Any]
Proceed: TypeAlias = Callable[[int], bool]
"""Asked between pieces of work, with the samples done so far: shall I go on?"""
Span: TypeAlias = tuple[int, int]
"""Where a slice of the flat vector begins and ends."""
Sums: TypeAlias = dict[str, float]
"""Figures of one slice by name, which add up over the slices to that of the whole vector."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a worker made of a task. `samples` may be fewer than asked for, even none."""

    vector: Array | None
    samples: int
    stats: Stats = field(default_factory=dict)


class Replica(Protocol):
    """The worker's side. It keeps nothing from one task to the next that could change a result."""

    def compute(self, model: Iterable[Array], task: Task, proceed: Proceed) -> Outcome:
        """Do a task on a model that comes as consecutive slices; the next may take its time."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The state of a thing: arrays by name, and the rest as plain JSON data."""

    arrays: Mapping[str, Array]
    data: Mapping[str, Any]

    def copy(self) -> Saved:
        """Return the same state, out of reach of the thing it was taken from."""
        return Saved({name: array.copy() for name, array in self.arrays.items()}, self.data)


class Shard(Protocol):
    """Owns the model, or a slice of it, and the optimizer's state that belongs to it."""

    @property
    def vector(self) -> Array:
        """The values as they travel; changed in place by `apply`."""

    @property
    def needs_totals(self) -> bool:
        """Whether `apply` needs the sums over all slices, and not only for the statistics."""

    def reduce(
        self, weights: Sequence[float], vectors: Sequence[Array], wants: frozenset[Want]
    ) -> Sums:
        """Add up results in the order given; return what must be known of the whole vector."""

    def apply(self, totals: Sums) -> None:
        """Let the optimizer step along what was reduced."""

    def save(self) -> Saved:
        """Return the state, as views that are good until the next step."""

    def load(self, saved: Saved) -> None: ...


Recipe: TypeAlias = Callable[[], Shard]
"""Makes the server of one slice; holds no array, so that it is quickly sent."""


class Server(Shard, Protocol):
    """The coordinator's side: the shard that is the whole."""

    @property
    def layout(self) -> Layout:
        """How the state can be cut."""

    def recipe(self, span: Span) -> Recipe:
        """Say how the server of a slice is made; refuse if a step cannot be taken in slices."""

    def step(
        self, weights: Sequence[float], vectors: Sequence[Array], wants: frozenset[Want]
    ) -> dict[Stat, float]:
        """Reduce and apply; return the statistics."""

    def model(self) -> Any:
        """Return the model for the user, apart from the one in training."""

    def export(self) -> dict[str, Array]:
        """Return the model's tensors by the names its users know."""


class Steps:
    """Gives a server that is not cut its `step`."""

    def step(
        self: Shard, weights: Sequence[float], vectors: Sequence[Array], wants: frozenset[Want]
    ) -> dict[Stat, float]:
        totals = self.reduce(weights, vectors, wants)
        self.apply(totals)
        return statistics(totals, wants)


@dataclass(frozen=True)
class Layout:
    """Where things lie in the flat vector: tensor after tensor, then what is not trained.

    In a `Saved` state, "values" goes over the whole vector, "previous" over the trained part, and
    "optimizer.3.…" over tensor 3, unless it is a scalar. What of tensor 3's state is
    no array is in the data, under "scalars" and "3".
    """

    size: int
    tensors: tuple[int, ...] = ()  # the trained tensors' sizes

    @property
    def trained(self) -> int:
        return sum(self.tensors) if self.tensors else self.size

    def spans(self, count: int) -> list[Span]:
        """Cut the vector into slices of equal length, as nearly as can be."""
        ends = [self.size * i // count for i in range(count + 1)]
        return list(pairwise(ends))

    def pieces(self, span: Span) -> Iterator[tuple[int, int, int]]:
        """Yield the trained tensors in a slice, each with where its piece begins and ends."""
        for index, end in enumerate(accumulate(self.tensors)):
            start, stop = max(span[0], end - self.tensors[index]), min(span[1], end)
            if start < stop:
                yield index, start, stop

    def cut(self, parts: Sequence[tuple[Span, Saved]], span: Span) -> Saved:
        """Return the state of a slice from those of other slices that together cover it."""
        chosen = [(at, saved) for at, saved in parts if at[0] < span[1] and span[0] < at[1]]
        chosen = chosen or [parts[0]]
        arrays: dict[str, Array] = {}
        ends = [0, *accumulate(self.tensors)]
        for name in dict.fromkeys(name for _, saved in chosen for name in saved.arrays):
            whole = (0, self.size)
            if name.startswith("optimizer."):
                index = int(name.split(".")[1])
                whole = ends[index], ends[index + 1]
            found = [(_meet(at, whole), s.arrays[name]) for at, s in chosen if name in s.arrays]
            if not found[0][1].ndim:  # the same in every part
                if _length(_meet(span, whole)):
                    arrays[name] = found[0][1]
                continue
            pieces = [
                array.reshape(-1)[max(span[0] - start, 0) : max(span[1] - start, 0)]
                for (start, _), array in found
            ]
            filled = [piece for piece in pieces if piece.size]
            if len(filled) > 1:
                arrays[name] = np.concatenate(filled)
            elif filled or name == "values":  # which even an empty slice has
                arrays[name] = (filled or pieces)[0]
        data = dict(chosen[0][1].data)
        if "scalars" in data:
            held = {str(index) for index, _, _ in self.pieces(span)}
            known = [item for _, saved in chosen for item in saved.data["scalars"].items()]
            data["scalars"] = {index: state for index, state in known if index in held}
        return Saved(arrays, data)


def _meet(one: Span, other: Span) -> Span:
    return max(one[0], other[0]), min(one[1], other[1])


def _length(span: Span) -> int:
    return max(span[1] - span[0], 0)


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

    def replica(self, seed: int, tiles: Partition | None = None) -> Replica:
        """Make a worker's side; with tiles, for tasks whose samples come from some of them."""

    def server(self) -> Server: ...
    def rate(self, version: int) -> float:
        """Return the learning rate of the step that a result at this version will be part of."""

    def check(self, work: Work) -> None:
        """Refuse work that this learner cannot do."""

    def about(self) -> dict[str, Any]:
        """Describe what a resumed run must have in common with the first."""


class Direction:
    """The steps' statistics that need the vectors themselves."""

    def __init__(self) -> None:
        self._previous: Array | None = None
        self._age = 0  # steps since it was kept

    def sums(self, direction: Array, wants: frozenset[Want]) -> Sums:
        """Return the square of the norm, and the product with the step before (first: 0.0).

        With ("dot", lag) it is the product with the step `lag` before. One vector is kept for it,
        so it is there at every lag-th step alone.
        """
        sums: Sums = {}
        if "norm" in wants:
            sums["norm"] = float(np.linalg.norm(direction)) ** 2
        lag = _lag(wants)
        # An empty slice has no state from which it could know at which steps the others multiply.
        if not lag or (lag > 1 and not direction.size):
            return sums
        self._age += 1
        if self._previous is None or self._age > lag:
            if lag == 1:
                sums["dot"] = 0.0
        elif self._age == lag:
            sums["dot"] = float(self._previous @ direction)
        else:
            return sums
        self._previous, self._age = direction.copy(), 0
        return sums

    def save(self) -> dict[str, Array]:
        if self._previous is None:
            return {}
        age = {"age": np.array(self._age)} if self._age else {}
        return {"previous": self._previous, **age}

    def load(self, arrays: Mapping[str, Array]) -> None:
        previous = arrays.get("previous")
        self._previous = None if previous is None else previous.copy()
        self._age = 0 if previous is None else int(arrays.get("age", 0))


def _lag(wants: frozenset[Want]) -> int:
    """Return how many steps before the other factor of "dot" is; 0 if nobody asks for one."""
    lags = {1 for want in wants if want == "dot"}
    lags |= {want[1] for want in wants if isinstance(want, tuple) and want[0] == "dot"}
    if len(lags) > 1:
        raise ValueError(
            f'products with the steps {sorted(lags)} before are wanted ("dot" is 1 before), but '
            "one vector is kept for them; use the same lag in all parts of a policy"
        )
    lag = lags.pop() if lags else None
    if lag is not None and lag < 1:
        raise ValueError(f'("dot", {lag}) names no step before; use ("dot", lag) with lag >= 1')
    return lag or 0


def mixed(model: Array, copies: Mapping[str, Array], mix: Mapping[str, float]) -> Array:
    """Return a weighted sum of a model with copies, of which the model has what is left of 1."""
    # Copies first: where their weights add up to 0, their sum is small, and so is its rounding.
    total = sum(np.multiply(copies[peer], weight) for peer, weight in mix.items())
    own = 1.0 - sum(mix.values())
    return np.asarray(model * model.dtype.type(own) + total, dtype=model.dtype)


def add_up(sums: Iterable[Sums]) -> Sums:
    """Add up the figures of all slices, in their order."""
    totals: Sums = {}
    for each in sums:
        for name, value in each.items():
            totals[name] = totals.get(name, 0.0) + value
    return totals


def statistics(totals: Sums, wants: frozenset[Want]) -> dict[Stat, float]:
    """Return what a policy asked for, from the sums over the whole vector."""
    stats: dict[Stat, float] = {}
    if "norm" in wants:
        stats["norm"] = sqrt(totals["norm"])
    if "dot" in totals and _lag(wants):  # with a lag, it is not there at every step
        stats["dot"] = totals["dot"]
    return stats


def mean_loss(weights: Sequence[Coefficients], losses: Sequence[float | None]) -> dict[Stat, float]:
    """Average the workers' losses as the step averages their results."""
    known = [
        (magnitude(w), loss) for w, loss in zip(weights, losses, strict=True) if loss is not None
    ]
    total = sum(weight for weight, _ in known)
    return {"loss": sum(weight * loss for weight, loss in known) / total} if total else {}
