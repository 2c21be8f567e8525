"""Faults without end: simulated storms by the thousand, bugs put in on purpose, and real processes.

`storm` trains whole runs on a simulated Ray with lost, doubled, late, wrong and stray answers,
crashes, pauses and driver kills, and checks what must hold after every event; every eighth is
without a main node, and with `gossip` all are. `planted` puts bugs
into Paceline and counts how many storms it takes to find each. `ray` trains on real processes that
are killed, paused and starved every few seconds, beside the same run without faults, in turns.

    python benchmarks/chaos.py [--quick] [--part storm|gossip|planted|ray] [--seed N]
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from _report import finish, machine, parser, table
from paceline.testing import Throttle, gossip_planted, gossip_storm
from paceline.testing.planted import BUGS, planted
from paceline.testing.storm import Outcome, Violation, play

STORMS = 10_000
FAULTS = 500_000
GOSSIP_STORMS = 1_500
FOUND_WITHIN = 2_000  # storms
PARTS = ("storm", "gossip", "planted", "ray")
GOSSIP_EVERY = 8  # storms: the last of each so many is without a main node
GOODPUT = 0.90  # of the run without faults, corrected for the time that workers were away


# --- simulated -----------------------------------------------------------------------------------


def storm(seed: int) -> Outcome | str:
    """Return what came of one storm, or what was broken; the seed decides of which kind it is."""
    return played(gossip_storm.play if seed % GOSSIP_EVERY == GOSSIP_EVERY - 1 else play, seed)


def gossip(seed: int) -> Outcome | str:
    """Return what came of one storm without a main node."""
    return played(gossip_storm.play, seed)


def played(kind: Callable[[int, Path], Outcome], seed: int) -> Outcome | str:
    logging.disable(logging.CRITICAL)
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        return kind(seed, folder)
    except Violation as error:
        return str(error)
    finally:
        shutil.rmtree(folder)


def storms(
    seeds: Sequence[int], processes: int, kind: Callable[[int], Outcome | str] = storm
) -> dict[str, Any]:
    """Count faults and broken promises over many storms."""
    begin = time.perf_counter()
    faults: Counter[str] = Counter()
    cases: Counter[str] = Counter()
    broken: list[str] = []
    kills = 0
    seconds = 0.0
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for done, outcome in enumerate(pool.imap_unordered(kind, seeds, chunksize=8), 1):
            if done % 500 == 0:
                seconds_each = (time.perf_counter() - begin) / done
                print(f"{done} storms, {faults.total()} faults, {1 / seconds_each:.1f} a second")
            if isinstance(outcome, str):
                broken.append(outcome)
                print(outcome, flush=True)
                continue
            faults += outcome.faults
            cases[outcome.case.name] += 1
            kills += outcome.kills
            seconds += outcome.seconds
    took = time.perf_counter() - begin
    table(["fault", "times"], [[name, str(count)] for name, count in faults.most_common()])
    return {
        "storms": len(seeds),
        "faults": faults.total(),
        "driver_kills": kills,
        "violations": len(broken),
        "by_case": dict(cases),
        "virtual_hours": seconds / 3600,
        "seconds": took,
        "storms_per_second": len(seeds) / took,
    }


def find_planted(most: int) -> dict[str, int | None]:
    """Return after how many storms each bug was found."""
    found: dict[str, int | None] = {}
    for kind, bugs in ((play, BUGS), (gossip_storm.play, gossip_planted.BUGS)):
        for bug in bugs:
            found[bug] = None
            with planted(bug, bugs), np.errstate(all="ignore"):
                for seed in range(most):
                    if isinstance(played(kind, seed), str):
                        found[bug] = seed + 1
                        break
    table(["bug put in", "found after"], [[bug, str(count)] for bug, count in found.items()])
    return found


# --- real processes ------------------------------------------------------------------------------


def slow_loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Take a few hundredths of a second, so that faults fall into the middle of tasks."""
    inputs, targets = batch
    weight = torch.eye(160)
    for _ in range(40):
        weight = weight @ torch.eye(160)
    return nn.functional.mse_loss(model(inputs), targets) * weight[0, 0]


def learner() -> pl.TorchLearner:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4096, 16, generator=generator)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    sgd = partial(torch.optim.SGD, lr=0.02)
    return pl.TorchLearner(model, slow_loss, sgd, data, batch_size=64, micro_batch=4)


class Faults(pl.Callback):
    """Kills, pauses or starves a random worker every so many seconds."""

    def __init__(self, engine: pl.Ray, every: float, seed: int) -> None:
        self._engine, self._every = engine, every
        self._rng = random.Random(seed)
        self._next = 0.0
        self._paused: list[tuple[float, int]] = []
        self._starved: list[tuple[float, contextlib.ExitStack]] = []
        self.done: Counter[str] = Counter()

    def started(self, live: pl.Live) -> None:
        self._next = time.monotonic() + self._every

    def stepped(self, progress: pl.Progress) -> None:
        now = time.monotonic()
        for at, pid in [each for each in self._paused if each[0] <= now]:
            _signal(pid, signal.SIGCONT)
            self._paused.remove((at, pid))
        for at, starving in [each for each in self._starved if each[0] <= now]:
            starving.close()
            self._starved.remove((at, starving))
        if now < self._next:
            return
        self._next += self._every
        pids = sorted(self._engine.pids().items())
        if not pids:
            return
        _, pid = self._rng.choice(pids)
        kind = self._rng.choice(("kill", "pause", "starve"))
        self.done[kind] += 1
        if kind == "kill":
            _signal(pid, signal.SIGKILL)
        elif kind == "pause":
            _signal(pid, signal.SIGSTOP)
            self._paused.append((now + self._rng.uniform(0.5, 4.0), pid))
        else:
            starving = contextlib.ExitStack()
            with contextlib.suppress(ProcessLookupError):  # it may just have been lost
                starving.enter_context(Throttle(pid, 0.1))
            self._starved.append((now + self._rng.uniform(1.0, 5.0), starving))

    def ended(self, reason: str) -> None:
        for _, pid in self._paused:
            _signal(pid, signal.SIGCONT)
        for _, starving in self._starved:
            starving.close()


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def on_ray(seconds: float, every: float, workers: int = 8) -> dict[str, Any]:
    """Train for so long with faults and without, a third of it at a time, in turns."""
    samples = {True: 0.0, False: 0.0}
    there = {True: 0.0, False: 0.0}
    took = {True: 0.0, False: 0.0}
    faults: Counter[str] = Counter()
    with pl.Ray(workers, timeout=6.0, respawns=10**6) as engine:
        for turn in range(3):
            for faulty in (True, False):
                trouble = Faults(engine, every, seed=turn)
                watch = [trouble] if faulty else []
                run = pl.Trainer(
                    learner(), pl.k_sync(6), engine, callbacks=watch, progress=False, seed=turn
                ).fit(seconds=seconds / 3)
                assert pl.replay(run.policy, run.journal) == run.journal
                _exactly_once(run)
                samples[faulty] += run.meter.samples_used
                there[faulty] += run.meter.worker_seconds
                took[faulty] += run.meter.now  # to the end, and not to the last step alone
                faults += trouble.done
    rates = {faulty: samples[faulty] / took[faulty] for faulty in samples}
    corrected = (samples[True] / there[True]) / (samples[False] / there[False])
    return {
        "seconds": sum(took.values()),
        "faults": dict(faults),
        "samples_per_second": {"with": rates[True], "without": rates[False]},
        "goodput": corrected,  # for the same worker-seconds
        "goodput_by_the_clock": rates[True] / rates[False],
        "workers_there": there[True] / took[True] / workers,
    }


def _exactly_once(run: pl.Run) -> None:
    place = 0
    for stretch in run.samples():
        assert stretch.draw == place, f"sample {place} is missing or doubled"
        place += stretch.samples


# --- all -----------------------------------------------------------------------------------------


def main() -> None:
    arguments = _arguments()
    logging.disable(logging.WARNING)
    if arguments.seed is not None:
        print((gossip if arguments.part == "gossip" else storm)(arguments.seed))
        return
    quick = arguments.quick
    parts = [arguments.part] if arguments.part else list(PARTS)
    figures: dict[str, Any] = {}
    checks = []
    if "storm" in parts:
        count = arguments.storms or (40 if quick else STORMS)
        seeds = range(arguments.first, arguments.first + count)
        figures["storm"] = found = storms(seeds, arguments.processes)
        checks += [found["violations"] == 0, found["faults"] >= FAULTS / STORMS * count / 2]
        if count >= STORMS:
            checks.append(found["faults"] >= FAULTS)
    if "gossip" in parts:
        count = arguments.storms or (20 if quick else GOSSIP_STORMS)
        seeds = range(arguments.first, arguments.first + count)
        figures["gossip"] = found = storms(seeds, arguments.processes, gossip)
        checks += [found["violations"] == 0, found["faults"] >= 20 * count]
    if "planted" in parts:
        figures["planted"] = find_planted(100 if quick else FOUND_WITHIN)
        checks.append(None not in figures["planted"].values())
    if "ray" in parts:
        seconds = arguments.seconds or (6.0 if quick else 300.0)
        figures["ray"] = on_ray(seconds, 1.0 if quick else arguments.every)
        checks.append(quick or figures["ray"]["goodput"] >= GOODPUT)  # too short to say
    bounds = {"faults": FAULTS, "found_within": FOUND_WITHIN, "goodput": GOODPUT}
    finish("chaos", figures, bounds, all(checks), machine("ray", "torch"), quick)


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--part", choices=PARTS)
    options.add_argument("--seed", type=int, help="show one storm, and nothing else")
    options.add_argument("--storms", type=int, help="how many")
    options.add_argument("--first", type=int, default=0, help="the first seed")
    options.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options.add_argument("--seconds", type=float, help="of training with faults on Ray")
    options.add_argument(
        "--every", type=float, default=5.0, help="seconds between two faults on Ray"
    )
    return options.parse_args()


if __name__ == "__main__":
    main()
