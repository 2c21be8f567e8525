"""Ray Train's TorchTrainer: DDP on gloo, elastic where hosts go and come."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from itertools import count
from typing import Any

import ray
import ray.train.torch
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig

from _driver import say
from arms.task import Order, Watch
from paceline.data.sampling import Stream

SAVED = 10  # steps between two checkpoints of an elastic run


def train(given: dict[str, Any]) -> None:
    """Train in a worker of Ray Train."""
    order, context = Order(**given), ray.train.get_context()
    torch.set_num_threads(1)
    watch = Watch(order, ray.util.get_node_ip_address() == order.ips[0])
    rank, size, data = context.get_world_rank(), context.get_world_size(), order.data()
    module, start = order.module(), 0
    optimizer = order.optimizer(module.parameters())
    if saved := ray.train.get_checkpoint():
        with saved.as_directory() as folder:
            state = torch.load(f"{folder}/state.pt", weights_only=True)
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    model = ray.train.torch.prepare_model(module)
    order.loss(model, data[:8]).backward()
    stream = Stream(len(data), order.seed)
    begin, end = (order.batch * each // size for each in (rank, rank + 1))
    watch.begin(start, module)
    for step in count(start):
        batch = data.__getitems__(stream.indices(step * order.batch + begin, end - begin))
        loss = order.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if watch.stepped(step + 1, module):
            break
        if order.least < order.hosts and (step + 1) % SAVED == 0:
            with tempfile.TemporaryDirectory() as folder:
                if rank == 0:
                    state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save({"step": step + 1, **state}, f"{folder}/state.pt")
                whole = Checkpoint.from_directory(folder) if rank == 0 else None
                ray.train.report({"step": step + 1}, checkpoint=whole)


def fit(order: Order, given: dict[str, Any]) -> None:
    """Start workers on all hosts, and wait for the end."""
    elastic: dict[str, Any] = {}
    if order.least < order.hosts:
        elastic = {"elastic_resize_monitor_interval_s": 5.0}
    ray.train.torch.TorchTrainer(
        train,
        train_loop_config=given,
        scaling_config=ScalingConfig(
            num_workers=(order.least, order.hosts) if elastic else order.hosts,
            resources_per_worker={"CPU": 0.05},
            placement_strategy="STRICT_SPREAD",
            **elastic,
        ),
        run_config=RunConfig(
            storage_path=order.folder,
            name="train",
            failure_config=FailureConfig(max_failures=20),
        ),
        torch_config=ray.train.torch.TorchConfig(backend="gloo", timeout_s=120),
    ).fit()


def main(address: str, ip: str) -> None:
    """Train whenever an order arrives."""
    ray.init(address=address, _node_ip_address=ip, log_to_driver=False, logging_level="ERROR")
    say(ready=os.getpid())
    for line in sys.stdin:
        given = json.loads(line)
        fit(Order(**given), given)
        say(end=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
