"""Any `nn.Module` with any `torch.optim` optimizer on any map-style dataset."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from paceline.codes.blocks import Encoder, scaled, sketch
from paceline.core.protocol import SHARED, Coefficients, Stats, Task, Work
from paceline.core.state import describe
from paceline.data.partition.base import Partition
from paceline.data.sampling import Samples
from paceline.data.seeding import generator
from paceline.learners.base import Array, Outcome, Proceed
from paceline.learners.flat import FlatModule, flat_size
from paceline.learners.optimize import MakeOptimizer, MakeScheduler, Rates, Rules, TorchServer
from paceline.learners.transforms import Transform

Loss: TypeAlias = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class TorchLearner:
    """Trains a module by `loss(model, batch)`, the mean over the batch.

    optimizer: makes the optimizer from parameters, e.g. `partial(torch.optim.SGD, lr=0.1)`.
    dataset: map-style, or a function that opens one (called once in each worker process).
    batch_size: the global batch, shared among the workers; it never changes by itself.
    outer: for local steps: workers use `optimizer`, started anew for each task, and the server
        steps with `outer` along the change they made. `partial(SGD, lr=1.0)` is averaging.
    scheduler: makes a learning-rate schedule, advanced once per step of the server.
    transform: what is done to the step's gradient first: `ClipNorm`, `TrustRatio`.
    micro_batch: the samples computed at a time; between them abandoned work can end.
    threads: of torch in each replica. Bits depend on it, so it is fixed and recorded.

    Persistent buffers (BatchNorm statistics) are part of the model: each worker starts from the
    server's, and a step moves them by the weighted mean of the workers' changes. Statistics
    within a batch are those of one worker's share. Random layers are seeded by (seed, draw), so
    a task gives the same result on every worker. The module given is a recipe and stays as it is.
    """

    model: nn.Module
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

    def __post_init__(self) -> None:
        if self.batch_size < 1 or (self.micro_batch is not None and self.micro_batch < 1):
            raise ValueError(
                f"batch_size={self.batch_size}, micro_batch={self.micro_batch}: use at least 1"
            )
        if not (self._is_open() or callable(self.dataset)):
            raise ValueError(
                f"dataset {type(self.dataset).__name__} is neither map-style (__len__ and "
                "__getitem__) nor a function that opens such a dataset"
            )

    def _is_open(self) -> bool:
        given = self.dataset
        return (
            not isinstance(given, type)
            and hasattr(given, "__getitem__")
            and hasattr(given, "__len__")
        )

    @cached_property
    def examples(self) -> int:
        return len(self.open_dataset())  # type: ignore[arg-type]

    @property
    def message_bytes(self) -> int:
        return 4 * flat_size(self.model)

    def open_dataset(self) -> Dataset[Any]:
        if self._is_open():
            return cast(Dataset[Any], self.dataset)
        return cast(Callable[[], Dataset[Any]], self.dataset)()

    def replica(self, seed: int, tiles: Partition | None = None) -> TorchReplica:
        return TorchReplica(self, seed, tiles)

    def server(self) -> TorchServer:
        rules = Rules(self.outer or self.optimizer, self.scheduler, self.transform)
        return TorchServer(self.model, rules)

    def rate(self, version: int) -> float:
        return self._rates.at(version)

    @cached_property
    def _rates(self) -> Rates:
        return Rates(self.outer or self.optimizer, self.scheduler)

    def check(self, work: Work) -> None:
        if work.parts is not None and (work.steps > 1 or self.outer is not None):
            raise ValueError(
                "parts of a batch are gradients of one model and cannot take local steps; use "
                "coded(…) without outer=, or local_sgd"
            )
        if work.parts is not None and work.budget < inf:
            raise ValueError("half a part of a batch is of no use: give coded work no budget")
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
        return {
            "learner": type(self.model).__name__,
            "batch_size": self.batch_size,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "threads": self.threads,
            "examples": self.examples,
            "optimizer": describe(self.optimizer),
            "outer": describe(self.outer),
            "scheduler": describe(self.scheduler),
            "transform": describe(self.transform),
        }


class TorchReplica:
    """The worker's side: a copy of the module and the data."""

    def __init__(self, learner: TorchLearner, seed: int, tiles: Partition | None = None) -> None:
        self._seed = seed
        self._flat = FlatModule(copy.deepcopy(learner.model).train(), learner.device)
        self._learner = replace(learner, model=self._flat.module)  # lets go of the recipe's
        dataset = learner.open_dataset()
        self._fetch = _fetcher(dataset, learner.collate)
        self._samples = Samples(len(dataset), seed, tiles)  # type: ignore[arg-type]
        self._ahead: Any = None  # the first samples, fetched while the model is on its way

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
                samples, loss = self._gradient(chosen, proceed)
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
        """Compute each part by itself, as all others who have it do, and add them up encoded."""
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
                return Outcome(None, 0)  # nobody can use half a part
            flat.buffer_change()
            share = size * task.work.cut / task.samples  # 1 if all parts are alike
            encoder.add(flat.grads.cpu().numpy(), scaled(factors, share))
            total += loss * size
        message = encoder.message(np.float32)
        stats: Stats = {
            "loss": total / task.computed,
            "sketch": sketch(message, generator(self._seed, SHARED, task.version)),
        }
        return Outcome(message, task.computed, stats)

    def _seeded(self, rng: np.random.Generator) -> AbstractContextManager[None]:
        return _quiet(self._learner.threads, self._learner.device, int(rng.integers(2**63)))

    def _read_ahead(self, chosen: NDArray[np.int64]) -> None:
        """Fetch the first samples, with the random numbers they would have got later."""
        self._ahead = self._fetch(chosen[: self._learner.micro_batch])

    def _batch(self, chosen: NDArray[np.int64]) -> Any:
        ahead, self._ahead = self._ahead, None
        return _to(self._fetch(chosen) if ahead is None else ahead, self._learner.device)

    def _gradient(self, chosen: NDArray[np.int64], proceed: Proceed) -> tuple[int, float]:
        """Leave the mean gradient in the flat buffer; return the samples seen and their loss."""
        flat, learner = self._flat, self._learner
        flat.grads.zero_()
        samples = len(chosen)
        size = learner.micro_batch or samples
        done, total = 0, 0.0
        while done < samples and proceed(done):
            piece = chosen[done : done + size]
            loss = learner.loss(flat.module, self._batch(piece))
            share = len(piece) / samples
            (loss if share == 1 else loss * share).backward()  # type: ignore[no-untyped-call]
            total += loss.item() * len(piece)
            done += len(piece)
        if 0 < done < samples:
            flat.grads.mul_(samples / done)
        return done, total / max(done, 1)

    def _local_steps(self, task: Task, proceed: Proceed) -> tuple[int, float]:
        flat = self._flat
        start = flat.values[: flat.trainable].clone()
        optimizer = self._learner.optimizer(flat.parameters)
        seen, total = 0, 0.0
        for step in range(task.work.steps):
            before = seen
            chosen = self._samples.of(task, step)
            samples, loss = self._gradient(chosen, lambda n: proceed(before + n))  # noqa: B023
            if not samples:
                break
            optimizer.step()
            seen, total = seen + samples, total + samples * loss
        torch.sub(start, flat.values[: flat.trainable], out=flat.grads[: flat.trainable])
        return seen, total / max(seen, 1)


@contextmanager
def _quiet(threads: int, device: str, seed: int) -> Iterator[None]:
    """Fix torch's threads and randomness inside, and leave both as they were."""
    before = torch.get_num_threads()
    if before != threads:
        torch.set_num_threads(threads)
    state = torch.get_rng_state()
    # Not torch.manual_seed, which takes 0.5 ms to note where it was called for other devices.
    torch.default_generator.manual_seed(seed)
    if device.startswith("cuda"):
        torch.cuda.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)
        if before != threads:
            torch.set_num_threads(before)


def _fetcher(
    dataset: Dataset[Any], collate: Callable[[list[Any]], Any]
) -> Callable[[np.ndarray[Any, np.dtype[np.int64]]], Any]:
    """Return how to get a batch by indices, the quickest way the dataset offers."""
    if type(dataset) is TensorDataset and collate is default_collate:
        tensors = dataset.tensors
        return lambda chosen: [tensor[torch.from_numpy(chosen)] for tensor in tensors]
    many = getattr(dataset, "__getitems__", None)
    if many is not None:
        return lambda chosen: collate(many(chosen.tolist()))
    return lambda chosen: collate([dataset[i] for i in chosen.tolist()])


def _to(batch: Any, device: str) -> Any:
    """Move a batch to a device: tensors in lists, tuples and dicts, or what can move itself."""
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
