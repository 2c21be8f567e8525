"""Arguments of a learner that would train wrongly, or not at all, are refused in a sentence."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import paceline as pl
from paceline.core.protocol import Task, Work
from paceline.learners.optimize import (
    Rates,
    Rules,
    SliceRecipe,
    TorchServer,
    check_elementwise,
    shapes_of,
)

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(11))
Y = (X[:, :2].sum(1) > 0).long()
DATA = TensorDataset(X, Y)
PLAIN = partial(optim.SGD, lr=0.1)
AVERAGE = partial(optim.SGD, lr=1.0)


def loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))


def learner(model: nn.Module | None = None, **more: Any) -> pl.TorchLearner:
    settings: dict[str, Any] = {"loss": loss, "optimizer": PLAIN, "dataset": DATA}
    return pl.TorchLearner(model or network(), **{**settings, "batch_size": 12, **more})


def task(version: int = 0, steps: int = 1, offset: int = 0, samples: int = 12) -> Task:
    return Task(0, "w0", Work(samples=samples, steps=steps), version, 0.0, samples, offset)


def compute(recipe: pl.TorchLearner, given: Task) -> np.ndarray[Any, Any]:
    found = recipe.replica(0).compute([recipe.server().vector], given, lambda done: True)
    assert found.vector is not None
    return found.vector.copy()


# --- optimizers of other tensors -----------------------------------------------------------------


def closing_over(module: nn.Module) -> Callable[[Any], optim.Optimizer]:
    """The usual way to make groups by name in a script, which here steps the wrong tensors."""

    def make(parameters: Any) -> optim.Optimizer:
        named = list(module.named_parameters())
        decay = [p for name, p in named if name.endswith("weight")]
        rest = [p for name, p in named if not name.endswith("weight")]
        groups: list[dict[str, Any]] = [
            {"params": decay, "weight_decay": 0.1},
            {"params": rest},
        ]
        return optim.SGD(groups, lr=0.1)

    return make


@pytest.mark.parametrize("keyword", ["optimizer", "outer"])
def test_an_optimizer_that_closes_over_the_module_is_refused(keyword: str) -> None:
    model = network()
    with pytest.raises(
        ValueError,
        match=rf"^{keyword}= was given 6 parameters and made SGD of 6 other .*named_parameters",
    ):
        learner(model, **{keyword: closing_over(model)})


class TurnsBad:
    """Makes the first few optimizers of the parameters given, and all later ones of others."""

    def __init__(self, good: int) -> None:
        self.good = good

    def __call__(self, parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
        self.good -= 1
        given = list(parameters)
        return optim.SGD(given if self.good >= 0 else [nn.Parameter(torch.zeros(3))], lr=0.1)


SHAPES = shapes_of(network())
PATHS: dict[str, Callable[[], object]] = {
    "server": lambda: TorchServer(network(), Rules(TurnsBad(0))),
    "slice": SliceRecipe(Rules(TurnsBad(0)), SHAPES, 90, (0, 40)),
    "rates": lambda: Rates(TurnsBad(0), None, SHAPES),
    "trial": lambda: check_elementwise(TurnsBad(0), SHAPES),
    "trial of slices": lambda: check_elementwise(TurnsBad(1), SHAPES),
    "local steps": lambda: compute(
        learner(optimizer=TurnsBad(2), outer=AVERAGE), task(steps=2)
    ),  # good for the learner and its copy in the replica
}


@pytest.mark.parametrize("path", PATHS)
def test_every_path_that_makes_an_optimizer_refuses_other_tensors(path: str) -> None:
    with pytest.raises(ValueError, match="given 6 parameters and made SGD of 1 other tensors"):
        PATHS[path]()


def test_an_optimizer_of_no_tensor_is_refused() -> None:
    def empty(parameters: Any) -> optim.Optimizer:
        return optim.SGD([{"params": []}], lr=0.1)

    with pytest.raises(ValueError, match="made SGD of none of them"):
        learner(optimizer=empty)


def test_parameters_left_out_are_named(caplog: pytest.LogCaptureFixture) -> None:
    recipe = learner(optimizer=lambda given: optim.SGD(list(given)[2:], lr=0.1))
    with caplog.at_level(logging.WARNING):
        recipe.server()
    (told,) = [r.getMessage() for r in caplog.records]
    assert told.startswith("SGD trains 4 of 6 parameters and leaves out 0.weight, 0.bias; set")
    caplog.clear()
    learner().server()
    assert not caplog.records


# --- groups by name ------------------------------------------------------------------------------


def by_name(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> optim.Optimizer:
    """No weight decay for biases and for the LayerNorm, whose weight has a name like others."""
    named = dict(named_parameters)
    kept = [name for name in named if name.endswith("bias") or name.startswith("1.")]
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in named.items() if name not in kept]},
        {"params": [named[name] for name in kept], "weight_decay": 0.0, "lr": 0.02},
    ]
    return optim.AdamW(groups, lr=0.01, weight_decay=0.5)


def plain_training(steps: int) -> nn.Module:
    from paceline.data.sampling import Stream

    model, stream = network(), Stream(64, seed=0)
    optimizer = by_name(model.named_parameters())
    for step in range(steps):
        chosen = stream.indices(12 * step, 12)
        optimizer.zero_grad()
        loss(model, [X[chosen], Y[chosen]]).backward()
        optimizer.step()
    return model


def assert_close(one: nn.Module, other: nn.Module) -> None:
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6), name


def test_groups_by_name_train_as_in_plain_torch() -> None:
    recipe = learner(optimizer=by_name)
    run = pl.Trainer(recipe, pl.sync(), pl.Simulator(3), progress=False).fit(steps=20)
    assert_close(run.model, plain_training(20))
    assert recipe.rate(0) == 0.01


def test_groups_by_name_in_local_steps() -> None:
    recipe = learner(optimizer=by_name, outer=AVERAGE)
    run = pl.Trainer(recipe, pl.local_sgd(20), pl.Simulator(1), progress=False).fit(steps=1)
    assert_close(run.model, plain_training(20))


@pytest.mark.parametrize("pairs", [False, True])
def test_groups_by_name_in_slices(pairs: bool) -> None:
    """Also where the pairs go to the optimizer as they are, which keeps the names in its groups."""

    def whole(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> optim.Optimizer:
        return optim.SGD(named_parameters, lr=0.1, momentum=0.9)

    server = TorchServer(network(), Rules(whole if pairs else by_name))
    size = server.layout.size
    spans = server.layout.spans(3)
    shards = [server.recipe(span)() for span in spans]
    for shard, span in zip(shards, spans, strict=True):
        shard.load(server.layout.cut([((0, size), server.save())], span))
    rng = np.random.default_rng(0)
    for _ in range(3):
        vector = rng.normal(size=size).astype(np.float32)
        server.step([1.0], [vector], frozenset())
        for shard, (begin, end) in zip(shards, spans, strict=True):
            shard.reduce([1.0], [vector[begin:end]], frozenset())
            shard.apply({})
    cut = np.concatenate([shard.vector for shard in shards])
    np.testing.assert_allclose(cut, server.vector, rtol=1e-6, atol=1e-7)
    if not pairs:
        groups = server._optimizer.param_groups
        assert [len(group["params"]) for group in groups] == [2, 4]


def test_names_go_through_partial_and_objects() -> None:
    class Maker:
        def __call__(self, named_parameters: Any, lr: float) -> optim.Optimizer:
            return optim.SGD([p for name, p in named_parameters if "bias" in name], lr=lr)

    recipe = learner(optimizer=partial(Maker(), lr=0.3))
    assert recipe.rate(0) == 0.3
    assert len(recipe.server()._optimizer.param_groups[0]["params"]) == 3


def test_a_fused_optimizer_is_looked_at_without_memory_of_its_size() -> None:
    with torch.device("meta"):
        huge = nn.Linear(10**6, 10**6)
    recipe = learner(huge, optimizer=partial(optim.AdamW, lr=0.1, fused=True))
    assert recipe.rate(5) == 0.1


# --- schedules and transforms with an outer optimizer --------------------------------------------

HALVES = partial(StepLR, step_size=2, gamma=0.5)


@pytest.mark.parametrize("keyword", ["scheduler", "transform"])
def test_with_outer_a_schedule_or_transform_is_inner_or_outer(keyword: str) -> None:
    value: Any = HALVES if keyword == "scheduler" else pl.learners.ClipNorm(1.0)
    with pytest.raises(ValueError) as refusal:
        learner(outer=AVERAGE, **{keyword: value})
    assert str(refusal.value) == (
        f"{keyword}= together with outer= could be of either optimizer; use inner_{keyword}= for "
        f"the workers' local steps, or outer_{keyword}= for the server's"
    )
    for side in ("inner", "outer"):
        with pytest.raises(ValueError, match=rf"{side}_{keyword}= .* outer=.* use {keyword}="):
            learner(**{f"{side}_{keyword}": value})
        learner(outer=AVERAGE, **{f"{side}_{keyword}": value})


def test_diloco_with_an_inner_schedule_and_clipping_is_plain_training_with_both() -> None:
    """One worker that averages: version 2 goes on in the schedule where version 1 ended."""
    from paceline.data.sampling import Stream

    def warm(optimizer: optim.Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: (step + 1) / 10 if step < 10 else 0.5)

    momentum = partial(optim.SGD, lr=0.5)
    recipe = learner(
        optimizer=momentum,
        outer=AVERAGE,
        inner_scheduler=warm,
        inner_transform=pl.learners.ClipNorm(0.3),
    )
    run = pl.Trainer(recipe, pl.local_sgd(5), pl.Simulator(1), progress=False).fit(steps=3)
    model, stream, clipped = network(), Stream(64, seed=0), 0
    optimizer = momentum(model.parameters())
    schedule = warm(optimizer)
    for step in range(15):
        chosen = stream.indices(12 * step, 12)
        optimizer.zero_grad()
        loss(model, [X[chosen], Y[chosen]]).backward()
        clipped += int(nn.utils.clip_grad_norm_(model.parameters(), 0.3) > 0.3)
        optimizer.step()
        schedule.step()
    assert clipped > 3
    assert_close(run.model, model)
    assert recipe.rate(0) == recipe.rate(7) == 1.0  # the server's


def test_the_outer_schedule_and_transform_are_the_servers() -> None:
    recipe = learner(
        outer=AVERAGE, outer_scheduler=HALVES, outer_transform=pl.learners.ClipNorm(1e-3)
    )
    assert [recipe.rate(version) for version in (0, 2, 4)] == [1.0, 0.5, 0.25]
    server = recipe.server()
    before = server.vector.copy()
    server.step([1.0], [np.ones(server.layout.size, dtype=np.float32)], frozenset())
    assert np.linalg.norm(server.vector - before) == pytest.approx(1e-3, rel=1e-2)
    same = compute(recipe, task(steps=3))
    assert np.array_equal(same, compute(learner(outer=AVERAGE), task(steps=3)))


def test_a_scheduled_task_is_the_same_on_every_worker_whatever_it_did_before() -> None:
    cycle = partial(optim.lr_scheduler.OneCycleLR, max_lr=0.4, total_steps=40)
    momentum = partial(optim.SGD, lr=0.1, momentum=0.9)
    recipe = learner(
        optimizer=momentum,
        outer=AVERAGE,
        inner_scheduler=cycle,
        inner_transform=pl.learners.ClipNorm(0.2),
    )
    model = recipe.server().vector
    busy, fresh = recipe.replica(0), recipe.replica(0)

    def vector(replica: Any, given: Task) -> np.ndarray[Any, Any]:
        found = replica.compute([model], given, lambda done: True).vector
        assert found is not None
        return np.array(found)

    first = vector(busy, task(version=1, steps=4))
    later = vector(busy, task(version=7, steps=4))
    assert not np.allclose(first, later)
    assert np.array_equal(vector(fresh, task(version=7, steps=4)), later)
    assert np.array_equal(vector(busy, task(version=1, steps=4)), first)  # it goes back, too
    assert np.array_equal(vector(fresh, task(version=1, steps=4)), first)


def test_the_settings_of_local_steps_are_recorded() -> None:
    told = learner(outer=AVERAGE, inner_transform=pl.learners.ClipNorm(2.0)).about()
    assert told["inner_transform"] == "ClipNorm(limit=2.0)"
    assert told["inner_scheduler"] == told["outer_scheduler"] == told["outer_transform"] == "None"


# --- the commonest mistakes ----------------------------------------------------------------------


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(DATA)

    def __len__(self) -> int:
        return 64


class Nothing(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return index


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "optimizer": (
        {"optimizer": optim.Adam(network().parameters(), lr=0.1)},
        r"optimizer= is a Adam and not a function.*partial\(torch.optim.Adam, lr=…\)",
    ),
    "outer": (
        {"outer": AVERAGE(network().parameters())},
        r"outer= is a SGD and not a function.*partial\(torch.optim.SGD, lr=…\)",
    ),
    "text": ({"optimizer": "adam"}, r"optimizer= is a str and not a function.*partial"),
    "no optimizer": ({"optimizer": lambda given: None}, r"optimizer= returned a NoneType; return"),
    "scheduler": (
        {"scheduler": StepLR(PLAIN(network().parameters()), 5)},
        r"scheduler= is a StepLR and not a function.*partial\(torch.optim.lr_scheduler.StepLR, …\)",
    ),
    "inner scheduler": (
        {"inner_scheduler": StepLR(PLAIN(network().parameters()), 5), "outer": AVERAGE},
        r"inner_scheduler= is a StepLR and not a function",
    ),
    "plateau": ({"scheduler": ReduceLROnPlateau}, r"ReduceLROnPlateau, which needs a metric.*use"),
    "no schedule": ({"scheduler": lambda given: 0.1}, r"scheduler= returned a float; return"),
    "another's schedule": (
        {"scheduler": lambda _: StepLR(PLAIN(network().parameters()), 5)},
        r"scheduler= returned StepLR of another optimizer than the one given",
    ),
    "iterable": ({"dataset": Rows()}, r"dataset Rows is an IterableDataset.*by their index.*give"),
    "without length": ({"dataset": Nothing()}, r"dataset Nothing is neither map-style"),
    "loss": ({"loss": 5}, r"loss= is a int.*give a function loss\(model, batch\)"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_at_construction(name: str) -> None:
    more, told = MISTAKES[name]
    with pytest.raises(ValueError, match=f"^{told}|{told}"):
        learner(**more)


@pytest.mark.parametrize("opened", [Rows, Nothing, lambda: None])
def test_a_function_that_opens_no_map_style_dataset_is_refused(opened: Any) -> None:
    with pytest.raises(ValueError, match=r"dataset \w+ is (an IterableDataset|neither map-style)"):
        learner(dataset=opened).examples  # noqa: B018


LOSSES: dict[str, tuple[Callable[[nn.Module, Any], Any], str]] = {
    "None": (lambda model, batch: None, "loss returned a NoneType; return the mean loss"),
    "number": (lambda model, batch: 0.5, "loss returned a float; return .* without .item()"),
    "vector": (
        lambda model, batch: nn.functional.cross_entropy(
            model(batch[0]), batch[1], reduction="none"
        ),
        r"loss returned a tensor of shape \(12,\); return one number, .*mean\(\)",
    ),
    "detached": (
        lambda model, batch: loss(model, batch).detach(),
        r"loss returned a tensor without a gradient.*no_grad",
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_no_mean_is_told(name: str) -> None:
    wrong, told = LOSSES[name]
    with pytest.raises(ValueError, match=told):
        compute(learner(loss=wrong), task())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_device_that_is_not_there_is_told(device: str) -> None:
    with pytest.raises(ValueError, match=rf'device="{device}".*no CUDA device.*device="cpu"'):
        learner(device=device).replica(0)


# --- randomness of the user's data ---------------------------------------------------------------


class Augmented(Dataset[Any]):
    """Adds noise of numpy and of Python's random."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        noise = np.random.normal(size=6) + random.random()
        return X[index] + torch.from_numpy(noise).float(), Y[index]


@pytest.mark.parametrize("steps", [1, 3])
def test_data_augmented_with_numpy_and_random_give_the_same_task_the_same_result(
    steps: int,
) -> None:
    more: dict[str, Any] = {"outer": AVERAGE} if steps > 1 else {}
    recipe = learner(dataset=Augmented(), micro_batch=5, **more)
    first = compute(recipe, task(steps=steps))
    np.random.seed(77)
    random.seed(77)
    assert np.array_equal(compute(recipe, task(steps=steps)), first)
    same = learner(dataset=Augmented(), micro_batch=5, **more).replica(1)
    other = same.compute([recipe.server().vector], task(steps=steps), lambda done: True)
    assert not np.array_equal(other.vector, first)  # type: ignore[arg-type]


def test_numpy_and_random_go_on_as_if_no_task_had_been_computed() -> None:
    np.random.seed(5)
    random.seed(5)
    expected = np.random.normal(), random.random()
    np.random.seed(5)
    random.seed(5)
    compute(learner(dataset=Augmented()), task())
    assert (np.random.normal(), random.random()) == expected


def test_the_first_of_two_random_sources_does_not_repeat_the_other() -> None:
    """Each source has its own seed, and other samples have other random numbers."""
    seen: list[tuple[float, float, float]] = []

    class Watched(Augmented):
        def __getitem__(self, index: int) -> Any:
            drawn = np.random.random(), random.random(), float(torch.rand(()))
            seen.append(drawn)
            return X[index], Y[index]

    recipe = learner(dataset=Watched())
    compute(recipe, task())
    compute(recipe, task(offset=12))
    numbers = [number for drawn in seen for number in drawn]
    assert len(set(numbers)) == len(numbers) == 3 * 24
