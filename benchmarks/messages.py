"""Accuracy against bytes: what results are encoded with on their way from 8 workers to the server.

Training in simulated time with real arithmetic, of an MLP on handwritten digits (`--quick`) or on
Fashion-MNIST. Two controls keep the figures honest: no communication at all (everyone trains by
itself, and the models are averaged once, at the end), and shards that are sorted by label, on
which that is a catastrophe. All methods see as many samples; learning rates are tuned for the
uncompressed method and left as they are.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline as pl
from _report import finish, machine, parser, table
from paceline.codecs.base import Codec
from paceline.core.protocol import Policy
from paceline.data.idx import fashion_mnist

WORKERS, BATCH = 8, 128
QUICK = (
    *("dense", "no communication", "sign, feedback", "top 1 %, no feedback"),
    "top 1 % + int8, feedback",
)
BOUNDS = {"bytes_saved": 0.9, "points": 0.5, "bytes_saved_sorted": 0.6, "bytes_saved_top_k": 0.97}


@dataclass(frozen=True)
class Method:
    """How a run is made."""

    codec: Codec | None = None
    policy: Policy = field(default_factory=pl.sync)
    local: bool = False  # steps at the workers, of which a change results
    momentum: float = 0.9
    lr: float = 1.0  # times that of the uncompressed method


def methods(steps: int) -> dict[str, Method]:
    ef, top = pl.Feedback, pl.TopK
    return {
        "dense": Method(),
        "no communication": Method(None, pl.local_sgd(steps), local=True),
        "bfloat16": Method(pl.BFloat16()),
        "int8": Method(pl.Int8()),
        "sign, feedback": Method(ef(pl.Sign())),
        "top 10 %, feedback": Method(ef(top(0.1))),
        "top 1 %, feedback": Method(ef(top(0.01))),
        "top 1 %, no feedback": Method(top(0.01)),
        "top 1 % + int8, feedback": Method(ef(pl.Chain(top(0.01), pl.Int8()))),
        "DGC, top 1 %": Method(pl.DeepGradient(0.01), momentum=0.0),
        "k_sync(6), top 1 %, feedback": Method(ef(top(0.01)), pl.k_sync(6)),
        "DiLoCo, 10 local steps": Method(None, pl.local_sgd(10), local=True),
        "DiLoCo, int8": Method(pl.Int8(), pl.local_sgd(10), local=True),
        "DiLoCo, top 10 %, feedback, 6 of 8": Method(
            ef(top(0.1)), pl.local_sgd(10, k=6), local=True
        ),
    }


@dataclass(frozen=True)
class Data:
    """A task: what is trained on, what is tested on, and how."""

    train: TensorDataset
    labels: Any
    test: tuple[Tensor, Tensor]
    width: int
    lr: float
    steps: int


def load(quick: bool) -> Data:
    if quick:
        from sklearn.datasets import load_digits

        digits = load_digits()
        order = np.random.default_rng(0).permutation(len(digits.target))
        x = torch.from_numpy(digits.data[order]).float() / 16
        y = torch.from_numpy(digits.target[order]).long()
        train, test = TensorDataset(x[:1440], y[:1440]), (x[1440:], y[1440:])
        return Data(train, y[:1440].numpy(), test, 64, 0.05, 440)
    data = fashion_mnist()
    x = torch.from_numpy(data.train_images).flatten(1).float() / 255
    y = torch.from_numpy(data.train_labels).long()
    test = (torch.from_numpy(data.test_images).flatten(1).float() / 255,
            torch.from_numpy(data.test_labels).long())  # fmt: skip
    return Data(TensorDataset(x, y), y.numpy(), test, 784, 0.05, 1400)


def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def run(data: Data, method: Method, sorted_by_label: bool, seed: int) -> dict[str, float]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(data.width, 64), nn.ReLU(), nn.Linear(64, 10))
    sgd = partial(torch.optim.SGD, lr=data.lr * method.lr, momentum=method.momentum)
    outer = partial(torch.optim.SGD, lr=1.0)
    learner = pl.TorchLearner(
        model, loss, sgd, data.train, BATCH, outer=outer if method.local else None
    )
    parts = pl.partition.by_label(data.labels, WORKERS) if sorted_by_label else (
        pl.partition.stratified(data.labels, WORKERS, seed=seed)
    )  # fmt: skip
    placement = pl.Placed(parts, move=False)
    engine = pl.Simulator(WORKERS, pl.ShiftedExponential(0.9, 0.1))
    trainer = pl.Trainer(
        learner, method.policy, engine, seed=seed, progress=False, codec=method.codec,
        placement=placement,
    )  # fmt: skip
    work = getattr(method.policy, "work", None)
    local = work.steps if work is not None else 1
    result = trainer.fit(steps=max(data.steps // local, 1))
    with torch.no_grad():
        right = (result.model(data.test[0]).argmax(1) == data.test[1]).float().mean()
    return {"accuracy": 100 * float(right), "bytes": float(result.meter.up_bytes)}


def told(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.1f}"
    factor = {2: 12.7, 3: 4.30, 4: 3.18, 5: 2.78}.get(len(values), 2.0)  # Student's t
    half = factor * statistics.stdev(values) / sqrt(len(values))
    return f"{statistics.mean(values):.1f} ± {half:.1f}"


def main() -> None:
    options = parser(__doc__).parse_args()
    data = load(options.quick)
    seeds = [0] if options.quick else [0, 1, 2]
    figures: dict[str, Any] = {}
    rows = []
    for name, method in methods(data.steps).items():
        if options.quick and name not in QUICK:
            continue
        found: dict[str, list[dict[str, float]]] = {"mixed": [], "sorted": []}
        for seed in seeds:
            for kind, runs in found.items():
                runs.append(run(data, method, kind == "sorted", seed))
        dense = figures.get("dense", {}).get(
            "bytes", statistics.mean(r["bytes"] for r in found["mixed"])
        )
        sent = statistics.mean(r["bytes"] for r in found["mixed"])
        figures[name] = {
            "mixed": round(statistics.mean(r["accuracy"] for r in found["mixed"]), 2),
            "sorted": round(statistics.mean(r["accuracy"] for r in found["sorted"]), 2),
            "bytes": sent,
            "saved": round(1 - sent / dense, 4),
        }
        rows.append([
            name, told([r["accuracy"] for r in found["mixed"]]),
            told([r["accuracy"] for r in found["sorted"]]),
            f"{sent / 1e6:.2f}", f"{figures[name]['saved']:.1%}",
        ])  # fmt: skip
    header = ["results sent by 8 workers", "accuracy", "sorted shards", "MB up", "saved"]
    table(header, rows)
    ok = holds(figures)
    figures["too late"] = late = discards(data, [0] if options.quick else [0, 1, 2])
    ok = ok and all(a < b for a, b in zip(late["top 1 %, given back"], late["top 1 %, lost"],
                                          strict=True))  # fmt: skip
    about = machine("torch", "paceline")
    finish("messages", figures, BOUNDS, ok, about, options.quick)


def discards(data: Data, seeds: Sequence[int]) -> dict[str, list[float]]:
    """Print the training loss when results that come too late go back to memory, and when not."""
    codecs: dict[str, Codec | None] = {
        "top 1 %, given back": pl.Feedback(pl.TopK(0.01)),
        "top 1 %, lost": pl.Feedback(pl.TopK(0.01), refunds=False),
        "dense": None,
    }
    quick, slow = pl.ShiftedExponential(0.5, 0.5), pl.ShiftedExponential(2.0, 2.0)
    inputs, labels = data.train.tensors
    found: dict[str, list[float]] = {name: [] for name in codecs}
    for seed in seeds:
        for name, codec in codecs.items():
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(data.width, 64), nn.ReLU(), nn.Linear(64, 10))
            sgd = partial(torch.optim.SGD, lr=0.05)
            learner = pl.TorchLearner(model, loss, sgd, data.train, 16)
            engine = pl.Simulator(WORKERS, [*[quick] * 5, *[slow] * 3])
            policy = pl.ringmaster(4, stops=False)
            trainer = pl.Trainer(learner, policy, engine, seed=seed, progress=False, codec=codec)
            result = trainer.fit(steps=1500)
            with torch.no_grad():
                found[name].append(float(loss(result.model, [inputs[:4096], labels[:4096]])))
    rows = [[name, ", ".join(f"{each:.3f}" for each in values)] for name, values in found.items()]
    print("\nringmaster(4, stops=False), 37 % of the results too late: training loss of each seed")
    table(["", "loss"], rows)
    return found


def holds(figures: dict[str, Any]) -> bool:
    """Tell whether some method saves as many bytes as it should and is as good as the dense one."""
    dense = figures["dense"]

    def best(kind: str, points: float) -> float:
        good = [f["saved"] for n, f in figures.items()
                if n != "no communication" and f[kind] >= dense[kind] - points]  # fmt: skip
        return max(good)

    mixed, on_sorted = best("mixed", BOUNDS["points"]), best("sorted", BOUNDS["points"])
    return mixed >= BOUNDS["bytes_saved_top_k"] and on_sorted >= BOUNDS["bytes_saved_sorted"]


if __name__ == "__main__":
    main()
