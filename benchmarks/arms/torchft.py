"""torchft: fault-tolerant DDP, and its DiLoCo. One replica group of one process on each host."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.local_sgd import DiLoCo

from _driver import say
from arms.task import LOCAL, Order, Watch, meet
from paceline.data.sampling import Stream

TIMEOUT = timedelta(seconds=60)
SHORT = timedelta(seconds=10)  # of a run whose hosts go and come: a collective waits so long


def per_step(order: Order, watch: Watch, host: int, meeting: str) -> None:
    """Train with a quorum and an all-reduce for each step."""
    model, data = order.module(), order.data()
    inner = order.optimizer(model.parameters())
    manager = managed(order, host, meeting, use_async_quorum=True, model=model, optimizer=inner)
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    stream, begun = Stream(len(data), order.seed), False
    while not watch.over(step := manager.current_step()):
        optimizer.zero_grad()  # starts the quorum
        manager.wait_quorum()
        if not begun:
            watch.begin(manager.current_step(), model)
            begun = True
        step, size = manager.current_step(), max(1, manager.num_participants())
        rank = manager.participating_rank() or 0
        begin, end = (order.batch * each // size for each in (rank, rank + 1))
        batch = data.__getitems__(stream.indices(step * order.batch + begin, end - begin))
        order.loss(ddp, batch).backward()
        optimizer.step()  # if all agree
        if manager.current_step() > step:
            watch.stepped(manager.current_step(), model)


def diloco(order: Order, watch: Watch, host: int, meeting: str) -> None:
    """Train with local steps; the models meet after every few."""
    model, data = order.module(), order.data()
    optimizer = order.optimizer(model.parameters())
    outer = order.outer_optimizer(model.parameters())
    parts = {"model": model, "optimizer": optimizer, "outer": outer}
    manager = managed(order, host, meeting, use_async_quorum=False, **parts)
    stream, share = Stream(len(data), order.seed), order.batch // order.hosts
    watch.begin(0, model)
    with DiLoCo(manager, [model], optimizer, outer, sync_every=LOCAL):
        taken = 0
        while not watch.over(step := manager.current_step() * LOCAL + taken % LOCAL):
            chosen = stream.indices(step * order.batch + host * share, share)
            loss = order.loss(model, data.__getitems__(chosen))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            taken += 1
            watch.stepped(manager.current_step() * LOCAL + taken % LOCAL, model)


def managed(
    order: Order, host: int, meeting: str, *, use_async_quorum: bool, **parts: Any
) -> Manager:
    """Return a manager of this host's replica, once those of all hosts are there."""
    timeout, ip = SHORT if order.least < order.hosts else TIMEOUT, order.ips[host]
    store = TCPStore(ip, 0, is_master=True, wait_for_workers=False)
    managed.store = store  # type: ignore[attr-defined]  # it must outlive this function

    def load(state: dict[str, Any]) -> None:
        for name, part in parts.items():
            part.load_state_dict(state[name])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        min_replica_size=order.least,
        load_state_dict=load,
        state_dict=lambda: {name: part.state_dict() for name, part in parts.items()},
        replica_id=f"host{host}_",
        hostname=ip,
        store_addr=ip,
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=meeting,
        timeout=timeout,
        quorum_timeout=TIMEOUT,
        connect_timeout=TIMEOUT,
        use_async_quorum=use_async_quorum,
        init_sync=order.least < order.hosts,
    )
    meet(order, host)
    return manager


ARMS = {"torchft": per_step, "torchft diloco": diloco}


def main(host: int, ip: str, meeting: str) -> None:
    """Train once, when the order arrives."""
    socket.gethostname = lambda: ip  # under which torchft serves its checkpoints
    torch.set_num_threads(1)
    say(ready=os.getpid())
    order = Order(**json.loads(sys.stdin.readline()))
    order.loss(order.module(), order.data()[:8]).backward()
    ARMS[order.arm](order, Watch(order, host == 0), host, meeting)
    time.sleep(2)  # a manager that is gone would fail the last step of the others
    say(end=True)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:4])
