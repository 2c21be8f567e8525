"""A server: an actor that owns a slice of the model and of the optimizer's state.

It returns each version of the slice, and the optimizer's state of that version. Both are in the
object store and belong to the driver, so a version outlives the process that made it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import ray

from paceline.codes.blocks import covering, decoded
from paceline.core.protocol import Coefficients, Stat
from paceline.engines.checks import NOT_FINITE, norm_of
from paceline.engines.ray.carrier import Carriers, Incoming, ask
from paceline.engines.ray.worker import Gone, Place, factors_of, here
from paceline.learners.base import Array, Layout, Recipe, Saved, Shard, Span, Sums

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec

State: TypeAlias = tuple[dict[str, Array], dict[str, Any]]
"""All of a shard's state but its values: arrays and plain data."""
Done: TypeAlias = tuple[Sums, bool, list[float]]
"""The sums, whether there is state in arrays, and how many seconds each result took to arrive."""
Pieces: TypeAlias = Sequence[Sequence[Span]] | None
"""Where in this slice the pieces of each result go; None if each comes as one."""
Order: TypeAlias = tuple[
    Sequence[Coefficients], Sequence[Stat], Pieces, Sequence[Any], Sequence[str | None], float
]
"""The results to add up: weights, wanted statistics, where pieces go, their references, the node
whose carrier brings each, and the timeout in seconds."""


class Unusable(Exception):
    """Pieces of results that a server cannot use, each by its place in the order: lost, not here
    in time, or refused for the given reason."""

    def __init__(self, lost: Sequence[int], late: Sequence[int], bad: Mapping[int, str]) -> None:
        super().__init__(lost, late, bad)
        self.lost, self.late, self.bad = lost, late, bad

    def __str__(self) -> str:
        bad = "; ".join(dict.fromkeys(self.bad.values()))
        return f"{len(self.lost)} pieces lost, {len(self.late)} late, {len(self.bad)} bad: {bad}"


class Server:
    """Owns a slice. `actor_class` wraps it by `ray.remote`, so this stays a plain class."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        place: Callable[[], Place] | None = None,
        threads: int = 1,
    ) -> None:
        self._clock, self._place, self._threads = clock, place or here, threads
        self._shard: Shard | None = None
        self._span: Span = (0, 0)
        self._version = -1
        self._carriers: Carriers = {}
        self._codec: Codec | None = None
        self._trained = 0
        self._reduced = -1  # the version whose results are added up
        self._sums: Sums = {}
        self._seconds: list[float] = []
        self._kept: dict[int, dict[int, State]] = {}  # by slot and version

    def set_up(
        self,
        recipe: Recipe,
        layout: Layout,
        span: Span,
        version: int,
        carriers: Carriers,
        codec: Codec | None,
        spans: Sequence[Span],
        *parts: Any,
    ) -> tuple[tuple[Place, bool], Array, State]:
        """Take over a slice from the values and states, in turn, of slices that cover it."""
        self._carriers, self._codec, self._trained = carriers, codec, layout.trained
        self._shard, self._reduced = None, -1  # frees the old memory first
        self._kept.clear()
        shard = recipe()
        if "torch" in sys.modules:  # bits do not depend on it: values are stepped one by one
            sys.modules["torch"].set_num_threads(self._threads)
        saved = [
            (at, Saved({"values": values, **arrays}, data))
            for at, values, (arrays, data) in zip(spans, parts[0::2], parts[1::2], strict=True)
        ]
        shard.load(layout.cut([((at[0], at[1]), part) for at, part in saved], span))
        self._shard, self._span, self._version = shard, (span[0], span[1]), version
        state = self._state()
        return (self._place(), bool(state[0])), shard.vector, state

    def step(self, version: int, order: Order) -> tuple[Done, Array, State]:
        """Take a whole step: add up the results, and let the optimizer step."""
        return self.apply(version, self.reduce(version, order))

    def reduce(self, version: int, order: Order) -> Sums:
        """Add up the results; return this slice's share of the sums over the whole vector.

        The server fetches the results by reference. As arguments of the call they would arrive at
        a lower priority, and up to twice as late over a slow link.
        """
        shard = self._turn(version)
        given, wants, at, refs, nodes, patience = order
        weights = [factors_of(weight) for weight in given]
        incoming = Incoming(ask(refs, nodes, self._carriers), patience, self._clock)
        if self._carriers and incoming.fails() and incoming.failed()[0]:
            # A carrier may be lost, and the stores work as well.
            self._carriers = {}
            incoming = Incoming(refs, patience, self._clock)
        if incoming.fails():
            raise Unusable(*incoming.failed(), {})
        self._seconds = incoming.seconds
        m = len(weights[0]) if isinstance(weights[0], tuple) else 1
        start, stop = covering(self._span, m)
        spans = [(0, stop - start)] * len(refs) if at is None else [s for each in at for s in each]
        pieces = self._checked(incoming.slices, spans, shard.vector.dtype)
        if at is not None:
            pieces = list(_joined(np.empty(stop - start, shard.vector.dtype), at, pieces))
        factors, vectors = decoded(weights, pieces, self._span)
        self._sums = shard.reduce(factors, vectors, frozenset(wants))
        self._reduced = version
        return self._sums

    def _checked(self, packed: Sequence[Any], spans: Sequence[Span], dtype: Any) -> list[Array]:
        """Decode the pieces, and refuse invalid ones.

        The driver has checked only the norm that the worker reported, not the values themselves.
        """
        pieces, bad = [], {}
        for index, (piece, span) in enumerate(zip(packed, spans, strict=True)):
            try:
                if self._codec is not None:
                    piece = self._received(self._codec, piece, span)
                pieces.append(piece)
                why = fault_of(piece, span[1] - span[0], dtype)
            except (ValueError, TypeError, IndexError, RuntimeError) as error:
                why = f"its message cannot be read ({error})"
            if why is not None:
                bad[index] = why
        if bad:
            raise Unusable((), (), bad)
        return pieces

    def _received(self, codec: Codec, packed: Any, span: Span) -> Array:
        """Decode a piece that covers a span of this slice."""
        from paceline.codecs.uplink import received

        start = self._span[0]
        return received(packed, codec, (start + span[0], start + span[1]), self._trained)

    def apply(self, version: int, totals: Sums) -> tuple[Done, Array, State]:
        """Step along the reduced results; return the entries of `Done`, the values, and the
        optimizer's state."""
        shard = self._turn(version)
        if self._reduced != version:
            raise RuntimeError(
                f"apply() of version {version} came before its reduce(); this is a bug in the "
                "engine"
            )
        shard.apply(totals)
        self._version = version
        state = self._state()
        return (self._sums, bool(state[0]), self._seconds), shard.vector, state

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def keep(self, slot: int, version: int, oldest: int, state: State) -> None:
        """Keep the state of another server's slice in the store of this node."""
        kept = self._kept.setdefault(slot, {})
        kept[version] = state
        for each in [each for each in kept if each < oldest]:
            del kept[each]

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def give(self, slot: int, version: int) -> State:
        """Return a state that this server keeps."""
        if version not in self._kept.get(slot, {}):
            raise Gone(f"the state of slice {slot} at version {version}")
        return self._kept[slot][version]

    def _state(self) -> State:
        assert self._shard is not None
        saved = self._shard.save()
        arrays = {name: array for name, array in saved.arrays.items() if name != "values"}
        return arrays, dict(saved.data)

    def _turn(self, version: int) -> Shard:
        """Refuse a step that is not the next one: no step is taken twice or left out."""
        if self._shard is None or version != self._version + 1:
            raise RuntimeError(
                f"a server at version {self._version} cannot make version {version}; this is a "
                "bug in the engine"
            )
        return self._shard


def fault_of(piece: Any, size: int, dtype: Any) -> str | None:
    """Return what is wrong with a piece of a result, or None if it is sound."""
    if not isinstance(piece, np.ndarray) or piece.shape != (size,):
        shape = getattr(piece, "shape", type(piece).__name__)
        return f"one of its slices has the shape {shape} instead of ({size},)"
    if piece.dtype != dtype:
        return f"one of its slices has the type {piece.dtype} instead of {dtype}"
    return None if isfinite(norm_of(piece)) else NOT_FINITE


def _joined(like: Array, at: Sequence[Sequence[Span]], pieces: Sequence[Array]) -> Any:
    """Yield the slice of each result, joined from pieces of another cut."""
    rest = iter(pieces)
    for places in at:
        vector = np.empty_like(like)
        for (start, stop), piece in zip(places, rest, strict=False):
            low, high = max(start, 0), min(stop, vector.size)
            vector[low:high] = piece[low - start : high - start]
        yield vector
