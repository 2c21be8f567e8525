"""The learning rate from which asynchronous SGD of a CNN is unstable, by theory and measured.

`sync` trains a CNN for some steps, and its largest curvature is measured. From that model, 8
workers continue asynchronously in simulated time, with real arithmetic. Theory gives the
limit of stability from the curvature, the number of workers and the law of their times.
Bisection measures it to 9 %. A run counts as unstable if within 300 steps the mean loss of 20
results rises a tenth above the first model's loss. Below the limit the loss falls. It seldom
grows without bound: the model moves to a flatter region, and continues from a higher loss.

Theory does not know how the curvature changes during training. It grows until the learning rate
is just stable (the edge of stability: Cohen et al., 2021, arXiv 2103.00065), most of all early.
So the limit at the initial model is far too high; it is shown without a bound.

    python benchmarks/planner.py --part rates [--quick]
"""

from __future__ import annotations

import copy
import time
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from _fashion import images, loss
from _report import table
from paceline.delays.models import Delay
from paceline.planner.measure.curvature import measure_curvature
from paceline.planner.theory.asynchrony import max_stable_lr

WORKERS, SHARE = 8, 256  # samples of each result
FACTOR = 1.5
STEPS, RISEN = 300, 1.1
LAWS: dict[str, Delay] = {
    "nearly fixed": pl.delays.ShiftedExponential(0.9, 0.1),
    "Erlang 4": pl.delays.Erlang(4, 1.0),
}
FIRST = "the first model"


def digits() -> TensorDataset:
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    return TensorDataset(x, torch.tensor(labels))


def fashion() -> TensorDataset:
    """Return every fifth image, so that the loss on all of them is quick to compute."""
    pixels, labels = images().tensors
    return TensorDataset(pixels[::5].float() / 255, labels[::5])


def make_model(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, stride=1 if width == 8 else 2), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten()),
        nn.LazyLinear(10),
    )


def learner(model: nn.Module, data: TensorDataset, lr: float) -> pl.TorchLearner:
    sgd = partial(torch.optim.SGD, lr=lr)
    return pl.TorchLearner(model, loss, sgd, data, WORKERS * SHARE)


def trained(data: TensorDataset, steps: int, lr: float) -> nn.Module:
    """Return a model after some steps on whole batches."""
    model = make_model(data.tensors[0].shape[-1])
    model(data.tensors[0][:1])  # sets the width of the lazy last layer
    if not steps:
        return model
    run = pl.Trainer(
        learner(model, data, lr), pl.sync(), pl.Simulator(WORKERS), progress=False
    ).fit(steps=steps)  # fmt: skip
    found: nn.Module = run.model
    return found


def diverges(
    model: nn.Module, data: TensorDataset, lr: float, law: Delay, first: float, seed: int
) -> bool:
    recent: list[float] = []

    def risen(progress: pl.Progress) -> bool:
        recent.append(progress.loss)
        return len(recent) >= 20 and not float(np.mean(recent[-20:])) < RISEN * first

    run = pl.Trainer(
        learner(copy.deepcopy(model), data, lr), pl.asynchronous(damping=False),
        pl.Simulator(WORKERS, law), seed=seed, progress=False,
    ).fit(steps=STEPS, until=risen)  # fmt: skip
    return run.steps < STEPS


def measured(
    model: nn.Module, data: TensorDataset, guess: float, law: Delay, first: float, seed: int
) -> float:
    """Return the learning rate from which training diverges."""
    rate = guess
    found = diverges(model, data, rate, law, first, seed)
    low, high = (0.0, rate) if found else (rate, 0.0)
    while not (low and high):
        rate = 2 * low if low else high / 2
        if not 1e-3 * guess < rate < 1e3 * guess:
            return rate
        if diverges(model, data, rate, law, first, seed):
            high = rate
        else:
            low = rate
    while high / low > 2 ** (1 / 8):
        rate = (low * high) ** 0.5
        if diverges(model, data, rate, law, first, seed):
            high = rate
        else:
            low = rate
    return float((low * high) ** 0.5)


def measure(quick: bool) -> tuple[dict[str, Any], bool]:
    data = digits() if quick else fashion()
    models = {"300 steps at 0.2": (300, 0.2)} if quick else {
        FIRST: (0, 0.0), "200 steps at 0.1": (200, 0.1), "600 steps at 0.1": (600, 0.1),
        "600 steps at 0.3": (600, 0.3),
    }  # fmt: skip
    laws = dict(list(LAWS.items())[:1]) if quick else LAWS
    rows, figures, ratios = [], [], []
    began = time.monotonic()
    for name, (steps, lr) in models.items():
        model = trained(data, steps, lr)
        curvature = measure_curvature(learner(model, data, 0.1), samples=2048, steps=20)
        for law_name, law in laws.items():
            limit = max_stable_lr(law, WORKERS, curvature.top)
            fact = measured(model, data, limit, law, curvature.loss, seed=0)
            ratio = fact / limit
            if name != FIRST:
                ratios.append(ratio)
            cells = [f"{curvature.loss:.3f}", f"{curvature.top:.1f}", f"{limit:.4f}"]
            rows.append([f"{name}, {law_name}", *cells, f"{fact:.4f}", f"{ratio:.2f}"])
            figures.append(
                {
                    "model": name, "law": law_name, "loss": round(curvature.loss, 4),
                    "curvature": round(curvature.top, 2), "predicted": round(limit, 5),
                    "measured": round(fact, 5), "ratio": round(ratio, 3),
                }
            )  # fmt: skip
            print(f"  {rows[-1]}", flush=True)
    print(f"\n8 workers, a CNN on {'digits' if quick else 'Fashion-MNIST'}: it is unstable from")
    table(["begun from", "loss", "curvature", "by theory", "in fact", "ratio"], rows)
    ok = all(1 / FACTOR <= ratio <= FACTOR for ratio in ratios)
    return {"rates": figures, "seconds": round(time.monotonic() - began, 1)}, ok
