"""Seconds to the same test accuracy over a slow network, by what is sent and how often.

Four hosts on this machine (network namespaces, `paceline.testing.hosts`), each behind a link of
20 Mbit/s, with 20 ms round trips. Each host has one Ray node and one worker. An MLP of 1.06 MB
on Fashion-MNIST, batches of 4 x 128. All arms run on the same hosts and take turns, seed by seed.

The simulator first finds the number of steps that a method needs: it trains until the test
accuracy reaches the target. It computes the same bits as the hosts, except for int8 in the slices
of several servers. Then the same number of steps is timed on the hosts. The model is not tested
during these steps, since that would cost network time; it is tested afterwards. In a decentralized
run on the hosts, messages arrive late, so more steps are needed. Runs get half as long again until
one reaches the target. DistributedDataParallel is tested after each step, with the clock stopped.

Learning rates are the best of a grid for each method, `--tune`. Needs root, `ip`, a C compiler.

    python benchmarks/messages.py --only network [--quick]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from _fashion import accuracy, loss, vectors
from _report import finish, machine, parser, table
from messages_star import NESTEROV
from paceline.codecs.base import Codec
from paceline.core.policy import Policy
from paceline.data.sampling import Stream
from paceline.testing.hosts import Hosts, missing

HOSTS, RATE, DELAY, QUEUE = 4, 20e6, 0.005, 256 << 10
HIDDEN, BATCH = 334, 512  # 1.06 MB: just enough that servers are spread by default
TARGET, QUICK_TARGET = 84.0, 80.0
MOST = 300  # steps
BOUNDS = {"top_k_to_ddp": 0.5, "diloco_to_ddp": 0.25, "points": 0.5}


@dataclass(frozen=True)
class Arm:
    """The settings of a run; policy=None: DistributedDataParallel."""

    lr: float
    momentum: float = 0.0
    policy: Policy | None = field(default_factory=pl.sync)
    codec: Codec | None = None
    model_codec: Codec | None = None
    outer: Any = None
    servers: Any = None
    rank: int | None = None  # of PowerSGD
    once: bool = False  # only for the first seed, since it takes minutes


FEW = pl.codecs.Feedback(pl.codecs.Chain(pl.codecs.TopK(0.01), pl.codecs.Int8()))
NEWS = pl.gossip.Gossip(
    pl.gossip.ring(HOSTS), pl.gossip.Difference(0.5), pl.gossip.OnChange(0.1, every=50)
)
ARMS = {
    "DDP": Arm(0.1, 0.9, None),
    "DDP, PowerSGD rank 4": Arm(0.05, 0.9, None, rank=4),
    "sync, one server": Arm(0.1, 0.9, servers="driver", once=True),
    "sync": Arm(0.1, 0.9),
    # A step changes at most 4 x 1 % of the values, so 5 % down omit nothing. Momentum would change
    # all values.
    "top 1 % + int8 up, 5 % down": Arm(0.4, codec=FEW, model_codec=pl.codecs.TopK(0.05)),
    "DGC 1 % up, 5 % down": Arm(
        0.2, codec=pl.codecs.DeepGradient(0.01), model_codec=pl.codecs.TopK(0.05)
    ),
    "gossip, top 10 % + int8": Arm(
        0.1, 0.9, NEWS, pl.codecs.Chain(pl.codecs.TopK(0.1), pl.codecs.Int8())
    ),
    "DiLoCo, 20 local steps": Arm(0.05, 0.9, pl.local_sgd(20), outer=NESTEROV),
    # The slices of results are then below 100 KB, and Ray sends them through the driver's host.
    "DiLoCo, int8 up": Arm(0.05, 0.9, pl.local_sgd(20), pl.codecs.Int8(), outer=NESTEROV),
    "DiLoCo, int8 up and down": Arm(
        0.05, 0.9, pl.local_sgd(20), pl.codecs.Int8(), pl.codecs.Int8(), NESTEROV
    ),
}
QUICK = ("DDP", "top 1 % + int8 up, 5 % down", "DiLoCo, 20 local steps")
GRID = (0.025, 0.05, 0.1, 0.2, 0.4, 0.8)


def data(test: bool) -> TensorDataset:
    return vectors(test, mean=0.286, deviation=0.353)  # those of the training images


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(784, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))


def make_learner(arm: Arm, seed: int) -> pl.TorchLearner:
    sgd = partial(torch.optim.SGD, lr=arm.lr, momentum=arm.momentum)
    opened = partial(data, False)  # by each worker, so that it is not sent
    return pl.TorchLearner(make_model(seed), loss, sgd, opened, BATCH, outer=arm.outer)


def trainer(arm: Arm, engine: Any, seed: int, *callbacks: pl.Callback) -> pl.Trainer:
    assert arm.policy is not None
    return pl.Trainer(
        make_learner(arm, seed), arm.policy, engine, seed=seed, progress=False,
        callbacks=callbacks, codec=arm.codec, model_codec=arm.model_codec,
    )  # fmt: skip


@cache
def rehearse(name: str, seed: int, target: float, hosts: int, lr: float | None = None) -> int:
    """Return the number of steps to the target; 0 if it is not reached."""
    arm = ARMS[name] if lr is None else replace(ARMS[name], lr=lr)
    reached: list[int] = []

    def until(progress: pl.Progress) -> bool:
        if accuracy(progress.model(), data(True)) >= target:
            reached.append(progress.step)
        return bool(reached)

    works = () if arm.policy is None else arm.policy.works()
    most = MOST // max((work.steps for work in works), default=1)
    trainer(arm, pl.Simulator(hosts), seed).fit(steps=most, until=until)
    return reached[0] if reached else 0


# --- on host 0 -----------------------------------------------------------------------------------


class Rank:
    """One process of DistributedDataParallel."""

    def __init__(self, address: str, rank: int, size: int) -> None:
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
        self._dist, self._rank, self._size = dist, rank, size

    def set_up(self, name: str, seed: int) -> None:
        """Build the model and the optimizer, which sends messages."""
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
        from torch.nn.parallel import DistributedDataParallel

        arm = ARMS[name]
        self._model = model = DistributedDataParallel(make_model(seed))
        if arm.rank is not None:
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=arm.rank, start_powerSGD_iter=2
            )
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        self._sgd = torch.optim.SGD(model.parameters(), lr=arm.lr, momentum=arm.momentum)
        self._stream = Stream(len(data(False)), seed)

    def train(self, target: float, most: int) -> dict[str, float]:
        """Train on the samples that `sync` would use; return seconds, steps and accuracy."""
        model, sgd, seconds, share = self._model, self._sgd, 0.0, BATCH // self._size
        for step in range(1, most + 1):
            self._dist.barrier()
            begin = time.perf_counter()
            start = (step - 1) * BATCH + self._rank * share
            batch = data(False)[self._stream.indices(start, share)]
            sgd.zero_grad()
            loss(model, batch).backward()
            sgd.step()
            seconds += time.perf_counter() - begin
            good = torch.zeros(1)
            if self._rank == 0:
                good += accuracy(model.module, data(True)) >= target
            self._dist.broadcast(good, 0)
            if good:
                break
        else:
            seconds = float("inf")
        return {"seconds": seconds, "steps": step, "all": accuracy(model.module, data(True))}


def start_ranks() -> list[Any]:
    """Start a rank on every node."""
    nodes = sorted(ray.nodes(), key=lambda node: node["NodeManagerAddress"])
    address = f"tcp://{nodes[0]['NodeManagerAddress']}:29777"
    actor = ray.remote(num_cpus=0)(Rank)
    place = partial(NodeAffinitySchedulingStrategy, soft=False)
    return [
        actor.options(scheduling_strategy=place(node["NodeID"])).remote(address, i, len(nodes))
        for i, node in enumerate(nodes)
    ]


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def mark() -> None:
    """Request a count of the bytes that were carried so far."""
    tell(mark=True)
    input()


class Marks(pl.Callback):
    """Requests byte counts at the first and the last step, which excludes setting up."""

    def __init__(self, last: int) -> None:
        self._at = (1, last)

    def stepped(self, progress: pl.Progress) -> None:
        for _ in range(self._at.count(progress.step)):  # a single step counts 0 bytes
            mark()


def drive(address: str, names: list[str], seeds: list[int], target: float) -> None:
    """Measure on the hosts, and print each run."""
    torch.set_num_threads(1)
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    hosts = len(ray.nodes())
    ranks = start_ranks()
    with pl.Ray(hosts, cpus=1, timeout=300) as engine:
        for name in ("sync", names[-1]):  # a warm-up: opens connections
            trainer(ARMS[name], engine, 0).fit(steps=1)
        for turn, seed in enumerate(seeds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                arm = ARMS[name]
                if arm.once and turn:
                    continue
                if arm.policy is None:
                    ray.get([rank.set_up.remote(name, seed) for rank in ranks], timeout=300)
                    mark()
                    calls = [rank.train.remote(target, MOST) for rank in ranks]
                    found = ray.get(calls, timeout=900)
                    mark()
                    seconds = max(one["seconds"] for one in found)
                    tell(arm=name, **{**found[0], "seconds": seconds}, counted=found[0]["steps"])
                    continue
                steps = rehearse(name, seed, target, hosts)
                if not steps:
                    tell(arm=name, seconds=float("inf"), steps=MOST, all=float("nan"), counted=0)
                    continue
                engine.servers = arm.servers
                run = trainer(arm, engine, seed, Marks(steps)).fit(steps=steps)
                right = accuracy(run.model, data(True))
                while isinstance(arm.policy, pl.gossip.Gossip) and right < target and steps < MOST:
                    steps = min(3 * steps // 2, MOST)  # messages arrive late on the hosts
                    run = trainer(arm, engine, seed, Marks(steps)).fit(steps=steps)
                    right = accuracy(run.model, data(True))
                tell(arm=name, seconds=run.seconds, steps=steps, all=right, counted=steps - 1)


# --- outside -------------------------------------------------------------------------------------


def measure(quick: bool) -> dict[str, Any]:
    """Run the driver on host 0; print each run as it ends, and return all figures."""
    names = list(QUICK if quick else ARMS)
    target, seeds = (QUICK_TARGET, [0]) if quick else (TARGET, [0, 1, 2])
    runs: dict[str, list[dict[str, float]]] = defaultdict(list)
    carried: list[list[int]] = []
    here, package = Path(__file__), Path(pl.__file__)
    paths = [str(package.parents[1]), str(here.parent), os.environ.get("PYTHONPATH", "")]
    env = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}  # this tree on every host
    load = os.getloadavg()[0]  # before the start, so without Ray's daemons
    print(f"\n{HOSTS} hosts, {RATE / 1e6:g} Mbit/s, 20 ms: seconds to {target:g} %", flush=True)
    with Hosts(HOSTS, delay=DELAY, rate=RATE, queue=QUEUE) as hosts:
        plan = json.dumps([hosts.start_ray(cpus=1, env=env), names, seeds, target])
        command = [sys.executable, str(here), "--drive", plan]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = hosts.popen(0, command, env, text=True, **pipes)
        killer = threading.Timer(3600, process.kill)
        killer.daemon = True
        killer.start()
        for line in process.stdout:  # type: ignore[union-attr]
            if not line.startswith("{"):
                continue
            told = json.loads(line)
            if "mark" in told:
                carried.append([out for out, _ in hosts.carried().values()])
                process.stdin.write("\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
                continue
            name = told.pop("arm")
            told["MB"] = [0.0] * HOSTS
            if told["counted"]:
                before, after = carried[-2:]  # of the last run
                scale = told["steps"] / told["counted"] / 1e6
                told["MB"] = [scale * (b - a) for a, b in zip(before, after, strict=True)]
            carried.clear()
            runs[name].append(told)
            print(f"  {name}: {told['seconds']:.1f} s, {told['steps']} steps, "
                  f"{told['all']:.1f} %, {max(told['MB']):.1f} MB", flush=True)  # fmt: skip
        killer.cancel()
        if process.wait(30):
            raise RuntimeError(f"the driver on host 0 ended with {process.returncode}")
    return report(runs, target) | {"target": target, "load_before": round(load, 2)}


def report(runs: dict[str, list[dict[str, Any]]], target: float) -> dict[str, Any]:
    """Print the table; return its figures."""
    figures: dict[str, Any] = {}
    for name, each in runs.items():
        middle = {key: statistics.median(run[key] for run in each) for key in ("steps", "all")}
        figures[name] = {
            "seconds": [round(run["seconds"], 2) for run in each],
            "median": round(statistics.median(run["seconds"] for run in each), 2),
            **{key: round(value, 2) for key, value in middle.items()},
            "MB_busiest": round(statistics.median(max(run["MB"]) for run in each), 2),
            "MB_mean": round(statistics.median(statistics.mean(run["MB"]) for run in each), 2),
        }
    reference = figures["DDP"]["median"]
    rows = [
        [
            name,
            f"{f['median']:.1f} [{min(f['seconds']):.1f}–{max(f['seconds']):.1f}]",
            f"{f['median'] / reference:.2f}",
            f"{f['steps']:.0f}",
            f"{f['median'] / f['steps']:.2f}",
            f"{f['MB_busiest']:.1f}",
            f"{f['MB_mean']:.1f}",
            f"{f['all']:.1f}",
        ]
        for name, f in figures.items()
    ]
    header = [f"to {target:g} %", "seconds, median [range]", "to DDP", "steps", "s a step"]
    print()
    table([*header, "MB out of the busiest host", "of each", "accuracy"], rows)
    return figures


def holds(figures: dict[str, Any], quick: bool) -> bool:
    """Return whether top-k messages and DiLoCo are faster than DDP by their bounds.

    A quick run has wider bounds, since starting takes much of its time.
    """
    ddp = figures["DDP"]["median"]
    few = figures["top 1 % + int8 up, 5 % down"]["median"] / ddp
    seldom = figures["DiLoCo, 20 local steps"]["median"] / ddp
    target = figures["target"] - BOUNDS["points"]
    trained = all(f["all"] >= target for n, f in figures.items() if isinstance(f, dict))
    bounds = {key: bound * (1.3 if quick else 1.0) for key, bound in BOUNDS.items()}
    return trained and few <= bounds["top_k_to_ddp"] and seldom <= bounds["diloco_to_ddp"]


def tune(seeds: Sequence[int]) -> None:
    """Print the steps to the target for a grid of learning rates, on the simulator.

    DDP needs the steps of `sync`. PowerSGD was tuned by hand, over five pairs of rank and lr.
    """
    for name in (name for name, arm in ARMS.items() if arm.policy and arm.servers is None):
        for lr in GRID:
            steps = [rehearse(name, seed, TARGET, HOSTS, lr) or "never" for seed in seeds]
            print(f"{name}, lr {lr:g}: {', '.join(map(str, steps))} steps", flush=True)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--tune", action="store_true", help="learning rates on the simulator")
    arguments.add_argument("--drive", help="for the benchmark itself, on host 0")
    options = arguments.parse_args()
    if options.drive:
        drive(*json.loads(options.drive))
        return
    if options.tune:
        tune([0, 1])
        return
    about = machine("torch", "ray", "paceline")
    if reason := missing():
        finish("messages_network", {"not_run": reason}, BOUNDS, False, about, options)
    figures = measure(options.quick)
    ok = holds(figures, options.quick)
    finish("messages_network", figures, BOUNDS, ok, about, options)


if __name__ == "__main__":
    main()
