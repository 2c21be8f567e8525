"""A worker: an actor that computes one task at a time, and abandons it on request."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import ray

from paceline.codes.blocks import covering
from paceline.core.protocol import Coefficients, Stats, Task, TaskId, Work, WorkerId
from paceline.data.partition.base import Partition
from paceline.engines.allocator import keep_freed_memory
from paceline.engines.checks import norm_of
from paceline.engines.ray.place import Place, here
from paceline.engines.ray.reclaimed import Notice, Reclaimed
from paceline.engines.ray.transport.holder import Holder
from paceline.engines.ray.transport.incoming import GivenUp, Incoming, timed
from paceline.learners.base import (
    Array,
    Changed,
    EarlyReplica,
    Final,
    Layout,
    Learner,
    Outcome,
    Replica,
    Span,
)

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec
    from paceline.codecs.uplink import Uplink


class Token(NamedTuple):
    """The unique name of one attempt at one task: a result counts under its own token only."""

    run: str
    worker: WorkerId
    incarnation: int
    task: TaskId

    def pack(self) -> bytes:
        """Return the token as bytes, which Ray sends as they are."""
        return json.dumps(self).encode()

    @staticmethod
    def unpack(packed: bytes) -> Token:
        return Token(*json.loads(packed))


class Answer(NamedTuple):
    """The answer of a worker. Its vector lies in the object store, outside of the pickle.

    samples: None if the worker could not get the model, and has not begun.
    """

    token: Token
    vector: Array | None
    samples: int | None
    seconds: float
    stats: Stats
    sent: int | None = None  # bytes of the vector, if it is encoded
    norm: float | None = None  # of a vector that goes to servers, or is not finite
    skipped: int = 0  # samples of a result that is not finite


# Ray sends bytes as they are, and spends 0.1 ms on every other argument of a call, 0.6 ms on the
# dataclasses of a task.
Order: TypeAlias = bytes
Reply: TypeAlias = tuple[Any, ...]
# Fields that JSON does not change.
_OF_WORK = "n_parts", "samples", "steps", "budget", "shares", "overlap"
_OF_TASK = "version", "since", "samples", "offset", "attempt"


def pack(token: Token, task: Task, *others: Any) -> Order:
    """Encode a task for its worker, with the other plain values that the call needs."""
    work = task.work
    parts = None if work.parts is None else tuple(work.parts.items())
    tiles = None if work.tiles is None else tuple(work.tiles.items())
    of_work = *(getattr(work, name) for name in _OF_WORK), work.tag
    of_task = *(getattr(task, name) for name in _OF_TASK), task.tile_offsets
    return json.dumps((token, parts, of_work, tiles, of_task, others)).encode()


def unpack(order: Order) -> tuple[Token, Task, list[Any]]:
    """Invert `pack`; JSON turns tuples into lists."""
    name, parts, of_work, tiles, of_task, others = json.loads(order)
    token = Token(*name)
    *settings, tag = of_work
    made: dict[str, Any] = dict(zip(_OF_WORK, settings, strict=True))
    made["parts"] = None if parts is None else {part: factors_of(each) for part, each in parts}
    made["tag"] = tuple(tag) if isinstance(tag, list) else tag
    made["tiles"] = None if tiles is None else dict(tiles)
    *stamps, tile_offsets = of_task
    task = dict(zip(_OF_TASK, stamps, strict=True))
    return (
        token,
        Task(token.task, token.worker, Work(**made), **task, tile_offsets=tuple(tile_offsets)),
        others,
    )


def factors_of(received: Any) -> Coefficients:
    """Return one or several factors as they were sent; calls turn tuples into lists."""
    return tuple(received) if isinstance(received, list) else received


def read(reply: Reply) -> Answer:
    """Return a worker's reply as an answer."""
    name, *rest = reply
    return Answer(Token(*name), *rest)


Given: TypeAlias = "tuple[Learner, Partition | None, Codec | None, Codec | None, Layout]"
"""The settings of a worker: the learner, the data shards (tiles), the codecs of results and of
models, and the layout of the model."""


class Gone(Exception):
    """The requested object is no longer here."""


@dataclass(frozen=True)
class _Opening:
    """A model on its way to this worker, which is opened when it is here."""

    incoming: Incoming
    opened: Callable[[], Iterator[Array]]

    def here(self, done: int) -> bool:
        return self.incoming.here(done)

    def __iter__(self) -> Iterator[Array]:
        return self.opened()


class Worker(Holder):
    """Computes tasks. `actors.py` wraps it by `ray.remote`, so this stays a plain class."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        place: Callable[[], Place] | None = None,
        gpus: float | None = None,
        reclaimed: Callable[[], Reclaimed] | None = None,
    ) -> None:
        """reclaimed: makes what waits for notices that this process will be taken away."""
        hide_gpus(gpus)
        keep_freed_memory()
        self._reclaimed = None if reclaimed is None else reclaimed()
        self._clock, self._place = clock, place or here
        self._replica: Replica | None = None
        self._rate: Callable[[int], float] | None = None
        self._uplink: Uplink | None = None
        self._down: Codec | None = None
        self._copy: Array | None = None  # of the model, if only its changes are sent
        self._layout = Layout(0)
        self._computing: Token | None = None
        self._incoming: Incoming | None = None  # the model of the task that it computes
        # The last two models, by version: a server whose node is lost starts from one of them.
        # Two, since its optimizer's state may be copied only up to the version before.
        self._models: dict[int, tuple[Sequence[Span], Sequence[Array]]] = {}
        self._abandoned: Token | None = None
        self._asks_anew: Token | None = None  # the next task, if its model has moved since

    def set_up(self, given: Given, seed: int, secret: bytes | None) -> Place:
        """Build the replica of a learner on its data shards, and forget an earlier one.

        secret: of the processes that may connect to this one; None: slices go by Ray's stores.
        """
        learner, tiles, codec, self._down, self._layout = given
        self._copy = None
        self._models.clear()
        self._incoming = self._uplink = None
        self._replica = None  # frees its memory first
        self._replica = learner.replica(seed, tiles)
        self._rate = learner.rate  # this learner has no weights but the replica's
        if codec is not None:
            from paceline.codecs.uplink import Uplink

            self._uplink = Uplink(codec, self._layout.trained, self._layout.tensors)
        address = self._open(secret)
        return replace(self._place(), address=address)

    def compute(
        self,
        order: Order,
        model: Array | None,
        changes: Sequence[Array] | None = None,
    ) -> Reply:
        """Compute a task, and return its vector with the reply.

        order: the task, and the earlier tasks whose results no step has used.
        changes: the changes of the model since the last task, if it does not come whole.
        """
        token, task, (unused,) = unpack(order)
        self._refund(unused)
        model = self._moved(model, changes)
        begin = self._clock()
        until = begin + task.work.budget

        def proceed(done: int) -> bool:
            return self._abandoned != token and self._clock() < until

        outcome = self._compute([model], task, proceed)
        if self._uplink is not None and self._abandoned == token:
            outcome = replace(outcome, vector=None)  # the task was cancelled
        if self._uplink is None or outcome.vector is None:
            return _reply(token, outcome, self._clock() - begin)
        if not isfinite(norm := norm_of(outcome.vector)):  # keeps the codec's memory finite
            return _reply(token, replace(outcome, vector=None), self._clock() - begin, 0, norm)
        (packed,) = self._send(outcome.vector, task, [(0, outcome.vector.size)], model)
        outcome = replace(outcome, vector=packed)
        return _reply(token, outcome, self._clock() - begin, packed.nbytes)

    def compute_slices(self, order: Order, model: Sequence[Any]) -> tuple[Any, ...]:
        """Compute a task on slices of a model that may still be in flight.

        Return the reply, and the slices of its vector as separate objects. The two cuts may differ.
        order: the task; tasks whose results no step has used; both cuts. Then whether to hold the
        model in case a server is lost with its slice; the seconds to wait for the model.
        """
        token, task, (unused, cut, spans, hold, timeout) = unpack(order)
        self._refund(unused)
        begin = self._clock()
        self._computing = token
        incoming = self._incoming = Incoming(model, timeout, self._clock)
        if self._abandoned == token:
            incoming.give_up()
        elif self._asks_anew == token:
            self._asks_anew = None
            incoming.lose()

        def proceed(done: int) -> bool:
            until = begin + incoming.waited + task.work.budget
            return self._abandoned != token and self._clock() < until

        try:
            opened = _Opening(incoming, lambda: self._opened(incoming, cut))
            outcome = self._compute(opened, task, proceed, self._early(task, spans))
        except GivenUp:
            return _reply(token, Outcome(None, 0), 0.0), *(None for _ in spans)
        except (ray.exceptions.RayError, Changed):  # to be computed again
            lost: Reply = (tuple(token), None, None, 0.0, {}, None, None)
            return lost, *(None for _ in spans)
        finally:
            self._incoming = None
        if hold:
            self._models[task.version] = cut, incoming.slices
            for old in sorted(self._models)[:-2]:
                del self._models[old]
        seconds = self._clock() - begin - incoming.waited
        vector = None if self._abandoned == token else outcome.vector  # nobody waits for it
        needed = [covering(span, task.work.messages) for span in spans]
        told = Outcome(None, outcome.samples, outcome.stats)
        if vector is None:
            return _reply(token, told, seconds), *(None for _ in spans)
        norm = norm_of(vector)
        if not isfinite(norm):  # keeps the codec's memory finite
            return _reply(token, told, seconds, None, norm), *(None for _ in spans)
        if self._uplink is not None:
            packed = self._send(vector, task, needed)
            sent = sum(each.nbytes for each in packed)
            return _reply(token, told, seconds, sent, norm), *packed
        slices = (vector[start:stop] for start, stop in needed)
        return _reply(token, told, seconds, None, norm), *slices

    def _moved(self, model: Array | None, changes: Sequence[Array] | None) -> Array:
        """Return the model: as it came, or the last one with changes applied."""
        if changes is not None:
            from paceline.codecs.downlink import moved

            assert self._copy is not None and self._down is not None
            model = moved(self._copy, changes, self._down, self._layout.trained)
        assert model is not None
        if self._down is not None:
            (model,) = self._opened([model], [(0, self._layout.size)])
            self._copy = model
        return model

    def _opened(self, slices: Iterable[Array], cut: Sequence[Span]) -> Iterator[Array]:
        """Yield slices of the model as their values, from the form in which they were sent."""
        if self._down is None:
            yield from slices
            return
        from paceline.codecs.downlink import opened

        for piece, (start, stop) in zip(slices, cut, strict=True):
            yield opened(piece, self._down, (start, stop), self._layout.trained)

    def _send(
        self, vector: Array, task: Task, spans: Sequence[Span], model: Array | None = None
    ) -> Sequence[Array]:
        assert self._uplink is not None and self._rate is not None
        return self._uplink.send(vector, task.id, self._rate(task.version), spans, model)

    def _refund(self, tasks: Sequence[TaskId]) -> None:
        if self._uplink is not None:
            self._uplink.refund(tasks)

    def _compute(
        self,
        model: Iterable[Array],
        task: Task,
        proceed: Callable[[int], bool],
        final: Final | None = None,
    ) -> Outcome:
        assert self._replica is not None
        if isinstance(self._replica, EarlyReplica):
            self._replica.final = final
        return self._replica.compute(model, task, proceed)

    def _early(self, task: Task, spans: Sequence[Span]) -> Final | None:
        """Return what pushes parts of a vector before it is complete, or None if none can be."""
        sending = self._sending
        if sending is None or not sending.wanted or self._uplink is not None or task.work.parts:
            return None

        def push(vector: Array, part: Span) -> None:
            for index in reversed(range(len(spans))):  # servers take the last ones first
                start, stop = spans[index]
                low, high = max(part[0], start), min(part[1], stop)
                if low < high:
                    sending.send(index, vector[low:high], (low - start, stop - start))

        return push

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def holds(self) -> list[int]:
        """Return the versions of the model that this worker has from its last tasks."""
        return list(self._models)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def held(self, version: int, span: Span) -> Array:
        """Return a slice of a held model, for a server to start from."""
        if version not in self._models:
            raise Gone(f"version {version} of the model")
        spans, slices = self._models[version]
        pieces = [
            piece[max(span[0] - start, 0) : max(span[1] - start, 0)]
            for (start, _), piece in zip(spans, slices, strict=True)
        ]
        return np.concatenate(pieces)

    @ray.method(concurrency_group="report")  # type: ignore[untyped-decorator]
    def sample(self, size: int) -> tuple[None, Array]:
        """Return an object of `size` bytes, which Ray puts into the store of this node."""
        return None, np.zeros(size, np.uint8)

    @ray.method(concurrency_group="report")  # type: ignore[untyped-decorator]
    def fetch(self, refs: Sequence[Any], timeout: float) -> list[float]:
        """Fetch objects, and return the seconds that each took, as `timed` does."""
        return timed(refs, timeout, self._clock)

    @ray.method(concurrency_group="notices")  # type: ignore[untyped-decorator]
    def notice(self, seconds: float) -> Notice | None:
        """Wait for the notice that this process or its machine will be taken away."""
        return None if self._reclaimed is None else self._reclaimed.wait(seconds)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def abandon(self, token: bytes) -> None:
        """End a task before its next piece of work."""
        self._abandoned = Token.unpack(token)
        if self._incoming is not None and self._computing == self._abandoned:
            self._incoming.give_up()

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def ask_anew(self, token: bytes) -> None:
        """Stop to wait for the model of a task, since a slice of it has moved."""
        self._asks_anew = Token.unpack(token)
        incoming = self._incoming
        if incoming is not None and self._computing == self._asks_anew:
            self._asks_anew = None
            incoming.lose()


def _reply(
    token: Token,
    outcome: Outcome,
    seconds: float,
    sent: int | None = None,
    norm: float | None = None,
) -> Reply:
    return tuple(token), outcome.vector, outcome.samples, seconds, dict(outcome.stats), sent, norm


def hide_gpus(reserved: float | None) -> None:
    """Hide all GPUs if Ray reserves none for this process, since Ray itself shows all of them."""
    if reserved == 0:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
