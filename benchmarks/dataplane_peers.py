"""Seconds per step beside DistributedDataParallel, on four hosts with slow links.

Hosts are network namespaces on this machine (`paceline.testing.hosts`): 100 Mbit/s, 20 ms round
trips, 1.2 cores for the four training processes together. A CNN of 1.9 MB on Fashion-MNIST, 512
samples a step, momentum. Each arm has its processes running all the time, and trains when it is its
turn, a block of steps at a time. Four conditions:

- calm: equal hosts;
- speeds: the training processes have cores as 1 : 1 : 2 : 4;
- stalls: every 10 s, all processes of a random host other than the driver's stop for 2 s;
- slow link: the link of one host has a tenth of its rate.

The seconds of a step of `k_sync` and `local_sgd` are for 512 samples too. `--cores 1` gives each
training process a core, on two hosts. `--batch 1024` doubles the backward pass, during which
gradients are sent, to about half a second. `--profile` tells where the time of a step goes.

Servers of the model, Ray and the driver are outside of the limits; DDP takes its steps inside.
`--limit-servers` counts the servers too.

    python benchmarks/dataplane_peers.py [--quick] [--cores 1] [--profile] [--only ARM,ARM]
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import paceline as pl
from _bench_hosts import Testbed
from _driver import Driver, say
from _fashion import images, pixel_loss, small_cnn
from _report import OtherLoad, finish, machine, parser, table
from paceline.data.sampling import Stream
from paceline.ddp import ProportionalSampler
from paceline.testing import groups
from paceline.testing.hosts import missing

CORES = 1.2  # of the four training processes together
BATCH, LOCAL = 512, 10  # samples a step; local steps of a round
WARM_UP = 3  # steps of a block that do not count
SPEEDS = {"speeds": (1, 1, 2, 4)}
BOUNDS = {"calm": 1.05, "speeds": 1.05, "stalls": 0.8, "slow link": 0.5}

# The arms of each condition; the first is the rival of the bound.
ARMS = {
    "calm": ["ddp", "sync", "k_sync(3)", "local_sgd"],
    "speeds": ["ddp + shares", "ddp", "sync", "sync + shares", "local_sgd + shares"],
    "stalls": ["ddp", "sync", "k_sync(3)", "rennala", "local_sgd"],
    "slow link": ["ddp", "sync", "k_sync(3)", "local_sgd"],
}
# The arms to which a bound applies: the fastest of them counts.
OURS = {
    "calm": ["sync"],
    "speeds": ["sync + shares"],
    "stalls": ["k_sync(3)", "rennala", "local_sgd"],
    "slow link": ["k_sync(3)", "local_sgd"],
}


SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)


# --- a rank of DistributedDataParallel -----------------------------------------------------------


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Fashion-MNIST, a batch at a time."""

    def __init__(self) -> None:
        self.tensors = images().tensors

    def __len__(self) -> int:
        return len(self.tensors[1])

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        return tuple(each[indices] for each in self.tensors)


class Rank:
    """Trains when it is asked to; waits for orders on its standard input."""

    def __init__(self, rank: int, size: int, address: str, batch: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
        self._data, self._rank, self._size, self._batch = Images(), rank, size, batch
        self._model = DistributedDataParallel(small_cnn())
        self._optimizer = SGD(self._model.parameters())
        self._arms = {"ddp": self._equal(), "ddp + shares": self._by_speed()}

    def _equal(self) -> Iterator[None]:
        """Train as the tutorials do, a step at a time."""
        stream, share, step = Stream(len(self._data), 0), self._batch // self._size, 0
        while True:
            chosen = stream.indices(step * self._batch + self._rank * share, share)
            self._step(self._data.__getitems__(list(map(int, chosen))), lambda loss: loss)
            step += 1
            yield

    def _by_speed(self) -> Iterator[None]:
        sampler = ProportionalSampler(self._data, self._batch, drop_last=True)
        loader = DataLoader(self._data, batch_sampler=sampler, collate_fn=lambda batch: batch)
        for epoch in range(1000):
            sampler.set_epoch(epoch)
            for batch in sampler.measured(loader):
                self._step(batch, sampler.scale)
                yield

    def _step(self, batch: Any, scaled: Callable[[Tensor], Tensor]) -> None:
        loss = pixel_loss(self._model, batch)
        self._optimizer.zero_grad()
        scaled(loss).backward()
        self._optimizer.step()

    def serve(self) -> None:
        say(pid=os.getpid())
        for line in sys.stdin:
            order = json.loads(line)
            steps = self._arms[order["arm"]]
            dist.barrier()
            for _ in range(WARM_UP):
                next(steps)
            say(begun=True)
            begin = time.monotonic()
            for _ in range(order["steps"]):
                next(steps)
            say(seconds=time.monotonic() - begin)


# --- the driver of Paceline ----------------------------------------------------------------------


class Begun(pl.Callback):
    """Reports when the steps begin that count."""

    def stepped(self, progress: pl.Progress) -> None:
        if progress.step == WARM_UP:
            say(begun=True)


def learner(arm: str, batch: int) -> pl.TorchLearner:
    local = "local_sgd" in arm
    outer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    pieces = "k_sync" in arm or "rennala" in arm
    return pl.TorchLearner(
        small_cnn(),
        pixel_loss,
        SGD,
        images,
        batch_size=batch,
        micro_batch=32 if pieces else None,
        outer=outer if local else None,
    )


def policy(arm: str, hosts: int, batch: int) -> Any:
    if "local_sgd" in arm:
        return pl.local_sgd(LOCAL)
    if "k_sync" in arm:
        return pl.k_sync(hosts - 1)
    return pl.rennala(batch // 32) if arm == "rennala" else pl.sync()


def drive(address: str, batch: int) -> None:
    import ray

    torch.set_num_threads(1)
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    hosts = len(ray.nodes())
    with pl.Ray(hosts, cpus=1, timeout=120, respawns=50) as engine:
        for line in sys.stdin:
            order = json.loads(line)
            arm, unit = order["arm"], LOCAL if "local_sgd" in order["arm"] else 1
            trainer = pl.Trainer(
                learner(arm, batch),
                policy(arm, hosts, batch),
                engine,
                progress=False,
                placement=pl.BySpeed() if "shares" in arm else None,
                callbacks=[Begun()],
            )
            if arm == "start":
                trainer.fit(steps=1)
                members = engine._pool.members.values()  # type: ignore[union-attr]
                places = [m.place for m in members if m.place is not None]
                say(pids=[place.pid for place in places])
                continue
            run = trainer.fit(steps=WARM_UP + order["steps"] // unit)
            times = [float(s) for s in run.metrics["seconds"]]
            told: dict[str, Any] = {"seconds": times[-1] - times[WARM_UP - 1]}
            if order["journal"]:
                told["parts"] = parts_of(run)
            say(**told)


def parts_of(run: pl.Run) -> dict[str, float]:
    """Return where the time of a step goes, from the journal of a run: medians over its steps."""
    starts: dict[int, float] = {}
    found: dict[str, list[float]] = defaultdict(list)
    ends: list[float] = []
    last = 0.0
    for entry in run.journal:
        event, at = entry.event, entry.now
        for command in entry.commands:
            if isinstance(command, pl.protocol.Start):
                starts[command.task.id] = at
        if isinstance(event, pl.protocol.Finished) and event.task in starts:
            found["computing"].append(event.seconds)
            found["the task and its model out, the answer back"].append(
                at - starts[event.task] - event.seconds
            )
            last = at
        elif isinstance(event, pl.protocol.Stepped):
            found["from the last answer to the report of the step"].append(at - last)
            ends.append(at)
    found["whole step"] = [b - a for a, b in pairwise(ends)]
    return {name: round(statistics.median(values[WARM_UP:]), 4) for name, values in found.items()}


# --- outside -------------------------------------------------------------------------------------


class Bench:
    """All arms on the same hosts, one at a time."""

    def __init__(
        self, count: int, cores: float, batch: int, stack: ExitStack, limit_servers: bool = False
    ) -> None:
        self._limit_servers = limit_servers
        self.count, self._bed = count, Testbed(count, cores, stack)
        self.hosts = self._bed.hosts
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        here, script = str(Path(__file__)), partial(Driver, self.hosts)
        address = self.hosts.start_ray(cpus=1)
        (folder / "ray").mkdir()
        self._driver = script(here, ["--drive", json.dumps([address, batch])], folder / "ray")
        meeting = f"tcp://{self.hosts.ip(0)}:29778"
        self._ranks = []
        for rank in range(count):
            (folder / str(rank)).mkdir()
            plan = json.dumps([rank, count, meeting, batch])
            self._ranks.append(script(here, ["--rank", plan], folder / str(rank), host=rank))
        self._driver.order(arm="start", steps=1, journal=False)
        for rank, process in enumerate(self._ranks):
            self._bed.limit(rank, process.heard(120)["pid"])
        for host, pid in self._by_host(self._driver.heard(120)["pids"]):
            self._bed.limit(host, pid)

    def _by_host(self, pids: Sequence[int]) -> list[tuple[int, int]]:
        where = {pid: host for host in range(self.count) for pid in self.hosts.pids(host)}
        return [(where[pid], pid) for pid in pids]

    def condition(self, name: str) -> None:
        """Set cores and links; stalls come with each block."""
        self._bed.speeds(SPEEDS.get(name, ()))
        self._bed.links(slow=name == "slow link")

    def block(self, arm: str, steps: int, seed: int | None, profile: bool = False) -> Any:
        """Train some steps; return the answer of the arm. seed: of the stalls, if there are any."""
        ours = not arm.startswith("ddp")
        asked = [self._driver] if ours else self._ranks
        for process in asked:
            process.order(arm=arm, steps=steps, journal=profile)
        for process in asked:
            assert process.heard(180)["begun"]
        if self._limit_servers:
            self._bed.limit_all("ray::Server")
        before = self._usage()
        with nullcontext() if seed is None else self._bed.stalls(seed):
            answers = [process.heard(600) for process in asked]
        if profile:
            answers[0]["usage"] = self._used(before, steps)
        return answers[0]

    def _usage(self) -> dict[tuple[int, str], float]:
        """Return the CPU seconds so far by host and kind of process, and of the processes that
        train and serve, by thread."""
        found: dict[tuple[int, str], float] = defaultdict(float)
        for host in range(self.count):
            for pid in self.hosts.pids(host):
                with suppress(OSError):
                    name = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                    kind = kind_of(name)
                    found[host, kind] += seconds_of(Path(f"/proc/{pid}/stat"))
                    for thread in Path(f"/proc/{pid}/task").iterdir() if kind in THREADS else ():
                        own = "main" if thread.name == str(pid) else thread_of(thread)
                        found[host, f"{kind}, {own}"] += seconds_of(thread / "stat")
        return found

    def _used(self, before: dict[tuple[int, str], float], steps: int) -> dict[str, list[float]]:
        after = self._usage()
        kinds = sorted({kind for _, kind in after})
        used = {
            kind: [
                round(1e3 * (after[host, kind] - before[host, kind]) / steps, 1)
                for host in range(self.count)
            ]
            for kind in kinds
        }
        return {kind: values for kind, values in used.items() if max(values) >= 0.5}


def seconds_of(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def thread_of(thread: Path) -> str:
    name = (thread / "comm").read_text().strip()
    python = name.startswith(("ray::", "python"))
    return name if name == "transport" else "computing" if python else "other threads"


THREADS = ("ray::Worker", "ray::Server", "rank")


def kind_of(command: str) -> str:
    for kind in ("ray::Worker", "ray::Server", "ray::Carrier", "raylet", "gcs_server"):
        if kind in command.split(" ")[0]:
            return kind
    return "driver" if "--drive" in command else "rank" if "--rank" in command else "Ray's agents"


def measure(
    bench: Bench, conditions: Sequence[str], repeats: int, steps: int, only: list[str]
) -> Any:
    """Return the seconds per step of each block, by condition and arm."""
    found: dict[str, dict[str, list[float]]] = {}
    for name in conditions:
        bench.condition(name)
        arms = [arm for arm in ARMS[name] if not only or arm in only]
        found[name] = {arm: [] for arm in arms}
        for repeat in range(repeats):
            for arm in arms:
                seed = repeat if name == "stalls" else None
                count = 3 * steps if name == "stalls" else steps
                seconds = bench.block(arm, count, seed)["seconds"] / count
                found[name][arm].append(seconds)
                print(f"{name}, {arm}: {seconds:.3f}", flush=True)
    return found


def report(found: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    rows, figures = [], {}
    for name, arms in found.items():
        rival = next(iter(arms))
        ratios = {
            arm: [a / b for a, b in zip(times, arms[rival], strict=True)]
            for arm, times in arms.items()
        }
        for arm, times in arms.items():
            rows.append(
                [
                    f"{name}, {arm}",
                    f"{statistics.median(times):.2f} [{min(times):.2f}–{max(times):.2f}]",
                    f"{statistics.median(ratios[arm]):.2f} "
                    f"[{min(ratios[arm]):.2f}–{max(ratios[arm]):.2f}]",
                ]
            )
        ours = [arm for arm in OURS[name] if arm in arms]
        best = min((statistics.median(ratios[arm]) for arm in ours), default=math.inf)
        figures[name] = {
            "seconds": {arm: round(statistics.median(times), 3) for arm, times in arms.items()},
            "ratio": round(best, 3),
        }
    table(["", "seconds a step, median [range]", "to the first"], rows)
    return figures


def profile(bench: Bench, steps: int, only: list[str]) -> None:
    """Print where the time goes, for the arms of a calm block and one with stalls."""
    for name in ("calm", "stalls"):
        bench.condition(name)
        for arm in only or ["ddp", "sync", "k_sync(3)"]:
            seed = 0 if name == "stalls" else None
            answer = bench.block(arm, steps, seed, profile=True)
            print(f"\n{name}, {arm}: {answer['seconds'] / steps:.3f} s a step")
            for part, seconds in answer.get("parts", {}).items():
                print(f"  {part}: {seconds:.3f} s")
            for kind, values in answer["usage"].items():
                print(f"  CPU of {kind}, ms a step by host: {values}", flush=True)


def main() -> None:
    arguments = parser(__doc__, seconds=200)
    arguments.add_argument("--cores", type=float, help="of each training process, on two hosts")
    inside = "let the servers of the model share the cores of the training processes"
    arguments.add_argument("--limit-servers", action="store_true", help=inside)
    arguments.add_argument("--batch", type=int, default=BATCH, help="samples a step")
    arguments.add_argument("--profile", action="store_true", help="where the time of a step goes")
    arguments.add_argument("--only", default="", help="these arms alone, by comma")
    arguments.add_argument("--conditions", default="", help="these conditions alone, by comma")
    arguments.add_argument("--repeats", type=int, help="blocks of each arm")
    arguments.add_argument("--rank", help="for the benchmark itself, on a host")
    arguments.add_argument("--drive", help="for the benchmark itself, on host 0")
    given = arguments.parse_args()
    if given.rank:
        Rank(*json.loads(given.rank)).serve()
        return
    if given.drive:
        drive(*json.loads(given.drive))
        return
    about = machine("torch", "ray", "numpy")
    if reason := missing() or groups.missing():
        finish("dataplane, peers", {"not_run": reason}, BOUNDS, False, about, given)
    only = [arm for arm in given.only.split(",") if arm]
    conditions = [name for name in given.conditions.split(",") if name]
    load = OtherLoad()
    with ExitStack() as stack:
        count = 2 if given.cores else 4
        cores = count * given.cores if given.cores else CORES
        bench = Bench(count, cores, given.batch, stack, given.limit_servers)
        if given.profile:
            profile(bench, 10, only)
            return
        if given.cores or given.quick:
            conditions = conditions or ["calm"]
        repeats = given.repeats or (1 if given.quick else 3)
        found = measure(bench, conditions or list(ARMS), repeats, 10, only)
    figures = report(found)
    about["others"] = load.cores()
    ok = all(figures[name]["ratio"] <= BOUNDS[name] for name in figures)
    finish("dataplane, peers", figures, BOUNDS, ok, about, given)


if __name__ == "__main__":
    main()
