"""The training task that all arms share, and the files by which a run is followed from outside."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import _gpt
from _fashion import images, pixel_loss, small_cnn
from gpt import loss as token_loss
from paceline.learners.base import Arriving

LOCAL = 10  # local steps of a round; also the steps between two models that are kept
HELD_OUT = 512  # samples on which the loss is computed
BATCH = {"cnn": 512, "gpt": 64}  # samples of all hosts together
WINDOWS = 1 << 14  # of the text, from which a GPT learns


@cache
def _text() -> _gpt.Text:
    file = _gpt.text_file()
    if file is None:
        raise SystemExit("set TINYSHAKESPEARE to the path of tinyshakespeare.txt of char-rnn")
    return _gpt.Text(file)


@cache
def _rows(model: str) -> tuple[Tensor, ...]:
    if model == "cnn":
        return images().tensors
    parts = [_text().batch(0, step, 0, 4096) for step in range(WINDOWS // 4096)]
    return tuple(torch.cat(same) for same in zip(*parts, strict=True))


class Rows(TensorDataset):
    """The training samples; a batch of them is read at once."""

    def __getitems__(self, indices: Iterable[Any]) -> tuple[Tensor, ...]:
        return tuple(each[list(map(int, indices))] for each in self.tensors)


def rows(model: str) -> Rows:
    return Rows(*(each[HELD_OUT:] for each in _rows(model)))


def as_it_is(batch: Any) -> Any:
    """Collate nothing: `Rows` reads whole batches."""
    return batch


def loss_of(model: str) -> Callable[[nn.Module, Any], Tensor]:
    return pixel_loss if model == "cnn" else token_loss


def held_out(model: str) -> tuple[Tensor, ...]:
    """Return samples that no arm trains on, for the loss that ends a run."""
    if model == "cnn":
        return tuple(each[:HELD_OUT] for each in _rows(model))
    return _text().held_out()


@dataclass(frozen=True)
class Order:
    """One run, as the script outside orders it."""

    arm: str
    folder: str  # for models, checkpoints, and the number of the last step
    seed: int = 0
    model: str = "cnn"
    lr: float = 0.05
    outer: tuple[float, float] = (0.7, 0.9)  # learning rate and momentum of the outer step
    hosts: int = 4
    first: int = 4  # hosts with which the run begins
    least: int = 4  # hosts with which it goes on
    address: str = ""  # of Ray or of the rendezvous
    run: str = ""
    target: float = 0.0  # the loss to reach
    ips: tuple[str, ...] = field(default=())
    device: str = "cpu"

    @property
    def batch(self) -> int:
        return BATCH[self.model]

    def module(self) -> nn.Module:
        """Return the model with its initial weights, which depend on the seed alone."""
        made = small_cnn(self.seed) if self.model == "cnn" else _gpt.make_model(self.seed)
        return made.to(self.device)

    def data(self) -> Rows:
        return Rows(*(each.to(self.device) for each in rows(self.model).tensors))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return loss_of(self.model)(model, batch)

    @property
    def optimizer(self) -> Callable[..., torch.optim.Optimizer]:
        if self.model == "cnn":
            return partial(torch.optim.SGD, lr=self.lr, momentum=0.9)
        return partial(torch.optim.AdamW, lr=self.lr, betas=(0.9, 0.95), weight_decay=0.1)

    @property
    def outer_optimizer(self) -> Callable[..., torch.optim.Optimizer]:
        lr, momentum = self.outer
        return partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=momentum > 0)


def meet(order: Order, host: int, seconds: float = 120.0) -> None:
    """Wait until all hosts with which the run begins have called this."""
    folder, until = Path(order.folder), time.monotonic() + seconds
    (folder / f"met-{host}").touch()
    while len(list(folder.glob("met-*"))) < order.first:
        if time.monotonic() > until:
            raise RuntimeError(f"the other hosts were not ready in {seconds:g} s")
        time.sleep(0.05)


class Watch:
    """Keeps models for the script outside, reports steps, and knows the last step."""

    def __init__(self, order: Order, speaks: bool) -> None:
        self._order, self.speaks, self._due = order, speaks, 0
        self._folder = Path(order.folder)

    def begin(self, step: int, model: nn.Module) -> None:
        """Keep the first model: the clock of a run begins here."""
        self._due = step
        self._keep(step, model)

    def stepped(self, step: int, model: nn.Module, met: int | None = None) -> bool:
        """Report a step and keep its model if it is time; return whether the run is over.

        met: the step up to which the model has the changes of all hosts, if that is an earlier one.
        """
        if self._order.device != "cpu":
            torch.cuda.synchronize()  # the step has ended
        if self.speaks:
            report(self._folder, step, step * self._order.batch)
        self._keep(step if met is None else met, model)
        return self.over(step)

    def over(self, step: int) -> bool:
        """Return whether this is the last step; all processes read the same number."""
        try:
            return step >= int((self._folder / "last").read_text())
        except (FileNotFoundError, ValueError):
            return False

    def _keep(self, step: int, model: nn.Module) -> None:
        if self.speaks and step >= self._due:
            values = [each.detach().reshape(-1) for each in model.parameters()]
            keep(self._folder, step, torch.cat(values).cpu().numpy())
            self._due = step - step % LOCAL + LOCAL


def report(folder: Path, step: int, samples: int) -> None:
    """Write a line about a step of a run."""
    with open(folder / "steps", "a") as lines:
        lines.write(json.dumps([time.monotonic(), step, samples]) + "\n")


def reported(folder: Path) -> list[tuple[float, int, int]]:
    """Return time, step and samples of the steps of a run so far."""
    try:
        lines = (folder / "steps").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [tuple(json.loads(line)) for line in lines if line.endswith("\n")]


def keep(folder: Path, step: int, vector: Any, at: float | None = None) -> None:
    """Write a model of a run with its step and time, whole or not at all."""
    at = time.monotonic() if at is None else at
    np.asarray(vector, np.float32).tofile(folder / "part")
    os.replace(folder / "part", folder / f"{step:06d}-{at:.3f}.model")


def kept(folder: Path) -> list[tuple[int, float, Path]]:
    """Return step, time and file of the models that are kept so far, in order of time."""
    found = []
    for file in folder.glob("*.model"):
        step, at = file.stem.split("-")
        found.append((int(step), float(at), file))
    return sorted(found, key=lambda each: (each[1], each[0]))


class Copied:
    """Passes slices on, keeps a copy of each, and notes when the last one has arrived."""

    def __init__(self, slices: Iterable[Any]) -> None:
        self._slices, self.copies, self.arrived = slices, list[Any](), 0.0

    def here(self, done: int) -> bool:
        return not isinstance(self._slices, Arriving) or self._slices.here(done)

    def __iter__(self) -> Iterator[Any]:
        for each in self._slices:
            self.copies.append(np.array(each, np.float32))
            self.arrived = time.monotonic()
            yield each
