"""Train a small GPT on text with 4 workers, one of them a straggler; simulated, or on Ray.

Run it:  python examples/gpt.py [--text FILE] [--ray] [--bf16] [--width 384 --layers 6]
Data:    sentences generated here, or a text file of your own
"""

import argparse
from functools import partial
from math import cos, pi
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

import paceline as pl

CONTEXT, HEADS = 64, 4
WORDS = [
    ["the", "a", "every", "no"],
    ["old", "small", "quiet", "quick", "red"],
    ["fox", "sailor", "river", "engine", "child"],
    ["follows", "forgets", "paints", "hears"],
    ["the moon.", "a long road.", "the rain.", "another story."],
]


def sentences(count: int) -> str:
    """Return random sentences of a small grammar, about 31 characters each."""
    random = torch.Generator().manual_seed(0)
    rows = [torch.randint(len(words), (count,), generator=random).tolist() for words in WORDS]
    return "\n".join(
        " ".join(words[i] for words, i in zip(WORDS, row, strict=True))
        for row in zip(*rows, strict=True)
    )


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text: the characters, and the characters that follow them."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // CONTEXT

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        window = self.tokens[row * CONTEXT : (row + 1) * CONTEXT + 1]
        return window[:-1], window[1:]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        heads = self.project(self.before(x)).view(rows, length, 3, HEADS, width // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).reshape(rows, length, width))
        fed: Tensor = x + self.feed(self.between(x))
        return fed


class GPT(nn.Module):
    def __init__(self, characters: int, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(characters, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        scores: Tensor = self.head(self.norm(self.blocks(self.token(tokens) + self.place(places))))
        return scores


def loss(model: nn.Module, batch: tuple[Tensor, Tensor], bf16: bool = False) -> Tensor:
    tokens, following = batch
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=bf16):
        scores = model(tokens)
    return F.cross_entropy(scores.flatten(0, 1).float(), following.flatten())


def warm_up_and_cosine(step: int, warm_up: int, steps: int) -> float:
    """Return the factor of the learning rate: up to 1, then down to a tenth."""
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.55 + 0.45 * cos(pi * min(1.0, (step - warm_up) / max(1, steps - warm_up)))


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Text) -> float:
    tokens, following = zip(*(text[row] for row in range(min(64, len(text)))), strict=True)
    return float(loss(model, (torch.stack(tokens), torch.stack(following))))


@torch.no_grad()
def write(model: nn.Module, characters: str, start: str, length: int) -> str:
    """Continue a text character by character."""
    tokens = [characters.index(each) for each in start]
    random = torch.Generator().manual_seed(0)
    for _ in range(length):
        scores = model(torch.tensor([tokens[-CONTEXT:]]))[0, -1] / 0.7  # the temperature
        tokens.append(int(torch.multinomial(scores.softmax(dim=0), 1, generator=random)))
    return "".join(characters[token] for token in tokens)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, help="a text file; sentences are generated without it")
    parser.add_argument("--ray", action="store_true", help="real processes, not the simulator")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=48, help="windows of all workers together")
    parser.add_argument("--width", type=int, default=64, help="384 with 6 layers: 11 M parameters")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 (autocast)")
    args = parser.parse_args()

    content = args.text.read_text(encoding="utf-8") if args.text else sentences(6000)
    characters = "".join(sorted(set(content)))
    place = {character: token for token, character in enumerate(characters)}
    tokens = torch.tensor([place[character] for character in content])
    train, test = Text(tokens[: len(tokens) * 9 // 10]), Text(tokens[len(tokens) * 9 // 10 :])
    if not len(test):
        parser.error(f"{args.text} has {len(content)} characters; give a text of 1000 or more")

    torch.manual_seed(0)
    model = GPT(len(characters), args.width, args.layers)
    schedule = partial(warm_up_and_cosine, warm_up=args.steps // 10 or 1, steps=args.steps)
    learner = pl.TorchLearner(
        model,
        partial(loss, bf16=args.bf16),
        optimizer=partial(torch.optim.AdamW, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1),
        dataset=train,
        batch_size=min(args.batch, len(train)),
        scheduler=partial(LambdaLR, lr_lambda=schedule),
        transform=pl.learners.ClipNorm(1.0),
    )
    usual = pl.delays.ShiftedExponential(0.08, 0.02)  # seconds for a quarter of the batch
    engine = (
        pl.Ray(workers=4)
        if args.ray
        else pl.Simulator(workers=4, delays=[usual, usual, usual, pl.delays.Scaled(usual, 5)])
    )
    run = pl.Trainer(learner, pl.k_sync(3), engine).fit(steps=args.steps)
    print(run.summary())
    before, after = held_out_loss(model, test), held_out_loss(run.model, test)
    print(f"{sum(p.numel() for p in model.parameters())} parameters")
    print(f"test loss before {before:.3f}, after {after:.3f}")
    print(write(run.model, characters, start=content[:4], length=120))


if __name__ == "__main__":
    main()
