"""Averages of a model's weights over the steps of a run."""

from __future__ import annotations

from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class MovingAverage:
    """An exponential moving average of weights and buffers, beginning with the first model."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._averaged: AveragedModel | None = None

    def update(self, model: nn.Module) -> None:
        if self._averaged is None:
            self._averaged = self._begin(model)
        self._averaged.update_parameters(model)

    def restore(self, average: nn.Module) -> None:
        """Continue from an average of one model or more."""
        self._averaged = self._begin(average)
        self._averaged.n_averaged.fill_(1)  # else the next model would replace the average

    def _begin(self, model: nn.Module) -> AveragedModel:
        average = get_ema_multi_avg_fn(self._decay)
        return AveragedModel(model, multi_avg_fn=average, use_buffers=True)

    @property
    def model(self) -> nn.Module | None:
        """The averaged model; None before the first update."""
        return None if self._averaged is None else self._averaged.module
