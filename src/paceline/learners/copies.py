"""Copies of a model's tensors by name: a module of torch, or an array of numpy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np


def copied(model: Any) -> dict[str, Any]:
    """Return copies of all tensors that training can change; none if the kind is unknown."""
    if isinstance(model, np.ndarray):
        return {"values": model.copy()}
    return {name: tensor.detach().clone() for name, tensor in _changing(model)}


def filled(model: Any, tensors: Mapping[str, Any]) -> Any:
    """Return a model after giving it the values of `copied`; refuse those of another model."""
    own = {"values": model} if isinstance(model, np.ndarray) else dict(_changing(model))
    if differing := sorted(own.keys() ^ tensors.keys()):
        raise ValueError(f"{differing[0]!r} is in one of two models only")
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape or tensor.dtype != tensors[name].dtype:
            raise ValueError(f"{name!r} is of another shape or dtype")
        if isinstance(tensor, np.ndarray):
            tensor[...] = tensors[name]
        else:
            tensor.detach().copy_(tensors[name])
    return model


def _changing(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield weights and buffers. Frozen weights are always those that the learner was given."""
    if hasattr(model, "named_parameters"):
        yield from ((name, p) for name, p in model.named_parameters() if p.requires_grad)
        yield from ((f"buffer.{name}", buffer) for name, buffer in model.named_buffers())
