"""A PyTorch module whose parameters and gradients are views of two flat buffers.

What travels is one float32 vector: the trainable parameters, then the persistent buffers (those
in the `state_dict`, such as BatchNorm statistics). No copy is made to flatten or to restore.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Float32 = NDArray[np.float32]


class FlatModule:
    """Holds a module together with its flat `values` and, unless it never needs them, `grads`."""

    def __init__(self, module: nn.Module, device: str = "cpu", with_grads: bool = True) -> None:
        self.module = module.to(device)
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        for name, parameter in named:
            if parameter.dtype != torch.float32:
                raise ValueError(
                    f"parameter {name} is {parameter.dtype}; results travel as float32, so keep "
                    "parameters in torch.float32 (model.float()) and use autocast in the loss"
                )
        self.parameters = [parameter for _, parameter in named]
        self._buffers = list(_buffers(module, persistent=True))
        for place in self._buffers:
            b = place.buffer
            if not (b.is_floating_point() or torch.equal(b.float().to(b.dtype), b)):
                raise ValueError(
                    f"buffer {place.name} has whole numbers beyond 2**24, which do not survive as "
                    "float32 on the wire; register it with persistent=False"
                )
        scratch = _buffers(module, persistent=False)
        self._scratch = [(place, place.buffer.clone()) for place in scratch]
        self.trainable = sum(p.numel() for p in self.parameters)
        size = self.trainable + sum(place.buffer.numel() for place in self._buffers)
        if not self.trainable:
            raise ValueError("the model has no parameter with requires_grad=True to train")
        self.values = torch.zeros(size, device=device)
        self.grads = torch.zeros(size if with_grads else 0, device=device)
        self.pull()
        for parameter, (start, stop) in zip(self.parameters, self._spans(), strict=True):
            with torch.no_grad():
                parameter.data = self.values[start:stop].view_as(parameter)
            if with_grads:
                parameter.grad = self.grads[start:stop].view_as(parameter)

    def pull(self) -> None:
        """Copy the module's parameters and buffers into `values`."""
        with torch.no_grad():
            for tensor, (start, stop) in zip(self.parameters, self._spans(), strict=True):
                self.values[start:stop] = tensor.detach().reshape(-1)
            for place, (start, stop) in self._buffer_spans():
                self.values[start:stop] = place.buffer.reshape(-1).float()

    def push_buffers(self) -> None:
        """Copy `values` into the module's buffers; parameters are views and need none."""
        for place, (start, stop) in self._buffer_spans():
            place.put_back()
            values = self.values[start:stop].view_as(place.buffer)
            place.buffer.copy_(values if place.buffer.is_floating_point() else values.round())

    def load(self, slices: Iterable[Float32]) -> None:
        """Take over a model as it travels, slice after slice."""
        start = 0
        for vector in slices:
            stop = start + vector.size
            if vector.ndim != 1 or stop > self.values.numel():
                raise ValueError(f"a model of {self.values.numel()} values got {vector.shape}")
            self.values[start:stop] = as_tensor(vector)
            start = stop
        if start != self.values.numel():
            raise ValueError(f"a model of {self.values.numel()} values got {start}")
        self.reset()

    def reset(self) -> None:
        """Put the buffers back to what was loaded."""
        self.push_buffers()
        for place, original in self._scratch:  # no trace of an earlier task
            place.put_back()
            place.buffer.copy_(original)

    def buffer_change(self) -> None:
        """Write into `grads` by how much the module's buffers differ from `values`."""
        for place, (start, stop) in self._buffer_spans():
            now = place.current().reshape(-1).float()
            self.grads[start:stop] = now - self.values[start:stop]

    def _spans(self) -> Iterator[tuple[int, int]]:
        start = 0
        for parameter in self.parameters:
            yield start, start + parameter.numel()
            start += parameter.numel()

    def _buffer_spans(self) -> Iterator[tuple[_Place, tuple[int, int]]]:
        start = self.trainable
        for place in self._buffers:
            stop = start + place.buffer.numel()
            yield place, (start, stop)
            start = stop


@dataclass(frozen=True)
class _Place:
    """Where a buffer lives in its module, which may put another tensor there."""

    owner: nn.Module
    name: str
    buffer: Tensor

    def current(self) -> Tensor:
        now = self.owner._buffers[self.name]
        assert now is not None
        return now

    def put_back(self) -> None:
        self.owner._buffers[self.name] = self.buffer


def flat_size(module: nn.Module) -> int:
    """Count the values that travel, without building anything."""
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    return trained + sum(place.buffer.numel() for place in _buffers(module, persistent=True))


def as_tensor(array: Float32) -> Tensor:
    """View an array as a tensor, without the warning that one from Ray's store is read-only."""
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def _buffers(module: nn.Module, persistent: bool) -> Iterator[_Place]:
    seen: set[int] = set()
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            is_persistent = name not in part._non_persistent_buffers_set
            if is_persistent is persistent and id(buffer) not in seen:
                seen.add(id(buffer))
                yield _Place(part, name, buffer)
