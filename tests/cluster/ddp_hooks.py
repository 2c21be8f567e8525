"""Trains under DistributedDataParallel with the communication hooks, on gloo.

Run by torchrun on three ranks: python -m torch.distributed.run ... ddp_hooks.py FOLDER
In place of a folder, "times" prints how long a step takes with which hook, and "lazy" what share of
the bytes a trigger saves, and where the loss ends, for batches of several sizes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.codecs.chain import Chain
from paceline.codecs.feedback import Feedback
from paceline.codecs.quantize import Half, Int8
from paceline.codecs.sparse import TopK
from paceline.codecs.triggers import Lag, OnChange
from paceline.ddp import ProportionalSampler
from paceline.ddp.hooks import CodecHook, TriggeredHook
from tests.cluster.ddp_problem import classified, perceptron

RANKS, STEPS, CUT = 3, 24, 9
SAMPLES, BATCH = 768, 96
SIDE, FAR = 20, 200  # of the quadratic: parameters squared, and steps until it has converged
SMALL = 0.0002  # megabytes of a bucket: several buckets

Hook: TypeAlias = CodecHook | TriggeredHook
Maker: TypeAlias = Callable[[Optimizer], Hook | None]


def make_data() -> TensorDataset:
    return classified(SAMPLES, 20, 4, seed=5)


def make_model() -> nn.Sequential:
    return perceptron(20, 64, 32, 4, seed=5)


def make_optimizer(model: nn.Module, momentum: float = 0.9) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


@dataclass
class Carried:
    """What was handed to the collectives: bytes, and how often."""

    gathered: int = 0
    reduced: int = 0
    calls: int = 0


@contextmanager
def counted() -> Iterator[Carried]:
    found, gather, reduce = Carried(), dist.all_gather, dist.all_reduce

    def counted_gather(tensor_list: list[Tensor], tensor: Tensor, *rest: Any, **more: Any) -> Any:
        assert {each.shape for each in tensor_list} == {tensor.shape}
        found.gathered += tensor.numel() * tensor.element_size()
        found.calls += 1
        return gather(tensor_list, tensor, *rest, **more)

    def counted_reduce(tensor: Tensor, *rest: Any, **more: Any) -> Any:
        found.reduced += tensor.numel() * tensor.element_size()
        found.calls += 1
        return reduce(tensor, *rest, **more)

    dist.all_gather, dist.all_reduce = counted_gather, counted_reduce
    try:
        yield found
    finally:
        dist.all_gather, dist.all_reduce = gather, reduce


@dataclass
class Case:
    """Trains on this rank's third of each batch, with or without a hook."""

    rank: int
    make_hook: Maker
    options: dict[str, Any] = field(default_factory=lambda: {"bucket_cap_mb": SMALL})

    def __post_init__(self) -> None:
        self.model = DistributedDataParallel(make_model(), **self.options)
        self.optimizer = make_optimizer(self.model)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.97)
        self.hook = self.make_hook(self.optimizer)
        self.buckets: list[list[list[int]]] = []  # of each step, the sizes in each bucket
        if self.hook:
            self.hook.register(self.model)

    def run(self, first: int, last: int) -> None:
        inputs, labels = make_data().tensors
        for step in range(first, last):
            low = step * BATCH % SAMPLES + self.rank * BATCH // RANKS
            span = slice(low, low + BATCH // RANKS)
            self.buckets.append([])
            loss = nn.functional.cross_entropy(self.model(inputs[span]), labels[span])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()

    def watch(self) -> None:
        """Note what is in the buckets."""
        assert self.hook
        exchange = self.hook._exchange

        def noted(bucket: Any) -> Any:
            self.buckets[-1].append([each.numel() for each in bucket.parameters()])
            return exchange(bucket)

        self.hook._exchange = noted  # type: ignore[method-assign]

    def save(self, path: Path) -> None:
        assert self.hook
        parts = (self.model.module, self.optimizer, self.schedule, self.hook)
        torch.save([part.state_dict() for part in parts], path)

    def load(self, path: Path) -> None:
        assert self.hook
        parts = (self.model.module, self.optimizer, self.schedule, self.hook)
        for part, state in zip(parts, torch.load(path, weights_only=True), strict=True):
            part.load_state_dict(state)


CASES: dict[str, tuple[Maker, dict[str, Any]]] = {
    "plain": (lambda _: None, {"bucket_cap_mb": SMALL}),
    "identity": (lambda _: CodecHook(TopK(1.0), dense_below=0), {"bucket_cap_mb": SMALL}),
    "dense": (lambda _: CodecHook(TopK(0.01), dense_below=10**6), {"bucket_cap_mb": SMALL}),
    "always": (lambda _: TriggeredHook(OnChange(0.0)), {"bucket_cap_mb": SMALL}),
    "noisy lag": (lambda _: TriggeredHook(Lag(workers=1), every=50), {"bucket_cap_mb": SMALL}),
    "feedback": (
        lambda optimizer: CodecHook(Feedback(TopK(0.1)), rate=optimizer, dense_below=100),
        {"bucket_cap_mb": SMALL},
    ),
    "one bucket": (
        lambda optimizer: CodecHook(Feedback(TopK(0.1)), rate=optimizer, dense_below=100),
        {"bucket_cap_mb": 25},
    ),
    "views": (
        lambda optimizer: CodecHook(Feedback(TopK(0.1)), rate=optimizer, dense_below=100),
        {"bucket_cap_mb": SMALL, "gradient_as_bucket_view": True},
    ),
    "random": (
        lambda optimizer: CodecHook(Feedback(Chain(TopK(0.1), Int8(64))), rate=optimizer),
        {"bucket_cap_mb": SMALL},
    ),
    "lazy": (lambda _: TriggeredHook(OnChange(0.015), every=5), {"bucket_cap_mb": SMALL}),
}
RESUMED = ("feedback", "random", "lazy")


class Quadratic(nn.Module):
    """|W - T_r|^2 / 2, and a branch that is used in some steps only.

    In a tenth of the places, the ranks pull apart with a force that is large and adds up to none.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.weight = nn.Parameter(torch.zeros(SIDE, SIDE))
        self.other = nn.Parameter(torch.zeros(SIDE, SIDE))
        self.target = torch.randn(SIDE, SIDE, generator=generator)
        force = 3.0 * (torch.rand(SIDE, SIDE, generator=generator) < 0.1)
        self.pulled = self.target + (-2.0, 1.0, 1.0)[rank] * force

    def forward(self, both: bool) -> Tensor:
        loss = (self.weight - self.pulled).square().sum() / 2
        return loss + (self.other - self.pulled).square().sum() / 2 if both else loss


def quadratic(rank: int, make_hook: Maker, steps: int = FAR) -> dict[str, Any]:
    """Descend at a falling rate, add up rate times gradient, and return all there is to know."""
    module = Quadratic(rank)
    model = DistributedDataParallel(module, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = make_hook(optimizer)
    if hook:
        hook.register(model)
    wanted = {name: torch.zeros(SIDE, SIDE, dtype=torch.float64) for name in ("weight", "other")}
    for step in range(steps):
        rate = optimizer.param_groups[0]["lr"] = 0.1 / (1 + step / 100)
        both = step % 3 == 0
        with torch.no_grad():
            wanted["weight"] += rate * (module.weight - module.pulled)
            if both:
                wanted["other"] += rate * (module.other - module.pulled)
        optimizer.zero_grad()
        model(both).backward()
        optimizer.step()
    return {
        "weight": module.weight.detach(),
        "other": module.other.detach(),
        "wanted": wanted,
        "loss": float((module.weight.detach() - module.target).square().sum() / 2),
        "state": hook.state_dict() if hook else {},
    }


QUADRATICS: dict[str, Maker] = {
    "q plain": lambda _: None,
    "q feedback": lambda optimizer: CodecHook(Feedback(TopK(0.1)), rate=optimizer, dense_below=0),
    "q topk": lambda _: CodecHook(TopK(0.1), dense_below=0),
    "q lag": lambda _: TriggeredHook(Lag(workers=1), every=50),
}


def proportional(make_hook: Maker) -> Tensor:
    """Train with shares of 1 : 2 : 3."""
    model = DistributedDataParallel(make_model(), bucket_cap_mb=SMALL)
    optimizer = make_optimizer(model)
    hook = make_hook(optimizer)
    assert hook
    hook.register(model)
    sampler = ProportionalSampler(SAMPLES, BATCH, speeds=[1, 2, 3])
    loader: DataLoader[tuple[Tensor, ...]] = DataLoader(make_data(), batch_sampler=sampler)
    for epoch in range(STEPS * BATCH // SAMPLES):
        sampler.set_epoch(epoch)
        for inputs, labels in sampler.measured(loader):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            sampler.scale(loss).backward()
            optimizer.step()
    return flat(model)


def asked(rank: int) -> list[float]:
    """Return what is stepped with when one gradient changes much and the others little."""
    module = nn.Linear(4, 1, bias=False)
    model, means = DistributedDataParallel(module), []
    TriggeredHook(OnChange(0.5)).register(model)
    for gradient in ((1.0, 1.0, 1.0), (1.2, 4.0, 1.2), (1.3, 4.1, 1.4)):
        model.zero_grad()
        model(torch.full((1, 4), gradient[rank])).sum().backward()
        assert module.weight.grad is not None
        means.append(float(module.weight.grad.mean()))
    return means


def wire(steps: int = 10) -> dict[str, dict[str, int]]:
    """Return what this process wrote, as the kernel counts it, and what the hooks say they sent."""

    def written() -> int:
        return int(Path("/proc/self/io").read_text().split("wchar: ")[1].split()[0])

    hooks: dict[str, Hook | None] = {
        "plain": None,
        "codec": CodecHook(Feedback(TopK(0.01))),
        "triggered": TriggeredHook(OnChange(0.0)),
    }
    found = {}
    for name, hook in hooks.items():
        model, inputs = DistributedDataParallel(nn.Linear(600, 600)), torch.randn(4, 600)
        if hook:
            hook.register(model)
        model(inputs).sum().backward()  # and the buckets are rebuilt
        before = hook.bytes_sent if hook else 0, hook.bytes_dense if hook else 0, written()
        for _ in range(steps):
            model(inputs).sum().backward()
        after = hook.bytes_sent if hook else 0, hook.bytes_dense if hook else 0, written()
        keys = ("sent", "dense", "written")
        found[name] = {k: b - a for k, a, b in zip(keys, before, after, strict=True)}
    return found


def main(folder: Path) -> None:
    rank = dist.get_rank()
    found: dict[str, Any] = {"file": paceline.__file__}
    tensors: dict[str, Any] = {}
    for name, (make_hook, options) in CASES.items():
        case = Case(rank, make_hook, options)
        if case.hook:
            case.watch()
        with counted() as carried:
            case.run(0, STEPS)
        tensors[name] = flat(case.model)
        found[name] = {"buckets": case.buckets, "carried": vars(carried)}
        if case.hook:
            found[name] |= {"sent": case.hook.bytes_sent, "dense": case.hook.bytes_dense}
    for name in RESUMED:
        make_hook, _ = CASES[name]
        path = folder / f"{name}.{rank}.pt"
        before = Case(rank, make_hook)
        before.run(0, CUT)
        before.save(path)
        after = Case(rank, make_hook)
        after.load(path)
        after.run(CUT, STEPS)
        assert after.hook
        tensors[f"{name} resumed"] = flat(after.model)
        found[f"{name} resumed"] = {"sent": after.hook.bytes_sent, "dense": after.hook.bytes_dense}
    for name, make_hook in QUADRATICS.items():
        tensors[name] = quadratic(rank, make_hook)
    for name in ("identity", "feedback", "always"):
        tensors[f"{name} by speed"] = proportional(CASES[name][0])
    found["asked"], found["wire"] = asked(rank), wire()
    torch.save(tensors, folder / f"{rank}.pt")
    (folder / f"{rank}.json").write_text(json.dumps(found))


def times(rounds: int = 15) -> None:
    """Print the median milliseconds of a step with 4.2 million parameters, hooks taking turns."""
    sides = (1024, 1024, 1024, 1024, 1024)

    def make() -> nn.Module:  # its own for each: all that wrap a parameter see its gradient
        return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sides)))

    inputs = torch.randn(8, sides[0])
    hooks: dict[str, Hook | None] = {
        "DDP": None,
        "Half": CodecHook(Half()),
        "Int8": CodecHook(Int8(stochastic=False)),
        "Feedback(TopK(0.01))": CodecHook(Feedback(TopK(0.01))),
        "Feedback(TopK(0.001))": CodecHook(Feedback(TopK(0.001))),
        "Feedback(Chain(TopK(0.01), Int8()))": CodecHook(Feedback(Chain(TopK(0.01), Int8()))),
        "TriggeredHook, all exchanged": TriggeredHook(OnChange(0.0)),
        "TriggeredHook, none exchanged": TriggeredHook(OnChange(1e9)),
    }
    models = {name: DistributedDataParallel(make()) for name in hooks}
    spent: dict[str, list[float]] = {name: [] for name in hooks}
    for name, hook in hooks.items():
        if hook:
            hook.register(models[name])
    for turn in range(rounds + 2):
        for name, model in models.items():
            dist.barrier()
            began = perf_counter()
            model(inputs).square().mean().backward()
            if turn > 1:
                spent[name].append(1000 * (perf_counter() - began))
    for name, hook in hooks.items():
        if dist.get_rank() == 0:
            low, middle, high = min(spent[name]), median(spent[name]), max(spent[name])
            share = hook.bytes_sent / hook.bytes_dense if hook else 1.0
            print(f"{name:36} {middle:7.1f} ms ({low:.1f} to {high:.1f}), bytes {share:.4f}")


def lazy(steps: int = 400) -> None:
    """Print what lazily aggregated gradients send, with more and more samples in a batch."""
    inputs, labels = (each.chunk(RANKS)[dist.get_rank()] for each in make_data().tensors)
    hooks: dict[str, Callable[[], Hook | None]] = {
        "DDP": lambda: None,
        "LAG": lambda: TriggeredHook(Lag(workers=1), every=50),
        "OnChange(0.01)": lambda: TriggeredHook(OnChange(0.01), every=50),
    }
    for batch in (8, 32, 128, 256):
        for name, make_hook in hooks.items():
            model, hook = DistributedDataParallel(make_model()), make_hook()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if hook:
                hook.register(model)
            generator = torch.Generator().manual_seed(dist.get_rank())
            halves = []
            for step in range(steps):
                chosen = torch.randperm(len(inputs), generator=generator)[:batch].sort().values
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
                optimizer.step()
                if hook and step + 1 in (steps // 2, steps):
                    halves.append((hook.bytes_sent, hook.bytes_dense))
            with torch.no_grad():
                data = make_data().tensors
                loss = float(nn.functional.cross_entropy(model.module(data[0]), data[1]))
            first, last = halves or [(1, 1), (2, 2)]
            early, late = first[0] / first[1], (last[0] - first[0]) / (last[1] - first[1])
            if dist.get_rank() == 0:
                print(f"{batch:3} each, {name:14} loss {loss:.4f}, bytes {early:.3f}, {late:.3f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    match sys.argv[1]:
        case "times":
            times()
        case "lazy":
            lazy()
        case folder:
            main(Path(folder))
    dist.destroy_process_group()
