"""The server's side of `TorchLearner`: the model, or a slice of it, and its optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.core.logs import logger_of
from paceline.core.protocol import Want
from paceline.core.state import decode, encode
from paceline.learners.base import (
    Array,
    Direction,
    Layout,
    Places,
    Recipe,
    Saved,
    Span,
    Steps,
    Sums,
)
from paceline.learners.flat import FlatModule, as_tensor, hollow
from paceline.learners.transforms import Piece, Transform

logger = logger_of(__name__)


class Scheduler(Protocol):
    """The required methods of a learning-rate schedule; torch's have them, except with a metric."""

    def step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


Named: TypeAlias = list[tuple[str, nn.Parameter]]
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""The trained tensors by name, in the order of the model."""
MakeOptimizer: TypeAlias = (
    Callable[[Iterable[nn.Parameter]], Optimizer]
    | Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]
)
"""Makes an optimizer from parameters, or from (name, parameter) pairs if its first argument is
called `named_parameters`."""
MakeScheduler: TypeAlias = Callable[[Optimizer], Scheduler]
_OWN = "transform."  # prefix of a transform's sums, whose names may be those of statistics


@dataclass(frozen=True)
class Rules:
    """The optimizer, schedule and transform of a step with the reduced gradient."""

    optimizer: MakeOptimizer
    scheduler: MakeScheduler | None = None
    transform: Transform | None = None


def trained(module: nn.Module) -> Named:
    """Return the trained parameters with their names."""
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def shapes_of(module: nn.Module) -> Shapes:
    return {name: tuple(parameter.shape) for name, parameter in trained(module)}


def stand_ins(shapes: Shapes) -> Named:
    """Return tensors of these shapes, each with the memory of one number."""
    return [(name, nn.Parameter(torch.zeros(()).expand(shape))) for name, shape in shapes.items()]


def make_optimizer(make: MakeOptimizer, named: Named, keyword: str = "optimizer") -> Optimizer:
    """Call a user's function; raise ValueError if its optimizer has other tensors than given."""
    if isinstance(make, Optimizer) or not callable(make):
        kind = type(make).__name__
        example = kind if isinstance(make, Optimizer) else "SGD"
        raise ValueError(
            f"{keyword}= is a {kind} and not a function; workers and servers each make their own "
            f"optimizer, so give a function of parameters: partial(torch.optim.{example}, lr=…)"
        )
    given = named if _takes_names(make) else [parameter for _, parameter in named]
    made = cast(Callable[[Any], Any], make)(given)
    if not isinstance(made, Optimizer):
        raise ValueError(
            f"{keyword}= returned a {type(made).__name__}; return a torch.optim.Optimizer of the "
            "parameters given"
        )
    known = {id(parameter) for _, parameter in named}
    held = [parameter for group in made.param_groups for parameter in group["params"]]
    foreign = sum(id(parameter) not in known for parameter in held)
    if foreign or not held:
        what = f"{foreign} other tensors" if foreign else "none of them"
        raise ValueError(
            f"{keyword}= was given {len(named)} parameters and made {type(made).__name__} of "
            f"{what}, so the model would not be trained; use the parameters it is called with. For "
            "groups by name, write a function whose first argument is called named_parameters: it "
            "is given (name, parameter) pairs"
        )
    return made


def _takes_names(make: MakeOptimizer) -> bool:
    try:
        arguments = signature(make).parameters
    except ValueError:  # a callable of C has none
        return False
    return next(iter(arguments), None) == "named_parameters"


def make_scheduler(
    make: MakeScheduler, optimizer: Optimizer, keyword: str = "scheduler"
) -> Scheduler:
    """Call a user's function; raise ValueError unless it sets this optimizer by steps alone."""
    if not callable(make):
        kind = type(make).__name__
        raise ValueError(
            f"{keyword}= is a {kind} and not a function; the optimizer is made anew, so give a "
            f"function of it: partial(torch.optim.lr_scheduler.{kind}, …)"
        )
    made = make(optimizer)
    kind = type(made).__name__
    if isinstance(made, ReduceLROnPlateau):
        raise ValueError(
            f"{keyword}= returned {kind}, which needs a metric at each step; use the callback "
            "Evaluate(plateau=…), or a schedule of steps alone, such as CosineAnnealingLR"
        )
    if not all(callable(getattr(made, n, None)) for n in ("step", "state_dict", "load_state_dict")):
        raise ValueError(
            f"{keyword}= returned a {kind}; return a schedule of torch.optim.lr_scheduler, or an "
            "object with step, state_dict and load_state_dict"
        )
    if getattr(made, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            f"{keyword}= returned {kind} of another optimizer than the one given, whose learning "
            "rate would never change; make it of the optimizer given"
        )
    return made


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group of an optimizer, without its tensors."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def settings_of(make: MakeOptimizer, shapes: Shapes) -> dict[str, Any]:
    """Return the name and the settings of the optimizer as JSON data.

    Subclasses of SGD are named "SGD". Settings that are off or not numbers are left out.
    """
    made = make_optimizer(make, stand_ins(shapes))
    name = "SGD" if isinstance(made, torch.optim.SGD) else type(made).__name__
    settings = {key: _plain(value) for key, value in options_of(made.param_groups[0]).items()}
    return {"name": name, **{key: value for key, value in settings.items() if value is not None}}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):  # a learning rate may be one
        return value.item() if value.numel() == 1 else None
    if isinstance(value, tuple | list):
        numbers = [_plain(each) for each in value]
        return None if None in numbers else numbers
    return value if isinstance(value, int | float) and value is not False else None


class Rates:
    """The settings of an optimizer's groups at each step of the schedule."""

    def __init__(
        self, optimizer: MakeOptimizer, scheduler: MakeScheduler | None, shapes: Shapes
    ) -> None:
        self._recipe = optimizer, scheduler, shapes
        self._restart()

    def _restart(self) -> None:
        make, schedule, shapes = self._recipe
        self._optimizer = make_optimizer(make, stand_ins(shapes))
        for group in self._optimizer.param_groups:
            del group["params"][1:]  # a schedule reads only the settings
        self._optimizer.state.clear()  # some optimizers make it at once, in full size
        self._schedule = make_scheduler(schedule, self._optimizer) if schedule else None
        self._optimizer.step()  # before the schedule's first, or torch warns
        self._step = 0

    def groups(self, step: int) -> list[dict[str, Any]]:
        """Return the settings of each group at a step; they depend on the step only."""
        if self._schedule is not None:
            if step < self._step:
                self._restart()
            while self._step < step:
                self._schedule.step()
                self._step += 1
        return [options_of(group) for group in self._optimizer.param_groups]

    def at(self, version: int) -> float:
        """Return the first group's learning rate for the step from this version to the next."""
        return float(self.groups(version)[0]["lr"])


class TorchShard:
    """A slice of the flat vector, its tensors (or pieces of them), and their optimizer.

    The optimizer steps the first `trained` values. The rest are buffers: `apply` adds the reduced
    change to them.
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
        self._grads: Tensor | None = None  # made when needed: a sharded model never steps here
        self._parameters = parameters
        self._optimizer, self._transform = optimizer, rules.transform
        self._scheduler = make_scheduler(rules.scheduler, optimizer) if rules.scheduler else None
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

    def apply(self, totals: Sums, lr_scale: float = 1.0) -> None:
        grads = self._gradients()
        if self._transform is not None:
            own = {k.removeprefix(_OWN): v for k, v in totals.items() if k.startswith(_OWN)}
            self._transform.apply(list(self._pieces()), own)
        self._step(lr_scale)
        if self._scheduler is not None:
            self._scheduler.step()
        self._values[self._trained :] += grads[self._trained :]

    def _step(self, lr_scale: float) -> None:
        """Let the optimizer step; a scale holds for this step, and schedules never see it."""
        groups = self._optimizer.param_groups if lr_scale != 1.0 else []
        before = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * lr_scale
        self._optimizer.step()
        for group, lr in zip(groups, before, strict=True):
            group["lr"] = lr

    def save(self) -> Saved:
        arrays = {"values": self.vector, **self._direction.save()}
        scalars: dict[str, dict[str, Any]] = {}
        for index, (parameter, _) in self._parameters.items():
            for name, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    arrays[f"optimizer.{index}.{name}"] = value.detach().cpu().numpy()
                else:
                    scalars.setdefault(str(index), {})[name] = value
        groups = [options_of(group) for group in self._optimizer.param_groups]
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
                    value = value.view_as(parameter)  # the state of a slice is flat
                self._optimizer.state[parameter][name] = value
        for group, options in zip(self._optimizer.param_groups, data["groups"], strict=True):
            group.update(options)
        fused(self._optimizer)  # independent of the saved setting
        if self._scheduler is not None:
            self._scheduler.load_state_dict(data["scheduler"])
        self._direction.load(saved.arrays)

    def _gradients(self) -> Tensor:
        """Return the flat buffer; all gradients are views of it."""
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
    """The server of the whole model in training."""

    def __init__(
        self, module: nn.Module, rules: Rules, owned: bool = False, changing: Collection[str] = ()
    ) -> None:
        own = module if owned else hollow(module, changing)
        self._flat = FlatModule(own.train(), with_grads=False, changing=changing)
        if not owned:
            self._flat.pull(module)
        self._rules, self._is_elementwise = rules, False  # until `recipe` has tested it
        super().__init__(
            self._flat.values,
            self._flat.trainable,
            {i: (p, p.ndim) for i, p in enumerate(self._flat.parameters)},
            fused(make_optimizer(rules.optimizer, trained(self._flat.module))),
            rules,
        )
        self._warn_of_omitted()

    def _warn_of_omitted(self) -> None:
        held = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        named = trained(self._flat.module)
        if names := [name for name, parameter in named if id(parameter) not in held]:
            logger.warning(
                "%s trains %d of %d parameters and leaves out %s%s; set requires_grad=False on "
                "them if they are frozen, and they are not sent either",
                type(self._optimizer).__name__, len(named) - len(names), len(named),
                ", ".join(names[:3]), ", …" if len(names) > 3 else "",
            )  # fmt: skip

    @property
    def layout(self) -> Layout:
        sizes = tuple(parameter.numel() for parameter in self._flat.parameters)
        return Layout(self._values.numel(), sizes)

    def recipe(self, span: Span) -> Recipe:
        shapes = shapes_of(self._flat.module)
        if not self._is_elementwise:
            check_elementwise(self._rules.optimizer, shapes)
            self._is_elementwise = True
        return SliceRecipe(self._rules, shapes, self._values.numel(), span)

    def settings_at(self, step: int) -> dict[str, Any]:
        """Return the settings of a new server after so many steps, as `save` gives them."""
        if self._scheduler is not None:
            self._optimizer.step()  # before the schedule's first, or torch warns
            for _ in range(step):
                self._scheduler.step()
        return {**self.save().data, "scalars": {}}

    def model(self) -> nn.Module:
        self._flat.push_buffers()
        return copy.deepcopy(self._flat.module).eval()  # each parameter with its own memory

    def export(self) -> dict[str, Tensor]:
        self._flat.push_buffers()
        state = self._flat.saved()
        if strange := [name for name, item in state.items() if not isinstance(item, Tensor)]:
            raise ValueError(
                f"{strange[0]!r} in the state_dict of {type(self._flat.module).__name__} is no "
                "tensor, so it is neither trained nor saved; keep it out of the state_dict"
            )
        return {name: tensor.detach().clone() for name, tensor in state.items()}

    def places(self) -> Places | None:
        return self._flat.places()


@dataclass(frozen=True)
class SliceRecipe:
    """Makes the server of a slice from the shapes of the trained tensors only."""

    rules: Rules
    shapes: Shapes
    size: int
    span: Span

    def __call__(self) -> TorchShard:
        start, stop = self.span
        values = torch.zeros(stop - start)
        shapes = list(self.shapes.values())
        layout = Layout(self.size, tuple(torch.Size(shape).numel() for shape in shapes))
        pieces = {
            index: nn.Parameter(_piece(values[begin - start : end - start], shapes[index]))
            for index, begin, end in layout.pieces(self.span)
        }
        return TorchShard(
            values,
            max(min(stop, layout.trained) - start, 0),
            {index: (piece, len(shapes[index])) for index, piece in pieces.items()},
            optimizer_of(self.rules.optimizer, self.shapes, pieces),
            self.rules,
        )


def _piece(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return values flat, or without dimensions if the tensor has none, as its state expects."""
    return values if shape else values.view(())


def optimizer_of(
    make: MakeOptimizer, shapes: Shapes, pieces: Mapping[int, nn.Parameter]
) -> Optimizer:
    """Make an optimizer of pieces, grouped as `make` groups the whole tensors.

    `make` receives tensors of the true shapes without memory. Groups often depend on shapes (no
    weight decay for biases), and pieces do not have these shapes.
    """
    whole = [(name, nn.Parameter(torch.empty(s, device="meta"))) for name, s in shapes.items()]
    index = {id(parameter): i for i, (_, parameter) in enumerate(whole)}
    template = make_optimizer(make, whole)
    groups = []
    for group in template.param_groups:
        held = [index[id(parameter)] for parameter in group["params"]]
        groups.append({**options_of(group), "params": [pieces[i] for i in held if i in pieces]})
    return fused(made_alike(type(template), template.defaults, groups))


def fused(optimizer: Optimizer) -> Optimizer:
    """Enable the optimizer's fused step, if torch has one and the user has not chosen.

    A fused step makes one pass over memory: AdamW on 10M values took 20 ms, not 126. Whole tensors
    and slices give the same bits. SGD stays unfused: its fused step rounds the last values of a
    tensor differently, so slices would differ.
    """
    if type(optimizer) in (Adam, AdamW, Adagrad):
        for group in optimizer.param_groups:
            plain = group["fused"] is None and group["foreach"] is None
            if plain and not group["differentiable"] and isinstance(group["lr"], float):
                group["fused"] = True
    return optimizer


def made_alike(
    kind: type[Optimizer], defaults: Mapping[str, Any], groups: list[dict[str, Any]]
) -> Optimizer:
    """Make an optimizer of class `kind` from groups with all their settings."""
    known = signature(kind).parameters
    return kind(groups, **{k: v for k, v in defaults.items() if k in known})


def check_elementwise(make: MakeOptimizer, shapes: Shapes) -> None:
    """Raise ValueError if the optimizer's step on slices differs from that on whole tensors.

    The test takes three steps on small tensors with as many dimensions as the true ones. It does
    so once with whole tensors and once with each tensor cut in two.
    """
    small = {name: tuple(min(n, 3) for n in shape) for name, shape in shapes.items()}
    random = torch.Generator().manual_seed(0)
    name = "this optimizer"
    halves: tuple[dict[int, nn.Parameter], ...] = ({}, {})
    try:
        whole = [nn.Parameter(torch.randn(shape, generator=random)) for shape in small.values()]
        optimizer = make_optimizer(make, list(zip(small, whole, strict=True)))
        name = type(optimizer).__name__
        for index, parameter in enumerate(whole):
            for half, piece in zip(halves, _in_two(parameter), strict=True):
                if piece.numel():
                    half[index] = nn.Parameter(_piece(piece.clone(), tuple(parameter.shape)))
        optimizers = [optimizer_of(make, small, half) for half in halves]
        for _ in range(3):
            for index, parameter in enumerate(whole):
                parameter.grad = torch.randn(parameter.shape, generator=random)
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
