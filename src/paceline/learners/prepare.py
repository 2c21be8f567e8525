"""What a worker does with its module before training: `torch.compile`, and the like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import nn

from paceline.learners.flat import FlatModule

Prepare: TypeAlias = Callable[[Any], "nn.Module | None"]
"""Is given the worker's module; returns the module for the loss, or None for the given one."""


def prepared(prepare: Prepare | None, flat: FlatModule) -> nn.Module:
    """Return the module for the loss; raise ValueError unless it trains the flat parameters."""
    module = flat.module
    if prepare is None:
        return module
    made = prepare(module)
    made = module if made is None else made
    if not isinstance(made, nn.Module):
        raise ValueError(
            f"prepare= returned {type(made).__name__}; return an nn.Module that wraps the given "
            "one, such as torch.compile(model), or None if it changes the given one"
        )
    own = {id(parameter): parameter for parameter in flat.parameters}
    found = {id(p): name for name, p in made.named_parameters() if p.requires_grad}
    if own.keys() != found.keys():
        raise ValueError(
            "prepare= returned a module with other trained parameters than the given one; wrap "
            "or change the given module, and freeze or add parameters in model= instead"
        )
    begin, size = flat.values.data_ptr(), flat.values.element_size()
    for parameter, (start, _) in zip(flat.parameters, flat.spans(), strict=True):
        moved = parameter.data_ptr() != begin + size * start or not parameter.is_contiguous()
        if parameter.numel() and (moved or parameter.dtype != flat.values.dtype):
            raise ValueError(
                f"prepare= moved parameter {found[id(parameter)]} or changed its dtype or layout "
                "(model.to, half, channels_last); use autocast in the loss, and device= of the "
                "learner"
            )
    return made
