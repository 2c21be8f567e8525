"""Goodput on real Ray nodes with a fault every few seconds, in turns with calm runs.

Hosts are network namespaces of this machine: the head with the driver, and three hosts with eight
workers. Each worker has a tenth of a core, so that no other worker can use a lost worker's share.

A fault hits a worker, a host or the checkpoints. A worker is killed, stopped or starved. A host's
link is cut or throttled, all its processes are frozen, or its raylet is killed. The disk of the
checkpoints is full or read-only. A node that Ray has given up is restarted, as a service manager
would do.

Goodput is the number of samples used per worker-second, with faults over without. A worker that is
stopped, frozen, cut off or not up has no worker-seconds. A starved worker has those of the share
that it keeps. Every run must use each sample once, its journal must replay, and the last
checkpoint must be readable. Needs Linux and root.

    python benchmarks/chaos_ray.py [--quick] [--seconds 300] [--every 5] [--policy rennala|k_sync]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
import paceline.training.checkpoint as checkpoint
from _driver import Driver, exactly_once, resident, say, say_pids
from _report import finish, machine, parser, table
from paceline.testing import groups, hosts
from paceline.testing.groups import Group
from paceline.testing.hosts import Hosts

GOODPUT = 0.90
EACH = 3  # workers that a host has room for
CORES = 0.8  # for all workers together
TIMEOUT = 8.0  # seconds for a task, which takes some tenths of one
# A step of rennala discards unfinished tasks, and fewer of them if fewer workers are connected.
# With many results in a step this loss is small, so that both kinds of turns can be compared.
POLICIES = {"rennala": pl.rennala(64), "k_sync": pl.k_sync(5)}
NODE = ("cut", "freeze", "raylet")  # faults of a whole host, one at a time
KINDS = {"kill": 5, "stop": 4, "starve": 4, "throttle": 2, "cut": 2, "freeze": 2, "raylet": 1,
         "disk": 1, "read only": 1}  # fmt: skip


# --- the driver, on host 0 -----------------------------------------------------------------------


def slow_loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Use some hundredths of a second of a core, so that faults hit tasks that are running."""
    inputs, targets = batch
    weight = torch.eye(160)
    for _ in range(6):
        weight = weight @ torch.eye(160)
    return nn.functional.mse_loss(model(inputs), targets) * weight[0, 0]


def learner() -> pl.TorchLearner:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4096, 16, generator=generator)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    sgd = partial(torch.optim.SGD, lr=0.02)
    return pl.TorchLearner(model, slow_loss, sgd, data, batch_size=2048, micro_batch=4)


class Begun(pl.Callback):
    """Reports the first step."""

    def stepped(self, progress: pl.Progress) -> None:
        if progress.step == 1:
            say(begun=True)


def drive(address: str, workers: int, policy: str, folder: Path) -> None:
    """Train once for each line of standard input, which gives the seconds and the seed."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    saves = pl.Checkpoints(folder / "disk" / "saved", every=5, keep=2)
    engine = pl.Ray(
        workers, address=address, cpus=1, timeout=TIMEOUT, start_timeout=60.0, respawns=10**6
    )
    ended = threading.Event()
    # Frequently: a new worker uses a whole core until its share is limited.
    threading.Thread(target=say_pids, args=(engine, ended, 0.02), daemon=True).start()
    with engine:
        for line in sys.stdin:
            order = json.loads(line)
            journal = folder / f"{order['seed']}.jsonl"
            run = pl.Trainer(
                learner(), POLICIES[policy], engine, callbacks=[Begun()], progress=False,
                seed=order["seed"], journal=journal, checkpoints=saves,
                min_workers=order["least"],
            ).fit(seconds=order["seconds"])  # fmt: skip
            exactly_once(run)
            say(
                done=run.reason,
                steps=run.steps,
                samples=run.meter.samples_used,
                worker_seconds=run.meter.worker_seconds,
                seconds=run.meter.now,  # to the end of the run, not to the last step
                memory=resident(),
            )
    ended.set()


# --- the faults ----------------------------------------------------------------------------------


class Fleet:
    """The workers' processes with their shares of a core, and the faults that hit them."""

    def __init__(self, hosts: Hosts, workers: int, seed: int, folder: Path) -> None:
        self.hosts, self.workers = hosts, workers
        self._filler = folder / "disk" / "filler"
        self.faults: Counter[str] = Counter()
        self._rng = random.Random(seed)
        self._share = CORES / workers
        self._groups: dict[int, Group] = {}
        self._host_of: dict[int, int] = {}
        self._left: dict[int, float] = {}  # the fraction of its share that a slowed process keeps
        self._healing: list[tuple[float, Callable[[], None]]] = []
        self._troubled: int | None = None  # the host that is affected as a whole
        self._away: set[int] = set()  # hosts that cannot compute or answer
        self._suspect = False  # whether Ray may have given up a node that has not noticed
        self._starting: dict[int, subprocess.Popen[Any]] = {}

    def know(self, pids: dict[str, int]) -> None:
        """Limit every worker to its share, and forget workers that are gone."""
        for pid in set(pids.values()) - set(self._groups):
            self._groups[pid] = Group([pid], self._share).__enter__()
            for host in range(1, self.hosts.count):
                if pid in self.hosts.pids(host):
                    self._host_of[pid] = host
        for pid in set(self._groups) - set(pids.values()):
            self._groups.pop(pid).__exit__()

    def able(self) -> float:
        """Return how many workers can compute and answer."""
        return sum(
            self._left.get(pid, 1.0) for pid in self._groups
            if self._host_of.get(pid) not in self._away and Path(f"/proc/{pid}/exe").exists()
        )  # fmt: skip

    def strike(self) -> None:
        """Inject a random fault."""
        kinds = dict(KINDS)
        if self._troubled is not None:
            kinds = {kind: often for kind, often in kinds.items() if kind not in NODE}
        kind = self._rng.choices(list(kinds), list(kinds.values()))[0]
        pid = self._rng.choice(sorted(self._groups)) if self._groups else None
        host = self._rng.randrange(1, self.hosts.count)
        if pid is None:
            return
        self.faults[kind] += 1
        seconds = self._rng.uniform(1.0, 10.0)
        match kind:
            case "kill":
                _signal(pid, signal.SIGKILL)
            case "stop":
                _signal(pid, signal.SIGSTOP)
                self._hinder(pid, 0.0, seconds)
            case "starve":
                less = max(self._share / 10, 0.01)
                self._groups[pid].limit(less)
                self._hinder(pid, less / self._share, seconds)
            case "throttle":
                self.hosts.link(host, rate=1e6)
                self._heal_after(seconds, partial(self.hosts.link, host, rate=1e9))
            case "disk":
                with contextlib.suppress(OSError), open(self._filler, "wb", buffering=0) as file:
                    while file.write(bytes(1 << 16)):
                        pass
                self._heal_after(seconds, self._heal_disk)
            case "read only":
                remount(self._filler.parent, "ro")
                self._heal_after(seconds, self._heal_disk)
            case _:
                self._strike_host(kind, host, seconds)

    def _strike_host(self, kind: str, host: int, seconds: float) -> None:
        self._troubled, self._suspect = host, True
        if kind == "raylet":
            for pid in self._raylets(host):
                _signal(pid, signal.SIGKILL)
            return
        self._away.add(host)
        if kind == "cut":
            self.hosts.link(host, up=False)
        else:
            self.hosts.freeze(host)
        self._heal_after(seconds, partial(self._return, host))

    def _return(self, host: int) -> None:
        self.hosts.link(host, up=True)
        self.hosts.thaw(host)
        self._away.discard(host)

    def _heal_disk(self) -> None:
        remount(self._filler.parent, "rw")
        self._filler.unlink(missing_ok=True)

    def _hinder(self, pid: int, left: float, seconds: float) -> None:
        """Record the share that a process keeps, and restore it after some seconds."""
        self._left[pid] = min(left, self._left.get(pid, 1.0))
        self._heal_after(seconds, partial(self._free, pid))

    def _free(self, pid: int) -> None:
        self._left.pop(pid, None)
        if pid in self._groups:
            _signal(pid, signal.SIGCONT)
            self._groups[pid].limit(self._share)

    def tend(self) -> None:
        """End the faults that are due, and restart nodes that Ray has given up."""
        now = time.monotonic()
        for due in [each for each in self._healing if each[0] <= now]:
            self._healing.remove(due)
            due[1]()
        host = self._troubled
        if host is None or host in self._away:
            return
        started = self._starting.get(host)
        if started is not None:
            if started.poll() is None:
                return
            del self._starting[host]
        if self._raylets(host):
            self._troubled = None
        else:
            self.hosts.kill(host)
            self._starting[host] = self.hosts.start_node(host)

    def heal(self) -> None:
        """End all faults, and wait until every host has its node again."""
        self._healing = [(0.0, action) for _, action in self._healing]
        until = time.monotonic() + 120
        self.tend()
        # A node that was cut off for long learns only now that Ray has given it up, and exits.
        quiet = time.monotonic() + 8 * self._suspect
        self._suspect = False
        while time.monotonic() < quiet or self._troubled is not None:
            for host in range(1, self.hosts.count):
                if self._troubled is None and not self._raylets(host):
                    self._troubled = host
            self.tend()
            if time.monotonic() > until:
                raise RuntimeError(f"host {self._troubled} has no node after two minutes")
            time.sleep(0.2)

    def close(self) -> None:
        for _, action in self._healing:
            action()
        while self._groups:
            self._groups.popitem()[1].__exit__()

    def _heal_after(self, seconds: float, action: Callable[[], None]) -> None:
        self._healing.append((time.monotonic() + seconds, action))

    def _raylets(self, host: int) -> list[int]:
        pids = self.hosts.pids(host)
        return [pid for pid in pids if _program(pid) == "raylet"]


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _signal(pid: int | None, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid or 0, number)


# --- both ----------------------------------------------------------------------------------------


def turn(driver: Driver, fleet: Fleet, seconds: float, every: float, seed: int) -> dict[str, Any]:
    """Train for some seconds; with faults if `every` is finite."""
    fleet.heal()
    calm = every == float("inf")
    driver.order(seconds=seconds, seed=seed, least=fleet.workers if calm else 1)
    begun = end = None
    able, mark = 0.0, time.monotonic()
    until = time.monotonic() + 3 * seconds + 240
    while time.monotonic() < until:
        said = driver.heard(0.1)
        now = time.monotonic()
        if end is not None:
            able += fleet.able() * max(0.0, min(now, end) - mark)
        mark = now
        if "pids" in said:
            fleet.know(said["pids"])
        if "begun" in said:
            begun, end = now, now + seconds
        if "done" in said:
            return {**said, "able_seconds": able}
        if begun is not None and not calm:
            if now >= begun + every:
                begun += every
                fleet.strike()
            fleet.tend()
    raise RuntimeError(f"no end of a run of {seconds:g} s after {3 * seconds + 240:g} s")


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a disk of some megabytes for the checkpoints."""
    disk = folder / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "paceline", str(disk)]
    subprocess.run(command, check=True, timeout=10)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True, timeout=10)


def remount(disk: Path, how: str) -> None:
    """Make a disk writable or read-only, unless a process is writing to it."""
    command = ["mount", "-o", f"remount,{how}", str(disk)]
    subprocess.run(command, capture_output=True, timeout=10)


def measure(
    seconds: float, every: float, policy: str, count: int = 4, turns: int = 5, calm: float = 1.0
) -> dict[str, Any]:
    """Train so many seconds with faults, and `calm` times as long without, in turns."""
    if reason := hosts.missing() or groups.missing():
        raise RuntimeError(f"{reason}; this benchmark needs hosts of its own")
    workers = EACH * (count - 1) - (count > 2)
    folder = Path(tempfile.mkdtemp(prefix="chaos"))
    sums: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    memory = []
    rates = []
    with contextlib.ExitStack() as leave:
        leave.callback(shutil.rmtree, folder, ignore_errors=True)
        leave.enter_context(small_disk(folder))
        place = leave.enter_context(Hosts(count, delay=0.001, rate=1e9))
        address = place.start_ray(cpus=EACH, object_store=100_000_000)
        fleet = Fleet(place, workers, 0, folder)
        leave.callback(fleet.close)
        options = ["--drive", address, "--workers", str(workers), "--policy", policy]
        driver = Driver(place, __file__, [*options, "--folder", str(folder)], folder)
        turn(driver, fleet, min(5.0, seconds / 2), float("inf"), 0)  # to warm up
        for number in range(1, turns + 1):
            for faulty in (False, True):
                length = seconds / turns * (1.0 if faulty else calm)
                gap = every if faulty else float("inf")
                said = turn(driver, fleet, length, gap, 2 * number + faulty)
                for name in ("samples", "worker_seconds", "able_seconds", "seconds", "steps"):
                    sums[faulty][name] += said[name]
                memory.append(round(said["memory"], 1))
                rates.append(round(said["samples"] / said["able_seconds"], 1))
                print(
                    f"turn {number}, {'with faults' if faulty else 'calm'}: {said['steps']} steps "
                    f"in {said['seconds']:.0f} s, {rates[-1]} samples a worker-second, "
                    f"{said['worker_seconds'] / said['seconds']:.2f} workers there and "
                    f"{said['able_seconds'] / said['seconds']:.2f} able, {said['done']}",
                    flush=True,
                )
        saved = pl.Checkpoints(folder / "disk" / "saved")
        last = checkpoint.read(checkpoint.newest(Path(saved.path))).step
        losses = driver.losses()
    table(["fault", "times"], [[name, str(n)] for name, n in fleet.faults.most_common()])
    table(["worker lost", "times"], [[name, str(n)] for name, n in losses.most_common()])
    with_, without = sums[True], sums[False]

    def ratio(unit: str) -> float:
        """Return the samples per unit with faults, over those without."""
        return (with_["samples"] / with_[unit]) / (without["samples"] / without[unit])

    return {
        "policy": policy,
        "workers": workers,
        "seconds_with_faults": with_["seconds"],
        "seconds_without": without["seconds"],
        "faults": dict(fleet.faults),
        "workers_lost": losses.total(),
        "goodput": ratio("able_seconds"),
        "goodput_of_workers_taken_for_there": ratio("worker_seconds"),
        "goodput_by_the_clock": ratio("seconds"),
        "workers_there": with_["worker_seconds"] / with_["seconds"] / workers,
        "workers_able": with_["able_seconds"] / with_["seconds"] / workers,
        "samples_a_worker_second": rates,  # turn by turn, without and with
        "driver_megabytes": memory,
        "last_checkpoint": last,
    }


def is_enough(found: dict[str, Any]) -> bool:
    """Return whether goodput reaches its bound, by both ways to count the workers."""
    ways = found["goodput"], found["goodput_of_workers_taken_for_there"]
    return bool(min(ways) >= GOODPUT)


def main() -> None:
    arguments = _arguments()
    if arguments.drive:
        drive(arguments.drive, arguments.workers, arguments.policy, arguments.folder)
        return
    quick = arguments.quick
    seconds = arguments.seconds or (10.0 if quick else 300.0)
    size = {"count": 2, "turns": 1} if quick else {"turns": arguments.turns}
    found = measure(
        seconds, 2.0 if quick else arguments.every, arguments.policy, calm=arguments.calm, **size
    )
    ok = quick or is_enough(found)  # a quick run is too short to judge
    finish("chaos_ray", found, {"goodput": GOODPUT}, ok, machine("ray", "torch"), arguments)


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, help="of training with faults")
    options.add_argument("--every", type=float, default=5.0, help="seconds between two faults")
    options.add_argument("--turns", type=int, default=5, help="in which that is done")
    options.add_argument("--calm", type=float, default=1.0, help="times as long without faults")
    options.add_argument("--policy", choices=sorted(POLICIES), default="rennala")
    options.add_argument("--drive", help=argparse.SUPPRESS)
    options.add_argument("--workers", type=int, help=argparse.SUPPRESS)
    options.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return options.parse_args()


if __name__ == "__main__":
    main()
