"""A PyTorch module whose parameters and gradients are views of two flat buffers.

What travels is one float32 vector: the trainable parameters, then the persistent buffers (those
in the `state_dict`, such as BatchNorm statistics). No copy is made to flatten or to restore.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Float32 = NDArray[np.float32]


class FlatModule:
    """Holds a module together with its flat `values` and `grads`."""

    def __init__(self, module: nn.Module, device: str = "cpu") -> None:
        self.module = module.to(device)
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        for name, parameter in named:
            if parameter.dtype != torch.float32:
                raise ValueError(
                    f"parameter {name} is {parameter.dtype}; results travel as float32, so keep "
                    "parameters in torch.float32 (model.float()) and use autocast in the loss"
                )
        self.parameters = [parameter for _, parameter in named]
        self._buffers = list(_persistent_buffers(module))
        self.trainable = sum(p.numel() for p in self.parameters)
        size = self.trainable + sum(b.numel() for b in self._buffers)
        if not self.trainable:
            raise ValueError("the model has no parameter with requires_grad=True to train")
        self.values = torch.zeros(size, device=device)
        self.grads = torch.zeros(size, device=device)
        self.pull()
        for parameter, (start, stop) in zip(self.parameters, self._spans(), strict=True):
            with torch.no_grad():
                parameter.data = self.values[start:stop].view_as(parameter)
            parameter.grad = self.grads[start:stop].view_as(parameter)

    def pull(self) -> None:
        """Copy the module's parameters and buffers into `values`."""
        with torch.no_grad():
            for tensor, (start, stop) in zip(self.parameters, self._spans(), strict=True):
                self.values[start:stop] = tensor.detach().reshape(-1)
            start = self.trainable
            for buffer in self._buffers:
                self.values[start : start + buffer.numel()] = buffer.reshape(-1).float()
                start += buffer.numel()

    def push_buffers(self) -> None:
        """Copy `values` into the module's buffers; parameters are views and need none."""
        start = self.trainable
        for buffer in self._buffers:
            values = self.values[start : start + buffer.numel()].view_as(buffer)
            buffer.copy_(values if buffer.is_floating_point() else values.round())
            start += buffer.numel()

    def load(self, vector: Float32) -> None:
        """Take over a model as it travels."""
        if vector.shape != (self.values.numel(),):
            raise ValueError(f"a model of {self.values.numel()} values got {vector.shape}")
        self.values.copy_(as_tensor(vector))
        self.push_buffers()

    def buffer_change(self) -> None:
        """Write into `grads` by how much the module's buffers differ from `values`."""
        start = self.trainable
        for buffer in self._buffers:
            stop = start + buffer.numel()
            self.grads[start:stop] = buffer.reshape(-1).float() - self.values[start:stop]
            start = stop

    def _spans(self) -> Iterator[tuple[int, int]]:
        start = 0
        for parameter in self.parameters:
            yield start, start + parameter.numel()
            start += parameter.numel()


def flat_size(module: nn.Module) -> int:
    """Count the values that travel, without building anything."""
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    return trained + sum(b.numel() for b in _persistent_buffers(module))


def as_tensor(array: Float32) -> Tensor:
    """View an array as a tensor, without the warning that one from Ray's store is read-only."""
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def _persistent_buffers(module: nn.Module) -> Iterator[Tensor]:
    seen: set[int] = set()
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield buffer
