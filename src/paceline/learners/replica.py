"""The worker's side of `TorchLearner`: gradients, coded sums of them, or local steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from paceline.codes.blocks import Encoder, sketch
from paceline.core.averages import scaled
from paceline.core.protocol import SHARED, Coefficients, Task
from paceline.data.partition.base import Partition
from paceline.data.sampling import Samples
from paceline.data.seeding import generator
from paceline.learners.base import Array, Final, Outcome, Proceed
from paceline.learners.early import EarlyGradients
from paceline.learners.flat import FlatModule
from paceline.learners.loss import Losses, stats_of
from paceline.learners.optimize import Named, Rates, make_optimizer, shapes_of, trained
from paceline.learners.transforms import Piece

if TYPE_CHECKING:  # which imports this file
    from paceline.learners.torch import TorchLearner


def device_of(wished: str) -> str:
    """Return the requested device; for "auto", the device that this process has."""
    if wished == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return wished


class TorchReplica:
    """The worker's side: a copy of the module and the data.

    If the loss returns counts, the vector of a result is the sum of its gradients per sample: its
    mean times its count per sample. See `core/averages.py`.
    """

    def __init__(
        self, learner: TorchLearner, module: nn.Module, seed: int, tiles: Partition | None = None
    ) -> None:
        self._seed = seed
        device = device_of(learner.device)
        self._flat = FlatModule(module.train(), device, changing=learner.buffers)
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
        if task.work.budget < inf and learner.device.startswith("cuda"):
            proceed = _synchronized(proceed)
        if task.work.parts is not None:
            return self._coded(model, task, task.work.parts, proceed)
        with self._seeded(self._samples.generator(task)):
            chosen = self._samples.of(task)
            self._read_ahead(chosen)
            flat.load(model)
            if learner.outer is None:
                losses = self._gradient(chosen, proceed, self.final)
            else:
                losses = self._local_steps(task, proceed)
        if not losses.samples:
            return Outcome(None, 0)
        flat.buffer_change()
        total, number, count = self._counted(losses, flat.trainable if learner.outer is None else 0)
        stats = stats_of(total, number, count)
        return Outcome(flat.grads.cpu().numpy(), losses.samples, stats)

    def _counted(self, losses: Losses, start: int) -> tuple[float, float, float | None]:
        """Multiply the vector from `start` on by the count per sample, if losses have counts.

        Return the sum of the losses, their number, and the count per sample.
        """
        total, number = losses.read()
        if not losses.counted:
            return total, number, None
        count = number / losses.samples
        if count:
            self._flat.grads[start:].mul_(count)
        else:
            self._flat.grads.zero_()
        return total, number, count

    def _coded(
        self,
        model: Iterable[Array],
        task: Task,
        parts: Mapping[int, Coefficients],
        proceed: Proceed,
    ) -> Outcome:
        """Compute each part separately, as every worker with it does, and add them up encoded."""
        flat, total, number, count = self._flat, 0.0, 0.0, 0.0
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
                losses = self._gradient(chosen, proceed)
            if losses.samples < size:
                return Outcome(None, 0)  # an incomplete part is useless
            flat.buffer_change()
            total_of, number_of, count_of = self._counted(losses, flat.trainable)
            share = size * task.work.n_parts / task.samples  # 1 if all parts have equal size
            factors = scaled(factors, share)
            encoder.add(flat.grads.cpu().numpy(), factors)
            total, number = total + total_of, number + number_of
            # A vector with this count everywhere would be encoded to the same number everywhere.
            count += (count_of or 0.0) * (sum(factors) if isinstance(factors, tuple) else factors)
        message = encoder.message(np.float32)
        seen = sketch(message, generator(self._seed, SHARED, task.version))
        stats = stats_of(total, number, count if losses.counted else None)
        return Outcome(message, task.computed, {**stats, "sketch": seen})

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
    ) -> Losses:
        """Write the gradient per sample to the flat buffer; return the losses of samples used."""
        flat, learner = self._flat, self._learner
        flat.grads.zero_()
        samples = len(chosen)
        size = learner.micro_batch or samples
        losses = Losses()
        while (done := losses.samples) < samples and proceed(done):
            piece = chosen[done : done + size]
            found = learner.loss(flat.module, self._batch(piece))
            part = losses.add(found, len(piece), samples)
            if part is not None:
                with self._watched(final if losses.samples == samples else None):
                    part.backward()
        if 0 < losses.samples < samples:
            flat.grads.mul_(samples / losses.samples)
        return losses

    def _watched(self, final: Final | None) -> AbstractContextManager[None]:
        """Report which parts of the gradient are final, during its last backward pass."""
        if final is None or self._flat.grads.device.type != "cpu":
            return nullcontext()
        if self._early is None:
            self._early = EarlyGradients(self._flat)
        return self._early.watching(final)

    def _local_steps(self, task: Task, proceed: Proceed) -> Losses:
        """Take local steps, each along its mean gradient; write the model's change."""
        flat, learner = self._flat, self._learner
        start = flat.values[: flat.trainable].clone()
        optimizer = make_optimizer(learner.optimizer, self._named)
        losses = Losses()
        for step in range(task.work.steps):
            before = losses.samples
            chosen = self._samples.of(task, step)
            found = self._gradient(chosen, lambda n: proceed(before + n))  # noqa: B023
            if not found.samples:
                break
            if found.counted:
                flat.grads.div_(found.per_sample())
            if learner.inner_scheduler is not None:
                settings = self._inner_rates.groups(task.version * task.work.steps + step)
                for group, options in zip(optimizer.param_groups, settings, strict=True):
                    group.update(options)
            if learner.inner_transform is not None:
                pieces = list(self._pieces())
                learner.inner_transform.apply(pieces, learner.inner_transform.sums(pieces))
            optimizer.step()
            losses.extend(found)
        torch.sub(start, flat.values[: flat.trainable], out=flat.grads[: flat.trainable])
        return losses

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


def _synchronized(proceed: Proceed) -> Proceed:
    """Return a `proceed` that first waits for the GPU, so that a budget of seconds is kept."""

    def wait(done: int) -> bool:
        torch.cuda.synchronize()
        return proceed(done)

    return wait


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
