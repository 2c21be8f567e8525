"""Hivemind: a peer on each host; a step is taken once all together have a batch."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from _driver import say
from arms.task import Order, Watch, meet

WAIT = 120.0  # seconds for the address of the first peer


def train(order: Order, watch: Watch, host: int, dht: Any) -> None:
    """Train on random samples, a piece at a time."""
    import hivemind

    model, data, piece = order.module(), order.data(), order.batch // 32
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id=order.run,
        target_batch_size=order.batch,
        batch_size_per_step=piece,
        params=model.parameters(),
        optimizer=order.optimizer,
        offload_optimizer=True,
        matchmaking_time=1.0,
        averaging_timeout=20.0,
        allreduce_timeout=15.0,
        average_state_every=10,
        averager_opts={"request_timeout": 0.5, "target_group_size": order.hosts},
        tracker_opts={
            "min_refresh_period": 0.2,
            "default_refresh_period": 0.5,
            "max_refresh_period": 1.0,
        },
    )
    random = torch.Generator().manual_seed(1000 * order.seed + host)
    meet(order, host)
    watch.begin(optimizer.local_epoch, model)
    while not watch.over(epoch := optimizer.local_epoch):
        chosen = torch.randint(len(data), (piece,), generator=random)
        order.loss(model, data.__getitems__(chosen.tolist())).backward()
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.local_epoch > epoch:
            watch.stepped(optimizer.local_epoch, model)


def met(order: Order, host: int, ip: str) -> Any:
    """Join the others: host 0 writes its address to a file."""
    import hivemind

    file, peers, until = Path(order.folder, "peer"), [], time.monotonic() + WAIT
    while host and not file.exists():
        if time.monotonic() > until:
            raise RuntimeError("the first peer has written no address")
        time.sleep(0.1)
    if host:
        peers = [file.read_text()]
    dht = hivemind.DHT(
        host_maddrs=[f"/ip4/{ip}/tcp/0"], initial_peers=peers, start=True, use_ipfs=False,
        use_relay=False, use_auto_relay=False,
    )  # fmt: skip
    if not host:
        file.with_suffix(".part").write_text(str(dht.get_visible_maddrs()[0]))
        os.replace(file.with_suffix(".part"), file)
    return dht


def main(host: int, ip: str) -> None:
    """Train once, when the order arrives."""
    torch.set_num_threads(1)
    say(ready=os.getpid())
    order = Order(**json.loads(sys.stdin.readline()))
    order.loss(order.module(), order.data()[:8]).backward()
    train(order, Watch(order, host == 0), host, met(order, host, ip))
    say(end=True)
    time.sleep(2)  # the others may still average with this one
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
