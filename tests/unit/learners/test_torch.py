"""Modules, optimizers and datasets of PyTorch: what a task gives, and what a step does with it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, MultiStepLR, StepLR
from torch.utils.data import Dataset, TensorDataset

import paceline as pl
import paceline.training.checkpoint as checkpoint
from paceline.core.policy import Policy
from paceline.core.protocol import Task, Want, Work
from paceline.data.sampling import Stream
from paceline.learners.base import Outcome, Saved
from paceline.learners.optimize import TorchServer
from paceline.learners.replica import TorchReplica
from paceline.learners.transforms import ClipNorm
from tests.conftest import vector_of

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(11))
Y = (X[:, :2].sum(1) > 0).long()
DATA = TensorDataset(X, Y)
SGD_PLAIN = partial(SGD, lr=0.1)
SGD_MOMENTUM = partial(SGD, lr=0.1, momentum=0.9)


def loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def network(*layers: nn.Module) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(6, 8), *(layers or (nn.ReLU(),)), nn.Linear(8, 2))


def learner(model: nn.Module | None = None, **more: Any) -> pl.TorchLearner:
    settings: dict[str, Any] = {"optimizer": SGD_PLAIN, "dataset": DATA, "batch_size": 12}
    settings |= more
    return pl.TorchLearner(model or network(), settings.pop("loss", loss), **settings)


def task(offset: int = 0, samples: int = 12, steps: int = 1, **more: Any) -> Task:
    work = Work(samples=samples, steps=steps)
    return Task(more.pop("id", 0), more.pop("worker", "w0"), work, 0, 0.0, samples, offset, **more)


def always(done: int) -> bool:
    return True


def compute(
    recipe: pl.TorchLearner, given: Task, proceed: Callable[[int], bool] = always, seed: int = 0
) -> Outcome:
    """Compute on a fresh replica, from the model the recipe starts with."""
    return recipe.replica(seed).compute([recipe.server().vector], given, proceed)


def gradient(model: nn.Module, chosen: Any) -> np.ndarray[Any, Any]:
    """The plain way: a mean loss, backward, all gradients in a row."""
    model = copy.deepcopy(model).train()
    loss(model, [X[chosen], Y[chosen]]).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()]).numpy()  # type: ignore[union-attr]


def train(recipe: pl.TorchLearner, policy: Policy, workers: int, steps: int) -> pl.Run:
    engine = pl.Simulator(workers)
    return pl.Trainer(recipe, policy, engine, seed=9, progress=False).fit(steps=steps)


# --- a task --------------------------------------------------------------------------------------


def test_a_task_is_the_mean_gradient_over_its_stretch_of_the_stream() -> None:
    outcome = compute(learner(), task(offset=60), seed=3)
    chosen = Stream(64, 3).indices(60, 12)
    assert np.array_equal(vector_of(outcome), gradient(network(), chosen))
    assert outcome.samples == 12
    expected = loss(network(), [X[chosen], Y[chosen]]).item()
    assert outcome.stats == {"loss": pytest.approx(expected, rel=1e-6)}


LAYERS = {
    "plain": (nn.ReLU(),),
    "dropout": (nn.Dropout(0.5), nn.ReLU()),
    "batch norm": (nn.BatchNorm1d(8), nn.ReLU()),
}


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("micro_batch", [None, 5])
def test_the_same_task_gives_the_same_bits_whatever_was_computed_before(
    layers: str, micro_batch: int | None
) -> None:
    recipe = learner(network(*LAYERS[layers]), micro_batch=micro_batch)
    model = recipe.server().vector.copy()
    first, second = recipe.replica(1), recipe.replica(1)
    expected = first.compute([model], task(offset=24), always)
    expected_vector = vector_of(expected).copy()
    torch.manual_seed(77)
    other = model + np.float32(0.1)
    second.compute([other], task(offset=5), always)
    second.compute([other], task(offset=500, samples=3), lambda done: False)
    again = second.compute([model], task(offset=24, id=8, worker="w5", attempt=2), always)
    assert np.array_equal(vector_of(again), expected_vector)
    assert again.stats == expected.stats
    once_more = first.compute([model], task(offset=24), always)
    assert np.array_equal(vector_of(once_more), expected_vector)


def test_a_part_is_the_same_vector_whoever_computes_it_and_with_which_others() -> None:
    """With dropout, BatchNorm and a buffer that counts: alone, first, or after another part."""
    recipe = learner(network(nn.BatchNorm1d(8), nn.Dropout(0.5)))
    length = recipe.message_bytes // 4

    def vector(parts: dict[int, Any], m: int = 1) -> np.ndarray[Any, Any]:
        work = Work(parts, n_parts=3, samples=12)
        found = compute(recipe, Task(0, "w0", work, 0, 0.0, 12, 24))
        assert found.vector is not None and found.vector.dtype == np.float32
        assert found.vector.size == -(-length // m)
        assert found.samples == 4 * len(parts)
        return found.vector

    alone = vector({1: 1.0})
    np.testing.assert_array_equal(vector({1: 1.0, 2: 0.0}), alone)
    np.testing.assert_array_equal(vector({2: 0.0, 1: 1.0}), alone)
    both = vector({1: (1.0, -2.0), 2: (3.0, 0.5)}, m=2)
    other, size = vector({2: 1.0}), length // 2
    for u, (a, b) in enumerate([(1.0, 3.0), (-2.0, 0.5)]):
        part = a * alone[u::2][:size] + b * other[u::2][:size]
        both[:size] -= part
    assert np.abs(both[:size]).max() < 1e-6


def test_half_a_part_is_no_result() -> None:
    recipe = learner(micro_batch=2)
    coded = Task(0, "w0", Work({0: 1.0, 1: 1.0}, n_parts=3, samples=12), 0, 0.0, 12, 0)
    found = recipe.replica(0).compute([recipe.server().vector], coded, lambda done: done < 2)
    assert found.vector is None and found.samples == 0


def test_random_layers_differ_from_draw_to_draw_and_seed_to_seed() -> None:
    """On equal samples only the layers' randomness is left to differ."""
    same = TensorDataset(torch.ones(64, 6), torch.zeros(64, dtype=torch.long))
    recipe = learner(network(nn.Dropout(0.5)), dataset=same)
    vectors = [
        vector_of(compute(recipe, task(offset=draw), seed=seed)).tobytes()
        for draw, seed in ((0, 0), (12, 0), (0, 1))
    ]
    assert len(set(vectors)) == 3


@pytest.mark.parametrize("micro_batch", [1, 5, 6, 12, 50])
def test_micro_batches_sum_to_the_same_gradient(micro_batch: int) -> None:
    whole = compute(learner(), task())
    pieces = compute(learner(micro_batch=micro_batch), task())
    assert pieces.vector == pytest.approx(whole.vector, rel=1e-6, abs=1e-7)
    assert pieces.stats["loss"] == pytest.approx(whole.stats["loss"], rel=1e-6)
    assert pieces.samples == 12


def test_work_that_ends_early_is_the_mean_over_what_was_done() -> None:
    recipe = learner(micro_batch=4)
    cut = compute(recipe, task(offset=3, samples=12), lambda done: done < 8)
    whole = compute(recipe, task(offset=3, samples=8))
    assert cut.samples == 8
    assert cut.vector == pytest.approx(whole.vector, rel=1e-6, abs=1e-7)
    assert cut.stats["loss"] == pytest.approx(whole.stats["loss"])


def test_it_asks_between_pieces_with_the_samples_done() -> None:
    asked: list[int] = []

    def proceed(done: int) -> bool:
        asked.append(done)
        return True

    compute(learner(micro_batch=5), task(samples=12), proceed)
    assert asked == [0, 5, 10]
    asked.clear()
    compute(learner(micro_batch=5, outer=partial(SGD, lr=1.0)), task(samples=6, steps=2), proceed)
    assert asked == [0, 5, 6, 11]


def test_nothing_done_has_no_vector() -> None:
    outcome = compute(learner(micro_batch=4), task(), lambda done: False)
    assert (outcome.vector, outcome.samples, outcome.stats) == (None, 0, {})


def test_a_worker_leaves_the_world_as_it_was() -> None:
    """The user's module, global randomness and the number of threads are untouched."""
    model = network(nn.BatchNorm1d(8), nn.Dropout(0.5)).eval()
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(123)
    expected = torch.rand(3)
    torch.manual_seed(123)
    threads = torch.get_num_threads()
    recipe = learner(model, threads=threads + 1)
    inside: list[int] = []

    def watching(module: nn.Module, batch: Any) -> Tensor:
        inside.append(torch.get_num_threads())
        return loss(module, batch)

    run = train(learner(model, threads=threads + 1, loss=watching), pl.sync(), 2, 3)
    compute(recipe, task())
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads
    assert set(inside) == {threads + 1}
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not torch.equal(run.model[0].weight, model.get_parameter("0.weight"))


def test_threads_and_randomness_come_back_after_an_error() -> None:
    def failing(model: nn.Module, batch: Any) -> Tensor:
        raise ArithmeticError("mine")

    threads = torch.get_num_threads()
    state = torch.get_rng_state()
    with pytest.raises(ArithmeticError, match="mine"):
        compute(learner(loss=failing, threads=threads + 1), task())
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_a_replica_trains_though_the_recipe_is_in_evaluation() -> None:
    recipe = learner(network(nn.Dropout(0.5)).eval())
    assert (
        compute(recipe, task(offset=0), seed=0).stats
        != compute(learner(network(nn.Dropout(0.0)).eval()), task(offset=0), seed=0).stats
    )


def test_a_vector_from_a_store_may_be_read_only() -> None:
    recipe = learner()
    vector = recipe.server().vector.copy()
    vector.flags.writeable = False
    outcome = recipe.replica(0).compute([vector], task(), always)
    gradient = vector_of(outcome).copy()
    gradient.flags.writeable = False
    recipe.server().step([1.0], [gradient], frozenset())


class Counting(nn.Module):
    """Counts its calls in a buffer, in place or by putting a new tensor in its place."""

    calls: Tensor

    def __init__(self, persistent: bool, in_place: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 2))
        self.register_buffer("calls", torch.zeros(()), persistent=persistent)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            self.calls += 1
        else:
            self.calls = self.calls + 1
        return x @ self.weight * self.calls


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_no_buffer_is_kept_from_task_to_task(persistent: bool, in_place: bool) -> None:
    recipe = learner(Counting(persistent, in_place))
    replica = recipe.replica(0)
    model = recipe.server().vector.copy()
    first = vector_of(replica.compute([model], task(), always)).copy()
    assert np.array_equal(vector_of(replica.compute([model], task(), always)), first)
    if persistent:
        assert first[-1] == 1.0  # the change of the count travels


# --- a step --------------------------------------------------------------------------------------


def single_process(
    model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer], steps: int, batch: int
) -> nn.Module:
    """Plain training on the samples that the stream gives to the steps in turn."""
    model = copy.deepcopy(model).train()
    made = optimizer(model.parameters())
    stream = Stream(64, seed=9)
    for step in range(steps):
        chosen = stream.indices(step * batch, batch)
        made.zero_grad()
        loss(model, [X[chosen], Y[chosen]]).backward()
        made.step()
    return model


def assert_close(one: nn.Module, other: nn.Module, rel: float) -> None:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    for (name, mine), (_, theirs) in pairs:
        size = theirs.norm().item() if theirs.is_floating_point() else 0.0
        difference = (mine - theirs).float().norm().item()
        assert difference <= rel * size, name


@pytest.mark.parametrize("workers", [1, 3, 5])
@pytest.mark.parametrize("optimizer", [SGD_MOMENTUM, partial(Adam, lr=0.01)], ids=["SGD", "Adam"])
def test_sync_is_large_batch_training_in_one_process(
    workers: int, optimizer: Callable[..., torch.optim.Optimizer]
) -> None:
    run = train(learner(optimizer=optimizer), pl.sync(shares=workers), workers, 50)
    plain = single_process(network(), optimizer, 50, 12)
    assert_close(run.model, plain, rel=1e-5)
    assert not torch.equal(plain.get_parameter("0.weight"), network().get_parameter("0.weight"))


def test_buffers_move_by_the_weighted_mean_of_the_workers_changes() -> None:
    model = network(nn.BatchNorm1d(8), nn.ReLU())
    run = train(learner(model, batch_size=10), pl.sync(shares=3), 3, 1)
    stream, draw = Stream(64, seed=9), 0
    mean, variance = torch.zeros(8), torch.zeros(8)
    for share in (4, 3, 3):
        alone = copy.deepcopy(model).train()
        alone(X[stream.indices(draw, share)])
        mean += share / 10 * alone.get_buffer("1.running_mean")
        variance += share / 10 * alone.get_buffer("1.running_var")
        draw += share
    norm = run.model[1]
    assert norm.running_mean == pytest.approx(mean, rel=1e-5, abs=1e-7)
    assert norm.running_var == pytest.approx(variance, rel=1e-5)
    assert norm.num_batches_tracked == 1
    assert norm.num_batches_tracked.dtype == torch.int64


def test_one_worker_with_batch_norm_is_plain_training() -> None:
    model = network(nn.BatchNorm1d(8), nn.ReLU())
    run = train(learner(model, optimizer=SGD_MOMENTUM), pl.sync(), 1, 20)
    assert_close(run.model, single_process(model, SGD_MOMENTUM, 20, 12), rel=1e-5)
    assert run.model[1].num_batches_tracked == 20


def test_averaging_the_local_steps_of_one_worker_is_plain_training() -> None:
    recipe = learner(outer=partial(SGD, lr=1.0), optimizer=SGD_PLAIN)
    run = train(recipe, pl.local_sgd(5), 1, 4)
    assert_close(run.model, single_process(network(), SGD_PLAIN, 20, 12), rel=1e-5)


def test_local_steps_start_their_optimizer_anew() -> None:
    recipe = learner(outer=partial(SGD, lr=1.0), optimizer=SGD_MOMENTUM)
    run = train(recipe, pl.local_sgd(3), 1, 2)
    model, stream = network(), Stream(64, seed=9)
    for round in range(2):
        optimizer = SGD_MOMENTUM(model.parameters())
        for step in range(3):
            chosen = stream.indices((3 * round + step) * 12, 12)
            optimizer.zero_grad()
            loss(model, [X[chosen], Y[chosen]]).backward()
            optimizer.step()
    assert_close(run.model, model, rel=1e-5)


def test_local_steps_of_several_are_averaged() -> None:
    recipe = learner(outer=partial(SGD, lr=1.0), optimizer=SGD_PLAIN)
    run = train(recipe, pl.local_sgd(3), 2, 1)
    stream, mean = Stream(64, seed=9), torch.zeros(2, 8)
    for worker in range(2):
        model = copy.deepcopy(network())
        optimizer = SGD_PLAIN(model.parameters())
        for step in range(3):
            chosen = stream.indices(18 * worker + 6 * step, 6)
            optimizer.zero_grad()
            loss(model, [X[chosen], Y[chosen]]).backward()
            optimizer.step()
        mean += model.get_parameter("2.weight").detach() / 2
    assert torch.allclose(run.model[2].weight, mean, rtol=1e-5, atol=1e-7)


def test_local_steps_that_end_early_return_the_change_so_far() -> None:
    recipe = learner(outer=partial(SGD, lr=1.0), micro_batch=6)
    cut = compute(recipe, task(samples=12, steps=4), lambda done: done < 24)
    whole = compute(recipe, task(samples=12, steps=2))
    assert cut.samples == 24
    assert np.array_equal(vector_of(cut), vector_of(whole))
    assert cut.stats == whole.stats
    nothing = compute(recipe, task(samples=12, steps=4), lambda done: False)
    assert (nothing.vector, nothing.samples) == (None, 0)


def test_the_schedule_advances_once_per_step() -> None:
    """Whatever the workers do: rates 0.1, 0.1, 0.05, 0.05, 0.025, …"""
    schedule = partial(StepLR, step_size=2, gamma=0.5)
    run = train(learner(scheduler=schedule), pl.sync(shares=3), 3, 6)
    model, stream = copy.deepcopy(network()), Stream(64, seed=9)
    for step, rate in enumerate([0.1, 0.1, 0.05, 0.05, 0.025, 0.025]):
        chosen = stream.indices(12 * step, 12)
        model.zero_grad()
        loss(model, [X[chosen], Y[chosen]]).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(rate * parameter.grad)
    assert_close(run.model, model, rel=1e-5)


def test_norm_and_dot_are_of_the_parameters_alone() -> None:
    server = learner(network(nn.BatchNorm1d(8))).server()
    both: frozenset[Want] = frozenset({"norm", "dot"})
    size = server.vector.size
    ones = np.ones(size, dtype=np.float32)
    trainable = size - (8 + 8 + 1)
    first = server.step([0.5], [ones], both)
    assert first == {"norm": pytest.approx(0.5 * trainable**0.5), "dot": 0.0}
    second = server.step([1.0, 1.0], [ones, ones], both)
    assert second["dot"] == pytest.approx(trainable)
    assert server.step([1.0], [ones], frozenset()) == {}


# --- the server's state --------------------------------------------------------------------------


def vectors(server: TorchServer, count: int, seed: int) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=server.vector.size).astype(np.float32) for _ in range(count)]


STATEFUL: dict[str, dict[str, Any]] = {
    "SGD": {"optimizer": SGD_PLAIN},
    "momentum": {"optimizer": partial(SGD, lr=0.1, momentum=0.9, nesterov=True)},
    "Adam": {"optimizer": partial(Adam, lr=0.01)},
    "AdamW amsgrad": {"optimizer": partial(torch.optim.AdamW, lr=0.01, amsgrad=True)},
    "StepLR": {"scheduler": partial(StepLR, step_size=2, gamma=0.5)},
    "MultiStepLR": {"scheduler": partial(MultiStepLR, milestones=[2, 4, 4, 6])},
    "CosineAnnealingLR": {"scheduler": partial(CosineAnnealingLR, T_max=9)},
    "LambdaLR": {"scheduler": partial(LambdaLR, lr_lambda=lambda step: 1 / (1 + step))},
    "outer": {"outer": partial(SGD, lr=0.7, momentum=0.9, nesterov=True)},
}


@pytest.mark.parametrize("name", STATEFUL)
def test_a_saved_server_takes_the_same_next_steps(name: str, tmp_path: Path) -> None:
    """Through files, as in a checkpoint."""
    recipe = learner(network(nn.BatchNorm1d(8)), **STATEFUL[name])
    server, fresh = recipe.server(), recipe.server()
    both: frozenset[Want] = frozenset({"norm", "dot"})
    for vector in vectors(server, 3, seed=1):
        server.step([1.0], [vector], both)
    saved = on_disk(server.save().copy(), tmp_path)
    fresh.load(saved)
    assert np.array_equal(fresh.vector, server.vector)
    for vector in vectors(server, 4, seed=2):
        assert server.step([0.5, 0.25], [vector, vector], both) == fresh.step(
            [0.5, 0.25], [vector, vector], both
        )
        assert np.array_equal(fresh.vector, server.vector)
    again = fresh.save()
    assert again.data == server.save().data
    for key, array in server.save().arrays.items():
        assert again.arrays[key].shape == array.shape
        assert np.array_equal(again.arrays[key], array)


def on_disk(saved: Saved, folder: Path) -> Saved:
    snapshot = checkpoint.Snapshot(0, {}, {}, saved, None)
    checkpoint.write(folder / "step-0", snapshot, {})
    return checkpoint.read(folder / "step-0").server


def test_what_was_saved_is_apart_from_further_training() -> None:
    server = learner(optimizer=SGD_MOMENTUM).server()
    vector = vectors(server, 1, seed=1)[0]
    server.step([1.0], [vector], frozenset())
    saved = server.save().copy()
    before = {name: array.copy() for name, array in saved.arrays.items()}
    server.step([1.0], [vector], frozenset())
    assert all(np.array_equal(saved.arrays[name], before[name]) for name in before)
    assert set(before) == {"values", *(f"optimizer.{i}.momentum_buffer" for i in range(4))}


def test_the_model_is_apart_from_further_training() -> None:
    recipe = learner(network(nn.BatchNorm1d(8)))
    server = recipe.server()
    vector = vectors(server, 1, seed=1)[0]
    server.step([1.0], [vector], frozenset())
    model, export = server.model(), server.export()
    assert not model.training
    assert (
        model.state_dict().keys() == export.keys() == network(nn.BatchNorm1d(8)).state_dict().keys()
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    server.step([1.0], [vector], frozenset())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
        assert np.array_equal(export[name], before[name].numpy())
        assert export[name].shape == tuple(value.shape)
    with torch.no_grad():
        model.get_parameter("0.weight").fill_(
            0.0
        )  # nor does the user's use of it reach the training
    assert server.model().get_parameter("0.weight").abs().sum() > 0
    assert all(parameter.grad is None for parameter in model.parameters())
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert len(storages) == len(list(model.parameters()))
    assert server.step([1.0], [vector], frozenset({"norm"}))["norm"] > 0


def test_the_model_has_the_buffers_of_the_workers() -> None:
    server = learner(network(nn.BatchNorm1d(8))).server()
    change = np.zeros(server.vector.size, dtype=np.float32)
    change[-17:] = 2.0
    server.step([0.25, 0.25], [change, change], frozenset())
    model = server.model()
    assert model.get_buffer("1.running_mean").tolist() == [1.0] * 8
    assert model.get_buffer("1.running_var").tolist() == [2.0] * 8
    assert model.get_buffer("1.num_batches_tracked") == 1
    assert server.export()["1.running_var"].tolist() == [2.0] * 8


# --- datasets ------------------------------------------------------------------------------------


class Slow(Dataset[Any]):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        return X[index], Y[index]


class Many(Slow):
    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("one by one, though it offers many at once")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.asked.append(indices)
        return [(X[i], Y[i]) for i in indices]


class Named(Slow):
    def __getitem__(self, index: int) -> Any:
        return {"inputs": X[index], "labels": int(Y[index])}


class Derived(TensorDataset):
    """A TensorDataset that does more must not be taken for a plain one."""

    def __getitem__(self, index: int) -> Any:
        inputs, labels = self.tensors
        return -inputs[index], labels[index]


def test_every_kind_of_dataset_gives_the_same_batches() -> None:
    expected = vector_of(compute(learner(), task(offset=50)))
    slow = compute(learner(dataset=Slow()), task(offset=50))
    assert np.array_equal(vector_of(slow), expected)
    many = Many()
    at_once = compute(learner(dataset=many), task(offset=50))
    assert np.array_equal(vector_of(at_once), expected)
    assert many.asked == [Stream(64, 0).indices(50, 12).tolist()]

    def named(model: nn.Module, batch: Any) -> Tensor:
        assert set(batch) == {"inputs", "labels"}
        return loss(model, (batch["inputs"], batch["labels"]))

    recipe = learner(dataset=Named(), loss=named)
    assert np.array_equal(vector_of(compute(recipe, task(offset=50))), expected)


def test_a_dataset_of_ones_own_is_asked() -> None:
    derived = compute(learner(dataset=Derived(X, Y)), task())
    negated = compute(learner(dataset=TensorDataset(-X, Y)), task())
    assert np.array_equal(vector_of(derived), vector_of(negated))


def test_a_collate_function_is_used() -> None:
    def double(items: list[Any]) -> Any:
        return torch.stack([2 * inputs for inputs, _ in items]), torch.stack([y for _, y in items])

    doubled = compute(learner(collate=double), task())
    plain = compute(learner(dataset=TensorDataset(2 * X, Y)), task())
    assert np.array_equal(vector_of(doubled), vector_of(plain))


def test_a_dataset_may_be_opened_by_a_function_once_in_a_worker() -> None:
    opened = []

    def make() -> Dataset[Any]:
        opened.append(1)
        return DATA

    recipe = learner(dataset=make)
    assert opened == []
    replica = recipe.replica(0)
    assert opened == [1]
    assert isinstance(replica, TorchReplica)
    outcome = replica.compute([recipe.server().vector], task(), always)
    assert opened == [1]
    assert np.array_equal(vector_of(outcome), vector_of(compute(learner(), task())))
    assert recipe.examples == 64


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("work", "told"),
    [
        (
            Work(parts={0: 1.0}, steps=2),
            "parts of a batch are gradients of one model and cannot take local steps; use "
            "coded(…) without outer=, or local_sgd",
        ),
        (
            Work(parts={0: 1.0}, budget=1.5),
            "coded work needs whole parts of a batch: leave its budget out",
        ),
        (
            Work(steps=3),
            "3 local steps need an outer optimizer for the server: "
            "TorchLearner(…, outer=partial(torch.optim.SGD, lr=1.0)) averages",
        ),
        (
            Work(budget=1.5),
            "a budget of 1.5 s can only end work between pieces: "
            "TorchLearner(…, micro_batch=…) says how large a piece is",
        ),
    ],
    ids=str,
)
def test_work_that_cannot_be_done_is_refused(work: Work, told: str) -> None:
    with pytest.raises(ValueError) as refusal:
        learner().check(work)
    assert str(refusal.value) == told
    with pytest.raises(ValueError):
        compute(learner(), Task(0, "w0", work, 0, 0.0, 1, 0))
    with pytest.raises(ValueError):
        pl.Trainer(learner(), pl.policies.Gather(1, work=work), pl.Simulator(1), progress=False)


def test_work_that_can_be_done_is_not_refused() -> None:
    able = learner(outer=partial(SGD, lr=1.0), micro_batch=2)
    able.check(Work(steps=3, budget=1.5))


def test_recipes_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="batch_size=0, micro_batch=None: use at least 1"):
        learner(batch_size=0)
    with pytest.raises(ValueError, match="batch_size=12, micro_batch=0: use at least 1"):
        learner(micro_batch=0)
    with pytest.raises(ValueError, match=r"dataset int is neither map-style .* nor a function"):
        learner(dataset=5)


def test_what_a_recipe_tells_of_itself() -> None:
    recipe = learner(network(nn.BatchNorm1d(8)))
    assert recipe.about() == {
        "learner": "Sequential",
        "batch_size": 12,
        "parameters": 6 * 8 + 8 + 16 + 8 * 2 + 2,
        "threads": 1,
        "examples": 64,
        "optimizer": "partial(SGD, lr=0.1)",
        "outer": "None",
        "scheduler": "None",
        "transform": "None",
    }
    assert learner(transform=ClipNorm(2.0)).about()["transform"] == "ClipNorm(limit=2.0)"
    assert recipe.message_bytes == 4 * (90 + 17)
    assert recipe.examples == 64


def test_the_heavy_parts_are_imported_when_used() -> None:
    assert pl.TorchLearner is type(learner())
    with pytest.raises(AttributeError, match="No paceline attribute TorchLearnr"):
        pl.TorchLearnr  # type: ignore[attr-defined]  # noqa: B018
