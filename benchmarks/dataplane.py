"""The time of a step over a network: spread servers against a star and against all-reduce.

Four hosts on this machine (network namespaces, `paceline.testing.hosts`), each behind a link of
100 Mbit/s, with 20 ms round trips. Each host has one Ray node. Four arms move the same vector:

- all-reduce: gloo among one process per host, what plain data-parallel training does;
- star: `sync` with the model in the driver;
- spread: `sync` with a server on each host;
- spread, bf16: the same, with results and models in bfloat16.

They take turns in blocks. Then one host's link slows down to a tenth. `k_sync(3)` with spread
servers and all-reduce are each compared with their time before. Computing takes 10 ms a step, so
the network dominates the time. Needs root, `ip`, and a C compiler.

`--large`: a model of 200M parameters on 4 workers and 4 servers of one host, and its memory.
`--width 7071 --workers 2 --half` is 400M in bfloat16 both ways. `--checkpoints` compares the steps
during which servers write a checkpoint with the others.

    python benchmarks/dataplane.py [--quick] [--large] [--bf16 20 100] [--slow-link 5 20]

`--bf16`: all-reduce, spread and spread in bfloat16 alone, for models of these megabytes.
`--slow-link`: steps of `k_sync(3)` before and after a link slows down in mid-run, for such models.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from _fashion import loss
from _report import OtherLoad, finish, machine, our_processes, parser, quantile, table
from paceline.testing.hosts import Hosts, missing

RATE, DELAY, QUEUE = 100e6, 0.005, 1 << 20
SLOW = 0.1
BF16 = pl.codecs.BFloat16()
BOUNDS = {"to_all_reduce": 1.25, "star_to_spread": 2.0, "slow_link": 1.3}
BOUNDS["bf16_to_all_reduce"] = 0.6  # from 20 MB on: half the bytes, and copies of exact values
QUICK_BOUNDS = {"to_all_reduce": 1.8, "star_to_spread": 1.4}  # three hosts, a handful of steps
WARM_UP = 2  # steps or rounds of a block that do not count
BLOCKS, UNDISTURBED, DISTURBED = 5, 8, 12  # a link that slows down in mid-run: steps of a block
AFTER_FIRST = 2.0  # the longest step after the first with the slow link, to the median before
INPUTS, CLASSES = 784, 10


def hidden_for(megabytes: float) -> int:
    return int(megabytes * 1e6 / 4 / (INPUTS + CLASSES + 1))


def examples() -> TensorDataset:
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (256,), generator=random)
    return TensorDataset(torch.randn(256, INPUTS, generator=random), labels)


def learner(megabytes: float, workers: int, momentum: float) -> pl.TorchLearner:
    hidden = hidden_for(megabytes)
    torch.manual_seed(0)
    return pl.TorchLearner(
        nn.Sequential(nn.Linear(INPUTS, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)),
        loss,
        partial(torch.optim.SGD, lr=0.01, momentum=momentum),
        examples,  # each worker makes its own, so that it is not sent
        batch_size=4 * workers,
    )


# --- on host 0 -----------------------------------------------------------------------------------


class Peer:
    """One process of the all-reduce."""

    def __init__(self, address: str, rank: int, size: int) -> None:
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
        self._dist = dist

    def rounds(self, length: int, count: int) -> list[float]:
        vector, seconds = torch.ones(length), []
        for _ in range(count):
            self._dist.barrier()
            begin = time.perf_counter()
            self._dist.all_reduce(vector)
            seconds.append(time.perf_counter() - begin)
        return seconds


class Arms:
    """All arms on one cluster, one at a time."""

    def __init__(self, engine: pl.Ray) -> None:
        self._engine = engine
        nodes = sorted(ray.nodes(), key=lambda node: node["NodeManagerAddress"])
        address = f"tcp://{nodes[0]['NodeManagerAddress']}:29777"
        self.size = len(nodes)
        self._peers = [
            ray.remote(num_cpus=0)(Peer)
            .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
            .remote(address, rank, self.size)
            for rank, node in enumerate(nodes)
        ]

    def all_reduce(self, megabytes: float, rounds: int, warm_up: int = WARM_UP) -> list[float]:
        length = hidden_for(megabytes) * (INPUTS + CLASSES + 1) + CLASSES
        calls = [peer.rounds.remote(length, warm_up + rounds) for peer in self._peers]
        slowest = np.max(ray.get(calls, timeout=600), axis=0)
        return [float(seconds) for seconds in slowest[warm_up:]]

    def steps(
        self,
        servers: Any,
        policy: pl.policies.Gather,
        megabytes: float,
        steps: int,
        momentum: float = 0.0,
        codec: pl.codecs.BFloat16 | None = None,
        callbacks: Sequence[pl.Callback] = (),
    ) -> list[float]:
        """codec: of results and models."""
        self._engine.servers = servers
        trainer = pl.Trainer(
            learner(megabytes, self.size, momentum),
            policy,
            self._engine,
            progress=False,
            codec=codec,
            model_codec=codec,
            callbacks=callbacks,
        )
        run = trainer.fit(steps=WARM_UP + steps)
        return [float(s) for s in np.diff(run.metrics["seconds"], prepend=0.0)]


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def drive(
    address: str, sizes: list[float], passes: int, counts: list[list[int]], slow: bool
) -> None:
    """Measure on the hosts, and print each block; request changes of the link and wait for them."""
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    workers = len(ray.nodes())
    with pl.Ray(workers, cpus=1, timeout=300) as engine:
        arms = Arms(engine)
        for megabytes, (rounds, spread, star) in zip(sizes, counts, strict=True):
            some = pl.k_sync(workers - 1)
            if slow:
                arms.steps("spread", pl.sync(), megabytes, 1)  # a warm-up: opens connections
            for _ in range(passes):
                block = partial(tell, size=megabytes)
                block(arm="all-reduce", seconds=arms.all_reduce(megabytes, rounds))
                tell(mark="spread")
                seconds = arms.steps("spread", pl.sync(), megabytes, spread)
                tell(mark="")
                block(arm="spread", seconds=seconds[WARM_UP:])
                seconds = arms.steps("spread", pl.sync(), megabytes, spread, codec=BF16)
                block(arm="spread, bf16", seconds=seconds[WARM_UP:])
                if not star:
                    continue
                block(
                    arm="star", seconds=arms.steps("driver", pl.sync(), megabytes, star)[WARM_UP:]
                )
                if slow:
                    seconds = arms.steps("spread", pl.sync(), megabytes, spread, momentum=0.9)
                    block(arm="spread, momentum", seconds=seconds[WARM_UP:])
                    seconds = arms.steps("spread", some, megabytes, spread)
                    block(arm="k_sync", seconds=seconds[WARM_UP:])
            if slow:
                tell(link="slow")
                input()
                tell(
                    size=megabytes,
                    arm="all-reduce, slow link",
                    seconds=arms.all_reduce(megabytes, 2, warm_up=0),
                )
                # The policy needs some steps to detect the slow link and to exclude its server.
                seconds = arms.steps("spread", some, megabytes, spread + 6)
                tell(size=megabytes, arm="k_sync, slow link, all steps", seconds=seconds)
                tell(size=megabytes, arm="k_sync, slow link", seconds=seconds[8:])
                tell(link="fast")
                input()


class SlowsDown(pl.Callback):
    """Has a link slow down after a step, and waits until it has."""

    def __init__(self, step: int) -> None:
        self._step = step

    def stepped(self, progress: pl.Progress) -> None:
        if progress.step == self._step:
            tell(link="slow")
            input()


def slow_link(address: str, sizes: list[float], blocks: int) -> None:
    """Have a link slow down in mid-run, once in each block; print the seconds of all steps."""
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    workers = len(ray.nodes())
    with pl.Ray(workers, cpus=1, timeout=300) as engine:
        arms = Arms(engine)
        for megabytes in sizes:
            some = pl.k_sync(workers - 1)
            arms.steps("spread", pl.sync(), megabytes, 1)  # a warm-up: opens connections
            for _ in range(blocks):
                slows = [SlowsDown(WARM_UP + UNDISTURBED)]
                steps = UNDISTURBED + DISTURBED
                seconds = arms.steps("spread", some, megabytes, steps, callbacks=slows)
                tell(size=megabytes, arm="k_sync", seconds=seconds[WARM_UP:])
                tell(link="fast")
                input()


def report_slow_link(found: dict[str, Any]) -> dict[str, Any]:
    """Compare the steps after a link slowed down with the median step before, block by block."""
    figures: dict[str, Any] = {}
    for size, arms in found.items():
        count = UNDISTURBED + DISTURBED
        steps = np.reshape(arms["k_sync"], (-1, count))
        print(
            f"{size}, seconds a step:", *(np.round(block, 2).tolist() for block in steps), sep="\n"
        )
        usual = np.median(steps[:, :UNDISTURBED], axis=1, keepdims=True)
        relative = steps[:, UNDISTURBED:] / usual
        figures[size] = {
            "usual_seconds": [round(float(each), 3) for each in usual[:, 0]],
            "first": [round(float(each), 2) for each in relative[:, 0]],
            "longest_after": [round(float(each), 2) for each in relative[:, 1:].max(axis=1)],
            "median_after": [round(float(np.median(each)), 2) for each in relative[:, 1:]],
        }
    return figures


# --- outside -------------------------------------------------------------------------------------


def measure(
    quick: bool, bf16: list[float], slow_links: list[float]
) -> tuple[dict[str, Any], float]:
    """Run the driver on host 0 and change links on request; return seconds by size and arm.

    bf16: the sizes, if only the arms without a star and a slow link are measured.
    slow_links: the sizes, if only a link that slows down in mid-run is measured.
    """
    hosts_count = 3 if quick else 4
    sizes = [5.0] if quick else [5.0, 20.0]
    counts = [[3, 4, 2]] if quick else [[6, 8, 3], [3, 4, 2]]
    if bf16:
        sizes, counts = bf16, [[3, 8, 0] for _ in bf16]
    passes = 1 if quick else 2
    found: dict[str, Any] = defaultdict(lambda: defaultdict(list))
    carried: list[float] = []
    with Hosts(hosts_count, delay=DELAY, rate=RATE, queue=QUEUE) as hosts:
        address = hosts.start_ray(cpus=1)
        plan: list[Any] = [address, sizes, passes, counts, not quick and not bf16]
        if slow_links:
            plan = [address, slow_links, 1 if quick else BLOCKS]
        process = hosts.popen(
            0,
            [sys.executable, __file__, "--drive", json.dumps(plan)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        killer = threading.Timer(2400 if bf16 else 1500, process.kill)
        killer.start()
        for line in process.stdout:  # type: ignore[union-attr]
            if not line.startswith("{"):
                continue
            told = json.loads(line)
            if "arm" in told:
                found[f"{told['size']:g} MB"][told["arm"]] += told["seconds"]
            elif "mark" in told:
                carried.append(hosts.carried()[1][0])
            elif "link" in told:
                rate = RATE * SLOW if told["link"] == "slow" else RATE
                hosts.link(hosts_count - 1, rate=rate)
                process.stdin.write("\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
        killer.cancel()
        if process.wait(30):
            raise RuntimeError(f"the driver on host 0 ended with {process.returncode}")
    per_step = 0.0
    if carried:
        per_step = (carried[1] - carried[0]) / (counts[0][1] + WARM_UP) / 1e6
    return {size: dict(arms) for size, arms in found.items()}, per_step


def report(found: dict[str, Any], per_step: float, bounds: dict[str, float]) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "bytes_out_of_a_host_per_step_of_the_first_size_MB": round(per_step, 2)
    }
    rows = []
    for size, arms in found.items():
        middle = {arm: quantile(seconds, 0.5) for arm, seconds in arms.items()}
        for arm, seconds in arms.items():
            rows.append(
                [
                    f"{size}, {arm}",
                    str(len(seconds)),
                    f"{middle[arm]:.2f} [{min(seconds):.2f}–{max(seconds):.2f}]",
                    f"{middle[arm] / middle['all-reduce']:.2f}",
                ]
            )
        ratios = {
            "to_all_reduce": middle["spread"] / middle["all-reduce"],
            "bf16_to_all_reduce": middle["spread, bf16"] / middle["all-reduce"],
        }
        if "star" in arms:
            ratios["star_to_spread"] = middle["star"] / middle["spread"]
        if "k_sync" in arms:
            ratios["slow_link"] = middle["k_sync, slow link"] / middle["k_sync"]
            ratios["all_reduce_slow_link"] = middle["all-reduce, slow link"] / middle["all-reduce"]
            ratios["copies_of_momentum"] = middle["spread, momentum"] / middle["spread"]
        figures[size] = {
            "seconds": {arm: round(value, 3) for arm, value in middle.items()},
            "ratios": {name: round(value, 3) for name, value in ratios.items()},
            "ok": ratios["to_all_reduce"] <= bounds["to_all_reduce"]
            and ratios.get("star_to_spread", inf) >= bounds["star_to_spread"]
            and ratios.get("slow_link", 0.0) <= bounds.get("slow_link", 1.0)
            and (size == "5 MB" or ratios["bf16_to_all_reduce"] <= bounds["bf16_to_all_reduce"]),
        }
    table(["", "steps", "seconds, median [range]", "to all-reduce"], rows)
    for size in found:
        print(size, figures[size]["ratios"])
    return figures


# --- a large model on one host -------------------------------------------------------------------

LAYERS, WIDTH = 8, 5000  # 8 x 5000 x 5000: 200M parameters; --width 2236 for 40M
LARGE_MB = 18_000  # at most, at 200M parameters
CHECKPOINT_BOUND = 1.05  # of the time of steps without checkpoints
LARGE_RATE = 300.0  # large: outputs and gradients of eight such layers are tiny at first


def deep_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(batch[0]).pow(2).mean()
    return loss


def deep_model(width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))


def wide_examples(width: int) -> TensorDataset:
    return TensorDataset(torch.randn(8, width, generator=torch.Generator().manual_seed(0)))


def memory_of_tree() -> float:
    """Return the megabytes of this process and its descendants; shared pages count once."""
    total = 0.0
    for pid in our_processes():
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1e3
    return total


class Peak(threading.Thread):
    """Samples the memory twice a second, and keeps the maximum."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.megabytes = 0.0
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.5):
            self.megabytes = max(self.megabytes, memory_of_tree())


def large(width: int, workers: int, half: bool) -> dict[str, Any]:
    """Train a large model for 3 steps with as many servers as workers; measure the peak memory."""
    size = LAYERS * width * width * 4 / 1e6
    codec = BF16 if half else None
    peak = Peak()
    peak.start()
    begin = time.monotonic()
    with pl.Ray(workers=workers, servers=workers, timeout=300) as engine:
        run = pl.Trainer(
            large_learner(width),
            pl.sync(),
            engine,
            progress=False,
            codec=codec,
            model_codec=codec,
        ).fit(steps=3)
    peak.done.set()
    # In units of the model. The driver holds its own server, and at the end the user's model.
    # Workers and servers hold values and gradients. The object store holds a result of each worker
    # and two versions of the model; in bfloat16 these take half, and two versions of the exact
    # values are there as well.
    store = (workers + 2) / 2 + 2 if half else workers + 2
    units = 2 + workers * 2 + 2 + store
    processes = 2 * workers + 1
    figures: dict[str, Any] = {
        "model_MB": round(size),
        "steps": run.steps,
        "seconds_per_step": [round(float(s), 1) for s in np.diff(run.metrics["seconds"])],
        "seconds": round(time.monotonic() - begin),
        "loss": [float(f"{value:.8g}") for value in run.metrics["loss"]],
        "peak_MB": round(peak.megabytes),
        "need_MB": round(units * size + processes * 270 + 250),
        "need": f"{units:g} models, 270 MB for each of {processes} processes with torch, "
        "250 MB for Ray",
    }
    figures["peak_to_need"] = round(figures["peak_MB"] / figures["need_MB"], 3)
    return figures


def large_learner(width: int) -> pl.TorchLearner:
    return pl.TorchLearner(
        partial(deep_model, width),
        deep_loss,
        partial(torch.optim.SGD, lr=LARGE_RATE),
        partial(wide_examples, width),
        batch_size=8,
    )


class Written(pl.Callback):
    """Notes after which steps a checkpoint was being written: its name still begins with a dot."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.during = folder, list[bool]()

    def stepped(self, progress: pl.Progress) -> None:
        self.during.append(any(each.name.startswith(".") for each in self._folder.iterdir()))


def checkpoints(width: int, workers: int) -> dict[str, Any]:
    """Compare steps during which servers write a checkpoint with steps during which none does."""
    with (
        tempfile.TemporaryDirectory() as folder,
        pl.Ray(workers=workers, servers=workers, timeout=300) as engine,
    ):
        written = Written(Path(folder))
        run = pl.Trainer(
            large_learner(width),
            pl.sync(),
            engine,
            progress=False,
            checkpoints=pl.Checkpoints(folder, every=6, keep=2),
            callbacks=[written],
        ).fit(steps=20)
    seconds = np.diff(run.metrics["seconds"])
    during = written.during[1:]
    quiet = [float(s) for s, writing in zip(seconds, during, strict=True) if not writing][1:]
    busy = [float(s) for s, writing in zip(seconds, during, strict=True) if writing]
    print("seconds a step:", [round(float(s), 2) for s in seconds], "writing:", during)
    return {
        "steps": run.steps,
        "steps_while_written": len(busy),
        "seconds_otherwise": round(quantile(quiet, 0.5), 2),
        "seconds_while_written": round(quantile(busy, 0.5), 2) if busy else None,
        "ratio_of_all_steps": round(float(np.mean(seconds[1:])) / quantile(quiet, 0.5), 3),
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--large", action="store_true", help="the large model alone")
    arguments.add_argument("--width", type=int, default=WIDTH, help="of its layers")
    arguments.add_argument("--workers", type=int, default=4, help="of the large model")
    arguments.add_argument("--half", action="store_true", help="the large model in bfloat16")
    arguments.add_argument("--checkpoints", action="store_true", help="of the large model alone")
    arguments.add_argument("--bf16", type=float, nargs="*", default=[], help="sizes in megabytes")
    arguments.add_argument("--slow-link", type=float, nargs="*", default=[], help="in megabytes")
    arguments.add_argument("--drive", help="for the benchmark itself, on host 0")
    given = arguments.parse_args()
    if given.drive:
        plan = json.loads(given.drive)
        (drive if len(plan) > 3 else slow_link)(*plan)
        return
    about = machine("torch", "ray", "numpy")
    if given.checkpoints:
        figures = checkpoints(given.width, given.workers)
        print(json.dumps(figures, indent=1))
        ok = figures["ratio_of_all_steps"] <= CHECKPOINT_BOUND
        bounds = {"ratio_of_all_steps": CHECKPOINT_BOUND}
        finish("dataplane, checkpoints", figures, bounds, ok, about, given)
    if given.large:
        figures = large(given.width, given.workers, given.half)
        print(json.dumps(figures, indent=1))
        learned = figures["loss"][-1] < figures["loss"][0]
        bounds = {"peak_to_need": 1.2} | ({"peak_MB": LARGE_MB} if given.width == WIDTH else {})
        ok = figures["steps"] == 3 and learned and all(figures[n] <= b for n, b in bounds.items())
        millions = round(figures["model_MB"] / 4)
        finish(f"dataplane, {millions}M parameters", figures, bounds, ok, about, given)
    bounds = QUICK_BOUNDS if given.quick else BOUNDS
    if reason := missing():
        finish("dataplane", {"not_run": reason}, bounds, False, about, given)
    load = OtherLoad()
    found, per_step = measure(given.quick, given.bf16, given.slow_link)
    if given.slow_link:
        figures = report_slow_link(found)
        about["others"] = load.cores()
        ok = all(max(each["longest_after"]) <= AFTER_FIRST for each in figures.values())
        finish("dataplane, slow link", figures, {"longest_after": AFTER_FIRST}, ok, about, given)
    figures = report(found, per_step, bounds)
    about["others"] = load.cores()
    ok = all(figure["ok"] for name, figure in figures.items() if name.endswith(" MB"))
    finish("dataplane", figures, bounds, ok, about, given)


if __name__ == "__main__":
    main()
