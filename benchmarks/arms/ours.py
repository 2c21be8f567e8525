"""A Trainer of Paceline on Ray: its driver, on host 0; the workers remain between runs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import paceline as pl
from _driver import say
from arms.few import CODECS, FEW, TOP
from arms.task import LOCAL, Copied, Order, as_it_is, keep, loss_of, report, rows
from paceline.core.protocol import Task
from paceline.data.partition.base import Partition
from paceline.learners.base import Outcome, Proceed
from paceline.learners.replica import TorchReplica

PIECES = 16  # of a batch, computed one by one where results of others may end a task


def train(order: Order, engine: pl.Ray, told: pl.Callback) -> pl.Run:
    """Train under the policy of an arm."""
    local, pieces = "local_sgd" in order.arm, order.arm in ("k_sync(3)", "rennala")
    learner = Followed(
        order.module(),
        loss_of(order.model),
        order.optimizer,
        Data(order.model),
        batch_size=order.batch,
        collate=as_it_is,
        micro_batch=order.batch // PIECES if pieces else None,
        outer=order.outer_optimizer if local else None,
        inner="kept" if local else None,
        folder=order.folder,
        on=order.ips[0],
        unit=LOCAL if local else 1,
    )
    policies = {
        "k_sync(3)": pl.k_sync(order.hosts - 1),
        "rennala": pl.rennala(PIECES),
        "auto": "auto",
    }
    rounds = pl.local_sgd(LOCAL, overlap="overlap" in order.arm)
    codec, model_codec = CODECS.get(order.arm, (None, None))
    engine.servers = "driver" if codec in (FEW, TOP) else None  # few numbers need no servers
    trainer = pl.Trainer(
        learner,
        rounds if local else policies.get(order.arm, pl.sync()),  # type: ignore[arg-type]
        engine,
        seed=order.seed,
        min_workers=order.first,
        target=order.target if order.arm == "auto" else None,
        placement=pl.BySpeed() if "shares" in order.arm else None,
        codec=codec,
        model_codec=model_codec,
        callbacks=[told],
        progress=False,
    )
    return trainer.fit(until=lambda progress: told.over)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Data:
    """Opens the training samples in a worker."""

    model: str

    def __call__(self) -> Any:
        return rows(self.model)


@dataclass(frozen=True)
class Followed(pl.TorchLearner):
    """A learner whose worker on one host keeps the models that it starts from.

    The driver would have to fetch each model over the network, and count the bytes.

    folder: where the models are kept.
    on: the address of the host.
    unit: optimizer steps of a version.
    """

    folder: str = ""
    on: str = ""
    unit: int = 1

    def replica(self, seed: int, tiles: Partition | None = None) -> TorchReplica:
        import ray

        made = super().replica(seed, tiles)
        if ray.util.get_node_ip_address() != self.on:
            return made
        compute, due = made.compute, 0

        def followed(model: Iterable[Any], task: Task, proceed: Proceed) -> Outcome:
            nonlocal due
            step, given = task.version * self.unit, Copied(model)
            if step < due or not self.folder:
                return compute(model, task, proceed)
            found = compute(given, task, proceed)
            model_now = torch.cat([torch.from_numpy(each) for each in given.copies])
            keep(Path(self.folder), step, model_now, given.arrived)
            due = step - step % LOCAL + LOCAL
            return found

        made.compute = followed  # type: ignore[method-assign]
        return made


class Told(pl.Callback):
    """Reports steps, and knows whether the run is over."""

    def __init__(self, order: Order) -> None:
        self._last, self._unit = Path(order.folder, "last"), LOCAL if "local" in order.arm else 1

    @property
    def over(self) -> bool:
        return self._last.exists()

    def stepped(self, progress: pl.Progress) -> None:
        report(self._last.parent, progress.step * self._unit, progress.samples)


def uses(run: pl.Run) -> dict[str, int]:
    """Count samples that the journal shows as lost or used twice."""
    lost = repeated = place = 0
    for stretch in run.samples():
        lost += max(0, stretch.offset - place)
        repeated += max(0, place - stretch.offset)
        place = max(place, stretch.offset + stretch.samples)
    return {"lost": lost, "repeated": repeated}


def main(address: str, ip: str, hosts: int) -> None:
    import ray

    torch.set_num_threads(1)
    ray.init(address=address, _node_ip_address=ip, log_to_driver=False, logging_level="ERROR")
    with pl.Ray(hosts, cpus=0.9, timeout=120, respawns=50) as engine:
        say(ready=os.getpid())
        warm = set()
        for line in sys.stdin:
            order = Order(**json.loads(line))
            if order.model not in warm:
                warm.add(order.model)
                first = Order(**{**json.loads(line), "arm": "sync", "folder": ""})
                warm_up(first, engine)
            run = train(order, engine, Told(order))
            say(end=True, **uses(run))


class Once(pl.Callback):
    over = True


def warm_up(order: Order, engine: pl.Ray) -> None:
    """Take a step, so that all workers have started."""
    train(order, engine, Once())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
