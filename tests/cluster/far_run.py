"""Trains on hosts that are far apart, tells of each step, and compares with a simulated run.

Run on host 0 by test_far_hosts.py: python far_run.py ADDRESS WORKERS K STEPS LEARNER
"""

from __future__ import annotations

import json
import logging
import sys
from functools import partial

import numpy as np
import ray
import torch

import paceline as pl
from tests.conftest import flat, make_learner

RULES = {
    "plain": partial(torch.optim.SGD, lr=0.01),
    "small": partial(torch.optim.SGD, lr=0.01),  # kept by the driver
    "momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
}


class Tell(pl.Callback):
    def stepped(self, progress: pl.Progress) -> None:
        print(f"step {progress.step} after {progress.seconds:.3f} s", flush=True)


def learner(rules: str) -> pl.TorchLearner:
    plain = make_learner(hidden=16 if rules == "small" else 20_000)  # 1.9 MB
    return pl.TorchLearner(plain.model, plain.loss, RULES[rules], plain.dataset, plain.batch_size)


def main() -> None:
    workers, k, steps = (int(word) for word in sys.argv[2:5])
    rules = sys.argv[5]
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
    policy = pl.sync(shares=workers) if k == workers else pl.k_sync(k)
    with pl.Ray(workers=workers, cpus=1, timeout=60, start_timeout=60, respawns=2) as engine:
        run = pl.Trainer(learner(rules), policy, engine, progress=False, callbacks=[Tell()]).fit(
            steps=steps
        )
        servers = [name for name in engine.members() if name.startswith("s")]
    whole = pl.Trainer(
        learner(rules), pl.sync(shares=workers), pl.Simulator(workers), progress=False
    ).fit(steps=steps)
    found = {
        "steps": run.steps,
        "bits": torch.equal(flat(run.model), flat(whole.model)),
        "servers": len(servers),
        "replays": pl.protocol.replay(run.driven_policy, run.journal) == run.journal,
        "seconds": np.diff(run.metrics["seconds"]).round(3).tolist(),
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
