"""Sessions beside a Trainer: the time of a step, and a slow process under `sync` and `k_sync`.

steps     A perceptron of 11 MB on four workers under `sync`, once by `pl.Trainer` on `pl.Ray`, and
          once by four processes with `pl.session`. The arms run one after the other, A B B A.
slow      Processes with `pl.session` and a batch of 1,024, one of which has a tenth of its share of
          the cores: seconds to a number of steps under `sync` and under `k_sync(n - 1)`, and of a
          Trainer under `k_sync(n - 1)`.

Seconds come from the journals, so they begin when all workers are there.

    python benchmarks/sessions.py [--quick]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from _report import OtherLoad, finish, machine, parser, table
from paceline.core.protocol import Step
from paceline.testing import Throttle

HIDDEN, BATCH, EXAMPLES, RATE = 3459, 128, 4096, 0.01  # 795 hidden + 10 numbers of 4 bytes
WARM_UP = 3  # steps that do not count
SLOW, LARGE = 0.1, 1024  # the share that the slow process has of its cores; the batch with it
BOUNDS = {"a step / a Trainer's": 1.10, "sync / k_sync": 4.0, "k_sync / a Trainer's": 1.10}
QUICK = {"a step / a Trainer's": 1.6, "sync / k_sync": 2.0, "k_sync / a Trainer's": 1.6}


def make_data() -> TensorDataset:
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(EXAMPLES, 784, generator=random)
    return TensorDataset(inputs, torch.randint(10, (EXAMPLES,), generator=random))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def policy_of(k: int) -> pl.policies.Gather:
    return pl.k_sync(k) if k else pl.sync()


# --- the arms, in processes of their own ---------------------------------------------------------


def by_session(journal: str, workers: int, steps: int, k: int, slow: bool) -> None:
    """Train in this process as one of several workers."""
    torch.set_num_threads(1)
    data, model = make_data(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    session = pl.session(
        model,
        optimizer,
        policy=policy_of(k),
        batch_size=LARGE if slow else BATCH,
        steps=steps,
        journal=journal,
    )
    loader = DataLoader(data, batch_sampler=session.batches(data))
    with throttled(workers if slow and os.environ["PACELINE_WORKER"] == "0" else 0):
        while not session.ended:
            for batch in loader:
                loss = loss_of(model, batch)
                loss.backward()
                session.step(loss)


def throttled(workers: int) -> Throttle | nullcontext[None]:
    """Slow this process, one of so many; 0: do not."""
    return Throttle(os.getpid(), share_of(workers), seconds=300) if workers else nullcontext()


def share_of(workers: int) -> float:
    """Return the share of the time in which the slow one of so many processes runs."""
    return SLOW * min(1.0, (os.cpu_count() or 1) / workers)


class Slowed(pl.Callback):
    """Slows the worker w0 of a Trainer once it is up."""

    def __init__(self, engine: pl.Ray) -> None:
        self._engine = engine
        self._throttle: Throttle | None = None

    def stepped(self, progress: pl.Progress) -> None:
        if self._throttle is None:
            share = share_of(self._engine.size)
            self._throttle = Throttle(self._engine.pids()["w0"], share, seconds=300)
            self._throttle.__enter__()

    def ended(self, reason: str) -> None:
        if self._throttle is not None:
            self._throttle.__exit__(None, None, None)


def by_trainer(journal: str, workers: int, steps: int, k: int, slow: bool) -> None:
    """Train with a Trainer on Ray."""
    learner = pl.TorchLearner(
        make_model(),
        loss_of,
        partial(torch.optim.SGD, lr=RATE),
        make_data(),
        LARGE if slow else BATCH,
    )
    engine = pl.Ray(workers, cpus=0.1)
    watch = [Slowed(engine)] if slow else []
    trainer = pl.Trainer(
        learner, policy_of(k), engine, journal=journal, progress=False, callbacks=watch
    )
    trainer.fit(steps=steps)


# --- measuring -----------------------------------------------------------------------------------


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def run(arm: str, workers: int, steps: int, k: int = 0, slow: bool = False) -> list[float]:
    """Train by an arm; return the seconds of its steps."""
    with folder() as here:
        journal = here / "run.jsonl"
        given = [arm, str(journal), str(workers), str(steps), str(k), str(int(slow))]
        command = [sys.executable, __file__, "--arm", *given]
        if arm == "session":
            launch = [sys.executable, "-m", "paceline", "launch", "--threads", "1"]
            command = [*launch, "--workers", str(workers), *command[1:]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise RuntimeError(f"{arm} has failed: {done.stderr[-2000:]}")
        entries = pl.Journal.load(journal)
        times = [e.now for e in entries if any(isinstance(c, Step) for c in e.commands)]
    return [after - before for before, after in pairwise(times)][WARM_UP:]


def compare_steps(blocks: int, steps: int) -> dict[str, float]:
    """Return the median step of both arms, and the ratio of neighbors with its range."""
    found: dict[str, list[float]] = {"trainer": [], "session": []}
    for block in range(blocks):
        order = ["trainer", "session"]
        for arm in order if block % 2 == 0 else reversed(order):
            found[arm].append(median(run(arm, 4, steps)))
    ratios = [s / t for s, t in zip(found["session"], found["trainer"], strict=True)]
    return {
        "trainer": median(found["trainer"]),
        "session": median(found["session"]),
        "ratio": median(ratios),
        "least": min(ratios),
        "most": max(ratios),
    }


def compare_slow(workers: int, steps: int) -> dict[str, float]:
    """Return the seconds of `steps` steps with a slow process."""
    waits = sum(run("session", workers, steps, slow=True))
    leaves = sum(run("session", workers, steps, workers - 1, slow=True))
    trainer = sum(run("trainer", workers, steps, workers - 1, slow=True))
    return {"sync": waits, "k_sync": leaves, "trainer": trainer}


def arm_of(given: list[str]) -> None:
    """Run an arm in this process."""
    arm, journal, *numbers = given
    workers, steps, k, slow = map(int, numbers)
    if arm == "session":
        by_session(journal, workers, steps, k, bool(slow))
    else:
        by_trainer(journal, workers, steps, k, bool(slow))


def main() -> None:
    arguments = parser(__doc__, 100).parse_args()
    load, bounds = OtherLoad(), QUICK if arguments.quick else BOUNDS
    step = compare_steps(*((1, 15) if arguments.quick else (4, 60)))
    slow = compare_slow(*((3, 10) if arguments.quick else (8, 16)))
    figures = {
        "a step / a Trainer's": step["ratio"],
        "sync / k_sync": slow["sync"] / slow["k_sync"],
        "k_sync / a Trainer's": slow["k_sync"] / slow["trainer"],
    }
    rows = [
        ["a step of a Trainer, 11 MB", f"{step['trainer']:.3f}"],
        ["a step of sessions, 11 MB", f"{step['session']:.3f}"],
        *([f"one slow process: {name}", f"{value:.1f}"] for name, value in slow.items()),
    ]
    table(["arm", "seconds"], rows)
    for name, value in figures.items():
        print(f"{name}: {value:.2f} (bound {bounds[name]:g})")
    ok = figures["sync / k_sync"] >= bounds["sync / k_sync"] and all(
        figures[name] <= bounds[name] for name in figures if name != "sync / k_sync"
    )
    about = {**machine("torch", "ray"), "other_cores": load.cores()}
    everything = {**figures, "step": step, "slow": slow}
    finish("sessions", everything, bounds, ok, about, arguments)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--arm"]:
        arm_of(sys.argv[2:])
    else:
        main()
