"""Learning rates of the arms, and how they were chosen: the same grid for all, on another seed.

`python benchmarks/peers.py --tune` prints the steps to the loss for each, on simulated workers.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import paceline as pl
from arms.few import CODECS
from arms.task import LOCAL, Order, as_it_is, held_out, loss_of

HOSTS, TUNED_ON = 4, 100
GRID = {"cnn": (0.02, 0.05, 0.1, 0.2, 0.4), "gpt": (3e-4, 1e-3, 3e-3, 6e-3)}
MEAN = (1.0, 0.0)
OUTER = ((0.7, 0.9), MEAN)  # learning rate and Nesterov momentum
FEW = {"step, few": "sync + top 1 %", "local, few": "local_sgd + few numbers"}  # arms of kinds
TARGET = {"cnn": 0.6, "gpt": 2.5}
EASY = {"cnn": 1.5, "gpt": 3.0}  # for a short look

# By kind of arm and model: learning rate, and that of the outer step with its momentum. They were
# chosen by `python benchmarks/peers.py --tune [--model gpt]`, "step" of the CNN without 0.4.
# Local steps keep their momentum.
RATES: dict[tuple[str, str], tuple[float, tuple[float, float]]] = {
    ("step", "cnn"): (0.1, (1.0, 0.0)),
    ("local", "cnn"): (0.2, (1.0, 0.0)),
    ("local, overlap", "cnn"): (0.1, (1.0, 0.0)),
    ("step, few", "cnn"): (0.1, (1.0, 0.0)),  # not tuned: as "step"
    ("local, few", "cnn"): (0.2, (1.0, 0.0)),  # not tuned: as "local"
    ("step", "gpt"): (1e-3, (1.0, 0.0)),
    ("local", "gpt"): (1e-3, (1.0, 0.0)),
    ("local, overlap", "gpt"): (1e-3, (1.0, 0.0)),  # not tuned: as "local"
    ("step, few", "gpt"): (1e-3, (1.0, 0.0)),  # none reached 2.5 in 200 steps; the first at 3.0
    ("local, few", "gpt"): (3e-3, (1.0, 0.0)),
}


class Judge:
    """The loss of a model on samples that no arm trains on."""

    def __init__(self, model: str) -> None:
        self._order = Order("", "", model=model)
        self._batch, self._module = held_out(model), self._order.module()

    @torch.no_grad()
    def __call__(self, vector: Tensor) -> float:
        vector_to_parameters(vector, self._module.parameters())
        return float(self._order.loss(self._module, self._batch))


class Smoothed:
    """Finds where the mean of the last two losses falls to a target, between two points."""

    def __init__(self, target: float) -> None:
        self._target, self._loss, self._mean = target, 0.0, (0.0, 0.0)
        self.points = 0

    def add(self, at: float, loss: float) -> float | None:
        """Return where the target was reached, once it is."""
        mean = loss if not self.points else (self._loss + loss) / 2
        before, self._loss, self._mean = self._mean, loss, (at, mean)
        self.points += 1
        if mean > self._target:
            return None
        if self.points == 1:
            return at
        return before[0] + (at - before[0]) * (before[1] - self._target) / (before[1] - mean)


class Look(pl.Callback):
    """Finds the steps to each target, and ends a run at the last of them."""

    def __init__(self, model: str, unit: int, most: int) -> None:
        self._judge, self._unit, self._most = Judge(model), unit, most
        self._targets = {of[model]: Smoothed(of[model]) for of in (TARGET, EASY)}
        self.steps: dict[float, int] = {}
        self.losses: list[float] = []

    def stepped(self, progress: pl.Progress) -> None:
        step = progress.step * self._unit
        if step % LOCAL:
            return
        vector = parameters_to_vector(progress.model().parameters()).detach()
        self.losses.append(round(self._judge(vector), 3))
        for target, smoothed in self._targets.items():
            if target not in self.steps:
                found = smoothed.add(step, self.losses[-1])
                if found is not None:
                    self.steps[target] = round(found)
        if len(self.steps) == len(self._targets) or step >= self._most:
            progress.stop("known")


def look(kind: str, order: Order, most: int) -> Look:
    """Train one kind of arm on simulated workers; only the steps matter."""
    local, overlap = kind.startswith("local"), kind == "local, overlap"
    learner = pl.TorchLearner(
        order.module(),
        loss_of(order.model),
        order.optimizer,
        order.data(),
        batch_size=order.batch,
        collate=as_it_is,
        outer=order.outer_optimizer if local else None,
        inner="kept" if local else None,
    )
    codec, model_codec = CODECS.get(order.arm, (None, None))
    found = Look(order.model, LOCAL if local else 1, most)
    link = pl.delays.Link()
    if overlap:  # messages take a third of the time that a worker computes in a round
        way = learner.message_bytes / (LOCAL / 6)
        link = pl.delays.Link(up=way, down=way)
    pl.Trainer(
        learner,
        pl.local_sgd(LOCAL, overlap=overlap) if local else pl.sync(),
        pl.Simulator(HOSTS, pl.delays.Fixed(1.0), link),
        seed=order.seed,
        codec=codec,
        model_codec=model_codec,
        callbacks=[found],
        progress=False,
    ).fit(steps=most)
    return found


def tune(model: str, only: str = "", most: int = 200) -> None:
    """Print the steps to the loss for each kind of arm, or for one, and each point of the grid."""
    torch.set_num_threads(1)
    kinds = [kind for kind, of in RATES if of == model and only in ("", kind)]
    for kind, lr, outer in product(kinds, GRID[model], OUTER):
        if (kind.startswith("step") or "few" in kind) and outer != MEAN:
            continue  # a step has none, and decaying error feedback is in its place
        arm = FEW.get(kind, "")
        order = Order(arm, "", seed=TUNED_ON, model=model, lr=lr, outer=outer)
        found = look(kind, order, most)
        name = f"{kind}: lr {lr:g}" + ("" if kind.startswith("step") else f", outer {outer}")
        steps = found.steps.get(TARGET[model], f"over {most}")
        easy = found.steps.get(EASY[model], "-")
        told = f"{steps} steps to {TARGET[model]}, {easy} to {EASY[model]}"
        print(f"{name}: {told}; {found.losses}", flush=True)
