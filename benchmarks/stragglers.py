"""Seconds to the same training loss with 8 Ray workers, one of them slowed to a tenth.

A small CNN on Fashion-MNIST. The straggler is a real process, stopped and continued so that it runs
a tenth of its normal time. With fewer cores than workers, that is a tenth of its equal share of the
cores. Otherwise it would be as fast as the other workers. Beside the policies, DDP trains on eight
processes with the same straggler, and on the seven others without it. All take turns, seed by seed.
`--tune` tunes the learning rates on the simulator, with as many trials for each (_tuning.py).
"""

from __future__ import annotations

import json
import math
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import paceline as pl
from _fashion import images, pixel_loss
from _report import finish, machine, parser, plotting, table
from _tuning import SEED, Trial, tune
from paceline.core.policy import Policy
from paceline.core.protocol import Finished, Start
from paceline.data.sampling import Stream
from paceline.testing import SlowWorkers, Throttle

WORKERS, SLOW, SLOWDOWN = 8, "w7", 10
BOUND = 4.0  # the best policy must be at least so many times as fast as sync
DELAY = pl.delays.ShiftedExponential(0.08, 0.02)  # for tuning: only the ratios of delays matter


@dataclass(frozen=True)
class Method:
    """A policy with the batch and learning rate that suit it."""

    policy: Policy
    lr: float
    momentum: float
    batch_size: int
    placement: pl.BySpeed | None = None


DDP, WITHOUT = "DDP", "DDP without the slow machine"
METHODS = {
    "sync()": Method(pl.sync(), 0.1, 0.9, 512),
    "sync(), BySpeed()": Method(pl.sync(), 0.1, 0.9, 512, pl.BySpeed()),
    "k_sync(7)": Method(pl.k_sync(7), 0.1, 0.9, 512),
    "rennala(8)": Method(pl.rennala(8), 0.1, 0.9, 512),
    "ringmaster(16)": Method(pl.ringmaster(16), 0.05, 0.0, 64),
}


@dataclass
class Outcome:
    """The result of one run."""

    seconds: float
    steps: int
    check: float  # the final loss on fixed samples
    done: bool  # whether the target was reached
    curve: list[tuple[float, float]] = field(default_factory=list)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 5, stride=2), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, stride=2), nn.ReLU(), nn.Flatten()),
        nn.Linear(64 * 5 * 5, 10),
    )


def make_learner(method: Method, data: TensorDataset, lr: float | None = None) -> pl.TorchLearner:
    sgd = partial(torch.optim.SGD, lr=lr or method.lr, momentum=method.momentum)
    return pl.TorchLearner(make_model(), pixel_loss, sgd, data, method.batch_size)


def reached(
    target: float, batch_size: int
) -> tuple[Callable[[pl.Progress], bool], list[tuple[float, float]]]:
    """Return a condition: the loss, averaged over about the last 4,000 samples, is at most target.

    Also return the curve of that average, which the condition fills during the run.
    """
    fade = min(1.0, batch_size / 4096)
    curve: list[tuple[float, float]] = []

    def until(progress: pl.Progress) -> bool:
        last = curve[-1][1] if curve else progress.loss
        curve.append((progress.seconds, last + fade * (progress.loss - last)))
        return curve[-1][1] <= target

    return until, curve


def run(
    method: Method,
    data: TensorDataset,
    engine: pl.Ray | pl.Simulator,
    target: float,
    seed: int,
    most: dict[str, Any],
    lr: float | None = None,
    callbacks: Sequence[pl.Callback] = (),
) -> tuple[pl.Run, Outcome]:
    """Train until the target or the limit `most` is reached."""
    learner = make_learner(method, data, lr)
    until, curve = reached(target, method.batch_size)
    trainer = pl.Trainer(
        learner,
        method.policy,
        engine,
        seed=seed,
        callbacks=callbacks,
        progress=False,
        placement=method.placement,
    )
    result = trainer.fit(**most, until=until)
    with torch.no_grad():
        check = pixel_loss(result.model, data[:4000]).item()
    done = bool(curve) and curve[-1][1] <= target
    return result, Outcome(result.seconds, result.steps, check, done, curve)


# --- DistributedDataParallel ----------------------------------------------------------------------


def rank(index: int, port: int) -> None:
    """Train when asked to on standard input; the first rank answers."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=index, world_size=WORKERS
    )
    groups = {size: dist.new_group(list(range(size))) for size in (WORKERS, WORKERS - 1)}
    data, sync = images(), METHODS["sync()"]
    print(os.getpid(), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        size, fade = order["size"], sync.batch_size / 4096
        model = DistributedDataParallel(make_model(), process_group=groups[size])
        optimizer = torch.optim.SGD(model.parameters(), lr=sync.lr, momentum=sync.momentum)
        stream, step, mean = Stream(len(data), order["seed"]), 0, None
        first, last = (sync.batch_size * i // size for i in (index, index + 1))
        begin, curve = time.monotonic(), []
        while mean is None or (mean > order["target"] and curve[-1][0] < order["seconds"]):
            chosen = stream.indices(step * sync.batch_size + first, last - first)
            loss = pixel_loss(model, data[torch.from_numpy(chosen)])
            share = (last - first) / sync.batch_size
            optimizer.zero_grad()
            (loss * share * size).backward()  # DDP divides by the number of ranks
            optimizer.step()
            # All ranks need the same loss and the same clock to stop at the same step.
            told = torch.tensor([loss.item() * share, index == 0 and time.monotonic() - begin])
            dist.all_reduce(told, group=groups[size])
            mean = float(told[0]) if mean is None else mean + fade * (float(told[0]) - mean)
            curve.append((float(told[1]), mean))
            step += 1
        if index == 0:
            with torch.no_grad():
                check = pixel_loss(model.module, data[:4000]).item()
            print(json.dumps([step, check, curve]), flush=True)


class Ranks:
    """Eight processes that wait for their turn."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(index), str(port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for index in range(WORKERS)
        ]
        self._pids = [int(self._line(process)) for process in self._processes]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait(30)

    def run(self, name: str, target: float, seed: int, seconds: float, share: float) -> Outcome:
        """Train to the target, or for some seconds; the last rank runs a share of the time."""
        size = WORKERS if name == DDP else WORKERS - 1
        order = json.dumps({"size": size, "target": target, "seed": seed, "seconds": seconds})
        with Throttle(self._pids[-1], share, 0.05, seconds=2 * seconds):
            for process in self._processes[:size]:
                assert process.stdin is not None
                process.stdin.write(order + "\n")
                process.stdin.flush()
            steps, check, curve = json.loads(self._line(self._processes[0]))
        curve = [(at, loss) for at, loss in curve]
        return Outcome(curve[-1][0], steps, check, curve[-1][1] <= target, curve)

    @staticmethod
    def _line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        if not (line := process.stdout.readline()):
            raise RuntimeError("a process of DistributedDataParallel has ended")
        return line


# --- figures -------------------------------------------------------------------------------------


def slowdown(result: pl.Run) -> float:
    """Return how many times as long the slow worker took per sample, by its own clock."""
    tasks = {c.task.id: c.task for e in result.journal for c in e.commands if isinstance(c, Start)}
    rates: dict[bool, list[float]] = {True: [], False: []}
    for entry in result.journal:
        if isinstance(event := entry.event, Finished) and event.samples:
            rates[tasks[event.task].worker == SLOW].append(event.seconds / event.samples)
    return statistics.median(rates[True]) / statistics.median(rates[False])


def show_tuned(data: TensorDataset, target: float) -> None:
    """Print the learning rate with the least virtual seconds to the target, on the simulator."""

    def seconds(trial: Trial) -> float:
        method = METHODS[trial.arm]
        engine = pl.Simulator(WORKERS, [*[DELAY] * 7, pl.delays.Scaled(DELAY, SLOWDOWN)], unit=64)
        most = 120 * 512 // method.batch_size  # steps
        _, outcome = run(
            method, data, engine, target, SEED, {"steps": most}, method.lr * trial.rate
        )
        return outcome.seconds if outcome.done else math.inf

    found = tune(METHODS, lambda trials: [-seconds(each) for each in trials])
    rows = [
        [name, f"{METHODS[name].lr * each.best.rate:.3g}", f"{-each.score:.1f}", str(each.trials)]
        for name, each in found.items()
    ]
    table(["policy", "lr", "virtual s", "trials"], rows)


def draw(path: str, outcomes: dict[str, list[Outcome]], target: float) -> None:
    """Draw the seconds to the target: a bar for the median, a line for the range of the seeds."""
    figure, axes = plotting().subplots(figsize=(7, 3.0), layout="constrained")
    names = list(outcomes)
    for place, name in enumerate(names):
        seconds = [outcome.seconds for outcome in outcomes[name]]
        middle = statistics.median(seconds)
        axes.barh(place, middle, color="#9aa5b1" if "DDP" in name else "#2b6cb0", height=0.65)
        axes.plot([min(seconds), max(seconds)], [place, place], color="black", linewidth=1)
        axes.annotate(f"{middle:.0f} s", (max(seconds), place), (4, -3), textcoords="offset points")
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.invert_yaxis()
    count = len(outcomes[names[0]])
    axes.set(xlabel=f"seconds to training loss {target}; median and range of {count} seeds")
    axes.set_title("8 workers, one at a tenth of the speed", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--tune", action="store_true", help="learning rates on the simulator")
    arguments.add_argument("--figure", metavar="FILE.svg", help="draw the loss curves")
    arguments.add_argument("--rank", type=int, nargs=2, help="for the benchmark itself")
    options = arguments.parse_args()
    if options.rank:
        rank(*options.rank)
        return
    train = images()
    target, seeds = (1.5, [0]) if options.quick else (0.8, [0, 1, 2])
    if options.tune:
        show_tuned(train, target)
        return
    about = machine("torch", "ray", "paceline")
    share = min(1.0, about["cores"] / WORKERS) / SLOWDOWN
    outcomes: dict[str, list[Outcome]] = {name: [] for name in (DDP, WITHOUT, *METHODS)}
    measured = []
    with Ranks() as ranks, pl.Ray(workers=WORKERS) as engine:
        warm = METHODS["sync()"]
        pl.Trainer(make_learner(warm, train), warm.policy, engine, progress=False).fit(steps=3)
        for turn, seed in enumerate(seeds):
            names = list(outcomes)
            for name in names[turn:] + names[:turn]:
                # A quick run stops those that wait early, so that their ratio is a lower bound.
                short = options.quick and name in ("sync()", DDP)
                most = {"seconds": 12.5 if short else 240.0}
                if name not in METHODS:
                    outcome = ranks.run(name, target, seed, most["seconds"], share)
                    outcomes[name].append(outcome)
                    continue
                slow = SlowWorkers(engine, {SLOW: share}, period=0.05)  # from the first step on
                result, outcome = run(
                    METHODS[name], train, engine, target, seed, most, callbacks=[slow]
                )
                outcomes[name].append(outcome)
                if name == "sync()":
                    measured.append(slowdown(result))
    print(
        f"{WORKERS} Ray workers, {SLOW} running {share:.1%} of the time "
        f"({statistics.median(measured):.1f} times slower per sample, measured), "
        f"training loss {target}, {len(seeds)} seeds"
    )
    medians = {n: statistics.median(o.seconds for o in runs) for n, runs in outcomes.items()}
    ratios = {n: [a.seconds / o.seconds if o.done or a is o else 0.0
                  for a, o in zip(outcomes["sync()"], runs, strict=True)]
              for n, runs in outcomes.items()}  # fmt: skip
    rows = [
        [
            name,
            f"{'' if all(o.done for o in runs) else '> '}{medians[name]:.2f}",
            f"{min(o.seconds for o in runs):.2f} - {max(o.seconds for o in runs):.2f}",
            f"{statistics.median(o.steps for o in runs):.0f}",
            f"{statistics.median(o.check for o in runs):.3f}",
            f"{statistics.median(ratios[name]):.1f}",
        ]
        for name, runs in outcomes.items()
    ]
    table(["policy", "seconds", "range", "steps", "loss after", "times sync"], rows)
    if options.figure:
        draw(options.figure, outcomes, target)
    best = max(statistics.median(values) for values in ratios.values())
    figures = {
        "target_loss": target,
        "slowdown": round(statistics.median(measured), 2),
        "seconds": {n: round(s, 3) for n, s in medians.items()},
        "ratio_to_sync": {n: [round(v, 2) for v in values] for n, values in ratios.items()},
        "best": round(best, 2),
    }
    finish("stragglers", figures, {"best": BOUND}, best >= BOUND, about, options)


if __name__ == "__main__":
    main()
