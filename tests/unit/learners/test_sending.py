"""What a worker gets to begin with: a learner without the weights that come with every model."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from ray import cloudpickle
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.core.protocol import Task, Work
from paceline.engines.ray.place import Place
from paceline.engines.ray.worker import Worker
from paceline.learners.base import Learner, for_workers

WIDTH = 1000
BYTES = 4 * WIDTH * WIDTH


def mean_square(module: nn.Module, batch: Any) -> Tensor:
    return torch.as_tensor(module(batch[0]).square().mean())


def rows() -> TensorDataset:
    return TensorDataset(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0)))


class Net(nn.Module):
    """A trained layer, a frozen one in bfloat16, and buffers of each kind."""

    mask: Tensor
    scratch: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen = nn.Linear(WIDTH, 10).to(torch.bfloat16).requires_grad_(False)
        self.norm = nn.BatchNorm1d(10)
        self.register_buffer("mask", torch.randn(200, 200))
        self.register_buffer("scratch", torch.randn(7), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.frozen(self.trained(x).to(torch.bfloat16)).float()
        found: Tensor = self.norm(hidden) * self.scratch.sum() + self.mask.mean()
        return found


def learner(model: nn.Module | Callable[[], nn.Module]) -> pl.TorchLearner:
    return pl.TorchLearner(model, mean_square, partial(torch.optim.SGD, lr=0.1), rows, 8)


def module() -> nn.Module:
    torch.manual_seed(3)
    return Net()


def arrived(recipe: pl.TorchLearner) -> Learner:
    sent: Learner = cloudpickle.loads(cloudpickle.dumps(for_workers(recipe)))
    return sent


def result(recipe: Learner, model: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    task = Task(0, "w0", Work(), 0, 0.0, 8, 0)
    vector = recipe.replica(0).compute([model], task, lambda done: True).vector
    assert vector is not None
    return vector.copy()


@pytest.mark.parametrize("model", [module(), module], ids=["module", "function"])
def test_a_learner_is_sent_without_the_weights_of_the_model(model: Any) -> None:
    recipe = learner(model)
    values = recipe.server().vector
    assert values.size == WIDTH * WIDTH + 20 + 21
    sent = len(cloudpickle.dumps(for_workers(recipe)))
    resident = 2 * (WIDTH * 10 + 10) + 4 * 200 * 200
    assert sent < 0.06 * BYTES and sent < resident + 20_000
    assert np.array_equal(result(arrived(recipe), values), result(recipe, values))


def test_a_function_is_sent_as_such_and_makes_the_same_model_each_time() -> None:
    recipe = learner(module)
    assert len(cloudpickle.dumps(for_workers(recipe))) < 20_000
    unseeded = learner(Net)
    before = torch.get_rng_state()
    one, other = unseeded.server(), unseeded.server()
    assert np.array_equal(one.vector, other.vector)
    assert torch.equal(torch.get_rng_state(), before)  # nobody else's numbers are used up
    assert np.array_equal(result(arrived(unseeded), one.vector), result(unseeded, one.vector))


class Drifting:
    """Makes a module with other frozen weights each time."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> nn.Module:
        self.calls += 1
        made = Net()
        made.frozen.weight.data += self.calls
        return made


def test_frozen_weights_that_differ_from_the_driver_s_are_refused() -> None:
    recipe = learner(Drifting())
    assert recipe.message_bytes == 4 * (WIDTH * WIDTH + 41)
    with pytest.raises(ValueError, match="model= made other frozen parameters or constant buffers"):
        arrived(recipe).replica(0)


def test_a_function_that_makes_no_module_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model= returned int; give an nn\.Module, or a function"):
        learner(lambda: 3).server()  # type: ignore[arg-type, return-value]


def test_the_module_given_stays_as_it_is() -> None:
    given = module()
    before = {name: tensor.clone() for name, tensor in given.state_dict().items()}
    recipe = learner(given)
    pl.Trainer(recipe, pl.sync(), pl.Simulator(2), progress=False).fit(steps=2)
    for_workers(recipe).replica(0)
    for name, tensor in given.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(p.grad is None and not p.is_meta for p in given.parameters())


@pytest.mark.parametrize("model", [module(), module], ids=["module", "function"])
def test_training_from_a_function_is_that_from_a_module(model: Any) -> None:
    run = pl.Trainer(learner(model), pl.sync(), pl.Simulator(2), progress=False).fit(steps=3)
    whole = pl.Trainer(learner(module()), pl.sync(), pl.Simulator(2), progress=False).fit(steps=3)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(run.model.state_dict()[name], tensor), name


def held() -> int:
    """Return the bytes of all tensors that Python holds in this process."""
    gc.collect()
    kinds = Tensor, nn.Parameter, nn.Buffer  # none of torch.compile's, which have no memory
    tensors = [thing for thing in gc.get_objects() if type(thing) in kinds]
    tensors = [tensor for tensor in tensors if tensor.layout == torch.strided]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("model", [module(), module], ids=["module", "function"])
def test_a_worker_holds_values_and_gradients_and_no_third_copy(model: Any) -> None:
    recipe = learner(model)
    layout = recipe.server().layout
    sent = cloudpickle.dumps((for_workers(recipe), None, None, None, layout))
    before = held()
    worker = Worker(place=lambda: Place("node", 0, ""))
    worker.set_up(cloudpickle.loads(sent), 0, None)
    assert 2.0 * BYTES <= held() - before <= 2.2 * BYTES
    worker.set_up(cloudpickle.loads(sent), 0, None)  # an earlier one is forgotten
    assert held() - before <= 2.2 * BYTES
