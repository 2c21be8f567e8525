"""Tensors that are neither trained nor sent: frozen parameters, and large constant buffers.

They must be equal in every process. A frozen base may have gigabytes, so nothing here copies it.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection, Iterable, Iterator
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn

from paceline.learners.flat import all_buffers, moved, sent_buffers

_WHOLE = 2**16  # bytes of a tensor that are hashed one by one
_SAMPLES, _SAMPLE = 64, 2**10  # of a larger tensor: so many pieces, of so many bytes


def frozen_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that are not trained, with their names."""
    return ((name, p) for name, p in module.named_parameters() if not p.requires_grad)


class Base:
    """The frozen parameters of a worker's module, which its tasks must not change."""

    def __init__(self, module: nn.Module) -> None:
        known = [(name, p) for name, p in frozen_parameters(module) if not p.is_inference()]
        self._known = [(name, p, p._version) for name, p in known]

    def check(self) -> None:
        """Raise ValueError if one was changed in place; changes of its `data` are not noticed."""
        for name, parameter, version in self._known:
            if parameter._version != version:
                raise ValueError(
                    f"parameter {name} has requires_grad=False and changed in training, and a "
                    "frozen parameter is neither sent nor saved; keep a tensor that the loss "
                    "changes as a buffer, and name it in TorchLearner(buffers=…) if it is large"
                )


def without_base(module: nn.Module) -> nn.Module:
    """Copy a module to the CPU; the copy's frozen parameters are on `meta` and take no memory.

    It suffices for a server, whose steps and checkpoints have no frozen parameters.
    """
    memo: dict[int, object] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False)
        for _, p in frozen_parameters(module)
    }
    return moved(copy.deepcopy(module, memo), "cpu")


def resident_digest(module: nn.Module, changing: Collection[str] = ()) -> str:
    """Return a hash of the tensors that are not sent: they must be equal in every process."""
    sent = {place.name for place in sent_buffers(module, changing)}
    others = ((p.name, p.buffer) for p in all_buffers(module) if p.name not in sent)
    return _digest(chain[tuple[str, Tensor]](frozen_parameters(module), others))


def base_digest(module: nn.Module) -> str | None:
    """Return a hash of the frozen parameters; None if all are trained.

    Buffers do not count: a table of sines may have other bits on another machine.
    """
    return _digest(frozen_parameters(module)) if any(frozen_parameters(module)) else None


def _digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a hash of tensors and their names.

    A large tensor counts with samples of its bytes and the sum of all its 8-byte words. This takes
    half a second for a gigabyte, where SHA-256 of all bytes took four. It finds another base or a
    changed value; it does not withstand a forger.
    """
    found = hashlib.sha256()
    for name, tensor in tensors:
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        content = flat.view(torch.uint8).numpy()
        if content.size <= _WHOLE:
            found.update(content.data)
            continue
        for start in np.linspace(0, content.size - _SAMPLE, _SAMPLES, dtype=np.int64):
            found.update(content[start : start + _SAMPLE].data)
        whole = content.size // 8 * 8
        total = content[:whole].view(np.uint64).sum(dtype=np.uint64)  # modulo 2**64
        found.update(total.tobytes() + content[whole:].tobytes())
    return found.hexdigest()
