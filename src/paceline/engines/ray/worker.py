"""A worker: an actor that computes one task at a time and can be told to give it up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import ray

from paceline.codes.blocks import covering
from paceline.core.protocol import Coefficients, Stats, Task, TaskId, Work, WorkerId
from paceline.data.partition.base import Partition
from paceline.engines.door import norm_of
from paceline.engines.ray.carrier import Carriers, GivenUp, Incoming, ask
from paceline.learners.base import Array, Layout, Learner, Outcome, Replica, Span

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec
    from paceline.codecs.uplink import Uplink


class Token(NamedTuple):
    """Names one attempt at one task, for ever: a result is used under its own token only."""

    run: str
    worker: WorkerId
    incarnation: int
    task: TaskId


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker lives."""

    node: str
    pid: int
    started: str  # tells the process from a later one with the same pid


class Answer(NamedTuple):
    """What a worker returns: its vector lies in the object store, outside of the pickle.

    Without samples (None) it could not get the model, and has not begun.
    """

    token: Token
    vector: Array | None
    samples: int | None
    seconds: float
    stats: Stats
    sent: int | None = None  # bytes, if it is encoded
    norm: float | None = None  # of a vector that goes elsewhere


# Calls carry plain tuples, which Ray packs ten times as fast as it pickles dataclasses: 0.06
# against 0.6 ms a call, as much as all the rest of it.
Order: TypeAlias = tuple[Any, ...]
Reply: TypeAlias = tuple[Any, ...]


def pack(token: Token, task: Task) -> Order:
    """Return a task for its way to a worker."""
    work = task.work
    parts = None if work.parts is None else tuple(work.parts.items())
    tiles = None if work.tiles is None else tuple(work.tiles.items())
    return (
        *(tuple(token), task.version, task.since, task.samples, task.draw, task.attempt),
        *(parts, work.cut, work.samples, work.steps, work.budget, work.shares, work.tag),
        *(tiles, task.draws),
    )


def unpack(order: Order) -> tuple[Token, Task]:
    """Invert `pack`; lists are what Ray makes of tuples."""
    name, version, since, samples, draw, attempt, parts, cut, *rest = order
    asked, steps, budget, shares, tag, tiles, draws = rest
    token = Token(*name)
    work = Work(
        None if parts is None else {part: factors_of(factors) for part, factors in parts},
        cut,
        asked,
        steps,
        budget,
        shares,
        tuple(tag) if isinstance(tag, list) else tag,
        None if tiles is None else dict(tiles),
    )
    of_tiles = tuple(draws)
    task = Task(token.task, token.worker, work, version, since, samples, draw, attempt, of_tiles)
    return token, task


def factors_of(received: Any) -> Coefficients:
    """Return a factor or several as they were sent; lists are what Ray makes of tuples."""
    return tuple(received) if isinstance(received, list) else received


def read(reply: Reply) -> Answer:
    """Return a worker's reply as an answer."""
    name, *rest = reply
    return Answer(Token(*name), *rest)


Given: TypeAlias = "tuple[Learner, Partition | None, Codec | None, Codec | None, Layout]"
"""What a worker is set up with: the learner, the data's tiles, the codecs up and down, and how the
model is laid out."""


class Gone(Exception):
    """What was asked for is not here any more."""


class Worker:
    """Wrapped by `ray.remote` where it is created, so this stays a plain class."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        place: Callable[[], Place] | None = None,
    ) -> None:
        self._clock, self._place = clock, place or here
        self._replica: Replica | None = None
        self._learner: Learner | None = None
        self._uplink: Uplink | None = None
        self._down: Codec | None = None
        self._copy: Array | None = None  # of the model, if only changes of it are sent
        self._trained = 0
        self._carriers: Carriers = {}
        self._computing: Token | None = None
        self._incoming: Incoming | None = None  # of the task that is being computed
        # The last two models, each by version: what a server starts from whose node is lost. Two,
        # since its optimizer's state may have been copied up to the one before only.
        self._models: dict[int, tuple[Sequence[Span], Sequence[Array]]] = {}
        self._abandoned: Token | None = None

    def set_up(self, given: Given, seed: int, carriers: Carriers) -> Place:
        """Build the replica of a learner on data in tiles; an earlier one is forgotten."""
        learner, tiles, codec, self._down, layout = given
        self._trained = layout.trained
        self._copy = None
        self._carriers = carriers
        self._models.clear()
        self._incoming = self._uplink = None
        self._replica = None  # the old one's memory first
        self._replica, self._learner = learner.replica(seed, tiles), learner
        if codec is not None:
            from paceline.codecs.uplink import Uplink

            self._uplink = Uplink(codec, self._trained, layout.tensors)
        return self._place()

    def compute(
        self,
        order: Order,
        model: Array | None,
        unused: Sequence[TaskId] = (),
        changes: Sequence[Array] | None = None,
    ) -> Reply:
        """Do a task, and return its vector with the reply.

        unused: earlier tasks whose results no step has used.
        changes: of the model since the last task, if it does not come whole.
        """
        token, task = unpack(order)
        self._refund(unused)
        model = self._moved(model, changes)
        begin = self._clock()
        until = begin + task.work.budget

        def proceed(done: int) -> bool:
            return self._abandoned != token and self._clock() < until

        outcome = self._compute([model], task, proceed)
        if self._uplink is not None and self._abandoned == token:
            outcome = replace(outcome, vector=None)  # nobody waits for it
        if self._uplink is None or outcome.vector is None:
            return _reply(token, outcome, self._clock() - begin)
        (packed,) = self._send(outcome.vector, task, [(0, outcome.vector.size)], model)
        outcome = replace(outcome, vector=packed)
        return _reply(token, outcome, self._clock() - begin, packed.nbytes)

    def compute_slices(
        self,
        order: Order,
        model: Sequence[Any],
        nodes: Sequence[str | None],
        cut: Sequence[Span],
        spans: Sequence[Span],
        hold: bool,
        unused: Sequence[TaskId] = (),
    ) -> tuple[Any, ...]:
        """Do a task on a model that may still be on its way, cut one way; return the reply and,
        each an object of its own, the slices of its vector, cut another way.

        hold: on to the model, in case the node of a server is lost.
        """
        token, task = unpack(order)
        self._refund(unused)
        begin = self._clock()
        self._computing = token
        incoming = self._incoming = Incoming(ask(model, nodes, self._carriers), clock=self._clock)
        if self._abandoned == token:
            incoming.give_up()

        def proceed(done: int) -> bool:
            until = begin + incoming.waited + task.work.budget
            return self._abandoned != token and self._clock() < until

        try:
            outcome = self._compute(incoming, task, proceed)
        except GivenUp:
            return _reply(token, Outcome(None, 0), 0.0), *(None for _ in spans)
        except ray.exceptions.RayError:
            self._carriers = {}  # it may be theirs to blame; the stores are as good
            lost: Reply = (tuple(token), None, None, 0.0, {}, None, None)
            return lost, *(None for _ in spans)
        finally:
            self._incoming = None
        if hold:
            self._models[task.version] = cut, incoming.slices
            for old in sorted(self._models)[:-2]:
                del self._models[old]
        seconds = self._clock() - begin - incoming.waited
        vector = outcome.vector
        needed = [covering(span, task.work.messages) for span in spans]
        told = Outcome(None, outcome.samples, outcome.stats)
        if self._uplink is not None and vector is not None:
            packed = self._send(vector, task, needed)
            sent = sum(each.nbytes for each in packed)
            return _reply(token, told, seconds, sent, norm_of(vector)), *packed
        if vector is None:
            return _reply(token, told, seconds), *(None for _ in spans)
        slices = (vector[start:stop] for start, stop in needed)
        return _reply(token, told, seconds, None, norm_of(vector)), *slices

    def _moved(self, model: Array | None, changes: Sequence[Array] | None) -> Array:
        """Return the model: as it came, or as changes make it of the last."""
        if changes is not None:
            from paceline.codecs.downlink import moved

            assert self._copy is not None and self._down is not None
            model = moved(self._copy, changes, self._down, self._trained)
        assert model is not None
        if self._down is not None:
            self._copy = model
        return model

    def _send(
        self, vector: Array, task: Task, spans: Sequence[Span], model: Array | None = None
    ) -> Sequence[Array]:
        assert self._uplink is not None and self._learner is not None
        return self._uplink.send(vector, task.id, self._learner.rate(task.version), spans, model)

    def _refund(self, tasks: Sequence[TaskId]) -> None:
        if self._uplink is not None:
            self._uplink.refund(tasks)

    def _compute(
        self, model: Iterable[Array], task: Task, proceed: Callable[[int], bool]
    ) -> Outcome:
        assert self._replica is not None
        return self._replica.compute(model, task, proceed)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def holds(self) -> list[int]:
        """Return the versions of the model that this worker has from its last tasks."""
        return list(self._models)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def held(self, version: int, span: Span) -> Array:
        """Return a slice of such a model, for a server to start from."""
        if version not in self._models:
            raise Gone(f"version {version} of the model")
        spans, slices = self._models[version]
        pieces = [
            piece[max(span[0] - start, 0) : max(span[1] - start, 0)]
            for (start, _), piece in zip(spans, slices, strict=True)
        ]
        return np.concatenate(pieces)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def abandon(self, token: tuple[Any, ...]) -> None:
        """Make a task end at the next piece of work."""
        self._abandoned = Token(*token)
        if self._incoming is not None and self._computing == self._abandoned:
            self._incoming.give_up()


def _reply(
    token: Token,
    outcome: Outcome,
    seconds: float,
    sent: int | None = None,
    norm: float | None = None,
) -> Reply:
    return tuple(token), outcome.vector, outcome.samples, seconds, dict(outcome.stats), sent, norm


def here() -> Place:
    """Return where this process lives."""
    pid = os.getpid()
    return Place(ray.get_runtime_context().get_node_id(), pid, start_time(pid))


def start_time(pid: int) -> str:
    """Return when a process of this host began, as Linux counts it; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def actor_class(kind: type, **options: Any) -> Any:
    """Return a worker or a server as an actor class. Restarts and retries are ours: Ray's would
    apply a result twice or hide a fault."""
    return ray.remote(
        concurrency_groups={"control": 1, "report": 1},
        max_restarts=0,
        max_task_retries=0,
        **options,
    )(kind)
