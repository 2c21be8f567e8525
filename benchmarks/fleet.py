"""Sixty-four real workers: the driver's CPU time per step, the workers' memory, and faults.

The learner is a quadratic function of 131,072 float64 values, a model of 1 MiB. Workers import
neither torch nor scipy, and computing takes almost no time, so the benchmark measures the engine.
`sync`, `k_sync(60)` and `rennala(64)` train on the same worker processes, with the model in the
driver and on eight servers.

For each step it measures the CPU time of the driver's main thread, which decides, sends the tasks,
checks the results and adds them up. The median is bounded, and split by activity; the rest is
deciding and writing the journal. It also measures the CPU time of the whole process, with Ray's
threads. It measures the time from the decision to step until the first and the last worker have
their next task. A loop of plain Python beside every step shows how much other load slowed the main
thread.

The full run spreads the workers over eight hosts (network namespaces with a Ray node each; needs
Linux and root). Then it trains for ten minutes with a fault every five seconds. A worker is killed,
stopped or made to raise, or a host leaves and comes back. Every run must use each sample once and
its journal must replay. At the end all workers must be connected again. `--quick` runs all workers
on one Ray node of this machine, without servers and faults.

    python benchmarks/fleet.py [--quick] [--seconds 600] [--every 5]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import paceline as pl
from _driver import Driver, exactly_once, resident, say, say_pids
from _report import Pace, finish, machine, parser, quantile, table
from paceline.core.protocol import Command, Step, Task, WorkerId
from paceline.data.partition.base import Partition
from paceline.engines.base import Job
from paceline.engines.ray.job import RayJob
from paceline.engines.ray.pool import Pool
from paceline.learners.arrays import ArrayReplica, ArrayServer, Quadratic
from paceline.learners.base import Array, Outcome, Proceed, Saved
from paceline.report.callbacks import Live
from paceline.testing import hosts
from paceline.testing.hosts import Hosts

WORKERS, HOSTS = 64, 8
VALUES = 2**17  # of 8 bytes: 1 MiB
CPU = 1.2  # of the driver's main thread, the median step, over the calibration loop
POLICIES = {"sync": pl.sync(), "k_sync": pl.k_sync(60), "rennala": pl.rennala(64)}
STEPS = 50  # of each calm run
WARM_UP = 5  # steps of each run that do not count
TIMEOUT, START_TIMEOUT = 30.0, 300.0  # seconds
KINDS = {"kill": 4, "stop": 3, "raise": 3, "host": 1}
HEAVY = ("torch", "scipy", "pandas")  # packages that no worker may import


# --- the learner ---------------------------------------------------------------------------------


class Raising(ArrayReplica):
    """Raises instead of computing a task if there is a file named after its process."""

    def __init__(self, problem: Bowl, seed: int, tiles: Partition | None) -> None:
        super().__init__(problem, seed, tiles)
        self._order = Path(problem.folder) / str(os.getpid())

    def compute(self, model: Iterable[Array], task: Task, proceed: Proceed) -> Outcome:
        if self._order.exists():
            self._order.unlink()
            raise RuntimeError("the benchmark has asked for this fault")
        return super().compute(model, task, proceed)


@dataclass(frozen=True)
class Bowl(Quadratic):
    """A quadratic function of many values, all with the same curvature."""

    size: int = VALUES
    folder: str = ""

    @property
    def message_bytes(self) -> int:
        return 8 * self.size

    def replica(self, seed: int, tiles: Partition | None = None) -> Raising:
        return Raising(self, seed, tiles)

    def server(self) -> ArrayServer:
        return ArrayServer(np.full(self.size, self.start), self.lr)


# --- one run, watched ----------------------------------------------------------------------------


class Watched(pl.Ray):
    """Records when a step is decided, when each worker gets its first task on each version, and
    the CPU time of the main thread by activity."""

    def open(self, job: Job, saved: Saved | None = None) -> None:
        self.decided: list[float] = []
        self.sent: dict[int, dict[WorkerId, float]] = {}
        self.spent: defaultdict[str, float] = defaultdict(float)
        began = time.perf_counter()
        super().open(job, saved)
        self.opened = time.perf_counter() - began

    def execute(self, node: WorkerId, command: Command) -> None:
        if isinstance(command, Step):
            self.decided.append(time.perf_counter())
        super().execute(node, command)

    def _make_job(self, job: Job, pool: Pool) -> RayJob:
        under_way = super()._make_job(job, pool)
        check = under_way._check
        check.fault = self._timed("checking", check.fault)  # type: ignore[method-assign]
        cancel = self._timed("cancelling", under_way._cancel)
        under_way._cancel = cancel  # type: ignore[method-assign]
        return under_way

    def _make_reducer(self, job: Job, pool: Pool, under_way: RayJob) -> Any:
        reducer = super()._make_reducer(job, pool, under_way)
        send = self._timed("sending", reducer.dispatch)

        def dispatch(member: Any, token: Any, task: Task, model: Any, again: bool = False) -> Any:
            reply = send(member, token, task, model, again)
            self.sent.setdefault(task.version, {}).setdefault(member.name, time.perf_counter())
            return reply

        reducer.dispatch = dispatch  # type: ignore[method-assign]
        reducer.step = self._timed("stepping", reducer.step)  # type: ignore[method-assign]
        return reducer

    def _timed(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any) -> Any:
            begin = time.thread_time()
            try:
                return method(*given)
            finally:
                self.spent[part] += time.thread_time() - begin

        return timed

    def processes(self) -> dict[str, int]:
        """Return the process ids of the connected workers on all hosts of this machine."""
        members = [] if self._pool is None else list(self._pool.members.values())
        return {m.name: m.place.pid for m in members if m.joined and m.place is not None}


class Costs(pl.Callback):
    """Measures the CPU times of every step, and of a loop of plain Python beside it."""

    def started(self, live: Live) -> None:
        self.main: list[float] = []
        self.process: list[float] = []
        self.wall: list[float] = []
        self.loop: list[float] = []
        self.pids: dict[str, int] = {}
        self._mark()

    def __init__(self, engine: Watched) -> None:
        self._engine = engine

    def _mark(self) -> None:
        self._last = time.thread_time(), time.process_time(), time.perf_counter()

    def stepped(self, progress: pl.Progress) -> None:
        now = time.thread_time(), time.process_time(), time.perf_counter()
        for values, begin, end in zip(
            (self.main, self.process, self.wall), self._last, now, strict=True
        ):
            values.append(1e3 * (end - begin))
        self.pids = self._engine.processes()
        begin = time.thread_time()
        total = 0
        for i in range(2000):
            total += i * i
        self.loop.append(1e3 * (time.thread_time() - begin))
        self._mark()


def train(
    engine: Watched, learner: Bowl, policy: str, servers: Any, least: int = WORKERS, **end: Any
) -> dict[str, Any]:
    """Train until the given end; return the costs."""
    engine.servers = servers
    costs = Costs(engine)
    run = pl.Trainer(
        learner, POLICIES[policy], engine, callbacks=[costs], progress=False, min_workers=least
    ).fit(**end)
    exactly_once(run)
    waits = [
        [1e3 * (pick(engine.sent[version].values()) - decided) for pick in (min, max)]
        for version, decided in enumerate(engine.decided, 1)
        if version > WARM_UP and version in engine.sent
    ]

    def middle(values: list[float], q: float = 0.5) -> float:
        return round(quantile(values, q), 2)

    counted = slice(WARM_UP, None) if run.steps > WARM_UP + 1 else slice(None)
    return {
        "policy": policy,
        "servers": servers,
        "steps": run.steps,
        "reason": run.reason,
        "joined": len(costs.pids),
        "main_cpu_ms": middle(costs.main[counted]),
        "main_cpu_ms_p90": middle(costs.main[counted], 0.9),
        "main_cpu_ms_of": {
            part: round(1e3 * seconds / run.steps, 2) for part, seconds in engine.spent.items()
        },
        "process_cpu_ms": middle(costs.process[counted]),
        "step_ms": middle(costs.wall[counted]),
        "first_assignment_ms": middle([first for first, _ in waits]) if waits else None,
        "last_assignment_ms": middle([last for _, last in waits]) if waits else None,
        "python_slowdown": round(statistics.median(costs.loop) / min(costs.loop), 2),
        "python_loop_ms": round(statistics.median(costs.loop), 3),
        "opened_seconds": round(engine.opened, 1),
        "workers_megabytes": memory(costs.pids.values()),
        "driver_megabytes": round(resident("VmRSS")),
        "driver_megabytes_private": round(resident("RssAnon")),
    }


def memory(pids: Iterable[int]) -> dict[str, Any]:
    """Return the mean megabytes of the workers, and the large packages that any of them loaded."""
    found: dict[str, list[float]] = {"Rss": [], "Pss": [], "Private": []}
    loaded: set[str] = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            maps = Path(f"/proc/{pid}/maps").read_text()
            for name, values in found.items():
                sizes = [line.split() for line in text.splitlines() if line.startswith(name)]
                taken = [each for each in sizes if name == "Private" or each[0] == f"{name}:"]
                values.append(sum(int(each[1]) for each in taken) / 1024)
            loaded |= {package for package in HEAVY if f"/{package}/" in maps}
    return {
        "processes": len(found["Rss"]),
        **{name.lower(): round(statistics.fmean(each)) for name, each in found.items() if each},
        "loaded": sorted(loaded),
    }


# --- faults --------------------------------------------------------------------------------------


class Faults:
    """Injects faults into workers and hosts, and ends them."""

    def __init__(self, place: Hosts, folder: Path, seed: int = 0) -> None:
        self._hosts, self._folder, self._rng = place, folder, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.pids: dict[str, int] = {}
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._away = False  # whether a host is away or coming back
        self._starting: tuple[int, subprocess.Popen[Any]] | None = None

    def strike(self) -> None:
        """Inject a random fault."""
        kinds = {kind: n for kind, n in KINDS.items() if kind != "host" or not self._away}
        kind = self._rng.choices(list(kinds), list(kinds.values()))[0]
        if kind != "host" and not self.pids:
            return
        self.counts[kind] += 1
        seconds = self._rng.uniform(1.0, 2 * TIMEOUT)
        if kind == "host":
            host = self._rng.randrange(1, self._hosts.count)  # the driver is on host 0
            self._away = True
            self._hosts.kill(host)
            self._after(seconds, partial(self._start, host))
            return
        pid = self._rng.choice(sorted(self.pids.values()))
        if kind == "raise":
            (self._folder / str(pid)).touch()
            return
        _signal(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        if kind == "stop":
            self._after(seconds, partial(_signal, pid, signal.SIGCONT))

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + seconds, action))

    def _start(self, host: int) -> None:
        self._starting = host, self._hosts.start_node(host)

    def heal(self) -> None:
        """End all faults, including requested ones."""
        self._due = [(0.0, action) for _, action in self._due]
        for order in self._folder.glob("[0-9]*"):
            order.unlink(missing_ok=True)

    def tend(self) -> None:
        """End the faults that are due; restart a node that Ray gave up after 30 s."""
        for each in [each for each in self._due if each[0] <= time.monotonic()]:
            self._due.remove(each)
            each[1]()
        if self._starting is None or (code := self._starting[1].poll()) is None:
            return
        if code == 0:
            self._starting, self._away = None, False
        else:
            self.counts["node given up by Ray"] += 1
            host = self._starting[0]
            self._hosts.kill(host)
            self._start(host)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


# --- on hosts ------------------------------------------------------------------------------------


def drive(address: str, folder: Path) -> None:
    """Train once for each line of JSON on standard input."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    learner = Bowl(batch_size=4 * WORKERS, folder=str(folder))
    engine = Watched(
        WORKERS, address=address, cpus=0.12, timeout=TIMEOUT, start_timeout=START_TIMEOUT,
        respawns=10**6,
    )  # fmt: skip
    ended = threading.Event()
    threading.Thread(target=say_pids, args=(engine, ended, 0.5), daemon=True).start()
    with engine:
        for line in sys.stdin:
            say(done=train(engine, learner, **json.loads(line)))
    ended.set()


def turn(driver: Driver, faults: Faults, every: float | None, limit: float, **order: Any) -> Any:
    """Let the driver train, with a fault every `every` seconds; return its answer."""
    if every is None:
        faults.heal()
    driver.order(**order)
    begun = time.monotonic()
    strike = begun + (every or 0.0)
    while time.monotonic() < begun + limit:
        said = driver.heard(0.2)
        faults.pids = said.get("pids", faults.pids)
        if "done" in said:
            return said
        if every is not None and time.monotonic() >= strike:
            strike += every
            faults.strike()
        faults.tend()
    raise RuntimeError(f"no end of {order} after {limit:g} s")


def on_hosts(steps: int, seconds: float, every: float, kinds: Sequence[str]) -> dict[str, Any]:
    """Train on eight hosts, first without faults and then with faults."""
    if reason := hosts.missing():
        raise RuntimeError(f"{reason}; --quick needs no hosts")
    rows, faulty = [], []
    with contextlib.ExitStack() as leave:
        folder = Path(tempfile.mkdtemp(prefix="fleet"))
        leave.callback(shutil.rmtree, folder, ignore_errors=True)
        place = leave.enter_context(Hosts(HOSTS, delay=0.0005, rate=1e9))
        # A node starts as many workers at once as it has CPUs, so each node has one CPU. If all
        # sixty-four started at once, they would compete for cores until Ray gives them up.
        address = place.start_ray(cpus=1, object_store=200_000_000, timeout=240.0)
        driver = Driver(place, __file__, ["--drive", address, "--folder", str(folder)], folder)
        faults = Faults(place, folder)
        for servers in kinds:
            for policy in POLICIES:
                order = {"policy": policy, "servers": servers, "steps": steps}
                said = turn(driver, faults, None, 600.0 + 5.0 * steps, **order)
                rows.append(said["done"])
                show(said["done"])
        figures: dict[str, Any] = {"runs": rows}
        each = seconds / (len(kinds) * len(POLICIES))
        for servers in kinds:
            for policy in POLICIES:
                order = {"policy": policy, "servers": servers, "seconds": each, "least": 1}
                said = turn(driver, faults, every, 3 * each + START_TIMEOUT, **order)
                faulty.append(said["done"])
                show(said["done"])
        order = {"policy": "sync", "servers": "driver", "steps": WARM_UP + 1}
        last = turn(driver, faults, None, 2 * START_TIMEOUT, **order)["done"]
        show(last)
        losses = driver.losses()
    table(["fault", "times"], [[name, str(n)] for name, n in faults.counts.most_common()])
    table(["worker lost", "times"], [[name, str(n)] for name, n in losses.most_common()])
    return figures | {
        "hosts": HOSTS,
        "faulty_runs": faulty,
        "faults": dict(faults.counts),
        "workers_lost": losses.total(),
        "joined_in_the_end": last["joined"],
    }


# --- on this machine alone -----------------------------------------------------------------------


def here(steps: int) -> dict[str, Any]:
    """Train on one node of this machine."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="fleet") as folder:
        learner = Bowl(batch_size=4 * WORKERS, folder=folder)
        with Watched(WORKERS, timeout=TIMEOUT, start_timeout=START_TIMEOUT) as engine:
            for policy in POLICIES:
                rows.append(train(engine, learner, policy, "driver", steps=steps))
                show(rows[-1])
    return {"runs": rows, "hosts": None}


# --- both ----------------------------------------------------------------------------------------


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['policy']:8}{row['servers']!s:>8}: {row['steps']:4} steps of {row['step_ms']:.0f} "
        f"ms; the driver's main thread {row['main_cpu_ms']:.1f} ms of CPU (p90 "
        f"{row['main_cpu_ms_p90']:.1f}; {row['main_cpu_ms_of']}), its process "
        f"{row['process_cpu_ms']:.1f}; first task after "
        f"{row['first_assignment_ms']} ms, last after {row['last_assignment_ms']}; Python "
        f"{row['python_slowdown']} times slower than at its best; {row['joined']} workers after "
        f"{row['opened_seconds']} s; megabytes: {row['workers_megabytes']}, driver "
        f"{row['driver_megabytes']}",
        flush=True,
    )


@contextlib.contextmanager
def compiled() -> Iterator[bool]:
    """Compile modules once, if Python has no bytecode cache; yield whether it was needed.

    Compiling Ray's 900 modules takes 2 s of CPU, twice as long as importing them. Otherwise each
    of the sixty-four processes would repeat it.
    """
    source = importlib.util.find_spec("ray")
    assert source is not None and source.origin is not None
    if Path(importlib.util.cache_from_source(source.origin)).exists():
        yield False
        return
    with tempfile.TemporaryDirectory(prefix="fleet") as folder:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = folder
        command = [sys.executable, "-c", "import paceline.engines.ray.engine"]
        subprocess.run(command, check=True, timeout=120)
        yield True


def stolen() -> tuple[int, int]:
    """Return the stolen time (used by other virtual machines) and the total time, in ticks."""
    times = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return times[7], sum(times)


def is_good(figures: dict[str, Any], loop: float) -> bool:
    """Return whether all bounds hold; loop: the CPU seconds of the calibration loop."""
    return (
        all(row["joined"] == WORKERS for row in figures["runs"])
        and all(row["reason"] == f"{row['steps']} steps taken" for row in figures["runs"])
        and all(row["steps"] >= STEPS for row in figures["runs"])
        and all("seconds" in row["reason"] for row in figures.get("faulty_runs", []))
        and all(row["main_cpu_ms"] <= 1e3 * CPU * loop for row in figures["runs"])
        and all(row["workers_megabytes"]["processes"] == WORKERS for row in figures["runs"])
        and not any(row["workers_megabytes"]["loaded"] for row in figures["runs"])
        and figures.get("joined_in_the_end", WORKERS) == WORKERS
    )


def main() -> None:
    options = parser(__doc__, 100)
    options.add_argument("--seconds", type=float, default=600.0, help="of training with faults")
    options.add_argument("--every", type=float, default=5.0, help="seconds between two faults")
    options.add_argument("--steps", type=int, help="of each calm run")
    kinds = ["driver", "spread"]
    options.add_argument("--servers", nargs="+", choices=kinds, default=kinds, help="on hosts")
    options.add_argument("--drive", help=argparse.SUPPRESS)
    options.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.drive:
        drive(given.drive, given.folder)
        return
    if "OMP_NUM_THREADS" not in os.environ:
        # OpenBLAS splits a product of so many float64 among threads, which wait for each other on
        # a busy machine: 59 instead of 15 ms to check 64 results. It does not split float32.
        os.environ["OMP_NUM_THREADS"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    began, before, pace = time.monotonic(), stolen(), Pace()
    with compiled() as anew:
        if given.quick:
            figures = here(given.steps or STEPS)
        else:
            figures = on_hosts(given.steps or STEPS, given.seconds, given.every, given.servers)
    after = stolen()
    for _ in range(10):  # the runs are in processes of their own, so looks cannot be in between
        pace.look()
    figures["calibration_loop_ms"] = round(1e3 * pace.seconds(), 2)
    about = machine("ray", "numpy") | {
        "load": os.getloadavg()[1],
        "stolen": round((after[0] - before[0]) / (after[1] - before[1]), 3),
        "compiled_anew": anew,
        "seconds": round(time.monotonic() - began),
    }
    bounds = {"main_cpu_over_loop": CPU, "joined": WORKERS}
    finish("fleet", figures, bounds, is_good(figures, pace.seconds()), about, given)


if __name__ == "__main__":
    main()
