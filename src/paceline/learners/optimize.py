"""The server's side of `TorchLearner`: the model, or a slice of it, and its optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.core.protocol import Want
from paceline.core.state import decode, encode
from paceline.learners.base import Array, Direction, Layout, Recipe, Saved, Span, Steps, Sums
from paceline.learners.flat import FlatModule, as_tensor
from paceline.learners.transforms import Piece, Transform


class Scheduler(Protocol):
    """What is needed of a learning-rate schedule; all of torch's that need no metric have it."""

    def step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], Optimizer]
MakeScheduler: TypeAlias = Callable[[Optimizer], Scheduler]
_OWN = "transform."  # before the names of its sums, which may be those of statistics


@dataclass(frozen=True)
class Rules:
    """How a step is taken along the reduced gradient."""

    optimizer: MakeOptimizer
    scheduler: MakeScheduler | None = None
    transform: Transform | None = None


def group_of(make: MakeOptimizer) -> dict[str, Any]:
    """Return the settings of the optimizer that is made, such as its rate and momentum."""
    return make([nn.Parameter(torch.zeros(1))]).param_groups[0]


class Rates:
    """The learning rate of each step: that of the first group, as the schedule says."""

    def __init__(self, optimizer: MakeOptimizer, scheduler: MakeScheduler | None) -> None:
        self._recipe = optimizer, scheduler
        self._restart()

    def _restart(self) -> None:
        make, schedule = self._recipe
        self._optimizer = make([nn.Parameter(torch.zeros(1))])
        self._schedule = schedule(self._optimizer) if schedule else None
        self._step = 0

    def at(self, version: int) -> float:
        """Return the rate of the step that makes the version after this one."""
        if self._schedule is not None:
            if version < self._step:
                self._restart()
            while self._step < version:
                self._optimizer.step()
                self._schedule.step()
                self._step += 1
        return float(self._optimizer.param_groups[0]["lr"])


class TorchShard:
    """A stretch of the flat vector, the tensors in it (or pieces of them), and their optimizer.

    The first `trained` values are stepped by the optimizer; the rest are buffers, which move by
    what was reduced.
    """

    def __init__(
        self,
        values: Tensor,
        trained: int,
        parameters: Mapping[int, tuple[nn.Parameter, int]],
        optimizer: Optimizer,
        rules: Rules,
    ) -> None:
        self._values, self._trained = values, trained
        self._grads: Tensor | None = None  # made when needed: what is sharded never steps
        self._parameters = parameters
        self._optimizer, self._transform = optimizer, rules.transform
        self._scheduler = rules.scheduler(optimizer) if rules.scheduler else None
        self._direction = Direction()

    @property
    def vector(self) -> Array:
        return self._values.numpy()

    @property
    def needs_totals(self) -> bool:
        return self._transform is not None

    def reduce(
        self, weights: Sequence[float], vectors: Sequence[Array], wants: frozenset[Want]
    ) -> Sums:
        grads = self._gradients()
        first = True
        for weight, vector in zip(weights, vectors, strict=True):
            if first:
                torch.mul(as_tensor(vector), weight, out=grads)
                first = False
            else:
                grads.add_(as_tensor(vector), alpha=weight)
        sums = self._direction.sums(grads[: self._trained].numpy(), wants)
        if self._transform is not None:
            found = self._transform.sums(list(self._pieces()))
            sums |= {_OWN + name: value for name, value in found.items()}
        return sums

    def apply(self, totals: Sums) -> None:
        grads = self._gradients()
        if self._transform is not None:
            own = {k.removeprefix(_OWN): v for k, v in totals.items() if k.startswith(_OWN)}
            self._transform.apply(list(self._pieces()), own)
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        self._values[self._trained :] += grads[self._trained :]

    def save(self) -> Saved:
        arrays = {"values": self.vector, **self._direction.save()}
        scalars: dict[str, dict[str, Any]] = {}
        for index, (parameter, _) in self._parameters.items():
            for name, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    arrays[f"optimizer.{index}.{name}"] = value.detach().cpu().numpy()
                else:
                    scalars.setdefault(str(index), {})[name] = value
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]
        data = {"groups": groups, "scalars": scalars}
        if self._scheduler is not None:
            data["scheduler"] = self._scheduler.state_dict()
        return Saved(arrays, encode(data))

    def load(self, saved: Saved) -> None:
        data = decode(saved.data)
        self._values.copy_(as_tensor(saved.arrays["values"]))
        self._optimizer.state.clear()
        for place, scalars in data["scalars"].items():
            self._optimizer.state[self._parameters[int(place)][0]] = dict(scalars)
        for key, array in saved.arrays.items():
            if key.startswith("optimizer."):
                _, place, name = key.split(".", 2)
                parameter, _ = self._parameters[int(place)]
                value = torch.tensor(array)
                if value.ndim == 1 and value.numel() == parameter.numel():
                    value = value.view_as(parameter)  # a slice's is flat
                self._optimizer.state[parameter][name] = value
        for group, options in zip(self._optimizer.param_groups, data["groups"], strict=True):
            group.update(options)
        if self._scheduler is not None:
            self._scheduler.load_state_dict(data["scheduler"])
        self._direction.load(saved.arrays)

    def _gradients(self) -> Tensor:
        """Return the flat buffer of which all gradients are views."""
        if self._grads is None:
            self._grads = torch.zeros_like(self._values)
            start = 0
            for parameter, _ in self._parameters.values():
                stop = start + parameter.numel()
                parameter.grad = self._grads[start:stop].view_as(parameter)
                start = stop
        return self._grads

    def _pieces(self) -> Iterator[Piece]:
        for index, (parameter, dimensions) in self._parameters.items():
            assert parameter.grad is not None
            yield Piece(index, dimensions, parameter.data, parameter.grad)


class TorchServer(TorchShard, Steps):
    """The model in training, whole."""

    def __init__(self, module: nn.Module, rules: Rules) -> None:
        self._flat = FlatModule(copy.deepcopy(module).train(), with_grads=False)
        self._rules, self._is_elementwise = rules, False  # until it is tried
        super().__init__(
            self._flat.values,
            self._flat.trainable,
            {i: (p, p.ndim) for i, p in enumerate(self._flat.parameters)},
            rules.optimizer(self._flat.parameters),
            rules,
        )

    @property
    def layout(self) -> Layout:
        sizes = tuple(parameter.numel() for parameter in self._flat.parameters)
        return Layout(self._values.numel(), sizes)

    def recipe(self, span: Span) -> Recipe:
        shapes = tuple(tuple(parameter.shape) for parameter in self._flat.parameters)
        if not self._is_elementwise:
            check_elementwise(self._rules.optimizer, shapes)
            self._is_elementwise = True
        return SliceRecipe(self._rules, shapes, self._values.numel(), span)

    def model(self) -> nn.Module:
        self._flat.push_buffers()
        module = copy.deepcopy(self._flat.module)
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()  # out of the flat buffer
            parameter.grad = None
        return module.eval()

    def export(self) -> dict[str, Array]:
        self._flat.push_buffers()
        state = self._flat.module.state_dict()
        return {name: tensor.detach().cpu().numpy().copy() for name, tensor in state.items()}


Shapes: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class SliceRecipe:
    """Makes the server of a slice from the shapes of the trained tensors alone."""

    rules: Rules
    shapes: Shapes
    size: int
    span: Span

    def __call__(self) -> TorchShard:
        start, stop = self.span
        values = torch.zeros(stop - start)
        layout = Layout(self.size, tuple(torch.Size(shape).numel() for shape in self.shapes))
        pieces = {
            index: nn.Parameter(_piece(values[begin - start : end - start], self.shapes[index]))
            for index, begin, end in layout.pieces(self.span)
        }
        return TorchShard(
            values,
            max(min(stop, layout.trained) - start, 0),
            {index: (piece, len(self.shapes[index])) for index, piece in pieces.items()},
            optimizer_of(self.rules.optimizer, self.shapes, pieces),
            self.rules,
        )


def _piece(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Leave a tensor without dimensions as it is, for so is its state."""
    return values if shape else values.view(())


def optimizer_of(
    make: MakeOptimizer, shapes: Shapes, pieces: Mapping[int, nn.Parameter]
) -> Optimizer:
    """Make an optimizer of pieces, grouped as `make` groups the whole tensors.

    `make` is shown tensors of the true shapes without memory, since groups often depend on
    shapes (no weight decay for biases), which pieces do not have.
    """
    whole = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    index = {id(parameter): i for i, parameter in enumerate(whole)}
    template = make(whole)
    groups = []
    for group in template.param_groups:
        held = [index[id(parameter)] for parameter in group["params"]]
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append({**options, "params": [pieces[i] for i in held if i in pieces]})
    return made_alike(type(template), template.defaults, groups)


def made_alike(
    kind: type[Optimizer], defaults: Mapping[str, Any], groups: list[dict[str, Any]]
) -> Optimizer:
    """Make an optimizer of a kind from groups with all their settings."""
    known = signature(kind).parameters
    return kind(groups, **{k: v for k, v in defaults.items() if k in known})


def check_elementwise(make: MakeOptimizer, shapes: Shapes) -> None:
    """Refuse an optimizer whose step on slices is not that on the whole, by trying it.

    Three steps on small tensors with as many dimensions as the true ones, once whole and once
    with each tensor cut in two.
    """
    small = tuple(tuple(min(length, 3) for length in shape) for shape in shapes)
    random = torch.Generator().manual_seed(0)
    name = "this optimizer"
    halves: tuple[dict[int, nn.Parameter], ...] = ({}, {})
    try:
        whole = [nn.Parameter(torch.randn(shape, generator=random)) for shape in small]
        optimizer = make(whole)
        name = type(optimizer).__name__
        for index, parameter in enumerate(whole):
            for half, piece in zip(halves, _in_two(parameter), strict=True):
                if piece.numel():
                    half[index] = nn.Parameter(_piece(piece.clone(), small[index]))
        optimizers = [optimizer_of(make, small, half) for half in halves]
        for _ in range(3):
            for index, parameter in enumerate(whole):
                parameter.grad = torch.randn(small[index], generator=random)
                for half, piece in zip(halves, _in_two(parameter.grad), strict=True):
                    if piece.numel():
                        half[index].grad = piece.clone().view_as(half[index])
            for each in (optimizer, *optimizers):
                each.step()
    except Exception as error:
        raise ValueError(
            f"{name} cannot be made for slices of tensors ({error}); use Ray(servers='driver')"
        ) from error
    for place, (half, each) in enumerate(zip(halves, optimizers, strict=True)):
        for index, held in half.items():
            _check_state(name, held, each.state.get(held, {}))
            stepped, cut = _in_two(whole[index])[place], held.detach().reshape(-1)
            if not torch.allclose(stepped, cut, rtol=1e-5, atol=1e-7):
                raise ValueError(
                    f"{name} does not step each value by itself, so servers cannot each hold a "
                    "slice; use Ray(servers='driver'), or an elementwise optimizer such as SGD or "
                    "AdamW"
                )


def _in_two(tensor: Tensor) -> tuple[Tensor, ...]:
    return torch.tensor_split(tensor.detach().reshape(-1), 2)


def _check_state(name: str, parameter: nn.Parameter, state: Mapping[str, Any]) -> None:
    for key, value in state.items():
        if isinstance(value, Tensor) and value.ndim and value.numel() != parameter.numel():
            raise ValueError(
                f"{name} keeps {key} of shape {tuple(value.shape)} for a tensor, neither one "
                "number (a float, or a tensor of shape ()) nor one for each value, so its state "
                "cannot be cut into slices; use Ray(servers='driver')"
            )
