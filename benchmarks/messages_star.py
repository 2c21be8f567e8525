"""Accuracy against bytes for codecs of the results that 8 workers send to the server.

An MLP trains in simulated time with real arithmetic, on handwritten digits (`--quick`) or on
Fashion-MNIST. There are two controls. Without communication, every worker trains by itself, and the
models are averaged once, at the end. On shards sorted by label, that control must fail. All methods
use the same number of samples.

Every method, controls included, gets the same number of trials of its learning rate, for each kind
of shards (_tuning.py). A quick run has no trials: it uses the rate that is best for dense results.

    python benchmarks/messages.py --only star [--quick]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import paceline as pl
from _fashion import accuracy, loss, vectors
from _report import Lines, interval, machine, told
from _tuning import SEED, Trial, Tuned, tune
from paceline.codecs.base import Codec
from paceline.core.policy import Policy
from paceline.learners.optimize import MakeOptimizer

WORKERS, STEPS = 8, 400
QUICK = ("dense", "no communication", "sign, feedback", "top 1 % + int8, feedback")
BOUNDS = {"points": 0.5, "bytes_saved_sorted": 0.6, "bytes_saved": 0.97}
ARMS = (
    *("dense", "no communication", "int8", "sign, feedback", "top 10 %, feedback"),
    *("top 1 %, feedback", "top 1 % + int8, no momentum", "DGC, top 1 %"),
    *("local SGD, 10 steps", "DiLoCo, 10 local steps"),
)
KINDS = ("mixed", "sorted")
AVERAGE = partial(torch.optim.SGD, lr=1.0)
NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)  # arXiv 2311.08105


@dataclass(frozen=True)
class Method:
    """The settings of a run."""

    codec: Codec | None = None
    model_codec: Codec | None = field(default=None, kw_only=True)
    policy: Policy = field(default_factory=pl.sync)
    outer: MakeOptimizer | None = None  # the server's optimizer, for local steps
    momentum: float = 0.9
    lr: float = 1.0  # times that of the uncompressed method


def methods(steps: int) -> dict[str, Method]:
    """Return all methods, for runs of `steps` steps per worker."""
    ef, top = pl.codecs.Feedback, pl.codecs.TopK
    few = ef(pl.codecs.Chain(top(0.01), pl.codecs.Int8()))
    return {
        "dense": Method(),
        "no communication": Method(None, pl.local_sgd(steps), AVERAGE),
        "bfloat16": Method(pl.codecs.BFloat16()),
        "bfloat16 both ways": Method(pl.codecs.BFloat16(), model_codec=pl.codecs.BFloat16()),
        "int8": Method(pl.codecs.Int8()),
        "sign, feedback": Method(ef(pl.codecs.Sign())),
        "top 10 %, feedback": Method(ef(top(0.1))),
        "top 1 %, feedback": Method(ef(top(0.01))),
        "top 1 %, no feedback": Method(top(0.01)),
        "top 1 % + int8, feedback": Method(few),
        "top 1 % + int8, no momentum": Method(few, momentum=0.0, lr=8.0),
        "DGC, top 1 %": Method(pl.codecs.DeepGradient(0.01), momentum=0.0),
        "k_sync(6), top 1 %, feedback": Method(ef(top(0.01)), pl.k_sync(6)),
        "local SGD, 10 steps": Method(None, pl.local_sgd(10), AVERAGE),
        "the same, top 10 %, feedback, 6 of 8": Method(
            ef(top(0.1)), pl.local_sgd(10, k=6), AVERAGE
        ),
        "DiLoCo, 10 local steps": Method(None, pl.local_sgd(10), NESTEROV),
        "DiLoCo, 10 local steps, int8": Method(pl.codecs.Int8(), pl.local_sgd(10), NESTEROV),
    }


@dataclass(frozen=True)
class Task:
    """A model, its data, and a measure of its accuracy."""

    train: Dataset[Any]
    labels: Any
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    accuracy: Callable[[nn.Module], float]  # in percent
    lr: float
    batch: int
    steps: int
    scales: tuple[float, float] = (0.05, 0.2)  # of thresholds in decentralized runs


def perceptron(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 10))


@cache
def digits() -> Task:
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    x = torch.from_numpy(data.data[order]).float() / 16
    y = torch.from_numpy(data.target[order]).long()
    train, test = TensorDataset(x[:1440], y[:1440]), TensorDataset(x[1440:], y[1440:])
    right = partial(accuracy, test=test)
    return Task(train, y[:1440].numpy(), partial(perceptron, 64), loss, right, 0.05, 128, 440)


@cache
def fashion() -> Task:
    train, right = vectors(), partial(accuracy, test=vectors(test=True))
    labels = train.tensors[1].numpy()
    return Task(train, labels, partial(perceptron, 784), loss, right, 0.05, 128, STEPS)


def run(task: Task, method: Method, sorted_by_label: bool, seed: int) -> dict[str, float]:
    """Train; return the accuracy and the bytes of all results."""
    torch.manual_seed(seed)
    sgd = partial(torch.optim.SGD, lr=task.lr * method.lr, momentum=method.momentum)
    learner = pl.TorchLearner(
        task.model(), task.loss, sgd, task.train, task.batch, outer=method.outer
    )
    parts = pl.partition.by_label(task.labels, WORKERS) if sorted_by_label else (
        pl.partition.stratified(task.labels, WORKERS, seed=seed)
    )  # fmt: skip
    engine = pl.Simulator(WORKERS, pl.delays.ShiftedExponential(0.9, 0.1))
    trainer = pl.Trainer(
        learner, method.policy, engine, seed=seed, progress=False, codec=method.codec,
        model_codec=method.model_codec, placement=pl.policies.Placed(parts, move=False),
    )  # fmt: skip
    local = max((work.steps for work in method.policy.works()), default=1)
    result = trainer.fit(steps=max(task.steps // local, 1))
    return {"accuracy": task.accuracy(result.model), "bytes": float(result.meter.up_bytes)}


def job(make: Callable[[], Task], name: str, kind: str, seed: int, lr: float) -> dict[str, float]:
    """Train once; a pool calls this in its own process."""
    task = make()
    method = methods(task.steps)[name]
    return run(task, replace(method, lr=lr * method.lr), kind == "sorted", seed)


def pool() -> ProcessPoolExecutor:
    """Return a pool with one process, and one torch thread, per core."""
    return ProcessPoolExecutor(
        machine()["cores"], get_context("spawn"), torch.set_num_threads, (1,)
    )


def tune_arms(
    runs: Executor, make: Callable[[], Task], names: Sequence[str], kind: str
) -> dict[str, Tuned]:
    """Return the learning rate of each method with the highest accuracy."""

    def scores(trials: Sequence[Trial]) -> list[float]:
        coming = [runs.submit(job, make, each.arm, kind, SEED, each.rate) for each in trials]
        return [one.result()["accuracy"] for one in coming]

    return tune(names, scores)


def compare(
    make: Callable[[], Task], names: Sequence[str], seeds: Sequence[int], tuned: bool
) -> dict[str, Any]:
    """Train by each method on both kinds of shards; print each row as it completes."""
    figures: dict[str, Any] = {}
    with pool() as runs:
        chosen = {kind: tune_arms(runs, make, names, kind) for kind in KINDS if tuned}
        rates = {
            kind: {name: each.best.rate for name, each in found.items()}
            for kind, found in chosen.items()
        }
        coming: dict[str, dict[str, list[Future[dict[str, float]]]]] = {
            name: {
                kind: [runs.submit(job, make, name, kind, seed, rates[kind][name] if tuned else 1.0)
                       for seed in seeds]
                for kind in KINDS
            }
            for name in names
        }  # fmt: skip
        header = ["accuracy", "rate", "sorted shards", "rate", "MB up", "saved"]
        lines = Lines(["results sent by 8 workers", *header], 36, 9)
        for name, kinds in coming.items():
            found = {kind: [one.result() for one in each] for kind, each in kinds.items()}
            sent = statistics.mean(one["bytes"] for one in found["mixed"])
            figures[name] = {
                "bytes": sent,
                "saved": round(1 - sent / figures.get("dense", {"bytes": sent})["bytes"], 4),
            }
            cells = []
            for kind, each in found.items():
                values = [one["accuracy"] for one in each]
                figures[name][kind] = spread(values) | (
                    chosen[kind][name].report() if tuned else {}
                )
                rate = f"{rates[kind][name]:.2g}" if tuned else "1"
                cells += [told(values), rate]
            lines.add([name, *cells, f"{sent / 1e6:.2f}", f"{figures[name]['saved']:.1%}"])
    return figures


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the mean, and for several values half the width of its 95 % interval."""
    mean, half = interval(values)
    return {"accuracy": round(mean, 2)} | ({"half": round(half, 2)} if len(values) > 1 else {})


LATE: dict[str, Codec | None] = {
    "top 1 %, given back": pl.codecs.Feedback(pl.codecs.TopK(0.01)),
    "top 1 %, lost": pl.codecs.Feedback(pl.codecs.TopK(0.01), refunds=False),
    "dense": None,
}


def late(make: Callable[[], Task], name: str, seed: int) -> float:
    """Train with 37 % of the results too late; return the training loss."""
    task, quick, slow = (
        make(),
        pl.delays.ShiftedExponential(0.5, 0.5),
        pl.delays.ShiftedExponential(2.0, 2.0),
    )
    assert isinstance(task.train, TensorDataset)
    torch.manual_seed(seed)
    sgd = partial(torch.optim.SGD, lr=0.05)
    learner = pl.TorchLearner(task.model(), task.loss, sgd, task.train, 16)
    engine = pl.Simulator(WORKERS, [*[quick] * 5, *[slow] * 3])
    policy = pl.ringmaster(4, stops=False)
    trainer = pl.Trainer(learner, policy, engine, seed=seed, progress=False, codec=LATE[name])
    result = trainer.fit(steps=1500)
    with torch.no_grad():
        return float(task.loss(result.model, task.train[:4096]))


def discards(make: Callable[[], Task], seeds: Sequence[int]) -> dict[str, list[float]]:
    """Print the training loss if late results are returned to the feedback memory, and if not."""
    print("\nringmaster(4, stops=False), 37 % of the results too late: training loss of each seed")
    lines, found = Lines(["", "loss"], 36, 21), {}
    with pool() as runs:
        coming = {name: [runs.submit(late, make, name, seed) for seed in seeds] for name in LATE}
        for name, each in coming.items():
            found[name] = [round(one.result(), 4) for one in each]
            lines.add([name, ", ".join(f"{value:.3f}" for value in found[name])])
    return found


def measure(quick: bool, only: Sequence[str] | None = None) -> dict[str, Any]:
    make, seeds = (digits, [0]) if quick else (fashion, [0, 1, 2])
    names = only or (QUICK if quick else ARMS)
    print(f"\n{make.__name__}, {make().steps} steps, {len(seeds)} seeds", flush=True)
    figures = compare(make, names, seeds, tuned=not quick)
    if not only:
        figures["too late"] = discards(make, seeds)
    return figures


def holds(figures: dict[str, Any]) -> bool:
    """Return whether a method as accurate as the dense one saves enough bytes.

    Returning late results to the feedback memory must also give a lower loss than losing them.
    """
    late = figures.get("too late", {})
    back, lost = (late.get(f"top 1 %, {what}", []) for what in ("given back", "lost"))
    return (
        saved(figures, "mixed") >= BOUNDS["bytes_saved"]
        and saved(figures, "sorted") >= BOUNDS["bytes_saved_sorted"]
        and all(a < b for a, b in zip(back, lost, strict=True))
    )


def saved(figures: dict[str, Any], kind: str) -> float:
    """Return the largest fraction of bytes that a method as accurate as the dense one saves."""
    least = figures["dense"][kind]["accuracy"] - BOUNDS["points"]
    methods = {
        name: f for name, f in figures.items() if name not in ("no communication", "too late")
    }
    return max(float(f["saved"]) for f in methods.values() if f[kind]["accuracy"] >= least)
