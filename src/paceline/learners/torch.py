"""Any `nn.Module` with any `torch.optim` optimizer on any map-style dataset."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from paceline.codes.blocks import Encoder, scaled, sketch
from paceline.core.protocol import SHARED, Coefficients, Stats, Task, Work
from paceline.core.state import describe
from paceline.data.partition.base import Partition
from paceline.data.sampling import Samples
from paceline.data.seeding import generator
from paceline.learners.base import Array, Final, Outcome, Proceed
from paceline.learners.early import EarlyGradients
from paceline.learners.flat import FlatModule, flat_size, hollow, resident_digest
from paceline.learners.optimize import (
    MakeOptimizer,
    MakeScheduler,
    Named,
    Rates,
    Rules,
    Shapes,
    TorchServer,
    make_optimizer,
    make_scheduler,
    shapes_of,
    stand_ins,
    trained,
)
from paceline.learners.transforms import Piece, Transform

Loss: TypeAlias = Callable[[nn.Module, Any], Tensor]
_OF_LOCAL_STEPS = "inner_scheduler", "inner_transform", "outer_scheduler", "outer_transform"


@dataclass(frozen=True)
class TorchLearner:
    """Trains a module by `loss(model, batch)`, the mean over the batch.

    optimizer: makes the optimizer from parameters, e.g. `partial(torch.optim.SGD, lr=0.1)`. If its
        first argument is called `named_parameters`, it receives (name, parameter) pairs.
    dataset: map-style, or a function that opens one (called once in each worker process).
    batch_size: the global batch, divided among the workers; only the user changes it.
    outer: the server's optimizer for local steps. Workers use a new `optimizer` for each task, and
        the server steps with `outer` along their change. `partial(SGD, lr=1.0)` is averaging.
    scheduler: makes a learning-rate schedule, advanced once per step of the server.
    transform: changes the step's gradient before the optimizer: `ClipNorm`, `TrustRatio`.
    inner_scheduler, inner_transform: the same for the local steps, with `outer`. The schedule is at
        step `version * steps + step`, so a task gives the same result on every worker.
    outer_scheduler, outer_transform: the same for the steps of `outer`.
    model: the module; or a function that makes it, called in each process with torch's seed 0. So
        no weights are sent to start a worker.
    micro_batch: the samples computed at a time; cancelled work can end between micro-batches.
    threads: the torch threads of each replica; results depend on it bit by bit, so it is fixed
        and recorded.
    device: "cpu", "cuda", or "auto", which is "cuda" in each worker that has a GPU.
    buffers: names of large persistent buffers that training changes; see below.

    Persistent buffers (BatchNorm statistics) are part of the model. Each worker starts from the
    server's, and a step moves them by the weighted mean of the workers' changes. A buffer of more
    than 16,384 values, other than a normalization layer's, counts as a constant (a causal mask)
    and is not sent. If a task changes it, the task fails and names it for `buffers=`. Batch
    statistics are those of one worker's share. The generators of torch, numpy and Python's `random`
    are seeded by (seed, offset), so a task gives the same result on every worker. Training does not
    change the given module.
    """

    model: nn.Module | Callable[[], nn.Module]
    loss: Loss
    optimizer: MakeOptimizer
    dataset: Dataset[Any] | Callable[[], Dataset[Any]]
    batch_size: int
    outer: MakeOptimizer | None = None
    scheduler: MakeScheduler | None = None
    transform: Transform | None = None
    micro_batch: int | None = None
    collate: Callable[[list[Any]], Any] = default_collate
    threads: int = 1
    device: str = "cpu"
    inner_scheduler: MakeScheduler | None = None
    inner_transform: Transform | None = None
    outer_scheduler: MakeScheduler | None = None
    outer_transform: Transform | None = None
    buffers: Collection[str] = ()

    def __post_init__(self) -> None:
        if self.batch_size < 1 or (self.micro_batch is not None and self.micro_batch < 1):
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
        if not callable(self.loss):
            raise ValueError(
                f"loss= is a {type(self.loss).__name__}; give a function loss(model, batch)"
            )
        if self._is_open() or not callable(self.dataset):
            _check_map_style(self.dataset)
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
                raise ValueError(
                    f"{name}= is for local steps, and there is no outer= optimizer; use {plain}=, "
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

    def open_dataset(self) -> Dataset[Any]:
        if self._is_open():
            return cast(Dataset[Any], self.dataset)
        opened = cast(Callable[[], Dataset[Any]], self.dataset)()
        _check_map_style(opened)
        return opened

    def replica(self, seed: int, tiles: Partition | None = None) -> TorchReplica:
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(
                f'device="{self.device}", and this process sees no CUDA device; use device="cpu", '
                "or give each worker a GPU with pl.Ray(gpus=1) on machines that have one"
            )
        return TorchReplica(self, seed, tiles)

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
    def _facts_once(self) -> _Facts:
        """The facts of a module from a function, which is called once for them."""
        module = self._module()
        resident = resident_digest(module, self.buffers)
        return replace(_Facts.of(module, self.buffers), resident=resident)

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
        if work.budget < inf and self.micro_batch is None:
            raise ValueError(
                f"a budget of {work.budget:g} s can only end work between pieces: "
                "TorchLearner(…, micro_batch=…) says how large a piece is"
            )

    def about(self) -> dict[str, Any]:
        local = () if self.outer is None else _OF_LOCAL_STEPS
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
            **{name: describe(getattr(self, name)) for name in local},
        }


@dataclass(frozen=True)
class _Facts:
    """The facts of a module that remain known without the module itself."""

    name: str
    size: int  # number of values that are sent
    parameters: int
    shapes: Shapes
    resident: str = ""  # hash of the tensors that are not sent, if a function makes the module

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


def device_of(wished: str) -> str:
    """Return the requested device; for "auto", the device that this process has."""
    if wished == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return wished


class TorchReplica:
    """The worker's side: a copy of the module and the data."""

    def __init__(self, learner: TorchLearner, seed: int, tiles: Partition | None = None) -> None:
        self._seed = seed
        given, device, changing = learner.model, device_of(learner.device), learner.buffers
        module = hollow(given, changing) if isinstance(given, nn.Module) else learner._module()
        self._flat = FlatModule(module.train(), device, changing=changing)
        # Drops the reference to the recipe's weights.
        self._learner = replace(learner, model=self._flat.module, device=device)
        dataset = learner.open_dataset()
        self._fetch = _fetcher(dataset, learner.collate)
        self._samples = Samples(len(dataset), seed, tiles)  # type: ignore[arg-type]
        self._ahead: Any = None  # the first samples, fetched while the model arrives
        self.final: Final | None = None
        self._early: EarlyGradients | None = None

    def compute(self, model: Iterable[Array], task: Task, proceed: Proceed) -> Outcome:
        learner, flat = self._learner, self._flat
        learner.check(task.work)
        if task.work.parts is not None:
            return self._coded(model, task, task.work.parts, proceed)
        with self._seeded(self._samples.generator(task)):
            chosen = self._samples.of(task)
            self._read_ahead(chosen)
            flat.load(model)
            if learner.outer is None:
                samples, loss = self._gradient(chosen, proceed, self.final)
            else:
                samples, loss = self._local_steps(task, proceed)
        if not samples:
            return Outcome(None, 0)
        flat.buffer_change()
        return Outcome(flat.grads.cpu().numpy(), samples, {"loss": loss})

    def _coded(
        self,
        model: Iterable[Array],
        task: Task,
        parts: Mapping[int, Coefficients],
        proceed: Proceed,
    ) -> Outcome:
        """Compute each part separately, as every worker with it does, and add them up encoded."""
        flat, total = self._flat, 0.0
        encoder = Encoder(flat.values.numel(), task.work.messages)
        for turn, (part, factors) in enumerate(parts.items()):
            place, size = task.part(part)
            with self._seeded(generator(self._seed, SHARED, place)):
                chosen = self._samples.stretch(place, size)
                self._read_ahead(chosen)
                if turn:
                    flat.reset()
                else:
                    flat.load(model)
                samples, loss = self._gradient(chosen, proceed)
            if samples < size:
                return Outcome(None, 0)  # an incomplete part is useless
            flat.buffer_change()
            share = size * task.work.n_parts / task.samples  # 1 if all parts have equal size
            encoder.add(flat.grads.cpu().numpy(), scaled(factors, share))
            total += loss * size
        message = encoder.message(np.float32)
        stats: Stats = {
            "loss": total / task.computed,
            "sketch": sketch(message, generator(self._seed, SHARED, task.version)),
        }
        return Outcome(message, task.computed, stats)

    def _seeded(self, rng: np.random.Generator) -> AbstractContextManager[None]:
        return _quiet(self._learner.threads, self._learner.device, rng)

    def _read_ahead(self, chosen: NDArray[np.int64]) -> None:
        """Fetch the first samples early, with the same random numbers as later."""
        self._ahead = self._fetch(chosen[: self._learner.micro_batch])

    def _batch(self, chosen: NDArray[np.int64]) -> Any:
        ahead, self._ahead = self._ahead, None
        return _to(self._fetch(chosen) if ahead is None else ahead, self._learner.device)

    def _gradient(
        self, chosen: NDArray[np.int64], proceed: Proceed, final: Final | None = None
    ) -> tuple[int, float]:
        """Write the mean gradient to the flat buffer; return the samples used and their loss."""
        flat, learner = self._flat, self._learner
        flat.grads.zero_()
        samples = len(chosen)
        size = learner.micro_batch or samples
        done, total = 0, 0.0
        while done < samples and proceed(done):
            piece = chosen[done : done + size]
            loss = learner.loss(flat.module, self._batch(piece))
            _check_loss(loss)
            share = len(piece) / samples
            with self._watched(final if done + len(piece) == samples else None):
                (loss if share == 1 else loss * share).backward()
            total += loss.item() * len(piece)
            done += len(piece)
        if 0 < done < samples:
            flat.grads.mul_(samples / done)
        return done, total / max(done, 1)

    def _watched(self, final: Final | None) -> AbstractContextManager[None]:
        """Report which parts of the gradient are final, during its last backward pass."""
        if final is None or self._flat.grads.device.type != "cpu":
            return nullcontext()
        if self._early is None:
            self._early = EarlyGradients(self._flat)
        return self._early.watching(final)

    def _local_steps(self, task: Task, proceed: Proceed) -> tuple[int, float]:
        flat, learner = self._flat, self._learner
        start = flat.values[: flat.trainable].clone()
        optimizer = make_optimizer(learner.optimizer, self._named)
        seen, total = 0, 0.0
        for step in range(task.work.steps):
            before = seen
            chosen = self._samples.of(task, step)
            samples, loss = self._gradient(chosen, lambda n: proceed(before + n))  # noqa: B023
            if not samples:
                break
            if learner.inner_scheduler is not None:
                settings = self._inner_rates.groups(task.version * task.work.steps + step)
                for group, options in zip(optimizer.param_groups, settings, strict=True):
                    group.update(options)
            if learner.inner_transform is not None:
                pieces = list(self._pieces())
                learner.inner_transform.apply(pieces, learner.inner_transform.sums(pieces))
            optimizer.step()
            seen, total = seen + samples, total + samples * loss
        torch.sub(start, flat.values[: flat.trainable], out=flat.grads[: flat.trainable])
        return seen, total / max(seen, 1)

    @cached_property
    def _named(self) -> Named:
        return trained(self._flat.module)

    @cached_property
    def _inner_rates(self) -> Rates:
        learner = self._learner
        return Rates(learner.optimizer, learner.inner_scheduler, shapes_of(self._flat.module))

    def _pieces(self) -> Iterator[Piece]:
        for index, parameter in enumerate(self._flat.parameters):
            assert parameter.grad is not None
            yield Piece(index, parameter.ndim, parameter.data, parameter.grad)


def _check_map_style(dataset: Any) -> None:
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            f"dataset {kind} is an IterableDataset, and workers fetch samples by their index; give "
            "a map-style dataset, with __len__ and __getitem__"
        )
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ValueError(
            f"dataset {kind} is neither map-style (__len__ and __getitem__) nor a function that "
            "opens such a dataset"
        )


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"loss returned a {type(loss).__name__}; return the mean loss of the batch as a "
            "tensor, without .item()"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"loss returned a tensor of shape {tuple(loss.shape)}; return one number, the mean "
            "over the batch: loss.mean()"
        )
    if not loss.requires_grad:
        raise ValueError(
            "loss returned a tensor without a gradient; compute it from the model given, without "
            "torch.no_grad() and .detach()"
        )


@contextmanager
def _quiet(threads: int, device: str, rng: np.random.Generator) -> Iterator[None]:
    """Fix torch's threads and all global seeds inside; restore both afterwards, except CUDA's."""
    before = torch.get_num_threads()
    if before != threads:
        torch.set_num_threads(threads)
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    seed = int(rng.integers(2**63))
    # Not torch.manual_seed, which takes 0.5 ms to note where it was called for other devices.
    torch.default_generator.manual_seed(seed)
    if device.startswith("cuda"):
        torch.cuda.manual_seed(seed)
    np.random.seed(int(rng.integers(2**32)))
    random.seed(int(rng.integers(2**63)))
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        if before != threads:
            torch.set_num_threads(before)


def _fetcher(
    dataset: Dataset[Any], collate: Callable[[list[Any]], Any]
) -> Callable[[np.ndarray[Any, np.dtype[np.int64]]], Any]:
    """Return the fastest function of the dataset that fetches a batch by indices."""
    if type(dataset) is TensorDataset and collate is default_collate:
        tensors = dataset.tensors
        return lambda chosen: [tensor[torch.from_numpy(chosen)] for tensor in tensors]
    many = getattr(dataset, "__getitems__", None)
    if many is not None:
        return lambda chosen: collate(many(chosen.tolist()))
    return lambda chosen: collate([dataset[i] for i in chosen.tolist()])


def _to(batch: Any, device: str) -> Any:
    """Move a batch to a device: tensors in lists, tuples and dicts, or objects with `to`."""
    if device == "cpu":
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: _to(item, device) for key, item in batch.items()}
    if isinstance(batch, list | tuple):
        moved = [_to(item, device) for item in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    if callable(move := getattr(batch, "to", None)):  # such as the BatchEncoding of transformers
        return move(device)
    return batch
