"""A node where there is no main one: its model, the copies it has of others, and its letters.

Everyone keeps the copy that its letters add up to, x̂. A letter about some tensors holds C(x - x̂),
or with no codec x itself, and x̂ moves by what that decodes to; so whatever a letter leaves out is
in the next difference, and nothing else needs to be remembered. What is not trained (BatchNorm's
statistics) goes with every letter, as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import sqrt
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.core.logs import logger_of
from paceline.core.protocol import Figure, Peer, Stat, Step, Task, TaskId, Want, WorkerId
from paceline.engines.door import NOT_FINITE, Door, Slot, norm_of
from paceline.learners.base import Array, Layout, Learner, Outcome, Proceed, mean_loss, mixed

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Bytes, Codec
    from paceline.codecs.letters import Letter
    from paceline.data.partition.base import Partition


logger = logger_of(__name__)

_AGAIN = 2  # results in a row that are refused; the next one is the model's doing


class Refused(RuntimeError):
    """A letter cannot be what it seems; its sender has to send the whole copy."""


def tensors_of(layout: Layout) -> tuple[int, ...]:
    """Return the sizes of the tensors that are told of one by one."""
    return layout.tensors or (layout.trained,)


class Node:
    """A model in training on one node. Letters may come while others of its threads compute."""

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
        self._start = self.server.vector.copy()  # what all copies are of at first
        self._copies = dict.fromkeys((peer.name, *peer.neighbors), self._start)
        self._number = 0  # of letters that have moved the copy
        # Of the last letter from each: its number, and the version it was of.
        self._heard = dict.fromkeys(peer.neighbors, (0, 0))
        self._news: set[WorkerId] = set()  # whose copies have moved since the last mix
        self._gone: set[WorkerId] = set()
        self._door = Door(self.server.vector.size, self.server.vector.dtype)
        self._slot = Slot()
        self._refused = 0  # results, one after the other
        self._results: dict[TaskId, Outcome] = {}
        self._lock = Lock()

    # --- computing -------------------------------------------------------------------------------

    def compute(self, task: Task, proceed: Proceed) -> Outcome:
        """Do a task on the model as it is, and hold its result.

        One that is not finite, or out of all proportion, counts as one of no sample. If it is so
        again and again it is the model's doing, and let in: then the run ends, and says so.
        """
        outcome = self._replica.compute([self.server.vector], task, proceed)
        fault = self._door.fault(task, outcome.vector, outcome.samples, outcome.stats)
        if fault is None:
            self._refused = 0
        elif self._refused < _AGAIN:
            self._refused += 1
            logger.warning("node %s does not use a result: %s", self._name, fault)
            outcome = Outcome(None, 0)
        else:
            self._door.let_in(outcome.vector)
        vector = None if outcome.vector is None else np.array(outcome.vector)
        self._results[task.id] = Outcome(vector, outcome.samples, outcome.stats)
        return outcome

    def discard(self, task: TaskId) -> None:
        self._results.pop(task, None)

    def step(self, step: Step) -> tuple[dict[Stat, float], dict[Figure, tuple[float, ...]]]:
        """Mix, then let the optimizer step; return what is known of both."""
        results = [self._results.pop(id) for id in step.weights]
        weights = [float(w) for w in step.weights.values() if not isinstance(w, tuple)]
        stats = mean_loss(weights, [result.stats.get("loss") for result in results])
        with self._lock:
            vector = self.server.vector
            before = vector.copy() if "move" in self._figures else vector
            if step.mix:
                self._mix(step.mix)
            if weights:
                vectors = [result.vector for result in results if result.vector is not None]
                stats |= self.server.step(weights, vectors, self._wants)
            self.version += 1
            figures = {name: self._figure(name, before) for name in self._figures}
        return stats | {"rate": self._learner.rate(self.version)}, figures

    def _mix(self, mix: Mapping[WorkerId, float]) -> None:
        """Mix what is trained as told, and the rest by averaging with what is news.

        Differences may make a variance negative, and averaging with old copies drags back.
        """
        vector, end = self.server.vector, self._trained
        trained = {peer: self._copies[peer][:end] for peer in mix}
        vector[:end] = mixed(vector[:end], trained, mix)
        if end < vector.size:
            peers = {peer: weight for peer, weight in mix.items() if peer in self._news}
            rest = {peer: self._copies[peer][end:] for peer in peers}
            vector[end:] = mixed(vector[end:], rest, peers)
        self._news.clear()

    def _figure(self, name: Figure, before: Array) -> tuple[float, ...]:
        x = self.server.vector
        if name != "norm":
            x = x - (before if name == "move" else self._copies[self._name])
        return tuple(float(np.linalg.norm(x[span])) for span in self._spans)

    def vector(self) -> Array:
        """Return the model as it is, out of reach of the next step."""
        with self._lock:
            return self.server.vector.copy()

    # --- letters ---------------------------------------------------------------------------------

    def letter(self, tensors: Sequence[int] | None) -> Bytes:
        """Make some tensors, or all, public; return the letter about them."""
        from paceline.codecs.letters import unseal

        chosen = range(len(self._sizes)) if tensors is None else tensors
        with self._lock:
            self._number += 1
            x, mine = self.server.vector, self._own(self._name)
            if self._codec is None:
                values = self._taken(x, chosen)
                packed = self._seal(chosen, values, False, x)
            else:
                change = self._taken(x, chosen) - self._taken(mine, chosen)
                packed = self._seal(chosen, change, True, x)
                values = unseal(packed, self._sizes, self._codec).values
            self._put(mine, chosen, values, self._codec is not None)
            mine[self._trained :] = x[self._trained :]
        return packed

    def whole(self) -> Bytes:
        """Return a letter with the public copy as it is."""
        with self._lock:
            mine = self._copies[self._name]
            return self._seal(range(len(self._sizes)), mine[: self._trained], False, mine)

    def receive(self, sender: WorkerId, packed: Bytes) -> int | None:
        """Move the copy of a peer; return its version, or None if it is no news.

        A letter that is spoiled, of another sender, or after one that is missing is `Refused`.
        """
        letter = self._read(sender, packed)
        is_whole = not letter.is_change and len(letter.tensors) == len(self._sizes)
        with self._lock:
            if sender in self._gone or sender == self._name:
                return None
            if sender not in self._copies and not is_whole:
                return None  # news of a copy that this node does not have
            before, version = self._heard.get(sender, (-1, 0))
            if letter.number < before or letter.version < version:
                return None  # late: the whole copy that came before was made after it
            if letter.number == before:  # twice, or the whole copy of a neighbor that is new
                if not is_whole:
                    return None
                self._heard[sender] = letter.number, letter.version  # the same one at a later step
                return letter.version
            if letter.number > before + 1 and not is_whole:
                raise Refused(
                    f"letter {letter.number} of {sender} to {self._name} after letter {before}"
                )
            self._admit(sender, letter)
            self._heard[sender] = letter.number, letter.version
            copy = self._own(sender)
            self._put(copy, letter.tensors, letter.values, letter.is_change)
            copy[self._trained :] = letter.untrained
            self._news.add(sender)
        return letter.version

    def _read(self, sender: WorkerId, packed: Bytes) -> Letter:
        """Read a letter, or refuse what is none of this sender."""
        from paceline.codecs.letters import mark_of, unseal

        try:
            letter = unseal(packed, self._sizes, self._codec)
        except Exception as error:  # whatever a codec says of bytes that it never wrote
            raise Refused(f"a letter of {sender} to {self._name}: {error}") from error
        dtype = self.server.vector.dtype
        left = self.server.vector.size - self._trained
        if letter.sender != mark_of(sender):
            raise Refused(f"a letter of another to {self._name} under the name of {sender}")
        if not letter.is_change and letter.values.dtype != dtype:
            raise Refused(f"a letter of {sender} to {self._name} of {letter.values.dtype}")
        if letter.untrained.shape != (left,) or letter.untrained.dtype != dtype:
            raise Refused(f"a letter of {sender} to {self._name} with too much or too little")
        return letter

    def _admit(self, sender: WorkerId, letter: Letter) -> None:
        """Refuse a letter that would make a copy worthless."""
        move = letter.values
        if not letter.is_change:
            move = move - self._taken(self._copies.get(sender, self._start), letter.tensors)
        fault = self._slot.fault(sender, norm_of(move) if move.size else 0.0)
        if fault is None and letter.untrained.size and not np.isfinite(letter.untrained).all():
            fault = NOT_FINITE
        if fault is not None:
            raise Refused(f"a letter of {sender} to {self._name}: {fault}")
        self._copies.setdefault(sender, self._start)

    def forget(self, peer: WorkerId) -> None:
        """Let go of the copy of a peer that is gone; what still comes from it is left out."""
        with self._lock:
            self._gone.add(peer)
            self._copies.pop(peer, None)
            self._heard.pop(peer, None)
            self._news.discard(peer)
            self._slot.forget(peer)

    def welcome(self, peer: WorkerId) -> None:
        """Take letters of a peer again that was gone."""
        with self._lock:
            self._gone.discard(peer)

    def _own(self, name: WorkerId) -> Array:
        """Return a copy that may be written to."""
        if self._copies[name] is self._start:
            self._copies[name] = self._start.copy()
        return self._copies[name]

    def _taken(self, vector: Array, tensors: Sequence[int]) -> Array:
        """Return the numbers of some tensors, one after the other."""
        if len(tensors) == len(self._sizes):
            return vector[: self._trained]
        return np.concatenate([vector[self._spans[i]] for i in tensors])

    def _put(self, vector: Array, tensors: Sequence[int], values: Array, is_change: bool) -> None:
        """Write the numbers of some tensors, or add them."""
        start = 0
        for i in tensors:
            stop = start + self._sizes[i]
            if is_change:
                vector[self._spans[i]] += values[start:stop]
            else:
                vector[self._spans[i]] = values[start:stop]
            start = stop

    def _seal(self, tensors: Sequence[int], values: Array, is_change: bool, model: Array) -> Bytes:
        from paceline.codecs.letters import Letter, mark_of, seal

        untrained, mark = model[self._trained :], mark_of(self._name)
        letter = Letter(self.version, self._number, is_change, tensors, values, untrained, mark)
        return seal(letter, len(self._sizes), self._codec)


class Outbox:
    """Letters for one peer that are not on their way yet.

    Once they are longer than the copy itself, the copy is sent in place of them: a link that is
    slow or cut gathers no more than that.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._letters: list[Bytes] = []
        self._whole = False

    def add(self, letter: Bytes) -> None:
        if not self._whole:
            self._letters.append(letter)
            if len(self._letters) > 1:
                total = sum(each.nbytes for each in self._letters)
                self._whole = total > self._node.server.vector.nbytes
        if self._whole:
            self._letters = []

    def add_whole(self) -> None:
        self._letters, self._whole = [], True

    def take(self) -> list[Bytes]:
        """Return what to send now, and be empty."""
        letters = [self._node.whole()] if self._whole else self._letters
        self._letters, self._whole = [], False
        return letters


def mean_of(vectors: Iterable[Array]) -> NDArray[np.float64]:
    """Return the mean of models, with no more of them in memory than it was given."""
    total, count = np.zeros(0), 0
    for vector in vectors:
        total = total + vector if count else vector.astype(np.float64)
        count += 1
    return total / count


def consensus(vectors: Mapping[WorkerId, Array]) -> float:
    """Return how far apart models are: the root of their mean squared distance from the mean."""
    mean = mean_of(vectors.values())
    squares = [float(np.linalg.norm(vector - mean)) ** 2 for vector in vectors.values()]
    return sqrt(sum(squares) / len(squares))
