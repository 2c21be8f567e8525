"""Learning rates of the arms, and how they were chosen: the same grid for all, on another seed.

`python benchmarks/peers.py --tune` prints the steps to the loss for each, in one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from arms.task import LOCAL, Order, held_out
from paceline.data.sampling import Stream

HOSTS, TUNED_ON = 4, 100
GRID = {"cnn": (0.02, 0.05, 0.1, 0.2, 0.4), "gpt": (1e-3, 3e-3, 6e-3)}
OUTER = ((0.7, 0.9), (1.0, 0.0))  # learning rate and Nesterov momentum; the second is the mean
TARGET = {"cnn": 0.6, "gpt": 2.5}
EASY = {"cnn": 1.5, "gpt": 3.0}  # for a short look

# By kind of arm and model: learning rate, and that of the outer step with its momentum. Those of
# the CNN were chosen by `python benchmarks/peers.py --tune`. Those of the GPT are not tuned here:
# the learning rate is that of `python benchmarks/sessions_hosts.py --tune`.
RATES: dict[tuple[str, str], tuple[float, tuple[float, float]]] = {
    ("step", "cnn"): (0.1, (1.0, 0.0)),
    ("local, kept", "cnn"): (0.2, (1.0, 0.0)),
    ("local, fresh", "cnn"): (0.1, (0.7, 0.9)),
    ("step", "gpt"): (3e-3, (1.0, 0.0)),
    ("local, kept", "gpt"): (3e-3, (1.0, 0.0)),
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


def curve(order: Order, kind: str) -> Iterator[tuple[int, Tensor]]:
    """Train in this process; yield the model after every few steps."""
    data, stream = order.data(), None
    stream = Stream(len(data), order.seed)
    shared = nn.Parameter(parameters_to_vector(order.module().parameters()).detach().clone())
    count = 1 if kind == "step" else HOSTS
    models = [order.module() for _ in range(count)]
    optimizers = [order.optimizer(model.parameters()) for model in models]
    outer, share = order.outer_optimizer([shared]), order.batch // count
    for start in range(0, 10**6, LOCAL):
        changes: list[Tensor] = []
        for host, model in enumerate(models):
            vector_to_parameters(shared.detach().clone(), model.parameters())
            if kind == "local, fresh":
                optimizers[host] = order.optimizer(model.parameters())
            for step in range(start, start + LOCAL):
                chosen = stream.indices(step * order.batch + host * share, share)
                loss = order.loss(model, data.__getitems__(chosen))
                optimizers[host].zero_grad()
                loss.backward()
                optimizers[host].step()
            changes.append(shared.detach() - parameters_to_vector(model.parameters()).detach())
        if kind == "step":
            shared.data -= changes[0]
        else:
            shared.grad = torch.stack(changes).mean(dim=0)
            outer.step()
        yield start + LOCAL, shared.detach().clone()


def tune(model: str, most: int = 150) -> None:
    """Print the steps to the loss for each kind of arm and each point of the grid."""
    torch.set_num_threads(1)
    judge = Judge(model)
    kinds = [kind for kind, of in RATES if of == model]
    for kind, lr, outer in product(kinds, GRID[model], OUTER):
        if kind == "step" and outer != OUTER[0]:
            continue
        order = Order("", "", seed=TUNED_ON, model=model, lr=lr, outer=outer)
        found: dict[str, Any] = {}
        smoothed = {name: Smoothed(of[model]) for name, of in (("", TARGET), ("easy", EASY))}
        losses = []
        for step, vector in curve(replace(order), kind):
            losses.append(round(judge(vector), 3))
            for name, each in smoothed.items():
                if name not in found and (at := each.add(step, losses[-1])) is not None:
                    found[name] = round(at)
            if "" in found or step >= most:
                break
        name = f"{kind}: lr {lr:g}" + ("" if kind == "step" else f", outer {outer}")
        told = f"{found.get('', 'over ' + str(most))} steps to {TARGET[model]}"
        print(f"{name}: {told}, {found.get('easy', '-')} to {EASY[model]}; {losses}", flush=True)
