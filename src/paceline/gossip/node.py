"""One node of decentralized training: its model, the copies of its peers, and its messages.

Every node keeps its public copy x̂, the sum of its messages. A message about some tensors holds
C(x - x̂), or x itself without a codec, and x̂ moves by the decoded message. So the next difference
contains all that a message left out, and a node needs no other memory. Buffers that are not
trained (BatchNorm's statistics) go with every message, as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import sqrt
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.core.averages import by_count, mean_loss
from paceline.core.logs import logger_of
from paceline.core.protocol import (
    Figure,
    Peer,
    Stat,
    Step,
    Task,
    TaskId,
    Want,
    WorkerId,
    magnitude,
)
from paceline.engines.checks import NOT_FINITE, ResultCheck, norm_of
from paceline.gossip.mixing import mixed
from paceline.gossip.validation import MessageCheck
from paceline.learners.base import Array, Layout, Learner, Outcome, Proceed, Saved

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Bytes, Codec
    from paceline.data.partition.base import Partition
    from paceline.gossip.messages import Update


logger = logger_of(__name__)

_LIFE = 1 << 32
"""The first message of a node that died d times has the number d * _LIFE. So a late message of an
earlier life has too low a number."""
_AGAIN = 2  # rejected results in a row; the model itself causes the next one


class RejectedUpdate(RuntimeError):
    """A message is invalid or out of order; its sender must send the whole copy."""


def tensors_of(layout: Layout) -> tuple[int, ...]:
    """Return the sizes of the tensors that messages may hold one by one."""
    return layout.tensors or (layout.trained,)


class Node:
    """The model of one node. Messages may arrive in one thread while another computes."""

    def __init__(
        self,
        peer: Peer,
        learner: Learner,
        seed: int,
        tiles: Partition | None,
        codec: Codec | None,
        wants: frozenset[Want],
    ) -> None:
        if codec is not None:
            from paceline.codecs.downlink import check_memoryless

            check_memoryless(codec, "codec")
        self._learner, self._codec = learner, codec
        self.server = learner.server()
        self._replica = learner.replica(seed, tiles)
        self._figures: tuple[Figure, ...] = tuple(
            sorted(want[1] for want in wants if isinstance(want, tuple) and want[0] == "each")
        )
        self._wants = frozenset(want for want in wants if not (want == "rate" or want[0] == "each"))
        layout = self.server.layout
        self._trained = layout.trained
        self._sizes = tensors_of(layout)
        ends = [0, *accumulate(self._sizes)]
        self._spans = [slice(start, stop) for start, stop in pairwise(ends)]
        self._name, self.version = peer.name, 0
        self._start = self.server.vector.copy()  # the first value of all copies
        self._copies = dict.fromkeys((peer.name, *peer.neighbors), self._start)
        self._number = 0  # of messages that have moved the public copy
        # For each neighbor: the number of its last message, and the version of its model.
        self._heard = dict.fromkeys(peer.neighbors, (0, 0))
        self._updated: set[WorkerId] = set()  # peers whose copies moved since the last mix
        self._gone: set[WorkerId] = set()
        self._deaths: dict[WorkerId, int] = {}  # of peers, and its own; see `_LIFE`
        self._result_check = ResultCheck(self.server.vector.size, self.server.vector.dtype)
        self._message_check = MessageCheck()
        self._refused = 0  # rejected results in a row
        self._results: dict[TaskId, Outcome] = {}
        self._lock = Lock()

    # --- computing -------------------------------------------------------------------------------

    def compute(self, task: Task, proceed: Proceed) -> Outcome:
        """Compute a task on the current model, and hold its result.

        A result that is not finite, or far too large, counts as one of no samples. Several in a
        row come from the model itself: then the node uses the next one, and the run ends.
        """
        outcome = self._replica.compute([self.server.vector], task, proceed)
        fault = self._result_check.fault(task, outcome.vector, outcome.samples, outcome.stats)
        if fault is None:
            self._refused = 0
        elif self._refused < _AGAIN:
            self._refused += 1
            logger.warning("node %s rejects a result: %s", self._name, fault)
            outcome = Outcome(None, 0)
        else:
            self._result_check.let_in(outcome.vector)
        vector = None if outcome.vector is None else np.array(outcome.vector)
        self._results[task.id] = Outcome(vector, outcome.samples, outcome.stats)
        return outcome

    def discard(self, task: TaskId) -> None:
        self._results.pop(task, None)

    def step(self, step: Step) -> tuple[dict[Stat, float], dict[Figure, tuple[float, ...]]]:
        """Mix, then take a step of the optimizer; return the statistics of both.

        The optimizer gets the mean of the results, and the sum of their weights multiplies its
        change of the model. So a weight also counts for Adam and for clipped gradients, which
        ignore the length of a gradient.
        """
        results = [self._results.pop(id) for id in step.weights]
        given, counts = list(step.weights.values()), [r.stats.get("count") for r in results]
        loss = mean_loss(given, [result.stats.get("loss") for result in results], counts)
        stats: dict[Stat, float] = {} if loss is None else {"loss": loss}
        weights = [float(w) for w in by_count(given, counts) if not isinstance(w, tuple)]
        with self._lock:
            vector = self.server.vector
            before = vector.copy() if "move" in self._figures else vector
            if step.mix:
                self._mix(step.mix)
            if weights:
                vectors = [result.vector for result in results if result.vector is not None]
                stats |= self._optimize(sum(map(magnitude, given)), weights, vectors)
            self.version += 1
            figures = {name: self._figure(name, before) for name in self._figures}
        return stats | {"rate": self._learner.rate(self.version)}, figures

    def _optimize(
        self, factor: float, weights: Sequence[float], vectors: Sequence[Array]
    ) -> dict[Stat, float]:
        """Take a step of the optimizer, and multiply its change of trained values by a factor."""
        if factor == 1.0:
            return self.server.step(weights, vectors, self._wants)
        trained = self.server.vector[: self._trained]
        before = trained.copy()
        stats = self.server.step([weight / factor for weight in weights], vectors, self._wants)
        trained += trained.dtype.type(factor - 1.0) * (trained - before)
        return stats

    def _mix(self, mix: Mapping[WorkerId, float]) -> None:
        """Mix trained tensors by the given factors; average the rest with updated copies.

        Differences can make a variance negative, and averaging with stale copies pulls it back.
        """
        vector, end = self.server.vector, self._trained
        trained = {peer: self._copies[peer][:end] for peer in mix}
        vector[:end] = mixed(vector[:end], trained, mix)
        if end < vector.size:
            peers = {peer: weight for peer, weight in mix.items() if peer in self._updated}
            rest = {peer: self._copies[peer][end:] for peer in peers}
            vector[end:] = mixed(vector[end:], rest, peers)
        self._updated.clear()

    def _figure(self, name: Figure, before: Array) -> tuple[float, ...]:
        x = self.server.vector
        if name != "norm":
            x = x - (before if name == "move" else self._copies[self._name])
        return tuple(float(np.linalg.norm(x[span])) for span in self._spans)

    def vector(self) -> Array:
        """Return a copy of the model, which the next step does not change."""
        with self._lock:
            return self.server.vector.copy()

    # --- messages --------------------------------------------------------------------------------

    def publish(self, tensors: Sequence[int] | None) -> Bytes:
        """Publish some tensors, or all; return the message with them."""
        from paceline.gossip.messages import unpack_update

        chosen = range(len(self._sizes)) if tensors is None else tensors
        with self._lock:
            self._number += 1
            x, mine = self.server.vector, self._own(self._name)
            if self._codec is None:
                values = self._taken(x, chosen)
                packed = self._pack(chosen, values, False, x)
            else:
                change = self._taken(x, chosen) - self._taken(mine, chosen)
                packed = self._pack(chosen, change, True, x)
                values = unpack_update(packed, self._sizes, self._codec).values
            self._put(mine, chosen, values, self._codec is not None)
            mine[self._trained :] = x[self._trained :]
        return packed

    def whole_copy(self) -> Bytes:
        """Return a message with the whole public copy."""
        with self._lock:
            mine = self._copies[self._name]
            return self._pack(range(len(self._sizes)), mine[: self._trained], False, mine)

    def receive(self, sender: WorkerId, packed: Bytes) -> int | None:
        """Move the copy of a peer; return its version, or None if the message changes nothing.

        Raise `RejectedUpdate` if it is damaged, of another sender, or follows a missing one.
        """
        update = self._read(sender, packed)
        is_whole = not update.is_change and len(update.tensors) == len(self._sizes)
        with self._lock:
            life, deaths = update.number // _LIFE, self._deaths.get(sender, 0)
            if life < deaths or sender == self._name:
                return None
            if life > deaths or sender in self._gone:
                raise RejectedUpdate(
                    f"{sender} joined again, and {self._name} has not been told yet"
                )
            if sender not in self._copies and not is_whole:
                return None  # a change of a copy that this node does not have
            before, version = self._heard.get(sender, (-1, 0))
            if update.number < before or update.version < version:
                return None  # late: a newer whole copy arrived before it
            if update.number == before:  # a duplicate, or the whole copy of a new neighbor
                if not is_whole:
                    return None
                self._heard[sender] = update.number, update.version  # the same one at a later step
                return update.version
            if update.number > before + 1 and not is_whole:
                raise RejectedUpdate(
                    f"message {update.number} from {sender} to {self._name} arrived after message "
                    f"{before}; those between are missing"
                )
            self._admit(sender, update)
            self._heard[sender] = update.number, update.version
            copy = self._own(sender)
            self._put(copy, update.tensors, update.values, update.is_change)
            copy[self._trained :] = update.untrained
            self._updated.add(sender)
        return update.version

    def _read(self, sender: WorkerId, packed: Bytes) -> Update:
        """Decode a message; reject one that is damaged or of another sender."""
        from paceline.gossip.messages import sender_mark, unpack_update

        try:
            update = unpack_update(packed, self._sizes, self._codec)
        except Exception as error:  # a codec may raise anything on foreign bytes
            raise RejectedUpdate(f"a message from {sender} to {self._name}: {error}") from error
        dtype = self.server.vector.dtype
        left = self.server.vector.size - self._trained
        if update.sender != sender_mark(sender):
            raise RejectedUpdate(
                f"a message to {self._name} carries the name of {sender}, but another node sent it"
            )
        if not update.is_change and update.values.dtype != dtype:
            raise RejectedUpdate(
                f"a message from {sender} to {self._name} has the type {update.values.dtype}, not "
                f"{dtype}"
            )
        if update.untrained.shape != (left,) or update.untrained.dtype != dtype:
            raise RejectedUpdate(
                f"a message from {sender} to {self._name} has {update.untrained.shape} untrained "
                f"values of {update.untrained.dtype}, not ({left},) of {dtype}"
            )
        return update

    def _admit(self, sender: WorkerId, update: Update) -> None:
        """Reject an update that would ruin a copy."""
        move = update.values
        if not update.is_change:
            move = move - self._taken(self._copies.get(sender, self._start), update.tensors)
        fault = self._message_check.fault(sender, norm_of(move) if move.size else 0.0)
        if fault is None and update.untrained.size and not np.isfinite(update.untrained).all():
            fault = NOT_FINITE
        if fault is not None:
            raise RejectedUpdate(f"a message from {sender} to {self._name}: {fault}")
        self._copies.setdefault(sender, self._start)

    def forget(self, peer: WorkerId) -> None:
        """Drop the copy of a peer that left, and ignore its late messages."""
        with self._lock:
            self._gone.add(peer)
            self._deaths[peer] = self._deaths.get(peer, 0) + 1
            self._copies.pop(peer, None)
            self._heard.pop(peer, None)
            self._updated.discard(peer)
            self._message_check.forget(peer)

    def welcome(self, peer: WorkerId) -> None:
        """Accept messages of a peer that joined again."""
        with self._lock:
            self._gone.discard(peer)

    def has_copy(self, peer: WorkerId) -> bool:
        with self._lock:
            return peer in self._copies

    def return_to_life(self) -> None:
        """Number messages anew: peers have dropped the copy of this node."""
        with self._lock:
            deaths = self._deaths[self._name] = self._deaths.get(self._name, 0) + 1
            self._number = deaths * _LIFE

    def saved(self) -> Saved:
        """Return the state of model and optimizer, which the next step does not change."""
        with self._lock:
            return self.server.save().copy()

    def load(
        self, saved: Saved, version: int, deaths: Mapping[WorkerId, int], gone: Iterable[WorkerId]
    ) -> None:
        """Begin with a model and an optimizer's state, and without copies of peers.

        deaths: of each node; the messages of earlier lives are ignored.
        gone: the peers that are away.
        """
        with self._lock:
            self.server.load(saved)
            self.version = version
            self._start = self.server.vector.copy()
            self._copies, self._heard = {self._name: self._start}, {}
            self._deaths, self._gone = dict(deaths), set(gone)
            self._number = self._deaths.get(self._name, 0) * _LIFE

    def _own(self, name: WorkerId) -> Array:
        """Return a copy that this node may write to."""
        if self._copies[name] is self._start:
            self._copies[name] = self._start.copy()
        return self._copies[name]

    def _taken(self, vector: Array, tensors: Sequence[int]) -> Array:
        """Return the elements of some tensors, one after the other."""
        if len(tensors) == len(self._sizes):
            return vector[: self._trained]
        return np.concatenate([vector[self._spans[i]] for i in tensors])

    def _put(self, vector: Array, tensors: Sequence[int], values: Array, is_change: bool) -> None:
        """Write the elements of some tensors, or add them."""
        start = 0
        for i in tensors:
            stop = start + self._sizes[i]
            if is_change:
                vector[self._spans[i]] += values[start:stop]
            else:
                vector[self._spans[i]] = values[start:stop]
            start = stop

    def _pack(self, tensors: Sequence[int], values: Array, is_change: bool, model: Array) -> Bytes:
        from paceline.gossip.messages import Update, pack_update, sender_mark

        untrained, mark = model[self._trained :], sender_mark(self._name)
        update = Update(self.version, self._number, is_change, tensors, values, untrained, mark)
        return pack_update(update, self._sizes, self._codec)


def mean_of(
    vectors: Mapping[WorkerId, Array], weights: Mapping[WorkerId, float] | None = None
) -> NDArray[np.float64]:
    """Return the weighted mean of models, without a second list of them in memory."""
    total, sum_of_weights = np.zeros(0), 0.0
    for name, vector in vectors.items():
        weight = 1.0 if weights is None else weights[name]
        share = vector.astype(np.float64) if weight == 1.0 else vector * np.float64(weight)
        total = total + share if sum_of_weights else share
        sum_of_weights += weight
    return total / sum_of_weights


def consensus(vectors: Mapping[WorkerId, Array]) -> float:
    """Return the consensus distance: the root of the mean squared distance from the mean."""
    mean = mean_of(vectors)
    squares = [float(np.linalg.norm(vector - mean)) ** 2 for vector in vectors.values()]
    return sqrt(sum(squares) / len(squares))
