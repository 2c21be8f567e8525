"""The GPT of `examples/gpt.py` on tinyshakespeare: its text and its size. Benchmarks share it."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn

import _report  # noqa: F401  # finds the examples
from gpt import CONTEXT, GPT, loss

CHARACTERS = 65  # of tinyshakespeare.txt


def text_file() -> Path | None:
    """Return the file that TINYSHAKESPEARE names, if it is there.

    It is distributed with char-rnn; 1,115,394 characters, in the public domain.
    """
    found = Path(os.environ.get("TINYSHAKESPEARE", ""))
    return found if found.is_file() else None


class Text:
    """A text as tokens: nine tenths to train on, the rest held out."""

    def __init__(self, file: Path) -> None:
        content = file.read_text(encoding="utf-8")
        place = {each: token for token, each in enumerate(sorted(set(content)))}
        tokens = torch.tensor([place[each] for each in content])
        cut = len(tokens) * 9 // 10
        self._train, self._test = tokens[:cut], tokens[cut:]

    def batch(self, seed: int, step: int, first: int, windows: int) -> tuple[Tensor, Tensor]:
        """Return windows of a step's batch, from number `first` on; they depend on nothing else."""
        random = torch.Generator().manual_seed(1_000_003 * seed + step)
        starts = torch.randint(len(self._train) - CONTEXT - 1, (4096,), generator=random)
        return _windows(self._train, starts[first : first + windows])

    def held_out(self, windows: int = 64) -> tuple[Tensor, Tensor]:
        starts = torch.linspace(0, len(self._test) - CONTEXT - 1, windows).long()
        return _windows(self._test, starts)


def _windows(tokens: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    places = starts[:, None] + torch.arange(CONTEXT)
    return tokens[places], tokens[places + 1]


def make_model(seed: int, width: int = 128, layers: int = 4) -> GPT:
    """Return a GPT, by default of about 0.8 million parameters, 3.3 MB."""
    torch.manual_seed(seed)
    model = GPT(CHARACTERS, width=width, layers=layers)
    for embedding in (model.token, model.place):
        nn.init.normal_(embedding.weight, std=0.02)
    return model


@torch.no_grad()
def test_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    return float(loss(model, batch))
