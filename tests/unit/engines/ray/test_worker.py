"""A worker that computes on slices of a model, and sends slices of its result."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.core.protocol import Task, Work
from paceline.engines.ray.place import Place
from paceline.engines.ray.transport.current import close_peer, open_peer
from paceline.engines.ray.transport.holder import Holding
from paceline.engines.ray.transport.peer import Peer
from paceline.engines.ray.worker import Token, Worker, pack, read
from paceline.learners.base import Array, Span

HOST, SECRET, SECONDS = "127.0.0.1", b"s" * 32, 20.0
WIDE = 300
X = torch.randn(32, WIDE, generator=torch.Generator().manual_seed(3))


class Here:
    """A slice that has arrived."""

    def __init__(self, values: Array) -> None:
        self._values = values

    def future(self) -> Future[Array]:
        future: Future[Array] = Future()
        future.set_result(self._values)
        return future


def square(model: nn.Module, batch: Any) -> Any:
    return model(batch[0]).square().mean()


def recipe(loss: Callable[..., Any] = square, **more: Any) -> pl.TorchLearner:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE))
    sgd = partial(torch.optim.SGD, lr=0.1)
    return pl.TorchLearner(model, loss, sgd, TensorDataset(X), batch_size=16, **more)


def order(id: int, cut: list[Span]) -> tuple[Token, bytes]:
    token = Token("run", "w0", 0, id)
    task = Task(id, "w0", Work(samples=16), 0, 0.0, 16, 16 * id)
    return token, pack(token, task, [], cut, cut, False, SECONDS)


@pytest.fixture
def worker() -> Iterator[Worker]:
    yield Worker(place=lambda: Place("node", 1, ""))
    close_peer()


def set_up(worker: Worker, learner: pl.TorchLearner) -> tuple[list[Span], list[Here]]:
    layout = learner.server().layout
    worker.set_up((learner, None, None, None, layout), 0, None)
    cut = layout.spans(3)
    return cut, [Here(learner.server().vector[start:stop]) for start, stop in cut]


def test_parts_that_leave_early_and_the_rest_make_the_whole_result(worker: Worker) -> None:
    cut, model = set_up(worker, recipe())
    plain = recipe().replica(0)
    ends = [Peer(HOST, SECRET) for _ in cut]
    here = worker._peer = open_peer(HOST, SECRET)
    pushed: list[Any] = []
    push = here.push
    here.push = lambda *told: (pushed.append(told), push(*told))  # type: ignore[method-assign, assignment, func-returns-value]
    try:
        for id in range(3):
            keys = [10 * id + index for index in range(3)]
            _, packed = order(id, cut)
            to = [end.address for end in ends]
            asked: Holding = "compute_slices", keys, [2] * 3, [], to, False
            assert read(worker.holding(asked, packed, model)).samples == 16
            arrived: list[Any] = [
                end.fetch(here.address, key).result(SECONDS)
                for key, end in zip(keys, ends, strict=True)
            ]
            vector = recipe().server().vector
            task = Task(id, "w0", Work(samples=16), 0, 0.0, 16, 16 * id)
            expected = plain.compute([vector], task, lambda done: True).vector
            assert expected is not None and np.array_equal(np.concatenate(arrived), expected)
            assert bool(pushed) == (id > 0)  # the first pass only counts
    finally:
        for end in ends:
            end.close()


def test_nothing_of_an_abandoned_task_is_sent(worker: Worker) -> None:
    token, packed = order(0, [])

    def loss(model: nn.Module, batch: Any) -> Any:
        worker.abandon(token.pack())
        return square(model, batch)

    cut, model = set_up(worker, recipe(loss, micro_batch=8))
    _, packed = order(0, cut)
    reply, *slices = worker.compute_slices(packed, model)
    assert slices == [None] * 3
    assert read(reply).samples == 8 and read(reply).norm is None


class Never:
    """A reference to a slice that does not come."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def future(self) -> Future[Any]:
        self.asked.set()
        return Future()


@pytest.mark.parametrize("waits", [True, False])
def test_a_task_whose_model_has_moved_is_answered_once_without_a_result(
    worker: Worker, waits: bool
) -> None:
    """The notice may come before the task, or while it waits. Its next attempt is as any other."""
    cut, model = set_up(worker, recipe(square))
    token, packed = order(0, cut)
    never = Never()

    def move() -> None:
        never.asked.wait(SECONDS)
        worker.ask_anew(token.pack())

    moved = threading.Thread(target=move)
    if waits:
        moved.start()
    else:
        worker.ask_anew(token.pack())
    reply, *slices = worker.compute_slices(packed, [never, *model[1:]])
    assert read(reply).samples is None and slices == [None] * 3
    if waits:
        moved.join(SECONDS)
    reply, *slices = worker.compute_slices(packed, model)
    assert read(reply).samples and all(piece is not None for piece in slices)
