"""A server: an actor that owns a slice of the model and of the optimizer's state.

It returns each version of the slice, and the optimizer's state of that version. Both are in the
object store and belong to the driver, so a version outlives the process that made it. For a while
a server owns a second slice: that of a server that is late.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import ray

from paceline.codes.blocks import covering, decoded
from paceline.core.protocol import Coefficients, Stat
from paceline.engines import low_priority
from paceline.engines.allocator import keep_freed_memory
from paceline.engines.checks import NOT_FINITE, norm_of
from paceline.engines.ray.place import Place, here
from paceline.engines.ray.servers.shared_folder import answer, check_seen
from paceline.engines.ray.servers.sums import grouped, weighted_sum
from paceline.engines.ray.transport.holder import Holder
from paceline.engines.ray.transport.incoming import Incoming
from paceline.engines.ray.transport.link import Address
from paceline.engines.ray.transport.refs import Held
from paceline.engines.ray.worker import Gone, factors_of
from paceline.learners.base import Array, Layout, Recipe, Saved, Shard, Span, Sums
from paceline.learners.tensor_file import entry_of, write

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec, Elementwise

State: TypeAlias = tuple[dict[str, Array], dict[str, Any]]
"""The state of a shard: arrays and plain data. It has the values if these are published rounded."""
Done: TypeAlias = tuple[Sums, bool, list[float]]
"""The sums, whether there is state in arrays, and how many seconds each result took to arrive."""
Pieces: TypeAlias = Sequence[Sequence[Span]] | None
"""Where in this slice the pieces of each result go; None if each comes as one."""
Groups: TypeAlias = Sequence[Sequence[int]] | None
"""The places of results that are added up first; None: all in one order."""
Order: TypeAlias = tuple[
    Sequence[Coefficients], Sequence[Stat], Pieces, Sequence[Any], float, Groups
]
"""The results to add up: weights, wanted statistics, where pieces go, their references, the
timeout in seconds, and the groups."""


class Unusable(Exception):
    """Pieces of results that a server cannot use, each by its place in the order.

    A piece is lost, not here in time, or refused for the given reason.
    """

    def __init__(self, lost: Sequence[int], late: Sequence[int], bad: Mapping[int, str]) -> None:
        super().__init__(lost, late, bad)
        self.lost, self.late, self.bad = lost, late, bad

    def __str__(self) -> str:
        bad = "; ".join(dict.fromkeys(self.bad.values()))
        return f"{len(self.lost)} pieces lost, {len(self.late)} late, {len(self.bad)} bad: {bad}"


@dataclass(eq=False)
class Slice:
    """A slice of the model, at a version.

    sums, seconds: of the results of the next version, once they are added up.
    """

    shard: Shard
    span: Span
    version: int
    sums: Sums | None = None
    seconds: list[float] = field(default_factory=list)


class Server(Holder):
    """Owns slices, by the numbers of their slots. `actor_class` wraps it by `ray.remote`, so this
    stays a plain class."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        place: Callable[[], Place] | None = None,
        threads: int = 1,
    ) -> None:
        keep_freed_memory()
        self._clock, self._place, self._threads = clock, place or here, threads
        self._slices: dict[int, Slice] = {}
        self._cut: int | None = None
        self._began = -1, 0.0  # the version whose results are fetched, and since when
        self._codec: Codec | None = None
        self._model_codec: Elementwise | None = None
        self._trained = 0
        self._kept: dict[tuple[int, int], dict[int, State]] = {}  # by slice and version
        self._keeping = threading.Lock()
        self._secret: bytes | None = None
        self._address: Address | None = None

    def set_up(
        self,
        recipe: Recipe,
        layout: Layout,
        span: Span,
        version: int,
        secret: bytes | None,
        codecs: tuple[Codec | None, Elementwise | None],
        slot: tuple[int, int],
        spans: Sequence[Span],
        *parts: Any,
    ) -> tuple[tuple[Place, bool], Array, State]:
        """Take over a slice from the parts, in turn, of slices that cover it.

        secret: of the processes that may connect to this one; None: slices go by Ray's stores.
        codecs: of results, and of models.
        slot: its number, and that of the cut. Of an earlier cut nothing is kept; a call of one may
            come late, because the parts that it waited for did.
        """
        index, cut = slot
        if self._cut is not None and cut < self._cut:
            raise Gone(f"slice {index} of an earlier cut")
        (self._codec, self._model_codec), self._trained = codecs, layout.trained
        self._began = -1, 0.0  # the run before may have had the same versions
        if cut != self._cut:
            self._slices.clear()
            with self._keeping:
                kept = {of: states for of, states in self._kept.items() if of[1] == cut}
                self._kept, self._cut = kept, cut
        self._slices.pop(index, None)  # frees the old memory first
        shard = recipe()
        if "torch" in sys.modules:  # bits do not depend on it: values are stepped one by one
            sys.modules["torch"].set_num_threads(self._threads)
        saved = zip(spans, joined(parts, len(spans)), strict=True)
        shard.load(layout.cut([((at[0], at[1]), part) for at, part in saved], span))
        taken = self._slices[index] = Slice(shard, (span[0], span[1]), version)
        state = self._state(taken)
        if self._peer is None or secret != self._secret:  # otherwise others may ask for its objects
            self._address, self._secret = self._open(secret), secret
        place = replace(self._place(), address=self._address)
        return (place, bool(state[0])), self._published(taken), state

    def step(
        self, version: int, order: Order, lr_scale: float = 1.0, slot: int = 0
    ) -> tuple[Done, Array, State]:
        """Take a whole step: add up the results, and let the optimizer step."""
        return self.apply(version, self.reduce(version, order, slot), lr_scale, slot)

    def reduce(self, version: int, order: Order, slot: int = 0) -> Sums:
        """Add up the results; return this slice's share of the sums over the whole vector.

        The server fetches the results by reference. As arguments of the call they would arrive at
        a lower priority, and up to twice as late over a slow link.
        """
        of = self._turn(slot, version)
        given, wants, at, refs, patience, groups = order
        weights = [factors_of(weight) for weight in given]
        incoming = Incoming(refs, patience, self._clock)
        if incoming.fails():
            raise Unusable(*incoming.failed(), {})
        if self._began[0] != version:  # the first of its slices
            self._began = version, incoming.began
        of.seconds = [incoming.began - self._began[1] + each for each in incoming.seconds]
        m = len(weights[0]) if isinstance(weights[0], tuple) else 1
        start, stop = covering(of.span, m)
        spans = [(0, stop - start)] * len(refs) if at is None else [s for each in at for s in each]
        dtype = of.shard.vector.dtype
        pieces = self._checked(incoming.slices, spans, of.span[0], dtype)
        if at is not None:
            pieces = list(_put_together(np.empty(stop - start, dtype), at, pieces))
        factors, vectors = decoded(weights, pieces, of.span)
        if groups is not None:
            factors, vectors = grouped(factors, vectors, groups)
        of.sums = of.shard.reduce(factors, vectors, frozenset(wants))
        return of.sums

    def _checked(
        self, packed: Sequence[Any], spans: Sequence[Span], start: int, dtype: Any
    ) -> list[Array]:
        """Decode the pieces of a slice that starts there, and refuse invalid ones.

        The driver has checked only the norm that the worker reported, not the values themselves.
        """
        pieces, bad = [], {}
        for index, (piece, span) in enumerate(zip(packed, spans, strict=True)):
            try:
                if self._codec is not None:
                    piece = self._received(self._codec, piece, start, span)
                pieces.append(piece)
                why = fault_of(piece, span[1] - span[0], dtype)
            except (ValueError, TypeError, IndexError, RuntimeError) as error:
                why = f"its message cannot be read ({error})"
            if why is not None:
                bad[index] = why
        if bad:
            raise Unusable((), (), bad)
        return pieces

    def _received(self, codec: Codec, packed: Any, start: int, span: Span) -> Array:
        """Decode a piece that covers a span of a slice."""
        from paceline.codecs.uplink import received

        return received(packed, codec, (start + span[0], start + span[1]), self._trained)

    def apply(
        self, version: int, totals: Sums, lr_scale: float = 1.0, slot: int = 0
    ) -> tuple[Done, Array, State]:
        """Step along the reduced results; return the entries of `Done`, the values as they are
        published, and the state."""
        of = self._turn(slot, version)
        if (sums := of.sums) is None:
            raise RuntimeError(
                f"apply() of version {version} came before its reduce(); this is a bug in the "
                "engine"
            )
        of.shard.apply(totals, lr_scale)
        of.version, of.sums = version, None
        state = self._state(of)
        return (sums, bool(state[0]), of.seconds), self._published(of), state

    @ray.method(concurrency_group="sums")  # type: ignore[untyped-decorator]
    def sum_up(self, weights: Sequence[float], slices: Sequence[Any], patience: float) -> Any:
        """Add up results of this node for servers on others, beside the steps of this server.

        slices: for each of those servers in turn, its slices of all results.
        Return a sum for each of them. The receiver checks its values.
        """
        incoming = Incoming(slices, patience, self._clock)
        if incoming.fails():
            raise Unusable(*incoming.failed(), {})
        count, found = len(weights), incoming.slices
        starts = range(0, len(found), count)
        sums = tuple(weighted_sum(weights, found[start : start + count]) for start in starts)
        return sums[0] if len(sums) == 1 else sums

    @ray.method(concurrency_group="copies")  # type: ignore[untyped-decorator]
    def keep(
        self, slot: tuple[int, int], version: int, oldest: int, state: State | Held, timeout: float
    ) -> None:
        """Keep the state of another server's slice on this node; slot: as in `set_up`.

        Several calls run at a time: a copy over a slow link holds up no other.
        """
        if isinstance(state, Held):
            state = cast(State, state.future().result(timeout))
        with self._keeping:
            if self._cut is not None and slot[1] < self._cut:
                return
            kept = self._kept.setdefault(slot, {})
            kept[version] = state
            for each in [each for each in kept if each < oldest]:
                del kept[each]

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def give(self, slot: tuple[int, int], version: int) -> State:
        """Return a state that this server keeps."""
        if version not in self._kept.get(slot, {}):
            raise Gone(f"the state of slice {slot[0]} at version {version}")
        return self._kept[slot][version]

    @ray.method(concurrency_group="report")  # type: ignore[untyped-decorator]
    def up(self) -> None:
        """Answer as soon as the process is there."""

    @ray.method(concurrency_group="report")  # type: ignore[untyped-decorator]
    def show(self, folder: str, token: str, name: str) -> None:
        """Show the driver that this process reads and writes its folder."""
        answer(Path(folder), token, name)

    @ray.method(concurrency_group="report")  # type: ignore[untyped-decorator]
    def write(
        self, path: str, token: str, refs: Sequence[Any], timeout: float
    ) -> tuple[str, dict[str, Any]]:
        """Write published values and their state into a file, beside the steps of this server.

        Return the hash of the file, and the part of the state that is in no array.
        """
        check_seen(Path(path).parent, token)
        (saved,) = joined([ref.future().result(timeout) for ref in refs], 1)
        entries = [entry_of(f"server/{name}", array) for name, array in saved.arrays.items()]
        found: Future[str] = Future()

        def work() -> None:
            try:
                found.set_result(write(Path(path), entries))
            except Exception as error:
                found.set_exception(error)

        low_priority.start(work, "paceline-slice")
        return found.result(timeout), dict(saved.data)

    def _state(self, of: Slice) -> State:
        state: State = parted(of.shard.save(), self._model_codec is not None)[-1]
        return state

    def _published(self, of: Slice) -> Array:
        """Return the values as workers get them."""
        if self._model_codec is None:
            return of.shard.vector
        from paceline.codecs.downlink import rounded

        return rounded(self._model_codec, of.shard.vector, of.span, self._trained)

    def _turn(self, slot: int, version: int) -> Slice:
        """Refuse a step that is not the next one: no step is taken twice or left out."""
        of = self._slices.get(slot)
        if of is None or version != of.version + 1:
            raise RuntimeError(
                f"a server at version {-1 if of is None else of.version} cannot make version "
                f"{version}; this is a bug in the engine"
            )
        return of


def parted(saved: Saved, is_rounded: bool) -> tuple[Any, ...]:
    """Return the parts of a slice from which a server can start: its values and its state.

    If values are published rounded, it is the state alone, with the values in it.
    """
    arrays, data = dict(saved.arrays), dict(saved.data)
    if is_rounded:
        return ((arrays, data),)
    values = arrays.pop("values")
    return values, (arrays, data)


def joined(parts: Sequence[Any], count: int) -> list[Saved]:
    """Invert `parted` for the parts of `count` slices."""
    each, found = len(parts) // count, []
    for first in range(0, len(parts), each):
        *values, (arrays, data) = parts[first : first + each]
        found.append(Saved({"values": values[0], **arrays} if values else arrays, data))
    return found


def fault_of(piece: Any, size: int, dtype: Any) -> str | None:
    """Return what is wrong with a piece of a result, or None if it is sound."""
    if not isinstance(piece, np.ndarray) or piece.shape != (size,):
        shape = getattr(piece, "shape", type(piece).__name__)
        return f"one of its slices has the shape {shape} instead of ({size},)"
    if piece.dtype != dtype:
        return f"one of its slices has the type {piece.dtype} instead of {dtype}"
    return None if isfinite(norm_of(piece)) else NOT_FINITE


def _put_together(like: Array, at: Sequence[Sequence[Span]], pieces: Sequence[Array]) -> Any:
    """Yield the slice of each result, joined from pieces of another cut."""
    rest = iter(pieces)
    for places in at:
        vector = np.empty_like(like)
        for (start, stop), piece in zip(places, rest, strict=False):
            low, high = max(start, 0), min(stop, vector.size)
            vector[low:high] = piece[low - start : high - start]
        yield vector
