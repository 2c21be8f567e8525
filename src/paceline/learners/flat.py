"""A PyTorch module whose parameters and gradients are views of two flat buffers.

One float32 vector is sent: the trainable parameters, then the persistent buffers that training may
change (such as BatchNorm statistics). Flattening and restoring make no copy. Frozen parameters and
large constant buffers (such as causal masks) keep their dtype and are not sent.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.learners.base import Places

Float32 = NDArray[np.float32]

CONSTANT_VALUES = 2**14
"""A persistent buffer with more values counts as a constant, unless it belongs to a normalization
layer of torch or is named in `TorchLearner(buffers=…)`. Sending smaller ones costs little."""


class FlatModule:
    """Moves a module's tensors into the flat vectors `values` and, if `with_grads`, `grads`.

    Tensors on the `meta` device become zeros, which `load` or `pull` replaces.
    changing: names of large buffers that training changes.
    """

    def __init__(
        self,
        module: nn.Module,
        device: str = "cpu",
        with_grads: bool = True,
        changing: Collection[str] = (),
    ) -> None:
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        for name, parameter in named:
            if parameter.dtype != torch.float32:
                raise ValueError(
                    f"parameter {name} is {parameter.dtype}, and trained parameters are float32 in "
                    "every process, as results are; cast them by p.data = p.data.float() for each "
                    "p in model.parameters() with p.requires_grad, and use autocast in the loss "
                    "to compute in bfloat16. Frozen parameters keep their dtype"
                )
        if not named:
            raise ValueError("the model has no parameter with requires_grad=True to train")
        self.parameters = [parameter for _, parameter in named]
        self.trainable = sum(p.numel() for p in self.parameters)
        buffers = sent_buffers(module, changing)
        size = self.trainable + sum(place.buffer.numel() for place in buffers)
        self.values = torch.zeros(size, device=device)
        self.grads = torch.zeros(size if with_grads else 0, device=device)
        for place in buffers:
            if place.buffer.is_meta:
                zeros = torch.zeros_like(place.buffer, device=device)
                _swap(place.buffer, zeros)
        for parameter, (start, stop) in zip(self.parameters, self.spans(), strict=True):
            view = self.values[start:stop].view(parameter.shape)
            if parameter.is_meta:
                _swap(parameter, nn.Parameter(view))
            else:
                with torch.no_grad():
                    view.copy_(parameter)
                    parameter.data = view
            if with_grads:
                parameter.grad = self.grads[start:stop].view_as(parameter)
        self.module = moved(module, device)
        self._buffers = sent_buffers(module, changing)
        for place in self._buffers:
            b = place.buffer
            if not (b.is_floating_point() or torch.equal(b.float().to(b.dtype), b)):
                raise ValueError(
                    f"buffer {place.name} has numbers that do not survive as float32 on the wire, "
                    "such as whole numbers beyond 2**24; register it with persistent=False"
                )
        kept = {place.name for place in self._buffers}
        others = [place for place in all_buffers(module) if place.name not in kept]
        # Copies of the buffers that are not sent: to reset them, and to detect changes.
        self._scratch = [(p, p.buffer.clone()) for p in others if not p.persistent]
        self._constant = [(p, p.buffer.clone()) for p in others if p.persistent and with_grads]
        # A float64 value that training leaves alone is not rounded to float32.
        self._wide = {p.name: p.buffer.clone() for p in self._buffers if _is_wide(p.buffer)}
        self._pull_buffers(self._buffers)

    def pull(self, module: nn.Module) -> None:
        """Copy parameters and buffers from the module that this one was copied from."""
        trained = [p for p in module.parameters() if p.requires_grad]
        with torch.no_grad():
            for tensor, (start, stop) in zip(trained, self.spans(), strict=True):
                self.values[start:stop] = tensor.detach().reshape(-1)
        kept = {place.name for place in self._buffers}
        self._pull_buffers([place for place in all_buffers(module) if place.name in kept])
        self.push_buffers()

    def _pull_buffers(self, places: Iterable[_Place]) -> None:
        for place, (_, (start, stop)) in zip(places, self._buffer_spans(), strict=True):
            self.values[start:stop] = place.buffer.detach().reshape(-1).float()

    def push_buffers(self) -> None:
        """Copy `values` into the module's buffers; parameters are views and need no copy."""
        for place, (start, stop) in self._buffer_spans():
            place.put_back()
            place.buffer.copy_(self._as_buffer(place, self.values[start:stop]))

    def _as_buffer(self, place: _Place, flat: Tensor) -> Tensor:
        """Return the values of a buffer as they come back from the flat vector."""
        values = flat.view_as(place.buffer)
        if (wide := self._wide.get(place.name)) is not None:
            return torch.where(values == wide.float(), wide, values)
        return values if place.buffer.is_floating_point() else values.round()

    def saved(self) -> dict[str, Any]:
        """Return the module's `state_dict` without its frozen parameters."""
        frozen = _frozen_memory(self.module)
        state = self.module.state_dict().items()
        return {n: t for n, t in state if not isinstance(t, Tensor) or _memory(t) not in frozen}

    def places(self) -> Places | None:
        """Return where the tensors of `saved` are; None if a hook makes some of them."""
        for place in self._buffers:
            place.put_back()
        flat = self.values.untyped_storage().data_ptr()
        sent = {_memory(place.buffer): (place, span) for place, span in self._buffer_spans()}
        kept = {_memory(tensor) for tensor in chain(*_tensors(self.module))}
        frozen = _frozen_memory(self.module)
        starts: dict[str, tuple[int, tuple[int, ...]]] = {}
        buffers: dict[str, tuple[_Place, tuple[int, int]]] = {}
        others: dict[str, Tensor] = {}
        for name, tensor in self.module.state_dict().items():
            if not isinstance(tensor, Tensor) or not tensor.is_contiguous():
                return None
            if tensor.untyped_storage().data_ptr() == flat and tensor.dtype == self.values.dtype:
                starts[name] = int(tensor.storage_offset()), tuple(tensor.shape)
            elif (memory := _memory(tensor)) in sent:
                buffers[name] = sent[memory]
            elif memory in frozen:
                continue
            elif memory in kept:
                others[name] = tensor.detach()
            else:
                return None

        def rest(tail: Float32) -> dict[str, Tensor]:
            values, begin = as_tensor(tail), self.trainable
            found = dict(others)
            for name, (place, (start, stop)) in buffers.items():
                made = self._as_buffer(place, values[start - begin : stop - begin])
                found[name] = made.to(place.buffer.dtype)
            return found

        return Places(starts, rest)

    def load(self, slices: Iterable[Float32]) -> None:
        """Load a model as it is sent, slice by slice."""
        start = 0
        for vector in slices:
            stop = start + vector.size
            if vector.ndim != 1 or stop > self.values.numel():
                raise ValueError(
                    f"a model of {self.values.numel()} values got a vector of shape {vector.shape}"
                )
            self.values[start:stop] = as_tensor(vector)
            start = stop
        if start != self.values.numel():
            raise ValueError(
                f"a model of {self.values.numel()} values got slices of {start} values in all"
            )
        self.reset()

    def reset(self) -> None:
        """Reset the buffers to the loaded values."""
        self.push_buffers()
        for place, original in self._scratch:  # so that an earlier task leaves no trace
            place.put_back()
            place.buffer.copy_(original)

    def buffer_change(self) -> None:
        """Write the difference of the module's buffers from `values` into `grads`."""
        for place, original in self._constant:
            if not torch.equal(place.current(), original):
                raise ValueError(
                    f"buffer {place.name} ({original.numel()} values) changed in training, and a "
                    f"buffer of more than {CONSTANT_VALUES} values is taken for a constant that is "
                    f"not sent; give TorchLearner(buffers=[{place.name!r}]) to send it and average "
                    "its changes, or register it with persistent=False to reset it for each task"
                )
        for place, (start, stop) in self._buffer_spans():
            now = place.current().reshape(-1).float()
            self.grads[start:stop] = now - self.values[start:stop]

    def add_to_buffers(self, change: Tensor) -> None:
        """Add changes to the module's buffers, not to `values`: `buffer_change` has them again."""
        for place, (start, stop) in self._buffer_spans():
            part = slice(start - self.trainable, stop - self.trainable)
            moved = self.values[start:stop] + change[part]
            place.buffer.copy_(self._as_buffer(place, moved))

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield where each trained parameter is in the vector."""
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
    """The place of a buffer in its module; the module may replace the tensor there."""

    owner: nn.Module
    key: str
    name: str  # as in the state_dict
    buffer: Tensor
    persistent: bool

    def current(self) -> Tensor:
        now = self.owner._buffers[self.key]
        assert now is not None
        return now

    def put_back(self) -> None:
        self.owner._buffers[self.key] = self.buffer


def moved(module: nn.Module, device: str) -> nn.Module:
    """Move a module to a device; frozen parameters without memory stay on `meta`."""
    if not any(tensor.is_meta for tensor in chain(*_tensors(module))):
        return module.to(device)
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    return module


def flat_size(module: nn.Module, changing: Collection[str] = ()) -> int:
    """Count the values that are sent, without building the flat vector."""
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    return trained + sum(place.buffer.numel() for place in sent_buffers(module, changing))


def hollow(module: nn.Module, changing: Collection[str] = (), share: bool = False) -> nn.Module:
    """Copy a module; the tensors that are sent are on the `meta` device and take no memory.

    The copy shares the memory of frozen parameters.
    share: it shares all other tensors too, which suffices for a module to be sent.
    """
    memo: dict[int, object] = {}
    for parameter in module.parameters():
        if parameter.requires_grad:
            memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"))
        elif type(parameter) is nn.Parameter:  # its own object, since `to` changes its `data`
            memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
        elif share:
            memo[id(parameter)] = parameter
    for place in all_buffers(module) if share else ():
        memo[id(place.buffer)] = place.buffer
    for place in sent_buffers(module, changing):
        if not _is_wide(place.buffer):
            memo[id(place.buffer)] = torch.empty_like(place.buffer, device="meta")
    return copy.deepcopy(module, memo)


def as_tensor(array: Float32) -> Tensor:
    """View an array as a tensor, without the warning for read-only arrays of Ray's store."""
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def all_buffers(module: nn.Module) -> Iterator[_Place]:
    """Yield each buffer once, even if it has several names."""
    seen: set[int] = set()
    for path, part in module.named_modules():
        for key, buffer in part.named_buffers(recurse=False):
            if id(buffer) not in seen:
                seen.add(id(buffer))
                name = f"{path}.{key}" if path else key
                yield _Place(part, key, name, buffer, key not in part._non_persistent_buffers_set)


def sent_buffers(module: nn.Module, changing: Collection[str]) -> list[_Place]:
    """Return the buffers that are sent with the parameters."""
    persistent = [place for place in all_buffers(module) if place.persistent]
    if unknown := sorted({*changing} - {place.name for place in persistent}):
        known = ", ".join(place.name for place in persistent) or "none"
        raise ValueError(
            f"buffers={unknown}: the model has no such persistent buffers; it has {known}"
        )
    return [
        place
        for place in persistent
        if place.buffer.numel() <= CONSTANT_VALUES
        or isinstance(place.owner, _NormBase)
        or place.name in changing
    ]


def _tensors(module: nn.Module) -> tuple[Iterator[Tensor], Iterator[Tensor]]:
    return module.parameters(), module.buffers()


def _frozen_memory(module: nn.Module) -> set[tuple[Any, ...]]:
    return {_memory(p) for p in module.parameters() if not p.requires_grad and p.numel()}


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    """Return what two tensors have in common if they are the same memory."""
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _swap(tensor: Tensor, other: Tensor) -> None:
    """Replace a tensor for all its holders; setting `data` cannot move it off `meta`."""
    torch.utils.swap_tensors(tensor, other)


def _is_wide(buffer: Tensor) -> bool:
    return buffer.dtype == torch.float64
