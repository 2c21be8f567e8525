"""Trains on a cluster of one machine; another of a second kind joins in mid-run."""

from __future__ import annotations

import json
import os
import sys
import time

import ray
from ray.cluster_utils import Cluster

import paceline as pl
from paceline.core.protocol import Finished, Joined, Start

HERE = {"node_ip_address": "127.0.0.2"}  # reachable from this machine alone
LONGEST = 120.0  # seconds that the run waits for the second machine, once it is to join
AWAY = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0  # seconds until it joins


class Watch(pl.Callback):
    """Adds the second machine after some seconds, and notes when its worker has a result."""

    def __init__(self, cluster: Cluster, engine: pl.Ray) -> None:
        self._cluster, self._engine = cluster, engine
        self.alive_at = self.used_at = 0.0
        self.nodes: dict[str, str] = {}

    def stepped(self, progress: pl.Progress) -> None:
        if progress.step >= 5 and progress.seconds >= AWAY and not self.alive_at:
            self._cluster.add_node(
                **HERE, num_cpus=1, resources={"little": 1}, labels={"kind": "small"}
            )
            self.alive_at = time.monotonic()
        pool = self._engine._pool
        assert pool is not None
        if not self.used_at and pool.members["small-0"].proven:  # it has answered a task
            self.used_at = time.monotonic()
            labels = {node["NodeID"]: node["Labels"].get("kind", "") for node in ray.nodes()}
            places = {name: member.place for name, member in pool.members.items()}
            self.nodes = {n: labels[place.node] for n, place in places.items() if place}


def main() -> None:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    cluster = Cluster()
    cluster.add_node(**HERE, num_cpus=0)
    cluster.add_node(**HERE, num_cpus=1, labels={"kind": "big"})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    engine = pl.Ray(
        fleet=[
            pl.Kind("big", cpus=1, labels={"kind": "big"}, price=2.0),
            pl.Kind("small", count=(0, 1), cpus=1, resources={"little": 1}, max_samples=3,
                    price=0.5),
        ],
        start_timeout=20.0,
    )  # fmt: skip
    watch = Watch(cluster, engine)
    learner = pl.learners.Quadratic((1.0, 0.2), noise=0.5, batch_size=12)
    trainer = pl.Trainer(
        learner, pl.sync(), engine, placement=pl.BySpeed(), callbacks=[watch], progress=False
    )
    called, began = time.monotonic(), list[float]()

    def enough(progress: pl.Progress) -> bool:
        began[:] = began or [time.monotonic()]
        return bool(watch.used_at)

    run = trainer.fit(seconds=LONGEST + AWAY, until=enough)
    largest: dict[str, int] = {}
    for entry in run.journal:
        for command in entry.commands:
            if isinstance(command, Start):
                task = command.task
                largest[task.worker] = max(largest.get(task.worker, 0), task.samples)
    found = {
        "nodes": watch.nodes,
        "joined": [e.event.worker for e in run.journal if isinstance(e.event, Joined)],
        "results": sum(isinstance(e.event, Finished) for e in run.journal),
        "largest": largest,
        "per_hour": trainer.prices.per_hour,
        "first": began[0] - called,
        "seconds": watch.used_at - watch.alive_at,
    }
    ray.shutdown()
    cluster.shutdown()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
