"""Any `nn.Module` with any `torch.optim` optimizer on any map-style dataset."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import default_collate

from paceline.core.protocol import Work
from paceline.core.state import describe
from paceline.data.partition.base import Partition
from paceline.learners.feed import Data, check_map_style
from paceline.learners.flat import flat_size, hollow
from paceline.learners.frozen import base_digest, resident_digest
from paceline.learners.loss import Loss
from paceline.learners.memory import MicroBatch
from paceline.learners.optimize import (
    MakeOptimizer,
    MakeScheduler,
    Rates,
    Rules,
    Shapes,
    TorchServer,
    make_optimizer,
    make_scheduler,
    shapes_of,
    stand_ins,
)
from paceline.learners.prepare import Prepare
from paceline.learners.replica import TorchReplica
from paceline.learners.scale import LossScale
from paceline.learners.transforms import Transform

_RULES = "inner_scheduler", "inner_transform", "outer_scheduler", "outer_transform"
_OF_LOCAL_STEPS = (*_RULES, "inner")


@dataclass(frozen=True)
class TorchLearner:
    """Trains a module by `loss(model, batch)`, the mean over the batch.

    loss: the mean; or (sum, count), such as the sum of the losses of tokens and their number. With
        counts, a step is along sum of sums / sum of counts, over all samples of the step.
    optimizer: makes the optimizer from parameters, e.g. `partial(torch.optim.SGD, lr=0.1)`. If its
        first argument is called `named_parameters`, it receives (name, parameter) pairs.
    dataset: map-style, or `Shards`; or a function that opens one (called once in each worker
        process).
    batch_size: the global batch, divided among the workers; only the user changes it.
    outer: the server's optimizer for local steps. Workers step with `optimizer`, and the server
        with `outer` along their change. `partial(SGD, lr=1.0)` is averaging.
    scheduler: makes a learning-rate schedule, advanced once per step of the server.
    transform: changes the step's gradient before the optimizer: `ClipNorm`, `TrustRatio`.
    inner_scheduler, inner_transform: the same for the local steps, with `outer`. The schedule is at
        step `version * steps + step`, so a task gives the same result on every worker.
    outer_scheduler, outer_transform: the same for the steps of `outer`.
    inner: with "kept", a worker keeps the state of its `optimizer` between tasks, as in DiLoCo.
        With "fresh", each task begins with a new state, so any worker computes the same. By default
        "fresh" for `torch.optim.SGD`, and "kept" for all others, such as Adam.
    model: the module; or a function that makes it, called in each process with torch's seed 0. So
        no weights are sent to start a worker.
    micro_batch: the samples computed at a time; cancelled work can end between micro-batches.
        With "auto" it is all of a task, and halved whenever a worker runs out of memory.
    threads: the torch threads of each replica; results depend on it bit by bit, so it is fixed
        and recorded.
    device: "cpu", "cuda", or "auto", which is "cuda" in each worker that has a GPU.
    buffers: names of large persistent buffers that training changes; see below.
    num_workers, prefetch_factor, pin_memory: of the DataLoader that each worker fetches samples
        with. Its processes remain from task to task, and read ahead. Results have the same bits
        with any number of them. Memory is pinned where a worker computes on a GPU.
    loss_scale: "auto" if `loss` computes in float16 (autocast): each worker scales its losses as
        torch's `GradScaler` does. A gradient that overflows is computed again with half the scale.
    prepare: called with the module once in each worker: `torch.compile`, activation checkpointing.
        It changes the module, or returns one that wraps it. The server's module is not changed.

    Persistent buffers (BatchNorm statistics) are part of the model. Each worker starts from the
    server's, and a step moves them by the weighted mean of the workers' changes. A buffer of more
    than 16,384 values, other than a normalization layer's, counts as a constant (a causal mask)
    and is not sent. If a task changes it, the task fails and names it for `buffers=`. Batch
    statistics are those of one worker's share. The generators of torch, numpy and Python's `random`
    are seeded by (seed, offset), so a task gives the same result on every worker. A kept inner
    state is the exception. Training does not change the given module.
    """

    model: nn.Module | Callable[[], nn.Module]
    loss: Loss
    optimizer: MakeOptimizer
    dataset: Data | Callable[[], Data]
    batch_size: int
    outer: MakeOptimizer | None = None
    scheduler: MakeScheduler | None = None
    transform: Transform | None = None
    micro_batch: MicroBatch = None
    collate: Callable[[list[Any]], Any] = default_collate
    threads: int = 1
    device: str = "cpu"
    inner_scheduler: MakeScheduler | None = None
    inner_transform: Transform | None = None
    outer_scheduler: MakeScheduler | None = None
    outer_transform: Transform | None = None
    buffers: Collection[str] = ()
    prepare: Prepare | None = None
    num_workers: int = 0
    prefetch_factor: int = 2
    pin_memory: bool = False
    inner: Literal["kept", "fresh"] | None = None
    loss_scale: LossScale = None

    def __post_init__(self) -> None:
        if isinstance(self.micro_batch, str) and self.micro_batch != "auto":
            raise ValueError(f'micro_batch={self.micro_batch!r}: use a number, or "auto"')
        least = self.micro_batch if isinstance(self.micro_batch, int) else 1
        if self.batch_size < 1 or least < 1:
            raise ValueError(
                f"batch_size={self.batch_size}, micro_batch={self.micro_batch}: use at least 1"
            )
        if self.device != "auto":
            try:
                torch.device(self.device)
            except RuntimeError as error:
                raise ValueError(
                    f'device={self.device!r}: use "cpu", "cuda", or "auto" for a GPU where a '
                    "worker has one"
                ) from error
        if self.num_workers < 0 or self.prefetch_factor < 1:
            raise ValueError(
                f"num_workers={self.num_workers}, prefetch_factor={self.prefetch_factor}: use at "
                "least 0 and 1, as for a DataLoader"
            )
        if not callable(self.loss):
            raise ValueError(
                f"loss= is a {type(self.loss).__name__}; give a function loss(model, batch)"
            )
        if self._is_open() or not callable(self.dataset):
            check_map_style(self.dataset)
        if self.loss_scale not in (None, "auto"):
            raise ValueError(f'loss_scale={self.loss_scale!r}: use "auto", or None')
        if self.inner not in (None, "kept", "fresh"):
            raise ValueError(f'inner={self.inner!r}: use "kept" or "fresh"')
        self._check_sides()
        self._check_recipes()

    def _check_sides(self) -> None:
        """Raise ValueError for a schedule or transform that fits both optimizers or neither."""
        for name in ("scheduler", "transform"):
            if self.outer is not None and getattr(self, name) is not None:
                raise ValueError(
                    f"{name}= together with outer= could be of either optimizer; use inner_{name}= "
                    f"for the workers' local steps, or outer_{name}= for the server's"
                )
        for name in _OF_LOCAL_STEPS:
            if self.outer is None and getattr(self, name) is not None:
                plain = name.partition("_")[2]
                instead = f"use {plain}=" if plain else "leave it out"
                raise ValueError(
                    f"{name}= is for local steps, and there is no outer= optimizer; {instead}, "
                    "or give outer= as well"
                )

    def _check_recipes(self) -> None:
        """Make optimizers and schedules once, for stand-in tensors, to find errors early."""
        if isinstance(self.model, Sent | Made):
            return  # checked before they were sent
        sides = [("optimizer", "scheduler")]
        if self.outer is not None:
            sides = [("optimizer", "inner_scheduler"), ("outer", "outer_scheduler")]
        for keyword, schedule in sides:
            made = make_optimizer(getattr(self, keyword), stand_ins(self.shapes), keyword)
            if getattr(self, schedule) is not None:
                make_scheduler(getattr(self, schedule), made, schedule)

    def _is_open(self) -> bool:
        given = self.dataset
        return (
            not isinstance(given, type)
            and hasattr(given, "__getitem__")
            and hasattr(given, "__len__")
        )

    @property
    def shapes(self) -> Shapes:
        """The shape of each trained parameter, by name."""
        given = self.model
        return given.shapes if isinstance(given, Sent | Made) else self._facts.shapes

    @cached_property
    def examples(self) -> int:
        return len(self.open_dataset())  # type: ignore[arg-type]

    @property
    def message_bytes(self) -> int:
        return 4 * self._facts.size

    def open_dataset(self) -> Data:
        if self._is_open():
            return cast(Data, self.dataset)
        opened = cast(Callable[[], Data], self.dataset)()
        check_map_style(opened)
        return opened

    def replica(self, seed: int, tiles: Partition | None = None) -> TorchReplica:
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(
                f'device="{self.device}", and this process sees no CUDA device; use device="cpu", '
                "or give each worker a GPU with pl.Ray(gpus=1) on machines that have one"
            )
        given = self.model
        module = hollow(given, self.buffers) if isinstance(given, nn.Module) else self._module()
        return TorchReplica(self, module, seed, tiles)

    def server(self) -> TorchServer:
        owned = not isinstance(self.model, nn.Module)
        return TorchServer(self._module(), self._rules, owned, self.buffers)

    def for_workers(self) -> TorchLearner:
        """Return this learner without the values that every model message contains."""
        if isinstance(self.model, nn.Module):
            sent = Sent(hollow(self.model, self.buffers, share=True), self.shapes)
            return replace(self, model=sent)
        made = Made(self.model, self._facts.resident, self.buffers, self.shapes)
        return replace(self, model=made)

    def _module(self) -> nn.Module:
        """Return the given module, or a newly made one that the caller owns."""
        return self.model if isinstance(self.model, nn.Module) else made(self.model)

    @property
    def _facts(self) -> _Facts:
        given = isinstance(self.model, nn.Module)
        return _Facts.of(self._module(), self.buffers) if given else self._facts_once

    @cached_property
    def _frozen(self) -> str | None:
        """The hash of the frozen base, which no checkpoint has; None if all is trained."""
        given = self.model
        return base_digest(given) if isinstance(given, nn.Module) else self._facts.base

    @cached_property
    def _facts_once(self) -> _Facts:
        """The facts of a module from a function, which is called once for them."""
        module = self._module()
        resident, base = resident_digest(module, self.buffers), base_digest(module)
        return replace(_Facts.of(module, self.buffers), resident=resident, base=base)

    @property
    def _rules(self) -> Rules:
        """The rules of the server's step."""
        if self.outer is None:
            return Rules(self.optimizer, self.scheduler, self.transform)
        return Rules(self.outer, self.outer_scheduler, self.outer_transform)

    def without_local_steps(self) -> TorchLearner:
        """Return this learner without local steps: its tasks compute gradients."""
        without: dict[str, Any] = dict.fromkeys(("outer", *_OF_LOCAL_STEPS))
        return replace(self, **without)

    @cached_property
    def keeps_inner_state(self) -> bool:
        """Whether workers keep the state of their optimizer between tasks of local steps."""
        if self.outer is None or self.inner is not None:
            return self.outer is not None and self.inner == "kept"
        return not isinstance(make_optimizer(self.optimizer, stand_ins(self.shapes)), SGD)

    @cached_property
    def optimizer_class(self) -> str:
        """The class of the server's optimizer."""
        kind = type(make_optimizer(self._rules.optimizer, stand_ins(self.shapes)))
        return f"{kind.__module__}.{kind.__qualname__}"

    def rate(self, version: int) -> float:
        return self._rates.at(version)

    @cached_property
    def _rates(self) -> Rates:
        return Rates(self._rules.optimizer, self._rules.scheduler, self.shapes)

    def check(self, work: Work) -> None:
        if work.parts is not None and (work.steps > 1 or self.outer is not None):
            raise ValueError(
                "parts of a batch are gradients of one model and cannot take local steps; use "
                "coded(…) without outer=, or local_sgd"
            )
        if work.parts is not None and work.budget < inf:
            raise ValueError("coded work needs whole parts of a batch: leave its budget out")
        if work.steps > 1 and self.outer is None:
            raise ValueError(
                f"{work.steps} local steps need an outer optimizer for the server: "
                "TorchLearner(…, outer=partial(torch.optim.SGD, lr=1.0)) averages"
            )
        if work.overlap and self.outer is None:
            raise ValueError(
                "overlap=True is for local steps, and this learner has no outer= optimizer; give "
                "outer=, or leave overlap out"
            )
        if work.budget < inf and not isinstance(self.micro_batch, int):
            raise ValueError(
                f"a budget of {work.budget:g} s can only end work between pieces: "
                "TorchLearner(…, micro_batch=…) says how large a piece is"
            )

    def about(self) -> dict[str, Any]:
        local: dict[str, Any] = {}
        if self.outer is not None:
            local = {name: describe(getattr(self, name)) for name in _RULES}
            local["inner"] = "kept" if self.keeps_inner_state else None  # as in older checkpoints
        return {
            "learner": self._facts.name,
            "batch_size": self.batch_size,
            "parameters": self._facts.parameters,
            "threads": self.threads,
            "examples": self.examples,
            "optimizer": describe(self.optimizer),
            "outer": describe(self.outer),
            "scheduler": describe(self.scheduler),
            "transform": describe(self.transform),
            **local,
            **({} if self._frozen is None else {"frozen": self._frozen}),
            **({} if self.prepare is None else {"prepare": describe(self.prepare)}),
        }


@dataclass(frozen=True)
class _Facts:
    """The facts of a module that remain known without the module itself."""

    name: str
    size: int  # number of values that are sent
    parameters: int
    shapes: Shapes
    # If a function makes the module, the hashes of the tensors that are not sent, and of those
    # among them that are frozen parameters.
    resident: str = ""
    base: str | None = None

    @staticmethod
    def of(module: nn.Module, changing: Collection[str]) -> _Facts:
        parameters = sum(p.numel() for p in module.parameters())
        return _Facts(
            type(module).__name__, flat_size(module, changing), parameters, shapes_of(module)
        )


@dataclass(frozen=True)
class Sent:
    """Returns a sent module: the module itself in the receiving process, a copy in the sender's."""

    module: nn.Module
    shapes: Shapes
    arrived: bool = False

    def __call__(self) -> nn.Module:
        return self.module if self.arrived else copy.deepcopy(self.module)

    def __reduce__(self) -> tuple[Any, ...]:
        return Sent, (self.module, self.shapes, True)


@dataclass(frozen=True)
class Made:
    """Makes a module; raises ValueError if its frozen tensors differ from the driver's."""

    make: Callable[[], nn.Module]
    resident: str
    changing: Collection[str]
    shapes: Shapes

    def __call__(self) -> nn.Module:
        module = made(self.make)
        if resident_digest(module, self.changing) != self.resident:
            raise ValueError(
                "model= made other frozen parameters or constant buffers in a worker than in the "
                "driver, and these are not sent; make the function return the same tensors in each "
                "process, or give the module itself"
            )
        return module


def made(make: Callable[[], nn.Module]) -> nn.Module:
    """Call a function that makes a module, each time with the same torch seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        module = make()
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"model= returned {type(module).__name__}; give an nn.Module, or a function without "
            "arguments that returns one"
        )
    return module
