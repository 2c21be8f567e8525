"""The reducer of one process: holds results, decodes and weights them, steps, publishes the model.

The simulator and the driver on Ray share it. Model servers take their steps in
`engines/ray/servers/` instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from paceline.codes.blocks import decoded
from paceline.core.averages import by_count, mean_loss
from paceline.core.protocol import Coefficients, Stat, Stats, TaskId, Want, WorkerId
from paceline.learners.base import Array, Server
from paceline.learners.robust import RobustServer

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Bytes, Codec
    from paceline.codecs.downlink import Downlink, Values
    from paceline.codecs.uplink import Receiver


Numbers: TypeAlias = dict[TaskId, float | None]


class Refused(Exception):
    """A result that cannot be read; the text says why."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A result until a step uses it."""

    vector: Array | None
    loss: float | None
    count: float | None


class Results:
    """The results of a run until a step uses them, and the versions of the model that they make.

    codec: decodes results; model_codec: encodes the model.
    """

    def __init__(
        self,
        server: Server,
        wants: frozenset[Want],
        codec: Codec | None = None,
        model_codec: Codec | None = None,
        version: int = 0,
    ) -> None:
        self._server, self._wants, self._codec = server, wants, codec
        self.version = version
        self._held: dict[TaskId, _Held] = {}
        self._receivers: dict[WorkerId, Receiver] = {}
        self._model_codec = model_codec
        self._downlink: Downlink | Values | None = None
        if model_codec is not None:
            from paceline.codecs.downlink import downlink

            self._downlink = downlink(model_codec, server.vector, server.layout.trained)

    # --- results ---------------------------------------------------------------------------------

    def read(self, worker: WorkerId, packed: Bytes, wanted: bool = True) -> Array | None:
        """Decode a worker's message; skip an unwanted one unless later messages build on it."""
        receiver = self._receiver(worker)
        if not wanted and not receiver.remembers:
            return None
        try:
            return receiver.read(packed)
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            raise Refused(f"its message cannot be read ({error})") from error

    def _receiver(self, worker: WorkerId) -> Receiver:
        """Return the receiver of a worker's messages."""
        if worker not in self._receivers:
            from paceline.codecs.uplink import Receiver

            assert self._codec is not None  # there are messages
            layout = self._server.layout
            made = Receiver(self._codec, layout.size, layout.trained, layout.tensors)
            self._receivers[worker] = made
        return self._receivers[worker]

    def forget(self, worker: WorkerId) -> None:
        """Forget the messages of a lost worker: its replacement begins anew under its name."""
        self._receivers.pop(worker, None)

    def hold(self, task: TaskId, vector: Array | None, stats: Stats) -> None:
        """Keep a result until a step uses it."""
        self._held[task] = _Held(vector, stats.get("loss"), stats.get("count"))

    def vector(self, task: TaskId) -> Array | None:
        """Return the vector of a held result."""
        return self._held[task].vector

    def drop(self, task: TaskId) -> None:
        """Forget a result, if it is held."""
        self._held.pop(task, None)

    def step(
        self, weights: Mapping[TaskId, Coefficients], keep: bool, lr_scale: float = 1.0
    ) -> dict[Stat, float]:
        """Take a step along held results; return its statistics."""
        if missing := [task for task in weights if task not in self._held]:
            raise RuntimeError(
                f"results of tasks {missing} are missing at a step; this is a bug in the engine"
            )
        results = [self._held[task] if keep else self._held.pop(task) for task in weights]
        given, counts = list(weights.values()), [result.count for result in results]
        if isinstance(self._server, RobustServer) and any(count is not None for count in counts):
            raise ValueError(
                "the loss returns a count, which lets a wrong worker set its own weight, and "
                "robust= limits weights; return the mean loss alone, or leave robust= out"
            )
        loss = mean_loss(given, [result.loss for result in results], counts)
        vectors = [result.vector for result in results if result.vector is not None]
        factors = by_count(given, counts)
        plain, sums = decoded(factors, vectors, (0, self._server.layout.size))
        self.version += 1
        stats: dict[Stat, float] = {} if loss is None else {"loss": loss}
        return stats | self._server.step(plain, sums, self._wants, lr_scale)

    # --- the model -------------------------------------------------------------------------------

    def publish(self) -> Array:
        """Return the newest model as it is sent whole: as it is, as its message, or as the public
        copy."""
        if self._downlink is None:
            return self._server.vector
        return self._downlink.publish(self.version, self._server.vector)

    def opened(self, published: Array) -> Array:
        """Return a published model as workers compute on it."""
        if self._model_codec is None:
            return published
        from paceline.codecs.downlink import opened

        layout = self._server.layout
        return opened(published, self._model_codec, (0, layout.size), layout.trained)

    @property
    def whole_bytes(self) -> int | None:
        """The bytes of a model that is sent whole, if they differ from those of the values."""
        return None if self._downlink is None else self._downlink.whole_bytes

    def changes(self, known: int | None, version: int) -> list[Bytes] | None:
        """Return the messages from a known version to another; None: send the whole model."""
        return None if self._downlink is None else self._downlink.since(known, version)

    # --- saving ----------------------------------------------------------------------------------

    def save(self) -> tuple[dict[str, Array], Numbers, Numbers]:
        """Return the arrays of held results and of the public copy, and the results' losses and
        counts."""
        arrays = {f"result.{i}": h.vector for i, h in self._held.items() if h.vector is not None}
        if self._downlink is not None:
            arrays |= self._downlink.state_dict()
        losses = {id: held.loss for id, held in self._held.items()}
        return arrays, losses, {id: held.count for id, held in self._held.items()}

    def load(
        self,
        arrays: Mapping[str, Array],
        losses: Mapping[TaskId, float | None],
        counts: Mapping[TaskId, float | None],
        memories: Mapping[WorkerId, Mapping[str, Array]],
    ) -> None:
        """Restore a saved state; memories: the states of the workers' uplinks."""
        for id, loss in losses.items():
            vector = arrays.get(f"result.{id}")
            kept = None if vector is None else np.array(vector)
            self._held[id] = _Held(kept, loss, counts.get(id))
        if self._downlink is not None:
            self._downlink.load_state_dict(arrays)
        for worker, memory in memories.items():
            self._receiver(worker).load_state_dict(dict[str, Any](memory))
