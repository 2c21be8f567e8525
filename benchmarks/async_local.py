"""Asynchronous local steps on unequal workers, beside rounds of local steps: time to a test loss.

Four simulated workers of speeds 1 : 1 : 2 : 4 train an MLP on Fashion-MNIST with real arithmetic.
The time of a task varies by a log-normal law, and links have 100 Mbit/s and 10 ms. Arms:

- rounds: `local_sgd(10)` with Nesterov momentum on the server (DiLoCo);
- rounds, BySpeed: the same, with shares of the batch by speed;
- asynchronous: `async_local_sgd(10)` with `DelayedNesterov`, and tasks by speed;
- asynchronous, usual momentum: the same with the momentum of `SGD`, at a quarter of its rate.

Every arm gets the same number of trials of its learning rate and of the server's, on another seed
(_tuning.py). `--jitter`: the standard deviation of the logarithm of a task's time.

    python benchmarks/async_local.py [--quick] [--jitter 0.1 0.5 1.0]
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import cache, partial
from math import inf, isfinite
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from _fashion import loss, vectors
from _report import finish, machine, parser, table
from _tuning import SEED, Trial, tune

SPEEDS, LOCAL, BATCH = (1, 1, 2, 4), 10, 64
TARGET, LONGEST, EVERY = 0.55, 20.0, 8  # test loss; simulated seconds; results between two tests
SECONDS = 0.02  # for a local step of the mean share of the batch, at speed 1
KNOBS = (0.2, 0.35, 1.0)  # learning rates of the server beside the usual one
BOUNDS = {"to_rounds_by_speed": 0.8}
ARMS = (
    "rounds",
    "rounds, BySpeed",
    "asynchronous",
    "asynchronous, usual momentum",
)


@cache
def data(test: bool) -> TensorDataset:
    return vectors(test)


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def outer_of(name: str, lr: float) -> Any:
    if name == "asynchronous":
        return partial(pl.learners.DelayedNesterov, lr=lr, momentum=0.9, every=len(SPEEDS))
    lr = lr / len(SPEEDS) if name.startswith("asynchronous") else lr
    return partial(torch.optim.SGD, lr=lr, momentum=0.9, nesterov=True)


class Reached:
    """Whether the test loss has reached the target, tested after every few results."""

    def __init__(self, results: int) -> None:
        self._every, self.done = max(EVERY // results, 1), False
        rows = data(True).tensors
        self._batch = rows[0][:2000], rows[1][:2000]

    def __call__(self, at: pl.Progress) -> bool:
        if at.step % self._every:
            return False
        with torch.no_grad():
            self.done = float(loss(at.model(), self._batch)) <= TARGET
        return self.done


def train(name: str, rate: float, knob: float | None, seed: int, jitter: float) -> float:
    """Return the simulated seconds to the target; infinity if it is not reached."""
    is_async = name.startswith("asynchronous")
    outer = outer_of(name, 0.7 if knob is None else knob)
    inner = partial(torch.optim.SGD, lr=0.1 * rate, momentum=0.0)
    batch = BATCH // len(SPEEDS) if is_async else BATCH
    learner = pl.TorchLearner(make_model(seed), loss, inner, data(False), batch, outer=outer)
    mean = SECONDS * LOCAL
    delays = [pl.delays.LogNormal(mean / speed, jitter) for speed in SPEEDS]
    unit = float(BATCH // len(SPEEDS) * LOCAL)
    link = pl.delays.Link(0.005, 12.5e6, 12.5e6)
    engine = pl.Simulator(len(SPEEDS), delays, link, unit=unit)
    policy = pl.policies.async_local_sgd(LOCAL) if is_async else pl.local_sgd(LOCAL)
    trainer = pl.Trainer(
        learner, policy, engine, seed=seed, progress=False,
        placement=None if name == "rounds" else pl.BySpeed(),
    )  # fmt: skip
    until = Reached(1 if is_async else len(SPEEDS))
    run = trainer.fit(seconds=LONGEST, until=until)
    return run.seconds if until.done else inf


def _plain(value: float) -> float | None:
    """Return a number for JSON; None if the target was not reached."""
    return round(value, 3) if isfinite(value) else None


def main() -> None:
    torch.set_num_threads(1)
    options = parser(__doc__, 120)
    options.add_argument("--jitter", type=float, nargs="+", default=[0.5])
    options.add_argument("--seeds", type=int, default=3)
    given = options.parse_args()
    figures: dict[str, Any] = {}
    for jitter in given.jitter:
        figures[str(jitter)] = compare(jitter, 1 if given.quick else given.seeds, given.quick)
    ratios = [each["asynchronous"]["to_rounds_by_speed"] or inf for each in figures.values()]
    ok = given.quick or max(ratios) <= BOUNDS["to_rounds_by_speed"]
    finish("asynchronous local steps", figures, BOUNDS, ok, machine("torch", "paceline"), given)


def compare(jitter: float, seeds: int, quick: bool) -> dict[str, Any]:
    """Tune all arms and measure them; return the figures of each."""

    def scores(trials: Sequence[Trial]) -> list[float]:
        return [-train(t.arm, t.rate, t.knob, SEED, jitter) for t in trials]

    knobs = {} if quick else {name: KNOBS for name in ARMS}
    tuned = tune(ARMS, scores, knobs, factors=(1.0, 3.0) if quick else (1 / 3, 1.0, 3.0))
    found: dict[str, list[float]] = {name: [] for name in ARMS}
    for seed in range(seeds):
        for name in ARMS:
            best = tuned[name].best
            found[name].append(train(name, best.rate, best.knob, seed, jitter))
            print(f"jitter {jitter}, {name}, seed {seed}: {found[name][-1]:.1f} s", flush=True)
    rows, figures = [], {}
    for name, seconds in found.items():
        ratios = [a / b for a, b in zip(seconds, found["rounds, BySpeed"], strict=True)]
        figures[name] = {
            "seconds": [_plain(each) for each in seconds],
            "to_rounds_by_speed": _plain(statistics.median(ratios)),
            "range": [_plain(min(ratios)), _plain(max(ratios))],
            "tuned": tuned[name].report(),
        }
        rows.append(
            [
                name,
                f"{statistics.median(seconds):.1f} [{min(seconds):.1f}–{max(seconds):.1f}]",
                f"{statistics.median(ratios):.2f} [{min(ratios):.2f}–{max(ratios):.2f}]",
            ]
        )
    table([f"jitter {jitter}", "seconds to the loss", "to rounds, BySpeed"], rows)
    return figures


if __name__ == "__main__":
    main()
