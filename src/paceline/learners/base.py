"""The interface between engines and learners: a recipe for the worker's and the server's side.

The server's side can be sharded: the flat vector of the model is cut into slices, each with its
part of the optimizer's state. A step then runs slice by slice. If it needs a value of the whole
vector, such as a norm, the slices first add up their sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import sqrt
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from paceline.core.protocol import Stat, Stats, Task, Want, Work, WorkerId
from paceline.data.partition.base import Partition

Array: TypeAlias = NDArray[Any]
Proceed: TypeAlias = Callable[[int], bool]
"""Called between pieces of work with the samples done so far; returns whether to continue."""
Span: TypeAlias = tuple[int, int]
"""The begin and end of a slice of the flat vector."""
Sums: TypeAlias = dict[str, float]
"""Sums over one slice by name; added over all slices they give those of the whole vector."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A worker's outcome of a task; `samples` may be fewer than assigned, even 0.

    With `stats["count"]`, the vector is its mean times that count: see `core/averages.py`.
    """

    vector: Array | None
    samples: int
    stats: Stats = field(default_factory=dict)


class Replica(Protocol):
    """The worker's side. It keeps no state between tasks that could change a result.

    A `KeepingReplica` is the exception.
    """

    def compute(self, model: Iterable[Array], task: Task, proceed: Proceed) -> Outcome:
        """Compute a task on a model given as consecutive slices, which may still be arriving."""


@runtime_checkable
class Arriving(Protocol):
    """A model whose slices may still be on their way; iterating over them waits for all."""

    def __iter__(self) -> Iterator[Array]: ...
    def here(self, done: int) -> bool:
        """Return whether all slices are here; done: samples of the task that are computed."""


@runtime_checkable
class KeepingReplica(Replica, Protocol):
    """A replica that may keep a state for each worker, such as that of an inner optimizer.

    Its results then depend on the earlier tasks of the worker, so another worker computes other
    ones. The state is lost with the worker's process. The first result without that of an inner
    optimizer, after version 0, has `stats["new_state"]`.
    """

    def forget(self, worker: WorkerId) -> None:
        """Drop the state of a worker that left; for a replica that serves several workers."""


Final: TypeAlias = Callable[[Array, Span], None]
"""Is told the vector of a result, and a part of it that will not change any more."""


class Changed(Exception):
    """A part of a vector changed after it had been reported as final."""


@runtime_checkable
class EarlyReplica(Replica, Protocol):
    """A replica that can report parts of its vector while it still computes.

    final: to be called with each of them; None: not wanted. `compute` raises `Changed` if one
    was not final.
    """

    final: Final | None


@dataclass(frozen=True, slots=True)
class Saved:
    """The state of a server: arrays by name, and the rest as plain JSON data."""

    arrays: Mapping[str, Array]
    data: Mapping[str, Any]

    def copy(self) -> Saved:
        """Return the same state with its own arrays, which later steps do not change."""
        return Saved({name: array.copy() for name, array in self.arrays.items()}, self.data)


class Shard(Protocol):
    """Owns the model, or a slice of it, and the optimizer's state that belongs to it."""

    @property
    def vector(self) -> Array:
        """The values as they are sent; `apply` changes them in place."""

    @property
    def needs_totals(self) -> bool:
        """Whether `apply` itself needs the sums over all slices (statistics may need them too)."""

    def reduce(
        self, weights: Sequence[float], vectors: Sequence[Array], wants: frozenset[Want]
    ) -> Sums:
        """Add up results in the order given; return the sums that the whole vector needs."""

    def apply(self, totals: Sums, lr_scale: float = 1.0) -> None:
        """Take an optimizer step with the reduced gradient, at the learning rate times a scale."""

    def save(self) -> Saved:
        """Return the state as views, which are valid until the next step."""

    def load(self, saved: Saved) -> None: ...


Recipe: TypeAlias = Callable[[], Shard]
"""Makes the server of one slice; holds no array, so it is cheap to send."""


class Server(Shard, Protocol):
    """The coordinator's side: the shard that holds the whole model."""

    @property
    def layout(self) -> Layout:
        """The layout by which the state can be cut."""

    def recipe(self, span: Span) -> Recipe:
        """Return the recipe of a slice's server; raise ValueError if steps need the whole model."""

    def step(
        self,
        weights: Sequence[float],
        vectors: Sequence[Array],
        wants: frozenset[Want],
        lr_scale: float = 1.0,
    ) -> dict[Stat, float]:
        """Reduce and apply; return the statistics."""

    def model(self) -> Any:
        """Return a copy of the model for the user."""

    def export(self) -> Mapping[str, Any]:
        """Return the model's tensors by their usual names: NumPy arrays, or torch tensors.

        Frozen parameters are left out: they are those that the learner was given.
        """

    def places(self) -> Places | None:
        """Return where the tensors of `export` are; None if only `export` itself can tell."""


@dataclass(frozen=True)
class Places:
    """Where the tensors of an exported model are, so that it can be written from slices.

    starts: the begin in the flat vector, and the shape, of tensors that have the vector's values.
    rest: returns the other tensors, given the values behind the trained ones. Any thread may call
        it.
    """

    starts: Mapping[str, tuple[int, tuple[int, ...]]]
    rest: Callable[[Array], Mapping[str, Any]]


class Steps:
    """Adds `step` to a server that holds the whole model."""

    def step(
        self: Shard,
        weights: Sequence[float],
        vectors: Sequence[Array],
        wants: frozenset[Want],
        lr_scale: float = 1.0,
    ) -> dict[Stat, float]:
        totals = self.reduce(weights, vectors, wants)
        self.apply(totals, lr_scale)
        return statistics(totals, wants)


@dataclass(frozen=True)
class Layout:
    """The layout of the flat vector: the trained tensors in order, then the untrained values.

    In a `Saved` state, "values" covers the whole vector, "previous" the trained part, and
    "optimizer.3.…" covers tensor 3, unless it is a scalar. Values of tensor 3's state that are not
    arrays are in the data, under "scalars" and "3".
    """

    size: int
    tensors: tuple[int, ...] = ()  # the trained tensors' sizes

    @property
    def trained(self) -> int:
        return sum(self.tensors) if self.tensors else self.size

    def spans(self, count: int, chunks: int = 1) -> list[Span]:
        """Return the spans of slices for `count` servers: of each chunk of the vector one slice for
        each server, equally long. The first chunk is half as long as each of the others.

        The gradients of the first layers come last, when the others are under way already. A step
        then waits for the first slices to come and to go out again, so these are the shorter ones.
        With one chunk, this is the slice of the first server.
        """
        if chunks == 1:
            return list(pairwise(self._ends(count)))
        edges = self._ends(chunks)
        return [
            (low + (high - low) * i // count, low + (high - low) * (i + 1) // count)
            for low, high in pairwise(edges)
            for i in range(count)
        ]

    def _ends(self, count: int) -> list[int]:
        """Return the edges of `count` spans, of which the first is half as long as the others."""
        first = max(self.size // (2 * count - 1), min(self.size // count, 1))  # empty if it must be
        rest = self.size - first
        ends = [first + rest * i // (count - 1) for i in range(count)] if count > 1 else [self.size]
        return [0, *ends]

    def pieces(self, span: Span) -> Iterator[tuple[int, int, int]]:
        """Yield the index of each trained tensor in a slice, with the span of its piece."""
        for index, end in enumerate(accumulate(self.tensors)):
            start, stop = max(span[0], end - self.tensors[index]), min(span[1], end)
            if start < stop:
                yield index, start, stop

    def cut(self, parts: Sequence[tuple[Span, Saved]], span: Span) -> Saved:
        """Return the state of a slice from the states of other slices that cover it."""
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
            elif filled or name == "values":  # even an empty slice has "values"
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
    """A recipe for both sides; many runs may use the same recipe."""

    @property
    def batch_size(self) -> int:
        """The global batch: samples per step, independent of the workers."""

    @property
    def examples(self) -> int | None:
        """The samples of one epoch; None if the data have no epochs."""

    @property
    def message_bytes(self) -> int:
        """The bytes of the model, and of a result, on the wire."""

    def replica(self, seed: int, tiles: Partition | None = None) -> Replica:
        """Make a worker's side; `tiles` are the data shards, if tasks draw from shards."""

    def server(self) -> Server: ...
    def rate(self, version: int) -> float:
        """Return the learning rate of the step that uses a result at this version."""

    def check(self, work: Work) -> None:
        """Raise ValueError for work that this learner cannot do."""

    def about(self) -> dict[str, Any]:
        """Return the settings that a resumed run must share with the first."""


def for_workers(learner: Learner) -> Learner:
    """Return the learner as sent to workers: its class may leave out what they do not need."""
    leave_out = getattr(type(learner), "for_workers", None)  # not of a learner inside a wrapper
    return learner if leave_out is None else leave_out(learner)


def state_values(server: Server) -> int:
    """Count the optimizer's state values per model value, by a step on a single value."""
    shard = server.recipe((0, 1))()
    shard.apply(shard.reduce([1.0], [np.zeros_like(shard.vector)], frozenset()))
    arrays = shard.save().arrays.items()
    return sum(array.size for name, array in arrays if name.startswith("optimizer.") and array.ndim)


class Direction:
    """Computes the statistics of steps that need the gradient vectors."""

    def __init__(self) -> None:
        self._previous: Array | None = None
        self._age = 0  # steps since it was kept

    def sums(self, direction: Array, wants: frozenset[Want]) -> Sums:
        """Return the squared norm and the inner product with the previous step (at first 0.0).

        With ("dot", lag) it is the product with the step `lag` before. Only one vector is kept,
        so the product exists at every lag-th step only.
        """
        sums: Sums = {}
        if "norm" in wants:
            sums["norm"] = float(np.linalg.norm(direction)) ** 2
        lag = _lag(wants)
        # An empty slice has no state, so it cannot know at which steps the others multiply.
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
    """Return the lag of the wanted "dot" in steps; 0 if no "dot" is wanted."""
    lags = {1 for want in wants if want == "dot"}
    lags |= {want[1] for want in wants if isinstance(want, tuple) and want[0] == "dot"}
    if len(lags) > 1:
        raise ValueError(
            f'the policy asks for dot products with several lags, {sorted(lags)} ("dot" has lag '
            "1), but the server keeps one earlier step; use the same lag in all parts of a policy"
        )
    lag = lags.pop() if lags else None
    if lag is not None and lag < 1:
        raise ValueError(f'("dot", {lag}) names no earlier step; use ("dot", lag) with lag >= 1')
    return lag or 0


def add_up(sums: Iterable[Sums]) -> Sums:
    """Add up the sums of all slices, in their order."""
    totals: Sums = {}
    for each in sums:
        for name, value in each.items():
            totals[name] = totals.get(name, 0.0) + value
    return totals


def statistics(totals: Sums, wants: frozenset[Want]) -> dict[Stat, float]:
    """Return the statistics that a policy wants, from the sums over the whole vector."""
    stats: dict[Stat, float] = {}
    if "norm" in wants:
        stats["norm"] = sqrt(totals["norm"])
    if "dot" in totals and _lag(wants):  # with a lag, not every step has it
        stats["dot"] = totals["dot"]
    return stats
