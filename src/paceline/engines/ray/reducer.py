"""The one seam through which results reach the model.

The engine knows results by task id only; what holds the vectors and adds them up stands behind
`Reducer`. Here it is the driver process; in `sharded.py` it is server actors.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import ray

from paceline.codes.blocks import decoded
from paceline.core.protocol import Coefficients, Stat, Task, TaskId, Want, WorkerId
from paceline.engines.ray.pool import Member
from paceline.engines.ray.worker import Answer, Token, pack
from paceline.learners.base import Array, Server, mean_loss

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec
    from paceline.codecs.downlink import Downlink
    from paceline.codecs.uplink import Receiver

INLINE_BYTES = 100 * 1024
"""Ray sends arguments up to this size inside the call, and larger ones by the object store."""


Stepped: TypeAlias = Callable[[dict[Stat, float]], None]


class Model(Protocol):
    """One version of the model, for tasks to be sent with."""

    @property
    def known(self) -> bool:
        """Whether it can be named to a worker, who may still have to wait for it."""

    @property
    def whole(self) -> bool:
        """Whether the step that makes it has been taken everywhere."""

    @property
    def gone(self) -> bool:
        """Whether a part of it is lost for good."""


class Reducer(Protocol):
    """Holds results until a step uses them, each under the token it was expected by."""

    def dispatch(self, member: Member, token: Token, task: Task, model: Any) -> Any:
        """Send a task to its worker; return the reference of the reply, expected by its token."""

    def accept(self, answer: Answer) -> bool:
        """Take a result in; False if nobody waits for it: it is stale or came before.

        Raises `Refused` if it cannot be read.
        """

    def vector(self, task: TaskId) -> Array | None:
        """Return the vector of a result that was taken in, if it is here."""

    def drop(self, task: TaskId, lost: bool = False) -> None:
        """Forget a task and its result; lost: with the worker that was to compute it."""

    def step(self, weights: Mapping[TaskId, Coefficients], keep: bool) -> None:
        """Take a step along held results. It is reported when the whole model has taken it."""

    def publish(self) -> Model:
        """Return the model after all steps so far."""

    def miss_model(self) -> None:
        """See to what is lost of the model: a worker could not get it."""

    def settle(self) -> None:
        """Bring the job's own server to the newest version, wherever the model is kept."""


@dataclass(frozen=True)
class Payload:
    """The whole model as a call takes it: an array, or the reference of one."""

    content: Any
    version: int = 0
    known = whole = True
    gone = False


class Refused(Exception):
    """A result that cannot be read; the text says why."""


class DriverReducer:
    """Reduces in the driver process: right for models that fit one machine's network card."""

    def __init__(
        self,
        server: Server,
        wants: frozenset[Want],
        stepped: Stepped,
        codec: Codec | None = None,
        down: Codec | None = None,
        version: int = 0,
    ) -> None:
        self._server, self._wants, self._stepped = server, wants, stepped
        self._codec, self._version = codec, version
        self._receivers: dict[WorkerId, tuple[int, Receiver]] = {}  # each of one incarnation
        self._unanswered: dict[WorkerId, Token] = {}  # what each was sent last, wanted or not
        self._downlink: Downlink | None = None
        if down is not None:
            from paceline.codecs.downlink import Downlink

            self._downlink = Downlink(down, server.vector, server.layout.trained)
        self._expected: dict[TaskId, Token] = {}
        self._held: dict[TaskId, Answer] = {}
        self._published: Payload | None = None

    def dispatch(self, member: Member, token: Token, task: Task, model: Payload) -> Any:
        self._expected[token.task] = self._unanswered[token.worker] = token
        unused, member.unused = member.unused, []
        order = pack(token, task)
        if self._downlink is None:
            return member.actor.compute.remote(order, model.content, unused)
        changes = self._downlink.since(member.known, model.version)
        member.known = model.version
        if changes is None:
            member.got = None
            return member.actor.compute.remote(order, model.content, unused)
        member.got = sum(each.nbytes for each in changes)
        return member.actor.compute.remote(order, None, unused, changes)

    def accept(self, answer: Answer) -> bool:
        token = answer.token
        expected = self._expected.get(token.task) == token
        first = self._unanswered.get(token.worker) == token  # and the worker is not a former one
        if first:
            del self._unanswered[token.worker]
        if self._codec is not None and answer.vector is not None and (expected or first):
            receiver = self._receiver(self._codec, token)
            if expected or receiver.remembers:  # it needs what nobody waits for, too
                try:
                    answer = answer._replace(vector=receiver.read(answer.vector))
                except (ValueError, TypeError, IndexError, RuntimeError) as error:
                    raise Refused(f"its message cannot be read ({error})") from error
        if not expected:
            return False
        del self._expected[token.task]
        self._held[token.task] = answer
        if self._codec is not None:
            return True
        if answer.vector is not None and answer.vector.nbytes > INLINE_BYTES:
            # Touch every page of the object store's memory now, while others still compute: the
            # first access to it is what takes most of the time of a step.
            answer.vector.view(np.uint8)[:: mmap.PAGESIZE].max()
        return True

    def _receiver(self, codec: Codec, token: Token) -> Receiver:
        """Return what reads a worker's messages; one that was started again begins anew."""
        from paceline.codecs.uplink import Receiver

        incarnation, receiver = self._receivers.get(token.worker, (None, None))
        if receiver is None or incarnation != token.incarnation:
            layout = self._server.layout
            receiver = Receiver(codec, layout.size, layout.trained, layout.tensors)
            self._receivers[token.worker] = token.incarnation, receiver
        return receiver

    def vector(self, task: TaskId) -> Array | None:
        return self._held[task].vector

    def drop(self, task: TaskId, lost: bool = False) -> None:
        self._expected.pop(task, None)
        self._held.pop(task, None)

    def step(self, weights: Mapping[TaskId, Coefficients], keep: bool) -> None:
        answers = [self._held[task] if keep else self._held.pop(task) for task in weights]
        vectors: list[Array] = [a.vector for a in answers if a.vector is not None]
        factors = list(weights.values())
        stats = mean_loss(factors, [answer.stats.get("loss") for answer in answers])
        self._published = None
        self._version += 1
        plain, sums = decoded(factors, vectors, (0, self._server.layout.size))
        self._stepped(stats | self._server.step(plain, sums, self._wants))

    def publish(self) -> Payload:
        if self._published is None:
            vector = self._server.vector
            if self._downlink is not None:
                vector = self._downlink.publish(self._version, vector)
            small = vector.nbytes <= INLINE_BYTES
            self._published = Payload(vector.copy() if small else ray.put(vector), self._version)
        return self._published

    def miss_model(self) -> None:
        pass  # it goes with the call

    def settle(self) -> None:
        pass
