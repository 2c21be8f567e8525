"""A fleet that changes: a worker that stops, and what overdue tasks cost.

`stopped` trains with eight workers under `k_sync(8)`, so that each step needs all of them. One of
them is stopped (SIGSTOP) in mid-run, which no connection shows. Idle workers redo its task once it
is overdue by its own response times. The ratio is that of the longest step from then on to the
median step before. No sample may be used twice or be lost.

python benchmarks/elastic.py [--quick]
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
from collections import Counter
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline as pl
from _report import finish, machine, parser, table
from paceline.core.protocol import Start

BOUNDS = {"longest_step": 4.0, "samples_twice": 0, "samples_lost": 0}
WORKERS = 8
BATCH = 16 * WORKERS


def rows() -> TensorDataset:
    random = torch.Generator().manual_seed(0)
    features = torch.randn(4096, 512, generator=random)
    return TensorDataset(features, features @ torch.randn(512, 8, generator=random))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def learner() -> pl.TorchLearner:
    """Return a model whose task takes some tenths of a second on an eighth of two cores."""
    torch.manual_seed(0)
    wide = [nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 8)]
    model = nn.Sequential(*wide)
    optimizer = partial(torch.optim.SGD, lr=0.01)
    return pl.TorchLearner(model, loss, optimizer, rows, BATCH, micro_batch=1)


class Stop(pl.Callback):
    """Stops the process of a worker after a step, and lets it go on at the end."""

    def __init__(self, engine: pl.Ray, worker: str, step: int) -> None:
        self._engine, self._worker, self._step = engine, worker, step
        self._pid = 0

    def stepped(self, progress: pl.Progress) -> None:
        if progress.step == self._step:
            self._pid = self._engine.pids()[self._worker]
            os.kill(self._pid, signal.SIGSTOP)

    def ended(self, reason: str) -> None:
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGCONT)


def stopped(steps: int, at: int, worker: str) -> dict[str, Any]:
    """Train while a worker is stopped after the step `at`; return the lengths of the steps."""
    with pl.Ray(WORKERS, timeout=600) as engine:
        callbacks = [Stop(engine, worker, at)]
        trainer = pl.Trainer(
            learner(), pl.k_sync(WORKERS), engine, callbacks=callbacks, progress=False
        )
        run = trainer.fit(steps=steps)
    lengths = [after - before for before, after in pairwise([0.0, *run.metrics["seconds"]])]
    tasks = [c.task for e in run.journal for c in e.commands if isinstance(c, Start)]
    used = Counter[int]()
    for stretch in run.samples():
        if stretch.fate == "used":
            used.update(range(stretch.offset, stretch.offset + stretch.samples))
    lost = [s for s in run.samples() if s.fate not in ("used", "unfinished", "cancelled")]
    usual = statistics.median(lengths[2:at])
    return {
        "usual_step": usual,
        "longest_step": max(lengths[at:]) / usual,
        "later_steps": statistics.median(lengths[at + 2 :]) / usual,
        "redone": sum(task.copy_of is not None for task in tasks),
        "samples_twice": sum(count > 1 for count in used.values()),
        "samples_lost": sum(stretch.samples for stretch in lost),
    }


def measure(quick: bool) -> dict[str, Any]:
    found = [stopped(40, 24, f"w{trial}") for trial in range(1 if quick else 5)]
    print(f"\nelastic: {WORKERS} workers under k_sync({WORKERS}), one is stopped")
    names = ["usual_step", "longest_step", "later_steps", "redone", "samples_twice", "samples_lost"]
    table(
        ["trial", "usual step (s)", "longest", "later", "redone", "used twice", "lost"],
        [[str(i), *(f"{each[name]:.3g}" for name in names)] for i, each in enumerate(found)],
    )
    return {name: [each[name] for each in found] for name in names}


def main() -> None:
    arguments = parser(__doc__, seconds=100).parse_args()
    figures = measure(arguments.quick)
    ok = statistics.median(figures["longest_step"]) <= BOUNDS["longest_step"]
    ok = ok and not sum(figures["samples_twice"]) and not sum(figures["samples_lost"])
    finish("elastic", {"stopped": figures}, BOUNDS, ok, machine("ray", "torch"), arguments.quick)


if __name__ == "__main__":
    main()
