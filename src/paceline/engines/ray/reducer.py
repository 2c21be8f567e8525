"""The one interface through which results reach the model.

The engine knows results by task id only. A `Reducer` holds the vectors and adds them up: here by
`Results` in the driver process, in `servers/` by server actors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import ray

from paceline.core.protocol import Coefficients, Stat, Task, TaskId, WorkerId
from paceline.engines.base import Writer
from paceline.engines.ray.pool import Member
from paceline.engines.ray.worker import Answer, Token, pack
from paceline.engines.results import Results
from paceline.learners.base import Array

INLINE_BYTES = 100 * 1024
"""Ray sends arguments up to this size inside the call, and larger ones by the object store."""


Stepped: TypeAlias = Callable[[dict[Stat, float]], None]


class Model(Protocol):
    """One version of the model, to send with tasks."""

    @property
    def known(self) -> bool:
        """Whether tasks can refer to it; a worker may still have to wait for its content."""

    @property
    def whole(self) -> bool:
        """Whether the step that makes it has been taken everywhere."""

    @property
    def gone(self) -> bool:
        """Whether a part of it is lost for good."""


class Reducer(Protocol):
    """Holds each result, under the token of its task, until a step uses it."""

    def dispatch(
        self, member: Member, token: Token, task: Task, model: Any, again: bool = False
    ) -> Any:
        """Send a task to its worker, and expect its token; return the reference of the reply.

        again: whether a worker could not get the model before.
        """

    def accept(self, answer: Answer) -> bool:
        """Hold a result; return False if it is not expected: it is stale or a duplicate.

        Raises `Refused` if it cannot be read.
        """

    def vector(self, task: TaskId) -> Array | None:
        """Return the vector of an accepted result, if it is in this process."""

    def drop(self, task: TaskId, lost: bool = False) -> None:
        """Forget a task and its result; lost: its worker was lost."""

    def step(
        self, weights: Mapping[TaskId, Coefficients], keep: bool, lr_scale: float = 1.0
    ) -> None:
        """Take a step along held results. It is reported when the whole model has taken it."""

    def publish(self) -> Model:
        """Return the model after all steps so far."""

    def recover_model(self) -> None:
        """Recover lost parts of the model, after a worker could not get it."""

    def leave(self, nodes: Collection[str]) -> None:
        """Move the model away from nodes that will be taken away."""

    def has_results_in(self, member: Member) -> bool:
        """Return whether results that are needed would be lost with the process of a worker."""

    def settle(self) -> None:
        """Bring the job's own server to the newest version, wherever the model is kept."""

    def writer(self, folder: Path) -> Writer | None:
        """Return how servers write the model into a folder; None if the driver has to."""


@dataclass(frozen=True)
class Payload:
    """The whole model as the argument of a call: an array, or a reference to it."""

    content: Any
    version: int = 0
    known = whole = True
    gone = False


class DriverReducer:
    """Reduces in the driver process: right for models that fit one machine's network card."""

    def __init__(self, results: Results, stepped: Stepped, encoded: bool = False) -> None:
        """encoded: results arrive as messages of a codec."""
        self._results, self._stepped, self._encoded = results, stepped, encoded
        self._incarnations: dict[WorkerId, int] = {}  # the process whose messages are read
        self._unanswered: dict[WorkerId, Token] = {}  # the last task of each, cancelled or not
        self._expected: dict[TaskId, Token] = {}
        self._published: Payload | None = None

    def dispatch(
        self, member: Member, token: Token, task: Task, model: Payload, again: bool = False
    ) -> Any:
        self._expected[token.task] = self._unanswered[token.worker] = token
        order = pack(token, task, member.refunds)
        member.refunds = []
        changes = self._results.changes(member.model_version, model.version)
        member.model_version = model.version
        if changes is None:
            member.model_bytes = self._results.whole_bytes
            return member.actor.compute.remote(order, model.content)
        member.model_bytes = sum(each.nbytes for each in changes)
        return member.actor.compute.remote(order, None, changes)

    def accept(self, answer: Answer) -> bool:
        token, vector = answer.token, answer.vector
        expected = self._expected.get(token.task) == token
        first = self._unanswered.get(token.worker) == token  # and the process is the current one
        if first:
            del self._unanswered[token.worker]
        if self._encoded and vector is not None and (expected or first):
            if self._incarnations.get(token.worker) != token.incarnation:  # a new process
                self._results.forget(token.worker)
                self._incarnations[token.worker] = token.incarnation
            vector = self._results.read(token.worker, vector, wanted=expected)
        if not expected:
            return False
        del self._expected[token.task]
        self._results.hold(token.task, vector, answer.stats)
        return True

    def vector(self, task: TaskId) -> Array | None:
        return self._results.vector(task)

    def drop(self, task: TaskId, lost: bool = False) -> None:
        self._expected.pop(task, None)
        self._results.drop(task)

    def step(
        self, weights: Mapping[TaskId, Coefficients], keep: bool, lr_scale: float = 1.0
    ) -> None:
        self._published = None
        self._stepped(self._results.step(weights, keep, lr_scale))

    def publish(self) -> Payload:
        if self._published is None:
            vector, version = self._results.publish(), self._results.version
            small = vector.nbytes <= INLINE_BYTES
            self._published = Payload(vector.copy() if small else ray.put(vector), version)
        return self._published

    def recover_model(self) -> None:
        pass  # the model goes with each call

    def leave(self, nodes: Collection[str]) -> None:
        pass  # it is in this process

    def has_results_in(self, member: Member) -> bool:
        return False  # they come with the reply

    def settle(self) -> None:
        pass

    def writer(self, folder: Path) -> None:
        return None
