"""Trains on hosts that are far apart, tells of each step, and compares with a simulated run.

Run on host 0 by test_far_hosts.py: python far_run.py WORKERS POLICY STEPS MOMENTUM
"""

from __future__ import annotations

import json
import logging
import sys
import time
from functools import partial

import numpy as np
import ray
import torch

import paceline as pl
from tests.conftest import flat, make_learner


class Tell(pl.Callback):
    def stepped(self, progress: pl.Progress) -> None:
        print(f"step {progress.step} {time.time():.3f}", flush=True)


def learner(momentum: float) -> pl.TorchLearner:
    plain = make_learner(hidden=20_000)  # 1.9 MB
    return pl.TorchLearner(
        plain.model,
        plain.loss,
        partial(torch.optim.SGD, lr=0.01, momentum=momentum),
        plain.dataset,
        plain.batch_size,
    )


def main() -> None:
    workers, k, steps, momentum = (int(word) for word in sys.argv[1:])
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    policy = pl.sync(workers) if k == workers else pl.k_sync(k)
    with pl.Ray(workers=workers, cpus=1, timeout=60, start_timeout=60, respawns=2) as engine:
        trainer = pl.Trainer(
            learner(momentum / 10), policy, engine, progress=False, callbacks=[Tell()]
        )
        run = trainer.fit(steps=steps)
        servers = len(engine._server_pool.members) if engine._server_pool else 0
    simulator = pl.Simulator(workers)
    whole = pl.Trainer(
        learner(momentum / 10), pl.sync(workers), simulator, progress=False
    ).fit(steps=steps)
    same = torch.allclose(flat(run.model), flat(whole.model), rtol=1e-6, atol=1e-6)
    told = {
        "steps": run.steps,
        "same": same,
        "servers": servers,
        "replays": pl.replay(run.policy, run.journal) == run.journal,
        "seconds": np.diff(run.metrics["seconds"]).round(3).tolist(),
    }
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
