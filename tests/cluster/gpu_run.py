"""Runs on a Ray that claims to have two GPUs, in a process of its own; prints what was seen."""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

import ray
from torch import Tensor, nn

import paceline as pl
from tests.conftest import make_learner


def seen(module: nn.Module, batch: Any) -> Tensor:
    """A loss that is the number of the one GPU that this process sees; -1 for none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    number = {"": -1.0, "0": 0.0, "1": 1.0}.get(visible, 99.0)
    found: Tensor = module(batch[0]).sum() * 0.0 + number
    return found


def learner(device: str, hidden: int = 16) -> pl.TorchLearner:
    plain = make_learner(hidden)
    return pl.TorchLearner(plain.model, seen, plain.optimizer, plain.dataset, 12, device=device)


def gpus(engine: pl.Ray, device: str) -> list[float]:
    """Return the GPUs that workers have seen."""
    trainer = pl.Trainer(learner(device), pl.sync(), engine, progress=False)
    seen_gpus: set[float] = set()
    for entry in trainer.fit(steps=2).journal:
        stats = getattr(entry.event, "stats", None) or {}
        if getattr(entry.event, "samples", None):
            seen_gpus.add(stats["loss"])
    return sorted(seen_gpus)


class Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.stores: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "object store" in record.getMessage():
            self.stores.append(record.getMessage())


def refusal(engine: pl.Ray) -> str:
    try:
        pl.Trainer(learner("cuda"), pl.sync(), engine, progress=False).fit(steps=1)
    except ValueError as error:
        return str(error)
    return "none"


def main() -> None:
    ray.init(
        address="local", num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False,
        logging_level="ERROR", _node_ip_address="127.0.0.2", object_store_memory=2**27,
    )  # fmt: skip
    told = Told()
    logging.getLogger("paceline").addHandler(told)
    found: dict[str, Any] = {}
    with pl.Ray(3, cpus=0.5, timeout=60) as engine:
        found["auto"] = gpus(engine, "auto")
        found["cpu"] = gpus(engine, "cpu")  # by other processes, which have no GPU
    found["refused"] = refusal(pl.Ray(2, gpus=0))
    found["stores"] = [*told.stores]
    wide = learner("cpu", hidden=100_000)  # 9.6 MB: 3 workers need 8 of them, 8 workers 18
    for workers in (3, 8):
        engine = pl.Ray(workers, cpus=0.25, servers="driver")
        pl.Trainer(wide, pl.sync(shares=1), engine, progress=False, min_workers=1).fit(steps=1)
        found[f"stores of {workers}"] = [*told.stores]
    ray.shutdown()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
