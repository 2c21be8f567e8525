"""The worker's side of `TorchLearner`: gradients, coded sums of them, or local steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from paceline.codes.blocks import Encoder, sketch
from paceline.core.averages import scaled
from paceline.core.logs import logger_of
from paceline.core.protocol import SHARED, Coefficients, Task, WorkerId
from paceline.data.partition.base import Partition
from paceline.data.sampling import Samples
from paceline.data.seeding import generator
from paceline.data.shards import stream_of
from paceline.learners.ahead import EarlyStart, Ends
from paceline.learners.base import Array, Final, Outcome, Proceed
from paceline.learners.early import EarlyGradients
from paceline.learners.feed import Request, feed_of, move, seeded
from paceline.learners.flat import FlatModule
from paceline.learners.frozen import Base
from paceline.learners.loss import Losses, stats_of
from paceline.learners.memory import Loading, Pieces
from paceline.learners.optimize import Named, Rates, make_optimizer, shapes_of, trained
from paceline.learners.prepare import prepared
from paceline.learners.scale import Scaler
from paceline.learners.transforms import Piece

if TYPE_CHECKING:  # which imports this file
    from paceline.learners.torch import TorchLearner

logger = logger_of(__name__)


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
        self._model = prepared(learner.prepare, self._flat)
        self._micro, self._base = Pieces(learner.micro_batch), Base(self._flat.module)
        self._scaler = Scaler(learner.loss_scale, device, self._flat.parameters)
        dataset = learner.open_dataset()
        ahead = learner.prefetch_factor, learner.pin_memory and device != "cpu"
        self._feed = feed_of(dataset, learner.collate, learner.num_workers, *ahead)
        stream = stream_of(dataset, seed, learner.batch_size)
        self._samples = Samples(stream, seed, tiles)
        self._last: Task | None = None
        self.final: Final | None = None
        self._early: EarlyGradients | None = None
        # The inner optimizers that are kept between tasks. A simulator has a replica for all
        # workers, and each worker has a state of its own.
        self._inner: dict[WorkerId, Optimizer] = {}
        self._ends = Ends(self._flat)

    def compute(self, model: Iterable[Array], task: Task, proceed: Proceed) -> Outcome:
        learner = self._learner
        learner.check(task.work)
        if task.work.budget < inf and learner.device.startswith("cuda"):
            proceed = _synchronized(proceed)
        steps = self._micro.is_auto and learner.outer is not None  # of those, none overflows
        load = Loading(self._flat, model, steps)
        final = self._micro.watched(self.final)
        found = self._scaler.until_finite(
            lambda: self._micro.until_it_fits(lambda: self._attempt(load, task, proceed, final))
        )
        self._base.check()
        return found

    def _attempt(self, load: Loading, task: Task, proceed: Proceed, final: Final | None) -> Outcome:
        try:
            return self._computed(load, task, proceed, final)
        except Exception:
            self.forget(task.worker)  # some of its steps were taken
            raise

    def _computed(
        self, load: Loading, task: Task, proceed: Proceed, final: Final | None
    ) -> Outcome:
        learner, flat = self._learner, self._flat
        self._feed.begin(self._requests(task), self._likely(task))
        is_new = learner.keeps_inner_state and task.version > 0 and task.worker not in self._inner
        if task.work.parts is not None:
            return self._coded(load, task, task.work.parts, proceed)
        with self._seeded(self._samples.generator(task)):
            if learner.outer is None:
                load()
                losses = self._gradient(task.samples, proceed, final)
                self._scaler.unscale()
            else:
                start = EarlyStart(flat, load, self._ends.before(task))
                losses = self._local_steps(task, proceed, start)
        if not losses.samples:
            return Outcome(None, 0)
        flat.buffer_change()
        self._ends.remember(task, losses.samples)
        total, number, count = self._counted(losses, flat.trainable if learner.outer is None else 0)
        stats = stats_of(total, number, count)
        if is_new:
            stats = {**stats, "new_state": 1.0}
        vector = flat.grads.cpu().numpy()
        carries = learner.keeps_inner_state or task.work.overlap
        if carries and not np.isfinite(vector).all():
            self.forget(task.worker)  # its moments, or its model, would ruin all later results
        return Outcome(vector, losses.samples, stats)

    def forget(self, worker: WorkerId) -> None:
        """Drop what is kept of a worker's tasks, as if its process had ended."""
        self._inner.pop(worker, None)
        self._ends.forget(worker)

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
        load: Loading,
        task: Task,
        parts: Mapping[int, Coefficients],
        proceed: Proceed,
    ) -> Outcome:
        """Compute each part separately, as every worker with it does, and add them up encoded."""
        flat, total, number, count = self._flat, 0.0, 0.0, 0.0
        encoder = Encoder(flat.values.numel(), task.work.messages)
        for part, factors in parts.items():
            place, size = task.part(part)
            with self._seeded(generator(self._seed, SHARED, place)):
                load()
                losses = self._gradient(size, proceed)
                self._scaler.unscale()
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
        return _quiet(self._learner.threads, self._learner.device, int(rng.integers(2**63)))

    def _requests(self, task: Task) -> list[Request]:
        """Return the batches of a task in their order."""
        if task.work.parts is not None:
            found: list[Request] = []
            for part in task.work.parts:
                place, size = task.part(part)
                chosen = [self._samples.stretch(place, size)]
                found += self._cut(chosen, generator(self._seed, SHARED, place))
            return found
        steps = 1 if self._learner.outer is None else task.work.steps
        chosen = [self._samples.of(task, step) for step in range(steps)]
        return self._cut(chosen, self._samples.generator(task))

    def _cut(self, steps: list[NDArray[np.int64]], rng: np.random.Generator) -> list[Request]:
        """Cut the samples of steps into micro-batches, each with its seed."""
        pieces = [
            chosen[start : start + size]
            for chosen in steps
            for size in [self._micro.of(len(chosen))]
            for start in range(0, len(chosen), size)
        ]
        seeds = rng.integers(2**63, size=1 + len(pieces))[1:]  # the first is the model's
        return [
            Request(tuple(piece.tolist()), int(seed))
            for piece, seed in zip(pieces, seeds, strict=True)
        ]

    def _likely(self, task: Task) -> list[Request]:
        """Return the batches of the next task, if it is as far ahead as this one was."""
        last, self._last = self._last, task
        if not self._learner.num_workers or task.work.parts is not None or task.work.tiles:
            return []
        stride = 0 if last is None or last.samples != task.samples else task.offset - last.offset
        return self._requests(replace(task, offset=task.offset + stride)) if stride > 0 else []

    def _gradient(self, samples: int, proceed: Proceed, final: Final | None = None) -> Losses:
        """Write the gradient per sample to the flat buffer; return the losses of samples used."""
        flat, learner = self._flat, self._learner
        flat.grads.zero_()
        size = self._micro.of(samples)
        losses = Losses()
        while (done := losses.samples) < samples and proceed(done):
            found = learner.loss(self._model, move(self._feed.next(), learner.device))
            part = losses.add(found, min(size, samples - done), samples)
            if part is not None:
                with self._watched(final if losses.samples == samples else None):
                    self._scaler.scaled(part).backward()
        if 0 < losses.samples < samples:
            flat.grads.mul_(samples / losses.samples)
        return losses

    def _watched(self, final: Final | None) -> AbstractContextManager[None]:
        """Report which parts of the gradient are final, during its last backward pass."""
        if final is None or self._scaler.is_on or self._flat.grads.device.type != "cpu":
            return nullcontext()
        if self._early is None:
            self._early = EarlyGradients(self._flat)
        return self._early.watching(final)

    def _local_steps(self, task: Task, proceed: Proceed, start: EarlyStart) -> Losses:
        """Take local steps, each along its mean gradient; write the model's change."""
        flat, learner = self._flat, self._learner
        optimizer = self._inner_optimizer(task)
        losses = Losses()
        for step in range(task.work.steps):
            before = losses.samples
            found = self._gradient(task.samples, lambda n: proceed(before + n))  # noqa: B023
            if not found.samples:
                break
            self._scaler.unscale_for(optimizer)
            if found.counted:
                flat.grads.div_(found.per_sample())
            if learner.inner_scheduler is not None:
                settings = self._inner_rates.groups(task.version * task.work.steps + step)
                for group, options in zip(optimizer.param_groups, settings, strict=True):
                    group.update(options)
            if learner.inner_transform is not None:
                pieces = list(self._pieces())
                learner.inner_transform.apply(pieces, learner.inner_transform.sums(pieces))
            self._scaler.step(optimizer)
            losses.extend(found)
            start.go_on(losses.samples)
        start.complete()
        torch.sub(start.model, flat.values[: flat.trainable], out=flat.grads[: flat.trainable])
        return losses

    def _inner_optimizer(self, task: Task) -> Optimizer:
        """Return the optimizer of local steps: the worker's own, or a new one."""
        optimizer = self._inner.get(task.worker)
        if optimizer is None:
            optimizer = make_optimizer(self._learner.optimizer, self._named)
            if self._learner.keeps_inner_state:
                self._inner[task.worker] = optimizer
                if task.version:
                    logger.warning(
                        "worker %s begins with a new state of its inner optimizer at version %d",
                        task.worker,
                        task.version,
                    )
        return optimizer

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
def _quiet(threads: int, device: str, seed: int) -> Iterator[None]:
    """Fix torch's threads and all global seeds inside; restore both afterwards, except CUDA's."""
    before = torch.get_num_threads()
    if before != threads:
        torch.set_num_threads(threads)
    if device.startswith("cuda"):
        torch.cuda.manual_seed(seed)
    try:
        with seeded(seed):
            yield
    finally:
        if before != threads:
            torch.set_num_threads(before)
