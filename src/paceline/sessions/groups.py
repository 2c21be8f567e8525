"""A worker that is a group of processes: the first one speaks with the run for all of them.

torch's own functions gather a model that DDP replicates or FSDP2 shards, and load it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.nn.parallel import DistributedDataParallel


def trained_names(model: nn.Module) -> set[str]:
    """Return the names of the trained parameters, without those of wrappers around the model."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    named = inner.named_parameters()
    return {name.replace("_orig_mod.", "") for name, p in named if p.requires_grad}


class Group:
    """The processes of one worker; None: this process alone."""

    def __init__(self, processes: Any = None) -> None:
        self._processes = processes
        self._several = processes is not None and dist.get_world_size(processes) > 1
        self.is_single = not self._several
        self.leads = not self._several or dist.get_rank(processes) == 0
        self._first = dist.get_global_rank(processes, 0) if self._several else 0

    def share(self, thing: Any) -> Any:
        """Return what the first process has given, in all of them."""
        if not self._several:
            return thing
        things = [thing]
        dist.broadcast_object_list(things, src=self._first, group=self._processes)
        return things[0]

    def state(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Return the whole `state_dict` in the first process; others may get an empty one."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return cast(Mapping[str, Tensor], get_model_state_dict(model, options=options))

    def load(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Load a whole `state_dict`, which the first process has, in all of them."""
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=self._several)
        set_model_state_dict(model, dict(state), options=options)
