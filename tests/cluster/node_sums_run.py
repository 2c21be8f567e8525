"""Trains with two workers on each of two nodes, with and without sums on nodes."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import ray
from ray.cluster_utils import Cluster

import paceline as pl
from paceline.engines.ray.servers import shell
from paceline.engines.ray.servers.events import Call, SumUp

HERE = {"node_ip_address": "127.0.0.2"}  # reachable from this machine alone
STEPS = 10

asked = 0
make = shell.Shell._make


def counted(self: shell.Shell, call: Call) -> None:
    global asked
    asked += isinstance(call, SumUp)
    make(self, call)


def main() -> None:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    cluster = Cluster()
    cluster.add_node(**HERE, num_cpus=0)
    for _ in range(2):
        cluster.add_node(**HERE, num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    shell.Shell._make = counted  # type: ignore[method-assign]
    curvature = tuple(np.linspace(0.1, 1.0, 2**16))  # slices of 256 KiB, which go by the store
    learner = pl.learners.Quadratic(curvature, noise=0.5, batch_size=12, lr=0.3)
    found: dict[str, Any] = {"sums": []}
    with pl.Ray(4, cpus=1, servers="spread", start_timeout=60.0) as engine:
        for sums in (False, True):
            engine.sum_on_nodes = sums
            run = pl.Trainer(learner, pl.sync(), engine, progress=False, seed=3).fit(steps=STEPS)
            found["sums"].append(asked)
            found[str(sums)] = run.model
    found["same"] = bool(np.array_equal(found["False"], found["True"]))
    found["apart"] = float(abs(found.pop("False") - found.pop("True")).max())
    print(json.dumps(found))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
