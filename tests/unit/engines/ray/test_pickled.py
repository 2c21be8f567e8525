"""What a learner weighs when it is sent to the workers, and what cannot be sent."""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray import cloudpickle
from torch import Tensor, nn, optim
from torch.utils.data import Dataset, TensorDataset

import paceline as pl
from paceline.engines.ray.pickled import LIMIT, PickledSize, check_pickled


def learner(**more: Any) -> pl.TorchLearner:
    settings: dict[str, Any] = {
        "model": nn.Linear(4, 2),
        "loss": loss,
        "optimizer": partial(optim.SGD, lr=0.1),
        "dataset": TensorDataset(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long)),
        "batch_size": 4,
    }
    return pl.TorchLearner(**settings | more)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def warnings_of(recipe: Any, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        check_pickled(recipe)
    return [record.getMessage() for record in caplog.records]


class Lazy(Dataset[Any]):
    """A row of tensors for each index, kept in whatever it is given."""

    def __init__(self, kept: Any) -> None:
        self.kept, self.lock = kept, threading.Lock()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.kept


BASE = torch.randn(50, 400)
THINGS: dict[str, Any] = {
    "tensor": BASE,
    "views": [{"input": row, "label": row[:1]} for row in BASE],
    "clones": [row.clone() for row in BASE],
    "the same view twice": [BASE[0]] * 2,
    "parameters": nn.Linear(300, 200),
    "numpy": np.zeros((300, 400)),
    "numpy, every other": np.zeros((300, 400))[:, ::2],
    "numpy views": list(np.zeros((300, 400))),
    "objects": np.array([b"some" * 1000, None]),
    "bytes": [bytes(1000 * i) for i in range(60)],
    "text": ["word" * i for i in range(600)],
    "sparse": torch.eye(3000).to_sparse(),
    "function": lambda: BASE,
}


@pytest.mark.parametrize("name", THINGS)
def test_the_size_is_that_of_the_pickle(name: str) -> None:
    buffers: list[Any] = []
    pickle = cloudpickle.dumps(THINGS[name], protocol=5, buffer_callback=buffers.append)
    expected = len(pickle) + sum(buffer.raw().nbytes for buffer in buffers)
    size = PickledSize(THINGS[name])
    assert size.is_whole
    # What is left is torch's own description of each tensor and storage, of some 500 bytes.
    tensors = 100 if name in ("views", "clones") else 5
    assert expected - 1000 * tensors <= size.total <= expected + 1000


def test_rows_that_are_views_are_counted_with_their_storage_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As a newcomer wrote them: 200 rows of a tensor of 3.2 MB."""
    tokens = torch.zeros(200, 2000, dtype=torch.long)
    rows = [{"input_ids": row} for row in tokens]
    (told,) = warnings_of(learner(dataset=rows), caplog)
    assert told.startswith("dataset= is 640 MB when pickled, and every node gets a copy, since 200")
    assert "(3 MB if sent once)" in told and "clone()" in told
    assert "give dataset= a function that opens the data" in told
    assert not warnings_of(learner(dataset=[{"input_ids": row.clone()} for row in tokens]), caplog)


@pytest.mark.parametrize("kind", ["tensor", "numpy", "bytes", "closure", "loss"])
def test_data_above_the_limit_are_told(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    large = torch.zeros(LIMIT // 4 + 1)
    data: dict[str, Any] = {
        "tensor": {"dataset": TensorDataset(large)},
        "numpy": {"dataset": [large.numpy()]},
        "bytes": {"dataset": [bytes(LIMIT), bytes(2 * LIMIT)]},
        "closure": {"dataset": lambda: TensorDataset(large)},
        "loss": {"loss": lambda model, batch: large.mean()},
    }
    (told,) = warnings_of(learner(**data[kind]), caplog)
    size = "more than 100" if kind == "bytes" else "100"
    where = "loss" if kind == "loss" else "dataset"
    assert told.startswith(f"{where}= is {size} MB when pickled, and every node gets a copy; give")


def test_a_large_model_and_data_below_the_limit_are_not_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert not warnings_of(learner(model=nn.Linear(6000, 5000)), caplog)
    assert not warnings_of(learner(dataset=TensorDataset(torch.zeros(LIMIT // 5))), caplog)
    assert not warnings_of(pl.learners.Quadratic((1.0, 0.3), lr=0.01, batch_size=8), caplog)


@pytest.mark.parametrize("keyword", ["dataset", "collate", "loss"])
def test_what_cannot_be_pickled_is_told_by_its_name(keyword: str) -> None:
    lock = threading.Lock()

    def locked(*_: Any) -> Any:
        return lock

    value = Lazy(0) if keyword == "dataset" else locked
    with pytest.raises(ValueError) as refusal:
        check_pickled(learner(**{keyword: value}))
    told = str(refusal.value)
    assert told.startswith(f"{keyword}= ({type(value).__name__}) cannot be pickled for the workers")
    assert "lock" in told and "dataset= may be a function" in told


@pytest.mark.parametrize("gossip", [False, True])
def test_a_run_on_ray_is_refused_before_anything_is_started(gossip: bool) -> None:
    policy: Any = (
        pl.gossip.Gossip(pl.gossip.ring(3), pl.gossip.Difference(0.5)) if gossip else pl.sync()
    )
    trainer = pl.Trainer(learner(dataset=Lazy(0)), policy, pl.Ray(workers=3), progress=False)
    with pytest.raises(ValueError, match=r"dataset= \(Lazy\) cannot be pickled.*lock"):
        trainer.fit(steps=1)
    assert not ray.is_initialized()
