"""A small GPT on characters: the text, the model, its loss. Benchmarks share it."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CONTEXT, WIDTH, HEADS, LAYERS = 64, 128, 4, 4
CHARACTERS = 65  # of tinyshakespeare.txt


def text_file() -> Path | None:
    """Return tinyshakespeare.txt, from TINYSHAKESPEARE or from beside the project, if it is there.

    It is distributed with char-rnn; 1,115,394 characters, in the public domain.
    """
    beside = Path(__file__).parents[2] / "shared" / "data" / "tinyshakespeare.txt"
    found = Path(os.environ.get("TINYSHAKESPEARE", beside))
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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.project, self.merge = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        heads = self.project(self.before(x)).view(rows, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        fed: Tensor = x + self.feed(self.between(x))
        return fed


class GPT(nn.Module):
    """About 0.8 million parameters, 3.3 MB."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.token, self.place = nn.Embedding(CHARACTERS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHARACTERS, bias=False)
        for embedding in (self.token, self.place):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        scores: Tensor = self.head(self.norm(self.blocks(self.token(tokens) + self.place(places))))
        return scores


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, following = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())


@torch.no_grad()
def test_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    return float(loss_of(model, batch))
