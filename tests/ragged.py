"""Rows of tokens of very different lengths, and their mean loss by plain PyTorch in float64."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import paceline as pl
from paceline.core.protocol import Start, Step, Task
from paceline.data.sampling import Samples, Stream

PAD, TOKENS, SEED = -100, 13, 9
_RNG = np.random.default_rng(4)
# Long rows have other tokens than short ones, so their gradients differ as well.
LENGTHS = np.clip(_RNG.lognormal(1.6, 0.9, 96).astype(int), 1, 60)
ROWS = [
    torch.from_numpy(_RNG.integers(0, TOKENS if length < 6 else TOKENS // 2, length + 1))
    for length in LENGTHS.tolist()
]


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> Tensor:
        return ROWS[index]


def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return inputs and labels; padding has the label PAD."""
    labels = nn.utils.rnn.pad_sequence([row[1:] for row in rows], True, PAD)
    return nn.utils.rnn.pad_sequence([row[:-1] for row in rows], True, 0), labels


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Sequential(nn.Embedding(TOKENS, 5), nn.Linear(5, TOKENS))


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses of tokens, and their number."""
    inputs, labels = batch
    scores = model(inputs).flatten(0, 1)
    total = cross_entropy(scores, labels.flatten(), ignore_index=PAD, reduction="sum")
    return total, (labels != PAD).sum()


def mean_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean over the tokens of one batch, as most scripts do."""
    total, count = token_loss(model, batch)
    return total / count


def learner(**changes: Any) -> pl.TorchLearner:
    settings: dict[str, Any] = {
        "model": network(),
        "loss": token_loss,
        "optimizer": partial(torch.optim.SGD, lr=0.5),
        "dataset": Rows(),
        "batch_size": 24,
        "collate": padded,
    }
    return pl.TorchLearner(**{**settings, **changes})


def engine(workers: int = 4) -> pl.Simulator:
    """Return workers with the speeds 1 : 1 : 2 : 4."""
    return pl.Simulator(workers, [pl.delays.Fixed(s) for s in (4.0, 4.0, 2.0, 1.0)[:workers]])


def flat_gradient(model: nn.Module, rows: Iterable[int]) -> tuple[Tensor, int]:
    """Return the gradient of the sum of the tokens' losses, and the number of tokens."""
    model, chosen = copy.deepcopy(model).double(), [ROWS[index] for index in rows]
    labels = torch.cat([row[1:] for row in chosen])
    scores = model(torch.cat([row[:-1] for row in chosen]))  # it looks at one token at a time
    cross_entropy(scores, labels, reduction="sum").backward()
    gradients = [parameter.grad.flatten() for parameter in model.parameters()]  # type: ignore[union-attr]
    return torch.cat(gradients), len(labels)


def move(model: nn.Module, direction: Tensor, lr: float) -> None:
    """Take a step of plain SGD."""
    start = 0
    with torch.no_grad():
        for parameter in model.parameters():
            size = parameter.numel()
            parameter.sub_(lr * direction[start : start + size].view_as(parameter))
            start += size


def steps_of(run: pl.Run) -> list[list[tuple[Task, Any]]]:
    """Return the tasks of each step with their weights, from the journal of a run."""
    tasks: dict[int, Task] = {}
    found = []
    for entry in run.journal:
        for command in entry.commands:
            if isinstance(command, Start):
                tasks[command.task.id] = command.task
            elif isinstance(command, Step):
                found.append([(tasks[id], weight) for id, weight in command.weights.items()])
    return found


def rows_of(run: pl.Run, seed: int = SEED) -> list[list[int]]:
    """Return the rows of each step; the tasks of a code share theirs."""
    samples, found = Samples(Stream(len(ROWS), seed), seed), []
    for step in steps_of(run):
        stretches = {(task.offset, task.samples): samples.of(task).tolist() for task, _ in step}
        found.append([row for stretch in stretches.values() for row in stretch])
    return found


def by_tokens(run: pl.Run, lr: float = 0.5) -> nn.Module:
    """Repeat a run in one process: each step along the mean over the tokens of its samples."""
    model = network().double()
    for rows in rows_of(run):
        total, count = flat_gradient(model, rows)
        move(model, total / count, lr)
    return model


def error(run: pl.Run, model: nn.Module) -> float:
    """Return the largest difference of any parameter from another model."""
    pairs = zip(run.model.parameters(), model.parameters(), strict=True)
    return max(float((ours.double() - other).detach().abs().max()) for ours, other in pairs)
