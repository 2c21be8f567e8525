"""The one seam through which results reach the model.

The engine knows results by task id only; what holds the vectors and adds them up stands behind
`Reducer`. Here it is the driver process; sharded server actors can take its place.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import ray

from paceline.core.protocol import Stat, TaskId
from paceline.engines.ray.worker import Answer, Token
from paceline.learners.base import Array, Server, mean_loss

INLINE_BYTES = 100 * 1024
"""Ray sends arguments up to this size inside the call, and larger ones by the object store."""


class Reducer(Protocol):
    """Holds results until a step uses them, each under the token it was expected by."""

    def expect(self, token: Token) -> None: ...
    def accept(self, answer: Answer) -> bool:
        """Take a result in; False if nobody waits for it: it is stale or came before."""

    def drop(self, task: TaskId) -> None: ...
    def step(
        self, weights: Mapping[TaskId, float], keep: bool, wants: frozenset[Stat]
    ) -> dict[Stat, float]: ...
    def publish(self) -> Any:
        """Return the current model as a worker's call takes it."""


class DriverReducer:
    """Reduces in the driver process: right for models that fit one machine's network card."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._expected: dict[TaskId, Token] = {}
        self._held: dict[TaskId, Answer] = {}
        self._published: Any = None

    def expect(self, token: Token) -> None:
        self._expected[token.task] = token

    def accept(self, answer: Answer) -> bool:
        if self._expected.get(answer.token.task) != answer.token:
            return False
        del self._expected[answer.token.task]
        self._held[answer.token.task] = answer
        if answer.vector is not None and answer.vector.nbytes > INLINE_BYTES:
            # Touch every page of the object store's memory now, while others still compute: the
            # first access to it is what takes most of the time of a step.
            answer.vector.view(np.uint8)[:: mmap.PAGESIZE].max()
        return True

    def drop(self, task: TaskId) -> None:
        self._expected.pop(task, None)
        self._held.pop(task, None)

    def step(
        self, weights: Mapping[TaskId, float], keep: bool, wants: frozenset[Stat]
    ) -> dict[Stat, float]:
        answers = [self._held[task] if keep else self._held.pop(task) for task in weights]
        vectors: list[Array] = [a.vector for a in answers if a.vector is not None]
        factors = list(weights.values())
        stats = mean_loss(factors, [answer.stats.get("loss") for answer in answers])
        self._published = None
        return stats | self._server.step(factors, vectors, wants)

    def publish(self) -> Any:
        if self._published is None:
            vector = self._server.vector
            small = vector.nbytes <= INLINE_BYTES
            self._published = vector.copy() if small else ray.put(vector)
        return self._published
