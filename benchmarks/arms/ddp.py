"""DistributedDataParallel on gloo, the same with shares by speed, and DiLoCo written by hand.

`python -m arms.ddp RANK SIZE ADDRESS [cuda]` waits for orders.
`python -m arms.ddp --once HOST ORDER` trains once under torchrun, and continues from the newest
checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader

from _driver import say
from arms.task import LOCAL, Order, Watch, as_it_is
from paceline.data.sampling import Stream
from paceline.ddp import ProportionalSampler

SAVED = 10  # steps between two checkpoints of an elastic run


def ddp(order: Order, watch: Watch, saves: Saves) -> None:
    """Train as the tutorials do, with checkpoints if the run is elastic."""
    rank, size, data = dist.get_rank(), dist.get_world_size(), order.data()
    module = order.module()
    optimizer = order.optimizer(module.parameters())
    start = saves.load(model=module, optimizer=optimizer)
    model = DistributedDataParallel(module)
    stream = Stream(len(data), order.seed)
    begin, end = (order.batch * each // size for each in (rank, rank + 1))
    saves.ready(watch, start, module)
    for step in count(start):
        batch = data.__getitems__(stream.indices(step * order.batch + begin, end - begin))
        loss = order.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if watch.stepped(step + 1, module):
            break
        saves.save(step + 1, model=module, optimizer=optimizer)


def ddp_with_shares(order: Order, watch: Watch, saves: Saves) -> None:
    """Train with Paceline's sampler, which divides each batch by the speeds of the ranks."""
    module, data = order.module(), order.data()
    optimizer = order.optimizer(module.parameters())
    start = saves.load(model=module, optimizer=optimizer)
    model = DistributedDataParallel(module)
    sampler = ProportionalSampler(data, order.batch, seed=order.seed, drop_last=True)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=as_it_is)
    steps = len(data) // order.batch
    saves.ready(watch, start, module)
    for epoch in count(start // steps):
        sampler.set_epoch(epoch)
        for step, batch in enumerate(sampler.measured(loader), max(epoch * steps, start)):
            loss = order.loss(model, batch)
            optimizer.zero_grad()
            sampler.scale(loss).backward()
            optimizer.step()
            if watch.stepped(step + 1, module):
                return
            saves.save(step + 1, model=module, optimizer=optimizer)


def diloco(order: Order, watch: Watch, saves: Saves) -> None:
    """Train as DiLoCo (Douillard et al., 2023, arXiv 2311.08105): local steps, an outer one."""
    rank, size, data = dist.get_rank(), dist.get_world_size(), order.data()
    model = order.module()
    optimizer = order.optimizer(model.parameters())
    shared = nn.Parameter(parameters_to_vector(model.parameters()).detach().clone())
    outer = order.outer_optimizer([shared])
    start = saves.load(model=model, optimizer=optimizer, outer=outer)
    shared.data = parameters_to_vector(model.parameters()).detach().clone()
    stream = Stream(len(data), order.seed)
    begin, end = (order.batch * each // size for each in (rank, rank + 1))
    saves.ready(watch, start, model)
    for step in count(start):
        batch = data.__getitems__(stream.indices(step * order.batch + begin, end - begin))
        loss = order.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % LOCAL == 0:
            change = shared.detach() - parameters_to_vector(model.parameters()).detach()
            dist.all_reduce(change)
            shared.grad = change / size
            outer.step()
            vector_to_parameters(shared.detach().clone(), model.parameters())
            saves.save(step + 1, model=model, optimizer=optimizer, outer=outer)
        if watch.stepped(step + 1, model):
            break


ARMS = {"ddp": ddp, "ddp + shares": ddp_with_shares, "diloco": diloco}


class Saves:
    """Checkpoints of an elastic run; nothing in a run whose processes remain."""

    def __init__(self, order: Order, elastic: bool) -> None:
        self._file = Path(order.folder, "checkpoint.pt") if elastic else None
        self._order = order

    def load(self, **parts: Any) -> int:
        """Load the checkpoint if there is one; return its step."""
        if self._file is None or not self._file.exists():
            return 0
        saved = torch.load(self._file, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        return int(saved["step"])

    def save(self, step: int, **parts: Any) -> None:
        if self._file is not None and dist.get_rank() == 0 and step % SAVED == 0:
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save({"step": step, **states}, self._file.with_suffix(".part"))
            os.replace(self._file.with_suffix(".part"), self._file)

    def ready(self, watch: Watch, step: int, model: nn.Module) -> None:
        """Warm the process up, wait for the others, and begin."""
        order = self._order
        module = DistributedDataParallel(order.module())
        order.loss(module, order.data()[:8]).backward()
        dist.barrier()
        watch.begin(step, model)


def serve(rank: int, size: int, address: str, device: str = "cpu") -> None:
    """Train whenever an order arrives, on the CPU or on the GPU with the number of the rank."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
        device = f"cuda:{rank}"
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=size)
    say(ready=os.getpid())
    for line in sys.stdin:
        order = replace(Order(**json.loads(line)), device=device)
        ARMS[order.arm](order, Watch(order, rank == 0), Saves(order, False))
        dist.barrier()
        say(end=True)


def once(host: int, order: Order) -> None:
    """Train in a process that torchrun has started."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ARMS[order.arm](order, Watch(order, host == 0), Saves(order, True))
    dist.barrier()
    dist.destroy_process_group()
    say(end=True)


if __name__ == "__main__":
    if sys.argv[1] == "--once":
        once(int(sys.argv[2]), Order(**json.loads(sys.argv[3])))
    else:
        serve(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
