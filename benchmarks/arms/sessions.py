"""Paceline in a loop of one's own: a session with shares by speed, and local steps."""

from __future__ import annotations

import json
import os
import sys
from itertools import count

import torch
from torch.utils.data import DataLoader

import paceline as pl
from _driver import say
from arms.task import LOCAL, Order, Watch, as_it_is
from paceline.data.sampling import Stream


def session(order: Order, watch: Watch, host: int) -> None:
    """Train with one gradient of all processes for each step."""
    model, data = order.module(), order.data()
    optimizer = order.optimizer(model.parameters())
    with pl.session(
        model, optimizer, run=order.run, batch_size=order.batch, seed=order.seed,
        workers=(order.first, order.hosts), placement=pl.BySpeed(), address=order.address,
    ) as run:  # fmt: skip
        loader = DataLoader(data, batch_sampler=run.batches(data), collate_fn=as_it_is)
        watch.begin(run.version, model)
        while True:
            for batch in loader:
                loss = order.loss(model, batch)
                loss.backward()
                run.step(loss)
                if watch.stepped(run.version, model):
                    return


def local_steps(order: Order, watch: Watch, host: int) -> None:
    """Train alone on own samples; the models meet after every few steps."""
    model, data = order.module(), order.data()
    optimizer = order.optimizer(model.parameters())
    stream = Stream(len(data), order.seed)
    share = order.batch // order.hosts
    with pl.local_steps(
        model, optimizer, every=LOCAL, outer=order.outer_optimizer, run=order.run,
        workers=(order.first, order.hosts), address=order.address, overlap="overlap" in order.arm,
    ) as outer:  # fmt: skip
        watch.begin(0, model)
        for step in count():
            chosen = stream.indices(step * order.batch + host * share, share)
            loss = order.loss(model, data.__getitems__(chosen))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            outer.report(loss)
            if watch.stepped(step + 1, model, outer.version * LOCAL) or outer.ended:
                return


ARMS = {
    "session + shares": session,
    "local_steps": local_steps,
    "local_steps + overlap": local_steps,
}


def main(host: int, address: str, ip: str) -> None:
    """Train whenever an order arrives."""
    import ray

    torch.set_num_threads(1)
    ray.init(address=address, _node_ip_address=ip, log_to_driver=False, logging_level="ERROR")
    say(ready=os.getpid())
    for line in sys.stdin:
        order = Order(**json.loads(line))
        order.loss(order.module(), order.data()[:8]).backward()
        ARMS[order.arm](order, Watch(order, host == 0), host)
        say(end=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:4])
