"""Local steps with few numbers: loss and bytes of a small GPT on tinyshakespeare, four workers.

Workers take 20 local steps of AdamW, whose state they keep, and send their change. Five arms use
the same samples and the same number of them:

- dense: DiLoCo with Nesterov momentum on the server (arXiv 2311.08105);
- sparse: 2 % of the numbers in two bits, fading error feedback, no momentum on the server, as in
  SparseLoCo (arXiv 2508.15706); 6 % of the model's change in two bits on the way down;
- sparse, Muon: the same, with Muon for the matrices inside (arXiv 2505.23725);
- gradients: no local steps, all numbers of each gradient;
- gradients, top 1 %: no local steps, 1 % of each gradient in bytes, with error feedback; the
  model's change as above.

Every arm gets the same number of trials of its learning rate, on another seed (_tuning.py). Losses
are of held-out text. Time is simulated: links of 20 Mbit/s, and the computing time of one process.

    TINYSHAKESPEARE=… python benchmarks/sparse_local.py [--quick]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn

import paceline as pl
from _gpt import Text, make_model, test_loss, text_file
from _report import finish, machine, parser, table
from _tuning import SEED, Trial, tune
from arms.few import FEW, MODELS, TOP
from gpt import Text as Windows
from gpt import loss

WORKERS, BATCH, LOCAL, ROUNDS = 4, 16, 20, 30
SIZE = 64, 2  # width and layers: 0.11 million parameters
RATE = 20e6 / 8  # bytes a second of each link
BOUNDS = {"loss_to_dense": 1.01, "bytes_to_dense": 1 / 50}
NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
AVERAGE = partial(torch.optim.SGD, lr=1.0)


@dataclass(frozen=True)
class Arm:
    rate: float
    local: int = LOCAL
    outer: Any = None
    codec: Any = None
    down: Any = None
    muon: bool = False


ARMS = {
    "dense": Arm(1e-3, outer=NESTEROV),
    "sparse": Arm(1e-3, outer=AVERAGE, codec=FEW, down=MODELS),
    "sparse, Muon": Arm(1e-3, outer=AVERAGE, codec=FEW, down=MODELS, muon=True),
    "gradients": Arm(1e-3, local=1),
    "gradients, top 1 %": Arm(1e-3, local=1, codec=TOP, down=MODELS),
}


class Both(torch.optim.Optimizer):
    """Muon for the matrices of the blocks at ten times the learning rate, AdamW for the rest."""

    def __init__(self, named_parameters: Sequence[tuple[str, nn.Parameter]], lr: float) -> None:
        named = list(named_parameters)
        matrices = [p for name, p in named if name.startswith("blocks") and p.dim() == 2]
        chosen = {id(p) for p in matrices}
        rest = [p for _, p in named if id(p) not in chosen]
        super().__init__([p for _, p in named], {"lr": lr})
        self._parts = [torch.optim.Muon(matrices, lr=10 * lr), torch.optim.AdamW(rest, lr=lr)]
        self.param_groups = [group for part in self._parts for group in part.param_groups]
        for part in self._parts:
            part.state = self.state  # each has entries for its own parameters

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self._parts:
            part.step()


@cache
def text() -> Text:
    file = text_file()
    assert file is not None
    return Text(file)


@cache
def seconds_of_a_sample() -> float:
    """Return the computing time of a sample on this machine, for the simulated workers."""
    model, batch = make_model(0, *SIZE), text().batch(0, 0, 0, BATCH // WORKERS)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        loss(model, batch).backward()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) / (BATCH // WORKERS)


def train(name: str, rate: float, seed: int, rounds: int) -> dict[str, float]:
    """Train an arm; return its test loss, its bytes in a round, and its simulated seconds."""
    arm = ARMS[name]
    inner = partial(Both if arm.muon else torch.optim.AdamW, lr=arm.rate * rate)
    learner = pl.TorchLearner(
        make_model(seed, *SIZE), loss, inner, Windows(text()._train), BATCH, outer=arm.outer
    )
    link = pl.delays.Link(0.02, RATE, RATE)
    engine = pl.Simulator(WORKERS, pl.delays.Fixed(seconds_of_a_sample()), link, unit=1.0)
    policy = pl.local_sgd(arm.local) if arm.local > 1 else pl.sync()
    trainer = pl.Trainer(
        learner, policy, engine, codec=arm.codec, model_codec=arm.down, seed=seed, progress=False
    )
    run = trainer.fit(steps=rounds * LOCAL // arm.local)
    first = WORKERS * learner.message_bytes  # the models that workers begin with
    return {
        "loss": test_loss(run.model, text().held_out()),
        "bytes": float(run.meter.up_bytes + run.meter.down_bytes - first) / rounds,
        "seconds": run.seconds,
    }


def main() -> None:
    torch.set_num_threads(1)
    options = parser(__doc__, 120)
    options.add_argument("--rounds", type=int, help=f"of {LOCAL} local steps")
    options.add_argument("--seeds", type=int, default=3)
    given = options.parse_args()
    about = machine("torch", "paceline")
    if text_file() is None:
        reason = {"not_run": "TINYSHAKESPEARE names no file"}
        finish("sparse local steps", reason, BOUNDS, False, about, given)
    rounds = given.rounds or (4 if given.quick else ROUNDS)
    names = ["dense", "sparse"] if given.quick else list(ARMS)
    chosen = {name: 1.0 for name in names}
    tuning: dict[str, Any] = {}
    if not given.quick:

        def scores(trials: Sequence[Trial]) -> list[float]:
            found = []
            for trial in trials:
                found.append(-train(trial.arm, trial.rate, SEED, rounds)["loss"])
                print(f"{trial.arm} at {trial.rate:.3g} of its rate: {-found[-1]:.4f}", flush=True)
            return found

        tuned = tune(names, scores, factors=(1 / 3, 1.0, 3.0))
        chosen = {name: each.best.rate for name, each in tuned.items()}
        tuning = {name: each.report() for name, each in tuned.items()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for seed in range(1 if given.quick else given.seeds):
        for name in names:
            found[name].append(train(name, chosen[name], seed, rounds))
            print(f"{name}, seed {seed}: {found[name][-1]}", flush=True)
    figures = {}
    rows = []
    for name, runs in found.items():
        ratios = [
            one["loss"] / other["loss"] for one, other in zip(runs, found["dense"], strict=True)
        ]
        sent = statistics.median(one["bytes"] for one in runs)
        dense = statistics.median(one["bytes"] for one in found["dense"])
        losses = [one["loss"] for one in runs]
        figures[name] = {
            "loss": round(statistics.mean(losses), 4),
            "losses": [round(each, 4) for each in losses],
            "loss_to_dense": round(statistics.median(ratios), 4),
            "megabytes_a_round": round(sent / 1e6, 3),
            "dense_over_bytes": round(dense / sent, 1),
            "seconds": round(statistics.median(one["seconds"] for one in runs), 1),
            **({"tuned": tuning[name]} if name in tuning else {}),
        }
        told = figures[name]
        low, high = min(losses), max(losses)
        rows.append(
            [
                name,
                f"{told['loss']:.3f} [{low:.3f}–{high:.3f}]",
                f"{told['loss_to_dense']:.3f}",
                f"{told['megabytes_a_round']:.2f}",
                f"{told['dense_over_bytes']:.1f}",
                f"{told['seconds']:.0f}",
            ]
        )
    table(["arm", "test loss", "to dense", "MB a round", "dense / bytes", "simulated s"], rows)
    best = figures["sparse"]
    ok = best["dense_over_bytes"] >= 1 / BOUNDS["bytes_to_dense"] and (
        given.quick or best["loss_to_dense"] <= BOUNDS["loss_to_dense"]
    )
    finish("sparse local steps", figures, BOUNDS, bool(ok), about, given)


if __name__ == "__main__":
    main()
