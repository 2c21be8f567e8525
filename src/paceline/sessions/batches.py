"""Which samples a session's loop computes next: a batch sampler for the user's DataLoader.

A DataLoader with worker processes asks for batches ahead of time, before the run has assigned them.
The sampler then guesses: the next task is as far behind this one as this one was behind the last.
Under `sync`, and while no worker comes or goes, every guess is right. A batch that was guessed
wrongly is not used: `step` skips it, and the loop goes on with the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil

from torch.utils.data import Sampler

from paceline.data.sampling import Stream
from paceline.sessions.turns import Turn


@dataclass(frozen=True)
class Piece:
    """Samples that the loop computes at a time; a stretch of the run's stream of samples."""

    offset: int
    indices: tuple[int, ...]


@dataclass
class Queue:
    """What the loader has asked for and the loop has not computed yet, in order.

    examples: the samples of one epoch.
    batch_size: the global batch, which is the distance of two tasks until it is known better.
    micro_batch: the most samples of a piece; None: a task is one piece.
    stream: the order of the run's samples.
    """

    examples: int
    batch_size: int
    micro_batch: int | None
    stream: Stream

    def __post_init__(self) -> None:
        self.asked: deque[Piece] = deque()
        self.due: list[Piece] = []  # of the turn, those that the loop has still to compute
        self._ahead: deque[Piece] = deque()  # of the turn or guessed, those not asked for
        self._guess: tuple[int, int] = (0, 0)  # the offset and size of the last task, or guess
        self._distance = self.batch_size
        self._most: int | None = None  # asked for and not computed, at the first step

    def begin(self, turn: Turn) -> None:
        """Take a new turn: find its pieces among those asked for, or ask for them."""
        offset, size = turn.task.offset, turn.task.samples
        before = self._last_offset
        if before is not None and offset > before:
            self._distance = offset - before
        self._last_offset = offset
        self.due = self._cut(offset, size)
        ahead = [piece for piece in self.asked if piece in self.due]
        if len(ahead) == len(self.due):
            return  # guessed; what the loop computes before them is skipped
        self._ahead = deque(self.due)
        self._guess = offset, size

    _last_offset: int | None = None

    def again(self) -> None:
        """Begin to ask anew: a new iterator of the loader, whose predecessor is gone."""
        self.asked.clear()
        self._ahead = deque(self.due)
        self._most = None
        if self.due and self._last_offset is not None:
            self._guess = self._last_offset, sum(len(piece.indices) for piece in self.due)

    def ask(self, end: int) -> Piece | None:
        """Return the next piece for the loader; None if it lies behind the end of the epoch."""
        if not self._ahead:
            offset, size = self._guess[0] + self._distance, self._guess[1]
            if offset >= end:
                return None
            self._ahead, self._guess = deque(self._cut(offset, size)), (offset, size)
        if self._ahead[0].offset >= end:
            return None
        piece = self._ahead.popleft()
        self.asked.append(piece)
        return piece

    def computed(self) -> Piece | None:
        """Return the piece that the loop has just computed."""
        waiting = len(self.asked)
        if self._most is None:
            self._most = waiting
        elif waiting > self._most:
            raise RuntimeError(
                "the loop has taken several batches since the last session.step(); call it after "
                "each backward pass: with micro_batch= it adds up gradients and steps when a task "
                "is whole"
            )
        return self.asked.popleft() if self.asked else None

    def _cut(self, offset: int, samples: int) -> list[Piece]:
        indices = self.stream.indices(offset, samples).tolist()
        size = self.micro_batch or max(samples, 1)
        return [
            Piece(offset + at, tuple(indices[at : at + size]))
            for at in range(0, len(indices), size)
        ]


class Batches(Sampler[list[int]]):
    """The batch sampler of a session: `DataLoader(data, batch_sampler=session.batches(data))`.

    One iteration is one epoch of the run. Its length is the number of steps of an epoch.
    """

    def __init__(
        self, queue: Queue, current: Callable[[], Turn | None], seed: Callable[[Turn], None]
    ) -> None:
        """seed: is called before the first samples of a turn are read."""
        self._queue, self._current, self._seed = queue, current, seed
        self._epochs = 0  # iterations so far
        self._first: int | None = None  # the epoch in which this process joined

    def __iter__(self) -> Iterator[list[int]]:
        turn = self._current()
        if turn is None:
            return
        if self._first is None:
            self._first = turn.task.offset // self._queue.examples
        self._epochs += 1
        end = (self._first + self._epochs) * self._queue.examples
        self._queue.again()
        while (turn := self._current()) and (piece := self._queue.ask(end)) is not None:
            if piece.offset == turn.task.offset:
                self._seed(turn)  # again: a new iterator of the loader draws a random number
            yield list(piece.indices)

    def __len__(self) -> int:
        return ceil(self._queue.examples / self._queue.batch_size)
