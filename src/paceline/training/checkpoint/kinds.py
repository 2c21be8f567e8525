"""The dtype and shape of tensors as safetensors has them, whichever library they are of."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from safetensors.numpy import save

Kind = tuple[str, tuple[int, ...]]
"""The dtype of an array, as safetensors names it, and its shape."""


def kind_of(tensor: Any) -> Kind:
    """Return dtype and shape as `Files.kinds` does, by serializing the first value."""
    first = written(tensor.reshape(-1)[:1])
    header = json.loads(first[8 : 8 + int.from_bytes(first[:8], "little")])
    return header[""]["dtype"], tuple(tensor.shape)


def written(tensor: Any) -> bytes:
    """Return the serialized array or tensor, to compare values of any dtype."""
    if is_array(tensor):
        return save({"": np.asarray(tensor, order="C")})
    from safetensors.torch import save as save_tensor

    found: bytes = save_tensor({"": tensor.contiguous()})
    return found


def is_array(tensor: Any) -> bool:
    return isinstance(tensor, np.ndarray | np.generic)
