"""Local steps beside DistributedDataParallel on four hosts: seconds to a loss of a small GPT.

Hosts are network namespaces on this machine (`paceline.testing.hosts`): 100 Mbit/s, 20 ms round
trips, 0.3 cores each. A GPT of 3.3 MB on tinyshakespeare, AdamW, 32 windows a step. Models of the
run are kept, and their test loss is computed afterwards, so the clock has training only.

calm    DDP on gloo; `pl.local_steps(every=40)`, whose outer step takes the mean.
slow    One host has a tenth of its cores: DDP and `local_steps`, whose steps to the loss are those
        of `calm`, and `local_steps` with k=3, which trains to the loss.
groups  Two processes a host under torchrun, with DDP or FSDP2 inside, are one worker.

`--tune` shows how both learning rates were chosen: three rates each on another seed, without hosts.

    python benchmarks/sessions_hosts.py [--quick] [--tune]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import paceline as pl
from _driver import Driver, say
from _gpt import Text, make_model, test_loss, text_file
from _report import OtherLoad, finish, machine, parser, table
from gpt import loss as loss_of
from paceline.testing import groups
from paceline.testing.groups import Group
from paceline.testing.hosts import Hosts, missing

HOSTS, RATE, DELAY, QUEUE = 4, 100e6, 0.005, 1 << 20
CORES, SLOW = 0.3, 0.1  # of a host; the share that the slow one has
WINDOWS, EVERY, WARM_UP = 8, 40, 20  # windows of a host; local steps; steps of the schedule
KEPT = 10  # steps of DDP between two models that are kept
LEARNING_RATES, LEARNING_RATE, TUNED_ON = (1e-3, 3e-3, 6e-3), 3e-3, 100
TARGET = 2.5
OUTER = partial(torch.optim.SGD, lr=1.0)
BOUNDS = {"local / ddp, calm": 1.0, "k=3 / ddp, slow": 0.35}
QUICK = {"local step / ddp's, calm": 1.0}


def adamw(model: nn.Module, rate: float = LEARNING_RATE) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)


class Loop:
    """The user's loop: the same for every arm."""

    def __init__(self, model: nn.Module, rate: float, seed: int, host: int, windows: int) -> None:
        self.model, self.optimizer, self.step = model, adamw(model, rate), 0
        self._rate, self._seed, self._first, self._windows = rate, seed, host, windows
        self._text = the_text()

    def take(self) -> Tensor:
        """Take a step of the optimizer."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate * min(1.0, (self.step + 1) / WARM_UP)
        batch = self._text.batch(self._seed, self.step, self._first, self._windows)
        loss = loss_of(self.model, batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        return loss


def the_text() -> Text:
    file = text_file()
    if file is None:
        raise SystemExit("set TINYSHAKESPEARE to the path of tinyshakespeare.txt of char-rnn")
    return Text(file)


# --- tuning, without hosts -----------------------------------------------------------------------


def tune(steps: int = 200) -> None:
    """Print the steps to the target for each learning rate, of both arms."""
    torch.set_num_threads(1)
    for rate in LEARNING_RATES:
        for name, curve in (("ddp", ddp_curve), ("local_steps", local_curve)):
            found = reached(curve(rate, TUNED_ON, steps))
            print(f"{name}: learning rate {rate:g}, {found:.0f} steps to {TARGET}", flush=True)


def ddp_curve(rate: float, seed: int, steps: int) -> Iterator[tuple[float, float]]:
    loop, test = Loop(make_model(seed), rate, seed, 0, HOSTS * WINDOWS), the_text().held_out()
    while loop.step < steps:
        loop.take()
        if loop.step % KEPT == 0:
            yield loop.step, test_loss(loop.model, test)


def local_curve(rate: float, seed: int, steps: int) -> Iterator[tuple[float, float]]:
    loops = [Loop(make_model(seed), rate, seed, host * WINDOWS, WINDOWS) for host in range(HOSTS)]
    test = the_text().held_out()
    while loops[0].step < steps:
        for loop in loops:
            loop.take()
        if loops[0].step % EVERY == 0:
            with torch.no_grad():
                for same in zip(*(loop.model.parameters() for loop in loops), strict=True):
                    middle = torch.stack([each.data for each in same]).mean(dim=0)
                    for each in same:
                        each.copy_(middle)
            yield loops[0].step, test_loss(loops[0].model, test)


def reached(curve: Iterator[tuple[float, float]] | list[tuple[float, float]]) -> float:
    """Return where a curve falls below the target, between its points; infinity if it does not."""
    before: tuple[float, float] | None = None
    for at, loss in curve:
        if loss <= TARGET:
            if before is None:
                return at
            return before[0] + (at - before[0]) * (before[1] - TARGET) / (before[1] - loss)
        before = at, loss
    return math.inf


# --- on the hosts --------------------------------------------------------------------------------


class Kept:
    """Models of a run with their times; computes their losses after the run."""

    def __init__(self, wanted: bool, speaks: bool = True) -> None:
        self._wanted, self._speaks = wanted, speaks
        self._models: list[tuple[int, float, dict[str, Tensor]]] = []
        self._begin = time.monotonic()

    def add(self, step: int, model: nn.Module) -> None:
        """Keep the model; every process of a group must call this."""
        at = time.monotonic() - self._begin
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)
        if self._wanted:
            self._models.append((step, at, {n: torch.clone(v) for n, v in state.items()}))  # type: ignore[arg-type]

    def tell(self, seed: int) -> None:
        """Print steps, seconds and losses."""
        if not self._wanted:
            return say(done=True) if self._speaks else None
        model, test = make_model(seed), the_text().held_out()
        curve = []
        for step, at, state in self._models:
            model.load_state_dict(state)
            curve.append([step, at, test_loss(model, test)])
        say(curve=curve)


def train_ddp(rank: int, order: dict[str, Any]) -> None:
    seed = order["seed"]
    model = DistributedDataParallel(make_model(seed))
    loop = Loop(model, LEARNING_RATE, seed, rank * WINDOWS, WINDOWS)
    dist.barrier()
    kept = Kept(rank == 0)
    kept.add(0, model)
    while loop.step < order["steps"]:
        loop.take()
        if loop.step % KEPT == 0:
            kept.add(loop.step, model)
    kept.tell(seed)


def train_local(host: int, order: dict[str, Any], inside: str = "") -> None:
    """Train as one worker, alone or with the other processes of this host."""
    seed, rank, size = order["seed"], 0, 1
    model: nn.Module = make_model(seed)
    group = dist.group.WORLD if inside else None
    if inside:
        rank, size = dist.get_rank(), dist.get_world_size()
        if inside == "ddp":
            model = DistributedDataParallel(model)
        else:
            fully_shard(model)
    windows = WINDOWS // size
    loop = Loop(model, LEARNING_RATE, seed, host * WINDOWS + rank * windows, windows)
    with pl.local_steps(
        model, loop.optimizer, every=EVERY, outer=OUTER, k=order["k"], workers=HOSTS,
        rounds=order["steps"] // EVERY, run=order["run"], address=order["address"],
        process_group=group,
    ) as outer:  # fmt: skip
        kept = Kept(host == 0 and rank == 0, speaks=rank == 0)
        kept.add(0, model)
        while not outer.ended:
            taken = outer.rounds
            outer.report(loop.take())
            if outer.rounds > taken and host == 0:
                kept.add(loop.step, model)
        kept.tell(seed)


def join_ray(address: str, ip: str) -> None:
    """Join the Ray node of this host: namespaces share their processes, and Ray takes the head."""
    import ray

    ray.init(address=address, _node_ip_address=ip, log_to_driver=False, logging_level="ERROR")


def serve(kind: str, host: int, address: str, ip: str) -> None:
    """Train whenever an order arrives."""
    torch.set_num_threads(1)
    if kind == "ddp":
        dist.init_process_group("gloo", init_method=address, rank=host, world_size=HOSTS)
    else:
        join_ray(address, ip)
    say(pid=os.getpid())
    for line in sys.stdin:
        order = json.loads(line)
        train_ddp(host, order) if kind == "ddp" else train_local(host, order)


def serve_group(host: int, inside: str, order: dict[str, Any]) -> None:
    """Train once, in a process that torchrun has started."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        join_ray(order["address"], order["ips"][host])
    train_local(host, order, inside)
    dist.destroy_process_group()


# --- outside -------------------------------------------------------------------------------------


class Bench:
    """Both arms on the same hosts, one at a time."""

    def __init__(self, stack: ExitStack) -> None:
        self._hosts = stack.enter_context(Hosts(HOSTS, delay=DELAY, rate=RATE, queue=QUEUE))
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._groups = [stack.enter_context(Group(cores=CORES)) for _ in range(HOSTS)]
        self._address = self._hosts.start_ray(cpus=1)
        self._runs = 0
        meeting = {"ddp": f"tcp://{self._hosts.ip(0)}:29779", "local": self._address}
        self._ranks = {
            kind: [
                self._started(host, ["--serve", kind, str(host), at, self._hosts.ip(host)])
                for host in range(HOSTS)
            ]
            for kind, at in meeting.items()
        }
        for ranks in self._ranks.values():
            for group, rank in zip(self._groups, ranks, strict=True):
                group.add(rank.heard(180)["pid"])

    def _started(self, host: int, arguments: list[str], script: str = __file__) -> Driver:
        folder = self._folder / f"{len(list(self._folder.iterdir()))}"
        folder.mkdir()
        return Driver(self._hosts, script, arguments, folder, host)

    def slow(self, yes: bool) -> None:
        """Give the last host a tenth of its cores, or all of them."""
        self._groups[-1].limit(CORES * SLOW if yes else CORES)

    def carried(self) -> int:
        """Return the bytes that have come into all hosts so far."""
        return sum(into for _, into in self._hosts.carried().values())

    def ddp(self, seed: int, steps: int) -> list[list[float]]:
        return self._curve(self._ranks["ddp"], {"seed": seed, "steps": steps})

    def local(self, seed: int, steps: int, k: int | None = None) -> list[list[float]]:
        return self._curve(self._ranks["local"], self._order(seed, steps, k))

    def group(self, inside: str, seed: int, steps: int) -> list[list[float]]:
        """Train with two processes a host, which torchrun starts."""
        order = json.dumps(self._order(seed, steps, None))
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        ranks = []
        for host, group in enumerate(self._groups):
            own = [__file__, "--group", str(host), inside, order]
            ranks.append(self._started(host, [*torchrun[1:], *own], torchrun[0]))
            group.add(ranks[-1].process.pid)
        return self._heard(ranks)

    def _order(self, seed: int, steps: int, k: int | None) -> dict[str, Any]:
        self._runs += 1
        about = {"run": f"gpt-{self._runs}", "address": self._address}
        ips = [self._hosts.ip(host) for host in range(HOSTS)]
        return {"seed": seed, "steps": steps, "k": k, "ips": ips, **about}

    def _curve(self, ranks: list[Driver], order: dict[str, Any]) -> list[list[float]]:
        for rank in ranks:
            rank.order(**order)
        return self._heard(ranks)

    def _heard(self, ranks: list[Driver]) -> list[list[float]]:
        found: list[list[float]] = ranks[0].heard(900)["curve"]
        for rank in ranks[1:]:
            assert rank.heard(300)["done"]
        return found


def seconds_to(curve: list[list[float]]) -> float:
    return reached([(at, loss) for _, at, loss in curve])


def seconds_a_step(curve: list[list[float]]) -> float:
    """Return the median over stretches between two kept models."""
    places = [(step, at) for step, at, _ in curve]
    return median((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(places))


def measure(bench: Bench) -> dict[str, Any]:
    """Run all arms, DDP and ours in turn."""
    calm: dict[str, list[float]] = {"ddp": [], "local": []}
    steps_of: dict[str, list[float]] = {"ddp": [], "local": []}
    found: dict[str, Any] = {"curves": {}}

    def keep(name: str, curve: list[list[float]]) -> list[list[float]]:
        found["curves"][name] = [[step, round(at, 2), round(loss, 4)] for step, at, loss in curve]
        print(f"{name}: {seconds_to(curve):.1f} s, {seconds_a_step(curve):.3f} a step", flush=True)
        return curve

    two = {
        f"2 {name} a host": seconds_to(keep(f"groups, {name}", bench.group(name, 0, 200)))
        for name in ("ddp", "fsdp")
    }
    for seed in range(3):
        for name in sorted(calm, reverse=bool(seed % 2)):
            curve = bench.ddp(seed, 140) if name == "ddp" else bench.local(seed, 200)
            calm[name].append(seconds_to(keep(f"calm, {name}, {seed}", curve)))
            steps_of[name].append(reached([(step, loss) for step, _, loss in curve]))
    bench.slow(True)
    slow: dict[str, list[float]] = {"ddp": [], "local": [], "k=3": []}
    for seed in range(2):
        for name, arm in (("ddp", bench.ddp), ("local", bench.local)):
            step = seconds_a_step(keep(f"slow, {name}, {seed}", arm(seed, EVERY)))
            slow[name].append(step * steps_of[name][seed])
        slow["k=3"].append(seconds_to(keep(f"slow, k=3, {seed}", bench.local(seed, 240, 3))))
    bench.slow(False)
    return {**found, "calm": calm, "groups": two, "slow": slow, "steps": steps_of}


def report(found: dict[str, Any]) -> dict[str, float]:
    """Print the seconds of each arm; return the ratios."""
    calm, slow = found["calm"], found["slow"]
    rows = [[f"calm: {name}", *_range(values)] for name, values in calm.items()]
    rows += [[f"calm: local, {name}", *_range([value])] for name, value in found["groups"].items()]
    rows += [[f"one host at a tenth: {name}", *_range(values)] for name, values in slow.items()]
    table(["arm", f"seconds to {TARGET}", "least", "most"], rows)
    ours, ddp = calm["local"], calm["ddp"]
    return {
        "local / ddp, calm": median(a / b for a, b in zip(ours, ddp, strict=True)),
        "k=3 / ddp, slow": median(a / b for a, b in zip(slow["k=3"], slow["ddp"], strict=True)),
        "2 ddp a host / ddp, calm": found["groups"]["2 ddp a host"] / ddp[0],
        "2 fsdp a host / ddp, calm": found["groups"]["2 fsdp a host"] / ddp[0],
    }


def _range(values: list[float]) -> list[str]:
    return [f"{each:.0f}" for each in (median(values), min(values), max(values))]


def quick(bench: Bench) -> tuple[dict[str, Any], dict[str, float]]:
    """Compare the seconds of a step only."""
    before = bench.carried()
    ours = seconds_a_step(bench.local(0, EVERY))
    bytes_ = bench.carried() - before
    ddp = seconds_a_step(bench.ddp(0, 20))
    print(f"a round of local steps carries {bytes_ / 1e6:.1f} MB")
    print(f"a step: local {ours:.3f} s, ddp {ddp:.3f} s")
    return {"local": ours, "ddp": ddp}, {"local step / ddp's, calm": ours / ddp}


def main() -> None:
    arguments = parser(__doc__, 100)
    arguments.add_argument("--tune", action="store_true", help="how the rates were chosen")
    given: argparse.Namespace = arguments.parse_args()
    if given.tune:
        return tune()
    if reason := missing() or groups.missing():
        raise SystemExit(f"this benchmark needs hosts: {reason}")
    the_text()
    load, bounds = OtherLoad(), QUICK if given.quick else BOUNDS
    with ExitStack() as stack:
        bench = Bench(stack)
        if given.quick:
            found, figures = quick(bench)
        else:
            found = measure(bench)
            figures = report(found)
    for name, value in figures.items():
        print(f"{name}: {value:.2f}" + (f" (bound {bounds[name]:g})" if name in bounds else ""))
    ok = all(figures[name] <= bound for name, bound in bounds.items())
    about = {**machine("torch", "ray"), "other_cores": load.cores()}
    finish("sessions_hosts", {**figures, **found}, bounds, ok, about, given)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], int(sys.argv[3]), *sys.argv[4:6])
    elif sys.argv[1:2] == ["--group"]:
        serve_group(int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
    else:
        main()
