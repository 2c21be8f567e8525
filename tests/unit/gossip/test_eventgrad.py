"""EventGraD with Top-K as published (arXiv 2103.07454), against the algorithm written down."""

from __future__ import annotations

from functools import cache, partial
from math import ceil

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.codecs.base import Codec
from paceline.core.protocol import Peer, Start, Step, Task, Work
from paceline.data.sampling import Samples, Stream
from paceline.gossip.metrics import GossipMeter
from paceline.gossip.node import Node
from tests.conftest import flat, make_learner, module_of

Floats = NDArray[np.float64]

LR, STEPS, NODES = 0.1, 60, 8
SIZES = (24, 4)  # weight and bias
PARTS = (slice(0, 24), slice(24, 28))
HORIZON, WARM, FRACTION = 0.95, 15, 0.3


@cache
def data() -> tuple[Floats, Floats]:
    random = np.random.default_rng(4)
    inputs = random.standard_normal((240, 6))
    targets = inputs @ random.standard_normal((6, 4)) + 0.1 * random.standard_normal((240, 4))
    return inputs, targets


def regression() -> pl.TorchLearner:
    """Return a linear model of two tensors."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Linear(6, 4)
    inputs, targets = (torch.from_numpy(each).float() for each in data())

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    sgd = partial(torch.optim.SGD, lr=LR)
    return pl.TorchLearner(model, loss, sgd, TensorDataset(inputs, targets), 32)


def trained(policy: pl.gossip.Gossip, codec: Codec | None = None) -> pl.Run:
    placed = pl.policies.Placed(pl.partition.even(240, NODES, seed=3), move=False)
    engine = pl.Simulator(NODES, pl.delays.Fixed(1.0))
    run = pl.Trainer(
        regression(), policy, engine, placement=placed, codec=codec, seed=3, progress=False
    )
    return run.fit(steps=STEPS)


def numbers(model: nn.Module) -> Floats:
    return flat(model).detach().double().numpy()


def gradient(x: Floats, rows: NDArray[np.int64]) -> Floats:
    inputs, targets = (each[rows] for each in data())
    wrong = 2 * (inputs @ x[:24].reshape(4, 6).T + x[24:] - targets) / targets.size
    return np.concatenate([(wrong.T @ inputs).ravel(), wrong.sum(0)])


def error(x: Floats) -> float:
    inputs, targets = data()
    return float(np.mean((inputs @ x[:24].reshape(4, 6).T + x[24:] - targets) ** 2))


def published(rows: list[list[NDArray[np.int64]]], start: Floats) -> tuple[list[Floats], int]:
    """Return the models, and the number of tensors sent: per tensor an event, then Top-K.

    `sent` has the values that a node sent last, which its neighbors hold: values not sent stay.
    The authors' replicas begin as other random models; here all begin as the model itself.
    """
    x, sent = [start.copy() for _ in rows], [start.copy() for _ in rows]
    state = [[(0.0, 0.0, 0, (0.0, 0.0)) for _ in PARTS] for _ in rows]
    events = 0
    for number in range(1, STEPS + 1):
        slopes = [gradient(x[i], rows[i][number - 1]) for i in range(NODES)]
        x = [
            (x[i] + sent[(i - 1) % NODES] + sent[(i + 1) % NODES]) / 3 - LR * slopes[i]
            for i in range(NODES)
        ]
        for i in range(NODES):
            for t, part in enumerate(PARTS):
                threshold, norm, last, history = state[i][t]
                now, threshold = float(np.linalg.norm(x[i][part])), HORIZON * threshold
                if abs(now - norm) >= threshold or number < WARM:
                    events += 2 * (number < STEPS)  # to both neighbors, until the run ends
                    change = np.abs(x[i][part] - sent[i][part])
                    largest = np.argsort(-change)[: ceil(FRACTION * len(change))]
                    sent[i][part][largest] = x[i][part][largest]
                    history = history[1], abs(now - norm) / (number - last)
                    threshold, norm, last = sum(history) / 2, now, number
                state[i][t] = threshold, norm, last, history
    return x, events


@cache
def event_run() -> pl.Run:
    trigger = pl.gossip.EventGrad(HORIZON, WARM)
    policy = pl.gossip.Gossip(pl.gossip.ring(NODES), pl.gossip.Averaging(), trigger)
    return trained(policy, pl.codecs.TopK(FRACTION, SIZES))


def test_it_is_the_published_algorithm() -> None:
    run = event_run()
    samples = Samples(Stream(240, 3), 3, pl.partition.even(240, NODES, seed=3))
    rows = [
        [
            np.asarray(samples.of(command.task))
            for entry in run.journals[f"w{i}"]
            for command in entry.commands
            if isinstance(command, Start)
        ]
        for i in range(NODES)
    ]
    models, events = published(rows, numbers(module_of(regression())))
    found = [numbers(run.models[f"w{i}"]) for i in range(NODES)]
    np.testing.assert_allclose(found, models, atol=1e-5)  # in float32
    assert isinstance(run.meter, GossipMeter)
    assert run.meter.tensors_sent == events


def test_it_saves_messages_and_bytes_and_ends_near_d_psgd() -> None:
    ring, averaging = pl.gossip.ring(NODES), pl.gossip.Averaging()
    dense = trained(pl.gossip.Gossip(ring, averaging))
    run = event_run()
    few, all_ = run.meter, dense.meter
    assert isinstance(few, GossipMeter)
    assert isinstance(all_, GossipMeter)
    assert few.tensors_sent < 0.8 * all_.tensors_sent
    assert few.up_bytes < 0.75 * all_.up_bytes  # headers count on so small a model
    best = error(numbers(dense.model))
    assert error(numbers(run.model)) - best < 0.02 * (error(np.zeros(28)) - best)


@pytest.mark.parametrize("int8", [False, True])
def test_values_not_sent_stay_stale_at_the_receiver(int8: bool) -> None:
    learner = make_learner()
    sizes = learner.server().layout.tensors
    codec: Codec = pl.codecs.TopK(0.1, sizes)
    if int8:
        codec = pl.codecs.Chain(pl.codecs.TopK(0.1, sizes), pl.codecs.Int8())
    sender, receiver = (
        Node(Peer(name, (other,), sizes), learner, 0, None, codec, frozenset())
        for name, other in (("w0", "w1"), ("w1", "w0"))
    )
    task = Task(0, "w0", Work(), 0, 0.0, 64, 0)
    sender.compute(task, lambda done: True)
    sender.step(Step({0: 1.0}))
    before = receiver._copies["w0"].copy()
    receiver.receive("w0", sender.publish([0, 3]))
    after, model = receiver._copies["w0"], sender.vector()
    ends = np.cumsum([0, *sizes])
    for i, size in enumerate(sizes):
        part = slice(ends[i], ends[i + 1])
        moved = np.flatnonzero(after[part] != before[part])
        if i not in (0, 3):
            assert not moved.size
            continue
        change = np.abs(model - before)[part]
        assert set(moved) == set(np.argsort(-change)[: ceil(0.1 * size)])
        np.testing.assert_allclose(
            after[part][moved], model[part][moved], atol=0.01 * change.max() if int8 else 1e-7
        )
