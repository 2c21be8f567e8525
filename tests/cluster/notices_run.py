"""Trains on machines that are taken away after a notice: by SIGTERM, a cloud, `ray drain-node`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

import paceline as pl
from paceline.core.protocol import Draining, Start
from paceline.engines.ray.notices import draining_nodes
from paceline.engines.ray.place import Place
from paceline.engines.ray.servers.reducer import ShardedReducer
from tests.unit.engines.ray.metadata import Service, serving

HERE = {"node_ip_address": "127.0.0.2"}  # reachable from this machine alone
LONGEST = 240.0  # seconds of training
TURNS = ("sigterm", "cloud", "drain-node", "end")


class Turns(pl.Callback):
    """Gives one notice after the other, each when the one before has been obeyed for some steps."""

    def __init__(self, cluster: Cluster, engine: pl.Ray, service: Service) -> None:
        self._cluster, self._engine, self._service = cluster, engine, service
        self.nodes = {node.node_id: node for node in cluster.worker_nodes}
        self._turn, self._since, self._left = -1, 0, ""
        self.servers: dict[str, int] = {}
        self.by_ray: list[bool] = []

    def stepped(self, progress: pl.Progress) -> None:
        if self._turn < 0:
            if progress.step >= 5:
                self._next(progress)
        elif self._is_obeyed() and progress.step >= self._since + 5:
            self._take_away()
            self._next(progress)

    def _next(self, progress: pl.Progress) -> None:
        self._turn, self._since = self._turn + 1, progress.step
        turn = TURNS[self._turn]
        self.servers[turn] = len(self._slots())
        pool = self._engine._pool
        assert pool is not None
        match turn:
            case "sigterm":
                self._pid = self._place("home-0").pid
                os.kill(self._pid, signal.SIGTERM)
            case "cloud":
                self._left = self._place("spot-0").node
                self._service.action = "terminate"
            case "drain-node":
                self._left = self._place("home-1").node
                tool = Path(sys.executable).with_name("ray")
                reason = "DRAIN_NODE_REASON_PREEMPTION"
                given = f"--node-id={self._left}", f"--reason={reason}", "--reason-message=test"
                command = [str(tool), "drain-node", f"--address={self._cluster.address}", *given]
                seconds = ["--deadline-remaining-seconds=120"]
                subprocess.run([*command, *seconds], check=True, capture_output=True, timeout=60)
            case _:
                progress.stop("all have left")

    def _place(self, name: str) -> Place:
        pool = self._engine._pool
        assert pool is not None
        place = pool.members[name].place
        assert place is not None
        return place

    def _slots(self) -> list[str]:
        job = self._engine._open
        assert job is not None and isinstance(job.reducer, ShardedReducer)
        machine = job.reducer.machine
        return [machine.steps.slots.node(slot) for slot in machine.steps.slots]

    def _is_obeyed(self) -> bool:
        pool = self._engine._pool
        assert pool is not None
        if TURNS[self._turn] == "sigterm":
            place = pool.members["home-0"].place
            return place is not None and place.pid != self._pid
        return self._left not in {*pool.nodes(), *self._slots()}

    def _take_away(self) -> None:
        """End the machine that has been left; its kind waits for another."""
        if TURNS[self._turn] != "sigterm":
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
            # Ray ends a drained node that is idle.
            self.by_ray.append(self._left not in alive or self._left in draining_nodes())
            self._cluster.remove_node(self.nodes[self._left], allow_graceful=False)


def main() -> None:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    cluster = Cluster()
    cluster.add_node(**HERE, num_cpus=0)
    for kind in ("home", "home", "home", "spot"):
        cluster.add_node(**HERE, num_cpus=1, labels={"kind": kind})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    with serving() as service:
        there = {"env_vars": {"PACELINE_METADATA_URL": service.url}}
        engine = pl.Ray(
            fleet=[
                pl.Kind("home", count=(1, 3), cpus=1, labels={"kind": "home"}),
                pl.Kind("spot", count=(0, 1), cpus=1, labels={"kind": "spot"}, cloud="aws",
                        runtime_env=there),
            ],
            servers="spread",
        )  # fmt: skip
        turns = Turns(cluster, engine, service)
        learner = pl.learners.Quadratic((1.0, 0.2, 0.5, 0.3), noise=0.5, batch_size=12)
        given: dict[str, Any] = {
            "callbacks": [turns],
            "progress": False,
            "min_workers": 4,
            "backups": False,
        }
        run = pl.Trainer(learner, pl.sync(), engine, **given).fit(seconds=LONGEST)
    tasks = [c.task for e in run.journal for c in e.commands if isinstance(c, Start)]
    found = {
        "reason": run.reason,
        "servers": turns.servers,
        "by_ray": turns.by_ray,
        "drained": [e.event.worker for e in run.journal if isinstance(e.event, Draining)],
        "redone": sum(task.attempt > 1 or task.copy_of is not None for task in tasks),
        "fates": sorted({stretch.fate for stretch in run.samples()}),
    }
    ray.shutdown()
    cluster.shutdown()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
