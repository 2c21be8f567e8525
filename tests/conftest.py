"""What several test folders share: a small real problem, and one real Ray for the whole run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import hypothesis
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.core import logs
from paceline.learners.base import Array, Outcome

os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # no token file in the tester's home
# A bound in seconds says more of the machine's load than of the code.
hypothesis.settings.register_profile("paceline", deadline=None)
hypothesis.settings.load_profile("paceline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let no test on Ray be where `make cluster` does not look."""
    for item in items:
        marked = item.get_closest_marker("cluster") is not None
        if marked and item.path.parent.name not in ("cluster", "contract"):
            raise pytest.UsageError(f"{item.nodeid} belongs in tests/cluster or tests/contract")


@pytest.fixture(autouse=True)
def all_is_logged() -> None:
    """Count no record of another test: what is said too often is left out."""
    logs.clear()


MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def cross_entropy(model: nn.Module, batch: list[Tensor]) -> Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def make_learner(hidden: int = 16, batch_size: int = 64, **more: Any) -> pl.TorchLearner:
    """Make a small classifier on random but learnable data, the same every time."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(512, 20, generator=generator)
    labels = (inputs @ torch.randn(20, 3, generator=generator)).argmax(dim=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(20, hidden), nn.ReLU(), nn.Linear(hidden, 3))
    data = TensorDataset(inputs, labels)
    return pl.TorchLearner(model, cross_entropy, MOMENTUM, data, batch_size, **more)


def module_of(learner: pl.TorchLearner) -> nn.Module:
    """Return the module of a learner that was given one, and no function that makes it."""
    assert isinstance(learner.model, nn.Module)
    return learner.model


def vector_of(outcome: Outcome) -> Array:
    """Return the vector of a task that has one."""
    assert outcome.vector is not None
    return outcome.vector


def flat(model: nn.Module) -> Tensor:
    """Return all tensors of a model as one vector."""
    return torch.cat([tensor.flatten().double() for tensor in model.state_dict().values()])


@pytest.fixture(scope="session")
def ray_workers() -> Iterator[pl.Ray]:
    """Keep one cluster and its four worker processes for the whole test run."""
    with pl.Ray(workers=4, timeout=60, respawns=20) as engine:
        yield engine


@pytest.fixture(scope="session")
def ray_servers() -> Iterator[pl.Ray]:
    """Keep four workers and three servers that share the model."""
    with pl.Ray(workers=4, servers=3, timeout=60, respawns=50) as engine:
        yield engine
