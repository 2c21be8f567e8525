"""Soak test: does the driver's memory stay constant while workers fail for a long time?

Trains on 8 real Ray workers under `k_sync(6)`, with the journal and checkpoints on disk, and kills
or pauses a worker every half a minute. Every few seconds it records the driver's resident memory,
open files and threads. The first fifth of the time is warm-up. The slope of the memory after it is
the median over all pairs of points (Theil and Sen), with its 95 % interval.

    python benchmarks/chaos_soak.py [--quick] [--minutes 20]
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from _report import OtherLoad, finish, machine, parser, quantile, table

WORKERS, K = 8, 6
SLOPE = 5.0  # MB in 10 minutes
GROWTH = 16.0  # MB; for a quick run, whose slope is too uncertain
FILES = 4  # how many more may be open in the last third than in the first
P99 = 0.10  # a larger change of the slowest steps is only printed, since other load causes it too
WARM_UP = 0.2  # of the time


def learner() -> pl.TorchLearner:
    """Return a small problem with steps of some hundredths of a second."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4096, 16, generator=generator)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    return pl.TorchLearner(model, loss, partial(torch.optim.SGD, lr=0.01), data, batch_size=64)


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


class Trouble(pl.Callback):
    """Kills a random worker, or pauses it for a few seconds, every so often."""

    def __init__(self, engine: pl.Ray, every: float) -> None:
        self._engine, self._every, self._rng = engine, every, random.Random(0)
        self._next, self._paused = time.monotonic() + every, (0.0, 0)
        self.done: Counter[str] = Counter()

    def stepped(self, progress: pl.Progress) -> None:
        now, (until, paused) = time.monotonic(), self._paused
        if paused and now >= until:
            self.ended("")
        pids = sorted(self._engine.pids().items())
        if now < self._next or not pids:
            return
        self._next, pid = now + self._every, self._rng.choice(pids)[1]
        kind = self._rng.choice(("kill", "pause"))
        self.done[kind] += 1
        _signal(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        if kind == "pause":
            self._paused = now + 4.0, pid

    def ended(self, reason: str) -> None:
        if self._paused[1]:
            _signal(self._paused[1], signal.SIGCONT)
            self._paused = 0.0, 0


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@dataclass
class Watch(pl.Callback):
    """Records what this process uses, every `every` seconds."""

    every: float
    rows: list[tuple[float, ...]] = field(default_factory=list)
    _next: float = 0.0

    def stepped(self, progress: pl.Progress) -> None:
        if progress.seconds < self._next:
            return
        self._next = progress.seconds + self.every
        status = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        resident, own = (int(status[name].split()[0]) / 1024 for name in ("VmRSS", "RssAnon"))
        files, threads = len(os.listdir("/proc/self/fd")), int(status["Threads"])
        blocks = sys.getallocatedblocks()  # what Python's own objects are made of
        self.rows.append((progress.seconds, resident, own, files, threads, blocks))


class Lines(logging.Handler):
    """Counts the lines that are logged."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


def soak(minutes: float, every: float, sample: float, folder: Path) -> dict[str, Any]:
    """Train for some minutes, and return the metrics."""
    lines, log = Lines(), logging.getLogger("paceline")
    log.addHandler(lines)
    log.propagate = False
    with pl.Ray(WORKERS, timeout=20.0, respawns=10**6) as engine:
        watch, trouble = Watch(sample), Trouble(engine, every)
        run = pl.Trainer(
            learner(),
            pl.k_sync(K),
            engine,
            callbacks=[watch, trouble],
            checkpoints=pl.Checkpoints(folder / "saved", every=500),
            journal=folder / "run.jsonl",
            progress=False,
        ).fit(seconds=60 * minutes)
    size = (folder / "run.jsonl").stat().st_size
    return {
        "minutes": minutes,
        "steps": run.steps,
        "faults": dict(trouble.done),
        "lost": run.meter.lost,
        "log_lines": lines.count,
        "journal_bytes_per_step": round(size / max(run.steps, 1)),
        **judged(np.array(watch.rows), run.metrics["seconds"]),
    }


def judged(rows: np.ndarray, steps: np.ndarray) -> dict[str, Any]:
    """Fit lines to the records after the warm-up, and compare their first third with the last."""
    from scipy.stats import theilslopes

    begin = rows[0, 0] + WARM_UP * (rows[-1, 0] - rows[0, 0])
    late = rows[rows[:, 0] >= begin]
    seconds, third = late[:, 0], (late[-1, 0] - begin) / 3
    found: dict[str, Any] = {"samples": len(late)}
    for name, column in (("rss", 1), ("own", 2)):
        slope, _, low, high = theilslopes(late[:, column], seconds)
        found[f"{name}_mb"] = round(float(late[-1, column]), 1)
        found[f"{name}_mb_per_10_minutes"] = [round(600 * float(x), 2) for x in (slope, low, high)]
    # If these stay constant and memory grows, Ray's own threads use it, which Python cannot see.
    found["python_blocks_per_10_minutes"] = round(600 * float(theilslopes(late[:, 5], seconds)[0]))
    places = np.linspace(0, len(rows) - 1, 11).astype(int)
    found["rss_mb_along"] = [round(float(each), 1) for each in rows[places, 1]]
    found["rss_grown_mb"] = round(float(late[-1, 1] - late[0, 1]), 2)
    first, last = late[seconds < begin + third], late[seconds >= begin + 2 * third]
    for name, column in (("files", 3), ("threads", 4)):
        found[name] = [float(np.median(part[:, column])) for part in (first, last)]
    took = np.diff(steps)
    for q in (0.5, 0.99):
        parts = (
            took[(steps[1:] >= begin) & (steps[1:] < begin + third)],
            took[steps[1:] >= begin + 2 * third],
        )
        found[f"step_ms_p{100 * q:.0f}"] = [
            round(1000 * quantile(part.tolist(), q), 2) for part in parts
        ]
    return found


def main() -> None:
    options = parser(__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--minutes", type=float, default=20.0)
    arguments = options.parse_args()
    quick, load = arguments.quick, OtherLoad()
    settings: tuple[float, float, float] = (
        (0.4, 6.0, 0.5) if quick else (arguments.minutes, 30.0, 3.0)
    )
    with tempfile.TemporaryDirectory() as folder:
        figures = soak(*settings, Path(folder))
    figures["other_load_cores"] = load.cores()
    slope, low, high = figures["rss_mb_per_10_minutes"]
    rows = [[name, str(value)] for name, value in figures.items()]
    table(["figure", "value"], rows)
    print(f"memory: {slope:+.2f} MB in 10 minutes, 95 % interval {low:+.2f} to {high:+.2f}")
    before, after = figures["step_ms_p99"]
    if abs(after / before - 1) > P99:
        print(f"the slowest steps differ: p99 {before:g} ms in the first third, {after:g} ms later")
    files = figures["files"][1] - figures["files"][0]
    flat = figures["rss_grown_mb"] <= GROWTH if quick else slope <= SLOPE
    bounds = {"rss_mb_per_10_minutes": SLOPE, "more_files": float(FILES)}
    if quick:
        bounds = {"rss_grown_mb": GROWTH, "more_files": float(FILES)}
    about = machine("ray", "torch")
    finish("chaos_soak", figures, bounds, bool(flat and files <= FILES), about, arguments)


if __name__ == "__main__":
    main()
