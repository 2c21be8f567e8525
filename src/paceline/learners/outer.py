"""Optimizers for the server's step along the changes that workers made by local steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT


class DelayedNesterov(Optimizer):
    """Nesterov momentum for changes that arrive one at a time, some of them stale.

    Each change moves the model by `lr / every` at once. The momentum is updated with the mean of
    `every` changes, and moves the model once for all of them. If none is stale, this is one step of
    `SGD(nesterov=True)` along their mean. After the delayed Nesterov update of Liu et al. 2024
    (arXiv 2401.09135). Usual momentum moves the model with every change, and so counts stale
    changes several times. Rates that suit rounds of local steps then diverge.

    every: changes for one update of the momentum; the number of workers is a good choice.
    """

    def __init__(
        self, params: ParamsT, lr: float = 0.7, momentum: float = 0.9, every: int = 4
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "every": every})
        for group in self.param_groups:
            lr, momentum, every = group["lr"], group["momentum"], group["every"]
            if lr < 0 or not 0 <= momentum < 1 or every < 1:
                raise ValueError(
                    f"lr={lr}, momentum={momentum}, every={every}: use lr >= 0, a momentum from 0 "
                    "to below 1, and every >= 1"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step along one change."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            every, momentum = group["every"], group["momentum"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros(())
                    state["momentum"] = torch.zeros_like(parameter)
                    state["mean"] = torch.zeros_like(parameter)
                state["step"] += 1
                state["mean"].add_(parameter.grad, alpha=1 / every)
                parameter.add_(parameter.grad, alpha=-group["lr"] / every)
                if int(state["step"]) % every == 0:
                    velocity = state["momentum"].mul_(momentum).add_(state["mean"])
                    parameter.add_(velocity, alpha=-group["lr"] * momentum)
                    state["mean"].zero_()
        return loss
