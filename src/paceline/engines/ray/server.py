"""A server: an actor that owns a slice of the model and of the optimizer's state.

What it returns is in the object store and belongs to the driver: each version of the slice, and
the optimizer's state that goes with it. So a version outlives the process that made it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import ray

from paceline.codes.blocks import covering, decoded
from paceline.core.protocol import Coefficients, Stat
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
"""What to add up: weights, wanted statistics, where pieces go, their references, who carries each,
and the seconds that they may take."""


class Server:
    """Wrapped by `ray.remote` where it is created, so this stays a plain class."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        place: Callable[[], Place] | None = None,
    ) -> None:
        self._clock, self._place = clock, place or here
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
        self._shard, self._reduced = None, -1  # the old one's memory first
        self._kept.clear()
        shard = recipe()
        saved = [
            (at, Saved({"values": values, **arrays}, data))
            for at, values, (arrays, data) in zip(spans, parts[0::2], parts[1::2], strict=True)
        ]
        shard.load(layout.cut([((at[0], at[1]), part) for at, part in saved], span))
        self._shard, self._span, self._version = shard, (span[0], span[1]), version
        state = self._state()
        return (self._place(), bool(state[0])), shard.vector, state

    def step(self, version: int, order: Order) -> tuple[Done, Array, State]:
        """Take a step whole: add up the results, and let the optimizer step."""
        return self.apply(version, self.reduce(version, order))

    def reduce(self, version: int, order: Order) -> Sums:
        """Add up the results; what is needed of the whole vector is the sum of all servers'.

        Results come as references which are got here: as arguments of the call they would arrive
        at a lower priority, and up to twice as late over a slow link.
        """
        shard = self._turn(version)
        given, wants, at, refs, nodes, patience = order
        weights = [factors_of(weight) for weight in given]
        try:
            incoming = Incoming(ask(refs, nodes, self._carriers), patience, self._clock)
            pieces = list(incoming)
        except ray.exceptions.RayActorError:  # a carrier's; the stores are as good
            self._carriers = {}
            incoming = Incoming(refs, patience, self._clock)
            pieces = list(incoming)
        self._seconds = incoming.seconds
        if self._codec is not None:
            pieces = self._received(self._codec, pieces, at)
        if at is not None:
            m = len(weights[0]) if isinstance(weights[0], tuple) else 1
            start, stop = covering(self._span, m)
            pieces = list(_joined(np.empty(stop - start, shard.vector.dtype), at, pieces))
        factors, vectors = decoded(weights, pieces, self._span)
        self._sums = shard.reduce(factors, vectors, frozenset(wants))
        self._reduced = version
        return self._sums

    def _received(self, codec: Codec, packed: Sequence[Array], at: Pieces) -> list[Array]:
        """Decode what has come, each piece as it was cut."""
        from paceline.codecs.uplink import received

        start = self._span[0]
        spans = [self._span] * len(packed)
        if at is not None:
            spans = [(start + low, start + high) for places in at for low, high in places]
        return [
            received(piece, codec, span, self._trained)
            for piece, span in zip(packed, spans, strict=True)
        ]

    def apply(self, version: int, totals: Sums) -> tuple[Done, Array, State]:
        """Step along what was reduced; say whether there is state in arrays, and how long each
        result was on its way."""
        shard = self._turn(version)
        if self._reduced != version:
            raise RuntimeError(f"a server was told to make {version} before it added it up")
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
        """Return what was kept."""
        if version not in self._kept.get(slot, {}):
            raise Gone(f"the state of slice {slot} at version {version}")
        return self._kept[slot][version]

    def _state(self) -> State:
        assert self._shard is not None
        saved = self._shard.save()
        arrays = {name: array for name, array in saved.arrays.items() if name != "values"}
        return arrays, dict(saved.data)

    def _turn(self, version: int) -> Shard:
        """Refuse a step that is not the next: no step is taken twice, and none is left out."""
        if self._shard is None or version != self._version + 1:
            raise RuntimeError(f"a server at version {self._version} was told to make {version}")
        return self._shard


def _joined(like: Array, at: Sequence[Sequence[Span]], pieces: Sequence[Array]) -> Any:
    """Yield the results' slices, put together of pieces cut elsewhere."""
    rest = iter(pieces)
    for places in at:
        vector = np.empty_like(like)
        for (start, stop), piece in zip(places, rest, strict=False):
            low, high = max(start, 0), min(stop, vector.size)
            vector[low:high] = piece[low - start : high - start]
        yield vector
