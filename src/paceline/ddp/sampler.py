"""A sampler that divides every global batch among the ranks of DDP by their speeds.

A step of DistributedDataParallel takes as long as its slowest rank. The division does not change
the gradient. DDP averages the gradients of n ranks. Rank r has b_r of the B samples and multiplies
its mean loss by n b_r / B. The average is then the gradient of the mean loss over the whole batch,
up to rounding.

A loader with workers draws batches from its sampler well before they are trained on. The ranks
therefore exchange how far they have drawn, together with their speeds. New shares hold from the
first step that no rank has drawn, so that all ranks divide the batch of every step alike.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from math import nan
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Sampler

from paceline.data.sampling import Stream
from paceline.ddp.exchange import Gather, agreed, all_gather, is_grouped, launched
from paceline.ddp.schedule import Schedule

Batch = TypeVar("Batch")
_TIMED = 10  # steps that are timed before an exchange on a GPU, which must be synchronized


class _Piece(NamedTuple):
    """The part that this rank has of the batch of one step."""

    step: int
    own: int
    of: int


class ProportionalSampler(Sampler[list[int]]):
    """A batch sampler that gives each rank its part of a global batch, in proportion to its speed.

    `batch_size` counts the samples of all ranks together. Each rank has at least 1 sample of a
    batch and at most `max_samples` (one number, or one for each rank, to fit its memory). Batches
    are consecutive samples of a shuffled epoch, in the order of `Stream(samples, seed)`. A smaller
    last batch is left out with `drop_last`, or if it has fewer samples than there are ranks.

        sampler = ProportionalSampler(dataset, batch_size=512)
        loader = DataLoader(dataset, batch_sampler=sampler)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for inputs, labels in sampler.measured(loader):
                loss = cross_entropy(model(inputs), labels)  # a mean over the samples
                optimizer.zero_grad()
                sampler.scale(loss).backward()
                optimizer.step()

    Rank and number of ranks come from the default process group. If there is none, they come from
    the variables RANK and WORLD_SIZE that torchrun sets.

    With `speeds`, one for each rank in any unit, the shares are fixed. Otherwise each rank measures
    its samples per second of loading and forward pass (the backward pass waits for the others).
    All ranks exchange their speeds after 5 steps, then after 10, 20, and so on up to `every`.
    `smoothing` is the weight of the previous speed. A rank with a fixed cost per step besides that
    of its samples is slower the smaller its share; repeated exchanges lead to equal times.

    Gradient accumulation works, with `no_sync()` or without: every micro-batch is a step of the
    sampler with its own factor, so `sampler.scale(loss / micro_batches)` is right. `GradScaler` and
    clipping after the backward pass work too. Batch normalization takes its statistics per rank, as
    always under DDP, so there the result depends on the shares; `SyncBatchNorm` weights by samples.
    A loss that is a mean over something other than samples (tokens, unmasked pixels) is weighted
    by samples here. That is not the mean over the batch.
    """

    def __init__(
        self,
        samples_or_dataset: int | Sized,
        batch_size: int,
        *,
        seed: int = 0,
        speeds: Sequence[float] | None = None,
        smoothing: float = 0.5,
        every: int = 50,
        max_samples: int | Sequence[int] | None = None,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        gather: Gather | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._asked = rank is None  # rank and size come from torch.distributed
        if (rank is None) != (world_size is None):
            raise ValueError("give both rank and world_size, or neither to ask torch.distributed")
        if rank is None or world_size is None:
            rank, world_size = launched()
            gather = gather or all_gather
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} with world_size={world_size}: use 0 to {world_size - 1}")
        if speeds is None and world_size > 1 and gather is None:
            raise ValueError(
                f"to measure speeds, the {world_size} ranks must communicate: call "
                "init_process_group() first and leave rank and world_size out, or give speeds="
            )
        batch_size = _whole(batch_size, "batch_size")
        limits = (
            [batch_size]
            if max_samples is None
            else [*max_samples]
            if isinstance(max_samples, Sequence)
            else [max_samples]
        )
        limits = [_whole(limit, "max_samples") for limit in limits]
        limits = limits * world_size if len(limits) == 1 else limits
        rates = [1.0] * world_size if speeds is None else [*map(float, speeds)]
        for name, given in (("max_samples", limits), ("speeds", rates)):
            if len(given) != world_size:
                raise ValueError(f"{len(given)} {name} for {world_size} ranks; give one for each")
        limits = [min(limit, batch_size) for limit in limits]
        self._schedule = Schedule(batch_size, rates, limits, smoothing, every)
        self.samples = (
            len(samples_or_dataset)
            if isinstance(samples_or_dataset, Sized)
            else _whole(samples_or_dataset, "samples")
        )
        last = not drop_last and self.samples % batch_size >= world_size
        self._steps = self.samples // batch_size + last
        if not self._steps:
            raise ValueError(
                f"{self.samples} samples make no batch of {batch_size} for {world_size} ranks; use "
                f"a smaller batch_size" + (", or drop_last=False" if drop_last else "")
            )
        self.batch_size, self.seed, self.rank, self.world_size = batch_size, seed, rank, world_size
        self.epoch = 0
        self._stream = Stream(self.samples, seed)
        self._gather, self._clock = gather if world_size > 1 else None, clock
        self._fixed = speeds is not None or world_size == 1
        self._start = 0  # the first step of the next iteration
        self._done = 0  # steps of the epoch that were trained on
        self._next = 0  # the first step that is not drawn yet
        self._turn = 0  # counts iterations
        self._drawn: deque[_Piece] = deque()  # drawn, and not yet handed out
        self._piece: _Piece | None = None  # the current batch
        self._scaled = True  # whether the loss of the current batch is scaled
        self._began: float | None = None  # when the current batch was requested, if timed
        self._samples, self._seconds = 0, 0.0  # timed since the last exchange
        self._device = torch.device("cpu")  # where the losses are

    def __len__(self) -> int:
        """Return the steps of an epoch, the same on all ranks."""
        return self._steps

    @property
    def shares(self) -> tuple[int, ...]:
        """The samples that each rank has of the next full batch."""
        return self._schedule.at(self._done)

    def set_epoch(self, epoch: int) -> None:
        """Shuffle anew for this epoch; without this call every epoch has the same order."""
        if epoch == self.epoch:
            return
        if self._piece is not None:
            raise RuntimeError(
                f"set_epoch({epoch}) inside the loop over epoch {self.epoch}; call it before"
            )
        self.epoch, self._start = epoch, 0
        self._rewind()

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the sample indices of this rank, step by step, for a DataLoader."""
        self._turn += 1
        turn = self._turn
        self._rewind()
        self._start = 0
        for step in range(self._next, self._steps):
            if self._turn != turn:
                raise RuntimeError(
                    "another iteration over this sampler was begun before this one ended; use "
                    "one loader at a time, and another sampler to inspect the data"
                )
            place = step * self.batch_size
            count = min(self.batch_size, self.samples - place)
            shares = self._schedule.at(step, count)
            own = shares[self.rank]
            self._next = step + 1
            self._drawn.append(_Piece(step, own, count))
            place += self.epoch * self.samples + sum(shares[: self.rank])
            yield self._stream.indices(place, own).tolist()

    def measured(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Iterate over the loader and measure speeds; pass the loss of every batch to `scale`."""
        source: object = getattr(loader, "batch_sampler", None)
        if source is not self:
            raise ValueError(
                f"this {type(loader).__name__} does not draw from this sampler; give measured() "
                f"the DataLoader(dataset, batch_sampler=sampler) itself, and wrap what it returns"
            )
        found = launched()
        if self._asked and is_grouped() and found != (self.rank, self.world_size):
            raise RuntimeError(
                f"this sampler was made for rank {self.rank} of {self.world_size}, before "
                f"init_process_group(), and this is rank {found[0]} of {found[1]}; make it "
                "afterwards"
            )
        if self._gather is all_gather and not is_grouped():
            raise RuntimeError(
                f"the {self.world_size} ranks cannot communicate yet; call init_process_group() "
                "before the loop"
            )
        if not getattr(loader, "in_order", True):
            raise ValueError("in_order=False mixes up the steps; use DataLoader(in_order=True)")
        return self._timing(loader)

    def _timing(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        self._rewind()
        self._exchange()  # no speeds yet, but it checks that the ranks agree
        batches, last = iter(loader), 0
        try:
            while True:
                timed = not self._fixed and (
                    self._device.type == "cpu" or self._schedule.left <= _TIMED
                )
                began = self._now() if timed else None
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                piece = self._piece = self._drawn.popleft()
                # The first step starts the loader; the first batch of a size may compile or tune.
                self._began = began if piece.own == last else None
                last, self._done = piece.own, piece.step
                self._schedule.left -= 1
                self._scaled = False
                yield batch
                if not self._scaled and self.world_size > 1:
                    raise RuntimeError(
                        "the loss of the last batch was not scaled, and its gradient is not that "
                        "of the global batch; write sampler.scale(loss).backward()"
                    )
                self._done = piece.step + 1
                if not self._fixed and self._schedule.left <= 0:
                    rows = self._exchange()
                    since = int(max(drawn for _, drawn in rows))
                    self._schedule.learn([speed for speed, _ in rows], since, self._done)
                    self._samples, self._seconds = 0, 0.0
        finally:
            self._piece = self._began = None

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times n b_r / B, so that DDP averages to the gradient of the batch."""
        if self._piece is None:
            raise RuntimeError(
                "scale() found no batch; call it inside `for batch in "
                "sampler.measured(loader):`, which counts the samples of the loss"
            )
        if loss.numel() != 1:
            raise ValueError(
                f"scale() takes the mean loss of the batch, one number, not {tuple(loss.shape)}; "
                f'use loss.mean(), or reduction="mean"'
            )
        self._device, self._scaled = loss.device, True
        if self._began is not None:
            self._samples += self._piece.own
            self._seconds += self._now() - self._began
            self._began = None  # a second loss of the same batch is not timed again
        self._done = self._piece.step + 1
        return loss * (self.world_size * self._piece.own / self._piece.of)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of training, ready for JSON, the same on all ranks.

        A batch counts once its loss is scaled, however far ahead the loader has drawn.
        """
        place = {"epoch": self.epoch, "step": self._done}
        return {**self._identity(), **place, "schedule": self._schedule.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, on every rank; the number of ranks may differ.

        The rest of its epoch comes next, also after `set_epoch` with that same epoch.
        """
        for name, mine in self._identity().items():
            if state[name] != mine:
                raise ValueError(
                    f"the state is of {name}={state[name]} and this sampler of {name}={mine}, "
                    f"which orders the samples differently; make it with {name}={state[name]}"
                )
        self.epoch, self._start = state["epoch"], state["step"]
        self._schedule.restart()
        if not self._fixed:
            self._schedule.load_state_dict(state["schedule"])
        self._rewind()

    def _identity(self) -> dict[str, int]:
        return {"samples": self.samples, "batch_size": self.batch_size, "seed": self.seed}

    def _rewind(self) -> None:
        """Forget the drawn batches; a new epoch begins with the newest shares."""
        if not self._start:
            self._schedule.restart()
        self._done = self._next = self._start
        self._drawn.clear()

    def _now(self) -> float:
        if self._device.type == "cuda":  # wait for launched kernels and the last all-reduce
            torch.cuda.synchronize(self._device)
        return self._clock()

    def _exchange(self) -> list[list[float]]:
        """Return the speed and the next step to draw of each rank; refuse if ranks disagree."""
        if self._gather is None:
            return []
        speed = self._samples / self._seconds if self._seconds > 0 else nan
        order = f"{self._identity()}, epoch {self.epoch}, step {self._done} of {self._steps}"
        about = f"{order}, {'fixed' if self._fixed else 'measured'} {self._schedule}"
        return agreed(self._gather, [speed, self._next], about)


def _whole(number: Any, name: str) -> int:
    """Return a number of any type as an integer; refuse a fraction."""
    if int(number) != number:
        raise ValueError(f"{name}={number}: use a whole number of samples")
    return int(number)
