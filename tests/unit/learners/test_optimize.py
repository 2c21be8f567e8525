"""A step taken in slices is the step of the whole, which is that of plain torch."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

from paceline.core.protocol import Stat, Want
from paceline.learners.base import Layout, Saved, Shard, Span, Sums, add_up, statistics
from paceline.learners.optimize import Rules, SliceRecipe, TorchServer, check_elementwise
from paceline.learners.transforms import ClipNorm, Piece, TrustRatio

Array = np.ndarray[Any, Any]
BOTH: frozenset[Want] = frozenset({"norm", "dot"})
NONE: frozenset[Want] = frozenset()
CLOSE: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}


class Net(nn.Module):
    """48 trained values, one of them a tensor without dimensions, and 9 in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Linear(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.two = nn.Linear(4, 3)


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Net()


def results(steps: int, seed: int = 0, size: int = 57) -> list[tuple[list[float], list[Array]]]:
    """For each step two or three results with their weights."""
    rng = np.random.default_rng(seed)
    counts = [2 + step % 2 for step in range(steps)]
    return [
        (
            rng.uniform(0.1, 0.9, size=count).tolist(),
            [rng.normal(size=size).astype(np.float32) for _ in range(count)],
        )
        for count in counts
    ]


class Slices:
    """The servers of slices, driven as an engine does."""

    def __init__(self, server: TorchServer, spans: Sequence[Span], saved: Saved | None = None):
        self.layout, self.spans = server.layout, list(spans)
        recipe = server.recipe(self.spans[0])
        assert isinstance(recipe, SliceRecipe)
        self.shards: list[Shard] = [replace(recipe, span=span)() for span in self.spans]
        state = saved or server.save()
        self.load([((0, self.layout.size), state)])

    def load(self, parts: Sequence[tuple[Span, Saved]]) -> None:
        for shard, span in zip(self.shards, self.spans, strict=True):
            shard.load(self.layout.cut(parts, span))

    def step(
        self, weights: list[float], vectors: list[Array], wants: frozenset[Want]
    ) -> dict[Stat, float]:
        sums = [
            shard.reduce(weights, [vector[begin:end] for vector in vectors], wants)
            for shard, (begin, end) in zip(self.shards, self.spans, strict=True)
        ]
        totals = add_up(sums)
        for shard in self.shards:
            shard.apply(totals if shard.needs_totals else {})
        return statistics(totals, wants)

    @property
    def vector(self) -> Array:
        return np.concatenate([shard.vector for shard in self.shards])

    def parts(self) -> list[tuple[Span, Saved]]:
        return [(span, shard.save()) for span, shard in zip(self.spans, self.shards, strict=True)]


class Plain:
    """Plain torch: a module, an optimizer, a schedule, and whatever is done to the gradients."""

    def __init__(
        self,
        make: Callable[..., optim.Optimizer],
        scheduler: Callable[..., Any] | None = None,
        change: Callable[[list[nn.Parameter]], object] | None = None,
    ) -> None:
        self.model = net()
        self.parameters = list(self.model.parameters())
        self.optimizer = make(self.parameters)
        self.scheduler = scheduler(self.optimizer) if scheduler else None
        self.change = change
        self.buffers = torch.cat([b.reshape(-1).float() for b in self.model.buffers()])

    def step(self, weights: list[float], vectors: list[Array], wants: object = None) -> None:
        total = torch.zeros(57)
        for weight, vector in zip(weights, vectors, strict=True):
            total += weight * torch.tensor(vector)
        start = 0
        for parameter in self.parameters:
            piece = total[start : start + parameter.numel()]
            parameter.grad = piece.reshape(parameter.shape).clone()
            start += parameter.numel()
        if self.change is not None:
            self.change(self.parameters)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.buffers += total[start:]

    @property
    def vector(self) -> Array:
        trained = [parameter.detach().reshape(-1) for parameter in self.parameters]
        return torch.cat([*trained, self.buffers]).numpy()


def assert_same_run(rules: Rules, plain: Plain, count: int, steps: int = 6) -> None:
    server = TorchServer(net(), rules)
    slices = Slices(server, server.layout.spans(count))
    for weights, vectors in results(steps):
        stats = server.step(weights, vectors, BOTH)
        plain.step(weights, vectors)
        assert slices.step(weights, vectors, BOTH) == pytest.approx(stats, rel=1e-5, abs=1e-5)
        np.testing.assert_allclose(server.vector, plain.vector, **CLOSE)
        np.testing.assert_allclose(slices.vector, server.vector, **CLOSE)


# --- optimizers of one's own ---------------------------------------------------------------------


class Counting(optim.Optimizer):
    """Elementwise; counts in a plain number, in a group, and for tensors it has not yet met."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter not in self.state:
                    self.state[parameter] = {"count": 0, "sum": torch.zeros_like(parameter)}
                state = self.state[parameter]
                state["count"] += 1
                state["sum"] += parameter.grad
                rate = group["lr"] / (state["count"] + group["steps"])
                parameter -= rate * state["sum"]


class Renamed(optim.Optimizer):
    """Elementwise, with arguments under other names than its options."""

    def __init__(self, params: Iterable[Any], rate: float = 0.5, *, power: float = 1.0) -> None:
        super().__init__(params, {"lr": rate, "exponent": power})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                change = parameter.grad.abs() ** group["exponent"] * parameter.grad.sign()
                parameter -= group["lr"] * change


class Normalized(optim.Optimizer):
    """Not elementwise: each tensor's gradient is made as long as its tensor."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad * parameter.norm() / parameter.grad.norm()


class Insists(optim.Optimizer):
    """Elementwise, with an argument that cannot be found out from its options."""

    def __init__(self, params: Iterable[Any], secret: float) -> None:
        super().__init__(params, {"lr": 2 * secret})

    def step(self, closure: Any = None) -> Any:
        raise AssertionError


class Forgetful(Renamed):
    """Keeps an argument to itself, so that a slice's has another."""

    def __init__(self, params: Iterable[Any], hidden: float = 1.0) -> None:
        super().__init__(params, rate=0.1)
        self._hidden = hidden

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter -= self._hidden * parameter.grad


class OddState(optim.SGD):
    """Keeps a tensor that is neither a number nor as long as the parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["count"] = torch.zeros(1)


# --- every elementwise optimizer -----------------------------------------------------------------

ELEMENTWISE: dict[str, Callable[..., optim.Optimizer]] = {
    "SGD": partial(optim.SGD, lr=0.1),
    "SGD momentum": partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.1),
    "SGD nesterov": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD weight decay": partial(optim.SGD, lr=0.1, weight_decay=0.1),
    "SGD maximize": partial(optim.SGD, lr=0.1, maximize=True),
    "Adam": partial(optim.Adam, lr=0.01, betas=(0.8, 0.95), weight_decay=0.01),
    "AdamW": partial(optim.AdamW, lr=0.01, weight_decay=0.1),
    "AdamW amsgrad": partial(optim.AdamW, lr=0.01, amsgrad=True),
    "AdamW foreach": partial(optim.AdamW, lr=0.01, foreach=True),
    "Adamax": partial(optim.Adamax, lr=0.01),
    "NAdam": partial(optim.NAdam, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "RAdam": partial(optim.RAdam, lr=0.01),
    "RMSprop": partial(optim.RMSprop, lr=0.01),
    "RMSprop centered": partial(optim.RMSprop, lr=0.01, centered=True, momentum=0.5),
    "Adagrad": partial(optim.Adagrad, lr=0.1, initial_accumulator_value=0.3, lr_decay=0.1),
    "Adadelta": partial(optim.Adadelta, lr=0.5),
    "ASGD": partial(optim.ASGD, lr=0.1, t0=2),
    "Rprop": partial(optim.Rprop, lr=0.01),
    "Counting": Counting,
    "Renamed": partial(Renamed, rate=0.05, power=1.5),
}


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_step_in_slices_is_that_of_the_whole(name: str, count: int) -> None:
    """Of 57 values, so that most cuts go through a tensor; the seventh slice has buffers alone."""
    make = ELEMENTWISE[name]
    assert_same_run(Rules(make), Plain(make), count)


def test_more_slices_than_values() -> None:
    make = partial(optim.Adam, lr=0.01)
    assert_same_run(Rules(make, transform=ClipNorm(1.0)), Plain(make, change=clip(1.0)), 64, 3)


@pytest.mark.parametrize("points", [[0, 50, 52, 57], [0, 1, 1, 2, 56, 57], [0, 48, 57]])
def test_cuts_anywhere(points: list[int]) -> None:
    """Through buffers too, so that several slices have nothing to train."""
    server = TorchServer(net(), Rules(MOMENTUM))
    slices = Slices(server, list(pairwise(points)))
    for each in results(3):
        stats = server.step(*each, BOTH)
        assert slices.step(*each, BOTH) == pytest.approx(stats, rel=1e-5, abs=1e-5)
        np.testing.assert_allclose(slices.vector, server.vector, **CLOSE)


def test_the_cuts_go_through_tensors() -> None:
    """Otherwise the tests above would show less than they say."""
    layout = TorchServer(net(), Rules(optim.SGD)).layout
    assert layout == Layout(57, (1, 20, 4, 4, 4, 12, 3))
    ends = np.cumsum(layout.tensors).tolist()
    for count in (2, 3, 5, 7):
        assert any(end not in ends for _, end in layout.spans(count)[:-1])
    assert layout.spans(7)[-1] == (48, 57)


# --- schedules and groups ------------------------------------------------------------------------


def by_dimensions(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    """Biases first, without weight decay and faster: not the order of the model."""
    given = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in given if p.ndim < 2], "weight_decay": 0.0, "lr": 0.3},
        {"params": [p for p in given if p.ndim > 1]},
    ]
    return optim.SGD(groups, lr=0.05, momentum=0.8, weight_decay=0.2)


def by_size(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    given = list(parameters)
    large = [p for p in given if p.numel() > 10]
    small = [p for p in given if p.numel() <= 10]
    groups: list[dict[str, Any]] = [{"params": large, "lr": 0.02}, {"params": small}]
    return optim.AdamW(groups, lr=0.1)


def without_some(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    """Leaves tensors out of training, the third and the last."""
    given = list(parameters)
    return optim.Adam([*given[:2], *given[3:-1]], lr=0.01)


def warm_up(optimizer: optim.Optimizer) -> SequentialLR:
    first = LinearLR(optimizer, start_factor=0.25, total_iters=3)
    return SequentialLR(optimizer, [first, CosineAnnealingLR(optimizer, T_max=5)], milestones=[3])


ONE_CYCLE = partial(OneCycleLR, max_lr=0.5, total_steps=20, base_momentum=0.7, max_momentum=0.95)
SCHEDULED: dict[str, tuple[Callable[..., optim.Optimizer], Callable[..., Any]]] = {
    "StepLR": (partial(optim.SGD, lr=0.1), partial(StepLR, step_size=2, gamma=0.5)),
    "CosineAnnealingLR": (partial(optim.Adam, lr=0.1), partial(CosineAnnealingLR, T_max=5)),
    "LambdaLR": (
        partial(optim.SGD, lr=0.1),
        partial(LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    ),
    "OneCycleLR momentum": (partial(optim.SGD, lr=0.1, momentum=0.9), ONE_CYCLE),
    "OneCycleLR betas": (partial(optim.AdamW, lr=0.1), ONE_CYCLE),
    "SequentialLR": (partial(optim.SGD, lr=0.1), warm_up),
    "groups": (by_dimensions, partial(StepLR, step_size=1, gamma=0.5)),
}


@pytest.mark.parametrize("count", [1, 3, 7])
@pytest.mark.parametrize("name", SCHEDULED)
def test_every_slice_has_the_schedule(name: str, count: int) -> None:
    make, scheduler = SCHEDULED[name]
    assert_same_run(Rules(make, scheduler), Plain(make, scheduler), count)


@pytest.mark.parametrize("count", [1, 2, 5, 7])
@pytest.mark.parametrize("make", [by_dimensions, by_size, without_some])
def test_slices_are_grouped_as_the_tensors_they_are_of(
    make: Callable[..., optim.Optimizer], count: int
) -> None:
    assert_same_run(Rules(make), Plain(make), count)


def test_what_is_in_no_group_stays() -> None:
    server = TorchServer(net(), Rules(without_some))
    slices, start = Slices(server, server.layout.spans(4)), server.vector.copy()
    for weights, vectors in results(2):
        slices.step(weights, vectors, NONE)
    moved = slices.vector != start
    assert not moved[21:25].any()
    assert not moved[45:48].any()
    assert moved[:21].all() and moved[25:45].all() and moved[48:].all()


# --- transforms ----------------------------------------------------------------------------------


def clip(limit: float) -> Callable[[list[nn.Parameter]], object]:
    return lambda parameters: nn.utils.clip_grad_norm_(parameters, limit)


def lars(parameters: list[nn.Parameter], eta: float, weight_decay: float) -> None:
    for p in parameters:
        if p.ndim > 1:
            assert p.grad is not None
            with torch.no_grad():
                norm = p.norm()
                rate = eta * norm / (p.grad.norm() + weight_decay * norm)
                p.grad = rate * (p.grad + weight_decay * p)


class Centered:
    """A transform of a user: the mean of all gradients is taken off each of them."""

    def sums(self, pieces: Sequence[Piece]) -> Sums:
        return {
            "norm": float(sum(piece.gradient.sum() for piece in pieces)),
            "dot": float(sum(piece.gradient.numel() for piece in pieces)),
        }

    def apply(self, pieces: Sequence[Piece], totals: Sums) -> None:
        assert totals.keys() == {"norm", "dot"}
        for piece in pieces:
            piece.gradient.sub_(totals["norm"] / totals["dot"])


def center(parameters: list[nn.Parameter]) -> None:
    mean = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None]).mean()
    for p in parameters:
        assert p.grad is not None
        p.grad -= mean


MOMENTUM = partial(optim.SGD, lr=0.1, momentum=0.9)
TRANSFORMED: dict[str, tuple[Callable[..., optim.Optimizer], Any, Any]] = {
    "always clipped": (MOMENTUM, ClipNorm(1.5), clip(1.5)),
    "clipped at times": (MOMENTUM, ClipNorm(5.5), clip(5.5)),
    "never clipped": (MOMENTUM, ClipNorm(100.0), None),
    "clipped Adam": (partial(optim.AdamW, lr=0.01), ClipNorm(2.0), clip(2.0)),
    "LARS": (MOMENTUM, TrustRatio(0.1, 0.2), partial(lars, eta=0.1, weight_decay=0.2)),
    "a user's": (MOMENTUM, Centered(), center),
}


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_transforms_know_the_whole(name: str, count: int) -> None:
    """The sums of a transform may bear any name: those of the statistics are apart."""
    make, transform, change = TRANSFORMED[name]
    assert_same_run(Rules(make, transform=transform), Plain(make, change=change), count)


def test_some_steps_are_clipped_and_some_are_not() -> None:
    server = TorchServer(net(), Rules(MOMENTUM))
    norms = [server.step(weights, vectors, BOTH)["norm"] for weights, vectors in results(6)]
    assert min(norms) < 5.5 < max(norms)


def test_totals_are_needed_for_transforms_alone() -> None:
    span = (3, 30)
    assert not TorchServer(net(), Rules(MOMENTUM)).recipe(span)().needs_totals
    assert TorchServer(net(), Rules(MOMENTUM, transform=ClipNorm(1.0))).recipe(span)().needs_totals


def test_statistics_are_of_the_reduced_gradient_without_buffers() -> None:
    """Before any transform; figures as numpy has them in double precision."""
    server = TorchServer(net(), Rules(MOMENTUM, transform=ClipNorm(0.1)))
    slices, before = Slices(server, server.layout.spans(5)), np.zeros(48)
    for weights, vectors in results(4):
        total = np.tensordot(weights, np.array(vectors, dtype=np.float64), 1)[:48]
        expected = {"norm": sqrt(total @ total), "dot": before @ total}
        assert server.step(weights, vectors, BOTH) == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert slices.step(weights, vectors, BOTH) == pytest.approx(expected, rel=1e-5, abs=1e-5)
        before = total
    weights, vectors = results(1)[0]
    assert slices.step(weights, vectors, NONE) == {}


# --- recipes -------------------------------------------------------------------------------------


def test_a_recipe_travels() -> None:
    server = TorchServer(net(), Rules(by_dimensions, SCHEDULED["StepLR"][1], ClipNorm(1.0)))
    recipe = server.recipe((10, 50))
    assert isinstance(recipe, SliceRecipe)
    again = pickle.loads(pickle.dumps(recipe))  # noqa: S301
    assert (again.shapes, again.size, again.span) == (recipe.shapes, 57, (10, 50))
    assert again().vector.shape == (40,)
    assert not again().vector.any()


def test_a_recipe_with_functions_on_the_spot_travels() -> None:
    from ray import cloudpickle

    rate = 0.1
    rules = Rules(lambda given: optim.SGD(given, lr=rate), SCHEDULED["LambdaLR"][1], Centered())
    server = TorchServer(net(), rules)
    shard = cloudpickle.loads(cloudpickle.dumps(server.recipe((0, 57))))()
    shard.load(server.save())
    for weights, vectors in results(2):
        shard.apply(shard.reduce(weights, vectors, NONE))
        server.step(weights, vectors, NONE)
    np.testing.assert_allclose(shard.vector, server.vector, **CLOSE)


def test_a_recipe_holds_no_tensor() -> None:
    large = TorchServer(nn.Linear(3200, 3200), Rules(partial(optim.AdamW, lr=0.1)))
    assert large.layout.size > 10_000_000
    assert len(pickle.dumps(large.recipe(large.layout.spans(2)[1]))) < 5_000


# --- the state -----------------------------------------------------------------------------------


def through_json(saved: Saved) -> Saved:
    """As a checkpoint or Ray's store returns it: plain data, arrays that cannot be written."""
    arrays = {name: array.copy() for name, array in saved.arrays.items()}
    for array in arrays.values():
        array.flags.writeable = False
    return Saved(arrays, json.loads(json.dumps(saved.data, allow_nan=False)))


STATES: dict[str, Rules] = {name: Rules(make) for name, make in ELEMENTWISE.items()}
STATES |= {name: Rules(*both) for name, both in SCHEDULED.items()}
STATES |= {
    "by size": Rules(by_size),
    "without some": Rules(without_some),
    "clipped": Rules(MOMENTUM, transform=ClipNorm(2.0)),
}


@pytest.mark.parametrize("begin", [0, 3])
@pytest.mark.parametrize("name", STATES)
def test_cut_and_joined_again_a_run_goes_on_as_if_never_cut(name: str, begin: int) -> None:
    """Whole, then three slices, then two others, then whole again, from the beginning or later."""
    never, start, end = (TorchServer(net(), STATES[name]) for _ in range(3))
    layout, steps = never.layout, results(begin + 6, seed=1)
    expected = [(never.step(*each, BOTH), never.vector.copy()) for each in steps]
    runs: list[tuple[dict[Stat, float], Array]] = []

    def go_on(server: TorchServer | Slices, count: int) -> None:
        for each in steps[len(runs) : len(runs) + count]:
            runs.append((server.step(*each, BOTH), server.vector.copy()))

    go_on(start, begin)
    three = Slices(start, layout.spans(3), through_json(start.save()))
    go_on(three, 2)
    two = Slices(start, [(0, 37), (37, 57)])
    two.load([(span, through_json(saved)) for span, saved in three.parts()])
    go_on(two, 2)
    end.load(through_json(layout.cut(two.parts(), (0, 57))))
    go_on(end, 2)

    for (stats, vector), (stats_again, again) in zip(expected, runs, strict=True):
        np.testing.assert_allclose(again, vector, **CLOSE)
        assert stats_again == pytest.approx(stats, rel=1e-5, abs=1e-5)
    one, other = never.save(), end.save()
    assert other.data == one.data
    assert other.arrays.keys() == one.arrays.keys()
    for key, array in one.arrays.items():
        assert other.arrays[key].shape == array.shape
        np.testing.assert_allclose(other.arrays[key], array, **CLOSE)


@pytest.mark.parametrize("name", STATES)
def test_the_state_of_a_slice_survives(name: str) -> None:
    server = TorchServer(net(), STATES[name])
    for each in results(3):
        server.step(*each, BOTH)
    for span in [(0, 57), (1, 23), (30, 30), (45, 57), (50, 57)]:
        saved = server.layout.cut([((0, 57), server.save())], span)
        shard = server.recipe(span)()
        shard.load(saved)
        again = shard.save()
        assert again.data == saved.data
        assert again.arrays.keys() == saved.arrays.keys()
        for key, array in saved.arrays.items():
            assert again.arrays[key].dtype == array.dtype
            assert np.array_equal(again.arrays[key].reshape(-1), array.reshape(-1))


@pytest.mark.parametrize("name", STATES)
def test_going_back_to_the_start_forgets_what_came_since(name: str) -> None:
    server = TorchServer(net(), STATES[name])
    start, each = server.save().copy(), results(1)[0]
    stats, first = server.step(*each, BOTH), server.vector.copy()
    server.step(*each, BOTH)
    server.load(start)
    assert server.step(*each, BOTH) == stats
    assert np.array_equal(server.vector, first)


def test_what_is_saved_are_views_and_what_is_loaded_are_copies() -> None:
    server = TorchServer(net(), Rules(MOMENTUM))
    weights, vectors = results(1)[0]
    server.step(weights, vectors, BOTH)
    fresh, saved, kept = TorchServer(net(), Rules(MOMENTUM)), server.save(), server.save().copy()
    fresh.load(saved)
    server.step(weights, vectors, BOTH)
    for name in ("values", "optimizer.1.momentum_buffer"):
        assert np.array_equal(saved.arrays[name], server.save().arrays[name])
        assert not np.array_equal(saved.arrays[name], kept.arrays[name])
    for name, array in kept.arrays.items():
        assert np.array_equal(fresh.save().arrays[name], array)


def test_state_in_a_shape_of_its_own_comes_back_in_it() -> None:
    """Where nothing is cut, the state of a tensor may have any shape."""

    class Transposed(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["turned"] = parameter.detach().clone().t()
            super().step()

    rules = Rules(partial(Transposed, lr=0.1))
    server, fresh = (TorchServer(nn.Linear(3, 2, bias=False), rules) for _ in range(2))
    server.step([1.0], [np.ones(6, dtype=np.float32)], NONE)
    fresh.load(server.save())
    turned = fresh.save().arrays["optimizer.0.turned"]
    assert turned.shape == (3, 2)
    assert np.array_equal(turned, server.save().arrays["optimizer.0.turned"])


def test_groups_that_do_not_fit_are_not_passed_over() -> None:
    one = TorchServer(net(), Rules(MOMENTUM))
    two = TorchServer(net(), Rules(by_dimensions))
    with pytest.raises(ValueError, match="zip"):
        two.load(one.save())


def test_the_model_is_that_of_the_joined_slices() -> None:
    server = TorchServer(net(), Rules(MOMENTUM))
    slices = Slices(server, server.layout.spans(3))
    for each in results(2):
        slices.step(*each, NONE)
    server.load(server.layout.cut(slices.parts(), (0, 57)))
    model = server.model()
    assert isinstance(model, Net)
    assert torch.equal(model.two.bias, torch.tensor(slices.vector[45:48]))
    assert model.norm.running_mean is not None
    assert torch.equal(model.norm.running_mean, torch.tensor(slices.vector[48:52]))
    assert np.array_equal(server.export()["one.bias"], slices.vector[21:25])


# --- refusals ------------------------------------------------------------------------------------


def shapes(*given: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {f"tensor {i}": shape for i, shape in enumerate(given)}


SHAPES = shapes((7, 5), (5,), ())
MATRIX = shapes((7, 5))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_are_accepted(name: str) -> None:
    check_elementwise(ELEMENTWISE[name], SHAPES)


REFUSED: dict[str, tuple[Callable[..., optim.Optimizer], Any, str]] = {
    "LBFGS": (optim.LBFGS, SHAPES, "LBFGS cannot be made for slices"),
    "SparseAdam": (optim.SparseAdam, SHAPES, "SparseAdam cannot be made for slices"),
    "Adafactor": (optim.Adafactor, SHAPES, "Adafactor does not step each value by itself"),
    "Normalized": (Normalized, SHAPES, "Normalized does not step each value by itself"),
    "Insists": (partial(Insists, secret=1.0), SHAPES, "Insists cannot be made .* 'secret'"),
    "Forgetful": (partial(Forgetful, hidden=3.0), SHAPES, "Forgetful does not step each value"),
    "OddState": (OddState, SHAPES, r"OddState keeps count of shape \(1,\) for a tensor"),
}
if hasattr(optim, "Muon"):  # since torch 2.9
    REFUSED["Muon"] = optim.Muon, MATRIX, "Muon cannot be made for slices"


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_whole_tensors_is_refused(name: str) -> None:
    make, tensors, told = REFUSED[name]
    with pytest.raises(ValueError, match=rf"^{told}.*use Ray\(servers='driver'\)"):
        check_elementwise(make, tensors)


@pytest.mark.parametrize(
    "tensors", [[(7, 5)], [(7, 5)] * 2, [(3,)] * 4, [(9, 9), (2,), (9, 9), (2,)]]
)
def test_a_norm_of_tensors_is_noticed_wherever_the_middle_lies(tensors: Any) -> None:
    """Even where two halves of the vector have whole tensors."""
    with pytest.raises(ValueError, match="does not step each value by itself"):
        check_elementwise(Normalized, shapes(*tensors))


def test_a_norm_of_some_group_is_noticed() -> None:
    class Some(Normalized):
        def step(self, closure: Any = None) -> Any:
            groups, self.param_groups = self.param_groups, self.param_groups[1:]
            super().step()
            self.param_groups = groups

    def make(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
        given = list(parameters)
        return Some([{"params": given[:-1]}, {"params": given[-1:]}])

    with pytest.raises(ValueError, match="Some does not step each value by itself"):
        check_elementwise(make, shapes((4, 4), (4, 4), (2, 2)))


def test_a_norm_that_comes_in_later_is_noticed() -> None:
    class Later(Normalized):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            self.steps += 1
            if self.steps > 2:
                super().step()

    with pytest.raises(ValueError, match="Later does not step each value by itself"):
        check_elementwise(Later, SHAPES)


def test_a_server_refuses_to_be_cut_but_not_to_step() -> None:
    server = TorchServer(nn.Linear(3, 2), Rules(partial(optim.Adafactor, lr=0.1)))
    with pytest.raises(ValueError, match="Adafactor does not step each value by itself"):
        server.recipe((0, 4))
    before = server.vector.copy()
    server.step([1.0], [np.ones(8, dtype=np.float32)], NONE)
    assert (server.vector != before).all()


def test_an_error_in_ones_own_recipe_is_told() -> None:
    def broken(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
        raise RuntimeError("no such thing")

    with pytest.raises(ValueError, match=r"this optimizer cannot be made .*no such thing"):
        check_elementwise(broken, SHAPES)


def test_the_trial_leaves_the_world_as_it_was() -> None:
    before = torch.get_rng_state()
    check_elementwise(optim.Adam, SHAPES)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_trial_is_small() -> None:
    """It takes no memory of the true size, and neither do the templates of slices."""
    seen: list[tuple[str, int]] = []

    def make(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
        given = list(parameters)
        seen.extend((p.device.type, p.numel()) for p in given)
        return optim.Adagrad(given)

    huge = (10**6, 10**6)
    check_elementwise(make, shapes(huge))
    SliceRecipe(Rules(make), shapes(huge), 10**12, (5, 9))()
    assert all(device == "meta" or size == 9 for device, size in seen)
    assert ("meta", 10**12) in seen
