"""A fleet that changes: a worker that stops, and workers that will be taken away.

`stopped` trains with eight workers under `k_sync(8)`, four with `--quick`, so that each step needs
all of them. One of them is stopped (SIGSTOP) in mid-run, which no connection shows. Idle workers
redo its task once it is overdue by its own response times. The ratio is that of the longest step
from then on to the median step before. No sample may be used twice or be lost.

`drained` has one worker after the other finish its task, leave and start again, under `sync()` with
four workers. No task may be redone. Its steps share the cores with the processes that start.

python benchmarks/elastic.py [--quick] [--part stopped]
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
from bisect import bisect
from collections import Counter
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline as pl
from _report import finish, machine, parser, table
from paceline.core.protocol import Draining, Start

BOUNDS = {"longest_step": 4.0, "samples_twice": 0, "samples_lost": 0, "redone": 0}
BATCH = 128


def rows() -> TensorDataset:
    random = torch.Generator().manual_seed(0)
    features = torch.randn(4096, 512, generator=random)
    return TensorDataset(features, features @ torch.randn(512, 8, generator=random))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def learner() -> pl.TorchLearner:
    """Return a model whose task takes some tenths of a second on a fraction of two cores."""
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


def stopped(workers: int, steps: int, at: int, worker: str) -> dict[str, Any]:
    """Train while a worker is stopped after the step `at`; return the lengths of the steps."""
    with pl.Ray(workers, timeout=600) as engine:
        callbacks = [Stop(engine, worker, at)]
        trainer = pl.Trainer(
            learner(), pl.k_sync(workers), engine, callbacks=callbacks, progress=False
        )
        run = trainer.fit(steps=steps)
    lengths = [after - before for before, after in pairwise([0.0, *run.metrics["seconds"]])]
    usual = statistics.median(lengths[2:at])
    return {
        "usual_step": usual,
        "longest_step": max(lengths[at:]) / usual,
        "later_steps": statistics.median(lengths[at + 2 :]) / usual,
        **accounts(run),
    }


def accounts(run: pl.Run) -> dict[str, int]:
    """Return the tasks that were redone, and the samples that were used twice or lost."""
    tasks = [c.task for e in run.journal for c in e.commands if isinstance(c, Start)]
    used = Counter[int]()
    for stretch in run.samples():
        if stretch.fate == "used":
            used.update(range(stretch.offset, stretch.offset + stretch.samples))
    lost = [s for s in run.samples() if s.fate not in ("used", "unfinished", "cancelled")]
    return {
        "redone": sum(task.copy_of is not None or task.attempt > 1 for task in tasks),
        "samples_twice": sum(count > 1 for count in used.values()),
        "samples_lost": sum(stretch.samples for stretch in lost),
    }


class Drain(pl.Callback):
    """Drains one worker after the other, each when the one before is back."""

    def __init__(self, engine: pl.Ray, times: int, first: int) -> None:
        self._engine, self._times, self.done = engine, times, 0
        self._next = first

    def stepped(self, progress: pl.Progress) -> None:
        if self.done >= self._times and progress.step >= self._next:
            progress.stop("all have drained")
        elif progress.step >= self._next and progress.workers == self._engine.size:
            self._engine.drain(self._engine.workers[self.done % self._engine.size])
            self.done, self._next = self.done + 1, progress.step + 10


def drained(times: int, first: int) -> dict[str, Any]:
    """Train while workers drain from a step on, one by one; return the lengths of the steps."""
    with pl.Ray(4, timeout=600) as engine:
        drain = Drain(engine, times, first)
        trainer = pl.Trainer(
            learner(), pl.sync(), engine, callbacks=[drain], progress=False, backups=False
        )
        run = trainer.fit(seconds=60.0 + 40.0 * times)
    lengths = [after - before for before, after in pairwise([0.0, *run.metrics["seconds"]])]
    drains = [e.now for e in run.journal if isinstance(e.event, Draining)]
    ends = run.metrics["seconds"]
    # The step under way at each notice, and the one after it.
    struck = [bisect(ends, at) + i for at in drains for i in (0, 1)]
    usual = statistics.median(lengths[2:first])
    at_notice = [lengths[i] / usual for i in struck if i < len(lengths)]
    print(f"\nelastic: 4 workers under sync(), {drain.done} drained one after the other")
    found = accounts(run)
    rows = [("usual step (s)", usual), ("steps at a notice, median", statistics.median(at_notice)),
            ("steps at a notice, longest", max(at_notice)), ("tasks redone", found["redone"]),
            ("samples used twice", found["samples_twice"]),
            ("samples lost", found["samples_lost"])]  # fmt: skip
    table(["", "measured"], [[name, f"{value:.3g}"] for name, value in rows])
    return {"drains": drain.done, "usual_step": usual, "steps_at_a_notice": at_notice, **found}


def stopped_often(quick: bool) -> dict[str, Any]:
    workers, steps, at = (4, 24, 14) if quick else (8, 40, 24)
    found = [stopped(workers, steps, at, f"w{trial}") for trial in range(1 if quick else 5)]
    print(f"\nelastic: {workers} workers under k_sync({workers}), one is stopped")
    names = ["usual_step", "longest_step", "later_steps", "redone", "samples_twice", "samples_lost"]
    table(
        ["trial", "usual step (s)", "longest", "later", "redone", "used twice", "lost"],
        [[str(i), *(f"{each[name]:.3g}" for name in names)] for i, each in enumerate(found)],
    )
    return {name: [each[name] for each in found] for name in names}


def main() -> None:
    given = parser(__doc__, seconds=100)
    given.add_argument("--part", choices=["stopped", "drained"])
    arguments = given.parse_args()
    figures: dict[str, Any] = {}
    ok = True
    if arguments.part in (None, "stopped"):
        found = figures["stopped"] = stopped_often(arguments.quick)
        ok = statistics.median(found["longest_step"]) <= BOUNDS["longest_step"]
        ok = ok and not sum(found["samples_twice"]) and not sum(found["samples_lost"])
    if arguments.part in (None, "drained"):
        found = figures["drained"] = drained(*((1, 10) if arguments.quick else (20, 20)))
        ok = ok and not (found["redone"] or found["samples_twice"] or found["samples_lost"])
    finish("elastic", figures, BOUNDS, ok, machine("ray", "torch"), arguments)


if __name__ == "__main__":
    main()
