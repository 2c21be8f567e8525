"""Which samples a loop computes next, with a loader that asks ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from paceline.core.protocol import Task, Work
from paceline.data.sampling import Stream
from paceline.sessions.batches import Batches, Piece, Queue
from paceline.sessions.turns import Turn

EXAMPLES, BATCH = 40, 8
SAMPLES = Stream(EXAMPLES, 0)


def turn(offset: int, samples: int) -> Turn:
    task = Task(0, "w0", Work(samples=samples), 0, 0.0, samples, offset)
    return Turn(task, np.zeros(1, np.float32), 0)


class Loop:
    """A loader with some batches asked for ahead, and the loop that takes them."""

    def __init__(self, ahead: int, micro: int | None = None, last: int = EXAMPLES) -> None:
        self.queue = Queue(last, BATCH, micro, Stream(last, 0))
        self.turn: Turn | None = None
        self.seeded: list[int] = []
        self._batches = Batches(self.queue, lambda: self.turn, self._seed)
        self._ahead = ahead
        self.yielded: list[list[int]] = []

    def _seed(self, turn: Turn) -> None:
        self.seeded.append(turn.task.offset)

    def begin(self, offset: int, samples: int = 4) -> None:
        self.turn = turn(offset, samples)
        self.queue.begin(self.turn)

    def epoch(self) -> Iterator[list[int]]:
        """Yield batches as a DataLoader does, which asks for the next before it yields one."""
        asked: list[list[int]] = []
        batches = iter(self._batches)
        more = True
        while more or asked:
            while more and len(asked) < self._ahead + 1:
                found = next(batches, None)
                more = found is not None
                if found is not None:
                    asked.append(found)
            if asked:
                yield asked.pop(0)


def expected(offset: int, samples: int = 4) -> list[int]:
    return [int(i) for i in SAMPLES.indices(offset, samples)]


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_two_equal_workers(ahead: int) -> None:
    loop, offset = Loop(ahead), 4  # the second half of each batch
    loop.begin(offset)
    for batch in loop.epoch():
        piece = loop.queue.computed()
        assert piece is not None and piece in loop.queue.due
        assert batch == expected(offset) == list(piece.indices)
        offset += BATCH
        loop.begin(offset)
    assert offset == 4 + EXAMPLES


def test_a_wrong_guess_is_skipped() -> None:
    loop, wasted = Loop(ahead=3, last=10 * EXAMPLES), 0
    used: list[int] = []
    offsets = iter([8, 20, 28, 36, 44])  # a task of a lost worker comes in between
    loop.begin(0)
    for batch in loop.epoch():
        piece = loop.queue.computed()
        assert piece is not None and batch == list(piece.indices)
        if used and used[-1] == 36:
            break
        if piece not in loop.queue.due:
            wasted += 1
            continue
        used.append(piece.offset)
        loop.begin(next(offsets))
    assert used == [0, 8, 20, 28, 36]
    assert 0 < wasted <= 2 * 4


def test_without_reading_ahead_nothing_is_wasted() -> None:
    loop, used = Loop(ahead=0), []
    offsets = iter([20, 12, 36, 40])  # a task of a lost worker comes back
    loop.begin(0)
    for _ in loop.epoch():
        piece = loop.queue.computed()
        assert piece is not None and piece in loop.queue.due
        used.append(piece.offset)
        loop.begin(next(offsets))
    assert used == [0, 20, 12, 36]


def test_micro_batches_are_pieces_of_a_task() -> None:
    loop, seen = Loop(ahead=0, micro=3), []
    loop.begin(0, 8)
    for batch in loop.epoch():
        piece = loop.queue.computed()
        assert piece is not None
        loop.queue.due.remove(piece)
        seen.append(len(batch))
        if not loop.queue.due:
            break
    assert seen == [3, 3, 2]
    assert loop.seeded == [0]


def test_a_loop_that_takes_several_batches_is_told() -> None:
    loop = Loop(ahead=2)
    loop.begin(0)
    batches = loop.epoch()
    next(batches)
    loop.queue.computed()
    next(batches)
    next(batches)
    with pytest.raises(RuntimeError, match="micro_batch"):
        loop.queue.computed()


def test_a_loop_that_breaks_keeps_its_task() -> None:
    loop = Loop(ahead=2)
    loop.begin(0)
    first = next(loop.epoch())
    again = next(loop.epoch())  # a new iterator, since the loop has ended
    assert first == again == expected(0)
    assert loop.queue.computed() == Piece(0, tuple(expected(0)))


def test_a_late_worker_begins_in_the_current_epoch() -> None:
    loop = Loop(ahead=0)
    loop.begin(2 * EXAMPLES + 8)
    offset = 2 * EXAMPLES + 8
    for _ in loop.epoch():
        loop.queue.computed()
        offset += BATCH
        loop.begin(offset)
    assert offset == 3 * EXAMPLES
    assert len(Batches(loop.queue, lambda: None, loop._seed)) == 5
    assert not list(Batches(loop.queue, lambda: None, loop._seed))
