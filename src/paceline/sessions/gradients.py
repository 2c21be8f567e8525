"""The gradient of a turn, from the batches that a session's loop computes."""

from __future__ import annotations

from math import isfinite
from typing import Any

import torch
from torch import Tensor

from paceline.core.protocol import Stats
from paceline.learners.base import Array
from paceline.learners.flat import FlatModule


class Gradients:
    """Adds up the gradients of a turn's batches, in the flat vector of the loop's model.

    With counts the sum is per sample, as in results of `TorchLearner`: see `core/averages.py`.
    """

    def __init__(self, flat: FlatModule) -> None:
        self._flat = flat
        self._sum = torch.zeros(0)  # of earlier batches of the turn
        self._begin()

    def _begin(self) -> None:
        self._samples = 0
        self._number = 0.0  # of losses that the means are over: samples, or what is counted
        self._losses: float | None = 0.0  # their sum, if it is known
        self._counted: bool | None = None  # whether the loop gives counts

    def clear(self) -> None:
        """Forget all batches of the turn."""
        self._begin()
        self._sum.zero_()
        self.zero()

    def zero(self) -> None:
        """Set all gradients to zero, as views of the flat vector."""
        flat = self._flat
        flat.grads.zero_()
        for parameter, (start, stop) in zip(flat.parameters, flat.spans(), strict=True):
            parameter.grad = flat.grads[start:stop].view_as(parameter)

    def add(self, loss: Any, count: Any, samples: int, of: int) -> None:
        """Add the gradient that the parameters have, of a batch of a turn of `of` samples.

        loss: the mean loss of the batch, if known.
        count: how many losses the mean is over; None: one for each sample.
        """
        self._gather()
        number = self._checked(count, samples)
        self._samples += samples
        self._number += number
        if not number:  # a mean over nothing
            self._flat.grads.zero_()
        elif loss is None or self._losses is None:
            self._losses = None
        else:
            self._losses += number * _number(loss)
        share = number / of
        if self._samples == of:
            if share != 1:
                self._flat.grads.mul_(share)
            if samples < of:
                self._flat.grads.add_(self._sum)
            return
        if self._sum.numel() != self._flat.grads.numel():
            self._sum = torch.zeros_like(self._flat.grads)
        self._sum.add_(self._flat.grads, alpha=share)
        self._flat.grads.zero_()

    def whole(self) -> tuple[Array, Stats]:
        """Return the vector and the statistics of the turn, once all batches are added."""
        flat = self._flat
        flat.buffer_change()
        stats: dict[Any, float] = {}
        if self._losses is not None and self._number:
            stats["loss"] = self._losses / self._number
        if self._counted:
            stats["count"] = self._number / self._samples
            flat.grads[flat.trainable :].mul_(stats["count"])
        return flat.grads.cpu().numpy(), stats

    def _gather(self) -> None:
        """Bring all gradients into the flat vector; a loop may have replaced or removed some."""
        flat = self._flat
        for parameter, (start, stop) in zip(flat.parameters, flat.spans(), strict=True):
            view = flat.grads[start:stop].view_as(parameter)
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
            parameter.grad = view

    def _checked(self, count: Any, samples: int) -> float:
        """Return how many losses the mean of a batch is over."""
        counted = count is not None
        if self._counted not in (None, counted):
            raise ValueError(
                "session.step() got a count for some batches of a task and none for others; give "
                "count= each time, or never"
            )
        self._counted = counted
        number = _number(count) if counted else float(samples)
        if not isfinite(number) or number < 0:
            raise ValueError(
                f"count={number:g}: give the number of losses that the mean of the batch is over, "
                "0 or more"
            )
        return number


def _number(value: Tensor | float) -> float:
    return float(value.detach().item() if isinstance(value, Tensor) else value)
