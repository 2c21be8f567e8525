"""Loss scaling for float16: gradients too small for it are computed on a larger loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from paceline.core.logs import logger_of

logger = logger_of(__name__)

LossScale: TypeAlias = Literal["auto"] | None
Found = TypeVar("Found")


class Overflow(Exception):
    """A gradient of a scaled loss was not finite; a smaller scale may help."""


class Scaler:
    """Scales losses by torch's `GradScaler`, whose factor is a power of two, in one worker.

    Gradients are exact: a task whose scaled gradient overflows computes it again with half the
    factor, on the same samples. A local step whose gradient overflows is left out, as GradScaler
    does.
    """

    def __init__(self, wished: LossScale, device: str, parameters: Iterable[nn.Parameter]) -> None:
        self.is_on = wished is not None
        self._torch = torch.amp.GradScaler(device.partition(":")[0], enabled=self.is_on)
        self._gradients = _Gradients(list(parameters))
        self._is_used = False  # since gradients were unscaled last

    def scaled(self, loss: Tensor) -> Tensor:
        if not self.is_on:
            return loss
        self._is_used = True
        return self._torch.scale(loss)

    def unscale(self) -> None:
        """Divide the gradients by the factor; raise Overflow if a smaller one may help."""
        if not self._is_used:
            return
        self._is_used, factor = False, self._torch.get_scale()
        self._torch.unscale_(self._gradients)
        is_finite = self._torch.step(self._gradients)
        self._torch.update()
        if not is_finite and factor > 1:
            raise Overflow

    def unscale_for(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimizer by the factor."""
        if self._is_used:
            self._torch.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Take an optimizer's step, unless a gradient of the scaled loss is not finite."""
        if not self._is_used:
            optimizer.step()
            return
        self._is_used, factor = False, self._torch.get_scale()
        self._torch.step(optimizer)
        self._torch.update()
        if self._torch.get_scale() < factor:
            logger.info("a local step overflowed and is left out: the loss scale is %g", factor / 2)

    def until_finite(self, attempt: Callable[[], Found]) -> Found:
        """Return what the attempt returns; repeat it after each Overflow."""
        while True:
            try:
                return attempt()
            except Overflow:
                pass
            logger.info("a gradient overflowed: the loss scale is %g", self._torch.get_scale())


class _Gradients(SGD):
    """The gradients of parameters in the form that `GradScaler` takes; a step changes nothing."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.0)

    def step(self, closure: object = None) -> bool:  # type: ignore[override]
        """Return that all gradients are finite: GradScaler calls it only then."""
        return True
