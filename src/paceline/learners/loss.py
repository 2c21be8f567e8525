"""What a user's loss returns: the mean over samples, or the sum and number of what it averages."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from numbers import Real
from typing import Any, Self, TypeAlias, cast

import torch
from torch import Tensor, nn

from paceline.core.protocol import Stats

Count: TypeAlias = int | float | Tensor
Loss: TypeAlias = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Count]]
"""Returns the mean loss of a batch; or the sum of its losses and their number, such as tokens."""

_PAIR = "(sum of the losses, number of losses)"


class Losses:
    """The losses of a task's pieces, which are read from their device once.

    samples: of all pieces so far.
    counted: whether the user's function returns counts; None if it was not called yet.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.counted: bool | None = None
        self._losses: list[Tensor] = []
        self._counts: list[Count] = []

    def add(self, returned: Any, samples: int, of: int) -> Tensor | None:
        """Add the loss of a piece; return its part of the mean over all `of` samples.

        With counts it is a part of the sum per sample. None: the count is 0, so there is none.
        """
        counted = isinstance(returned, tuple)
        self._note(samples, counted)
        if not counted:
            _check_loss(returned, "the mean loss of the batch", "the mean over the batch: .mean()")
            self._losses.append(returned.detach().reshape(()))
            self._counts.append(samples)
            return cast(Tensor, returned if samples == of else returned * (samples / of))
        loss, count = _pair(returned)
        if not isinstance(count, Tensor) and not count:
            return None
        _check_loss(loss, "the sum of the losses", "the sum over the batch: .sum()")
        self._losses.append(loss.detach().reshape(()))
        self._counts.append(count)
        return cast(Tensor, loss / of)

    def extend(self, others: Self) -> None:
        """Add the losses of other pieces of the same task."""
        self._note(others.samples, others.counted)
        self._losses += others._losses
        self._counts += others._counts

    def _note(self, samples: int, counted: bool | None) -> None:
        if self.counted not in (None, counted):
            raise ValueError(
                "loss returned a count for some batches and none for others; return "
                f"{_PAIR} for every batch, with the count 0 if it has no losses"
            )
        self.samples, self.counted = self.samples + samples, counted

    def per_sample(self) -> Tensor | float:
        """Return the count per sample, on its device; 1 in place of 0."""
        total = sum(self._counts) / self.samples
        return torch.where(total > 0, total, 1.0) if isinstance(total, Tensor) else total or 1.0

    def read(self) -> tuple[float, float]:
        """Return the sum of all losses, and their number."""
        losses, counts = _numbers(self._losses), _numbers(self._counts)
        if not self.counted:
            return sum(loss * size for loss, size in zip(losses, counts, strict=True)), sum(counts)
        for count in counts:
            _check_count(count)
        return sum(losses), sum(counts)


def stats_of(total: float, number: float, count: float | None) -> Stats:
    """Return the statistics of a result; a mean over nothing is left out.

    total, number: the sum of its losses, and how many they are.
    """
    stats: dict[Any, float] = {"loss": total / number} if number else {}
    return stats if count is None else {**stats, "count": count}


def _pair(returned: tuple[Any, ...]) -> tuple[Any, Count]:
    """Return the loss and the count; a count in the main memory as a plain number."""
    if len(returned) != 2:
        raise ValueError(
            f"loss returned a tuple of {len(returned)}; return the mean loss as a tensor, or "
            f"{_PAIR}"
        )
    loss, count = returned
    if isinstance(count, Tensor) and count.numel() == 1:
        count = count.detach().reshape(())
        count = count.item() if count.device.type == "cpu" else count
    elif isinstance(count, Real):
        count = float(count)
    else:
        shape = f" of shape {tuple(count.shape)}" if isinstance(count, Tensor) else ""
        raise ValueError(
            f"loss returned a {type(count).__name__}{shape} as its count; return {_PAIR}, the "
            "number as an int, a float or a tensor of one value"
        )
    if not isinstance(count, Tensor):
        _check_count(count)
    return loss, count


def _check_count(count: float) -> None:
    if not isfinite(count) or count < 0:
        raise ValueError(
            f"loss returned the count {count:g}; return the number of losses in the sum, 0 or more"
        )


def _check_loss(loss: Any, meaning: str, how: str) -> None:
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"loss returned a {type(loss).__name__}; return {meaning} as a tensor, without "
            f".item(), or {_PAIR}"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"loss returned a tensor of shape {tuple(loss.shape)}; return one number, {how}"
        )
    if not loss.requires_grad:
        raise ValueError(
            "loss returned a tensor without a gradient; compute it from the model given, without "
            "torch.no_grad() and .detach()"
        )


def _numbers(values: list[Any]) -> list[float]:
    """Return values as numbers; those on a device are read together."""
    there = [value for value in values if isinstance(value, Tensor)]
    read = iter(torch.stack(there).tolist() if there else ())
    return [float(next(read) if isinstance(value, Tensor) else value) for value in values]
