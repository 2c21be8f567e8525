"""The loss curve of a GPT on four unequal workers beside that of one process.

Both train in bfloat16 (autocast) with AdamW, warm-up and cosine, and clipped gradients, on the same
samples in the same order. One process sees the whole batch at once; four simulated workers see
shares of it by their speeds 1 : 1 : 2 : 4, which are rounded differently. The noise is how far two
orders of the data are apart in one process, from the same initial model.

TINYSHAKESPEARE names the text; without it, or with --quick, sentences are generated.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import default_collate

import paceline as pl
from _gpt import text_file
from _report import finish, machine, parser, table
from gpt import GPT, Text, held_out_loss, loss, sentences, warm_up_and_cosine
from paceline.data.sampling import Stream

BOUNDS = {"difference_of_noise": 1.0}
COMPUTE = partial(loss, bf16=True)


@dataclass(frozen=True)
class Size:
    """How large the model is, and how long it trains."""

    width: int
    layers: int
    batch: int
    steps: int
    seeds: int

    @property
    def schedule(self) -> Any:
        factor = partial(warm_up_and_cosine, warm_up=self.steps // 10, steps=self.steps)
        return partial(LambdaLR, lr_lambda=factor)

    @property
    def optimizer(self) -> Any:
        return partial(torch.optim.AdamW, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def model(self, characters: int) -> GPT:
        torch.manual_seed(0)
        return GPT(characters, self.width, self.layers)


def one_process(size: Size, model: GPT, text: Text, seed: int) -> list[float]:
    """Train a model in a plain loop; return the loss of each step."""
    optimizer = size.optimizer(model.parameters())
    rates, stream, curve = size.schedule(optimizer), Stream(len(text), seed), []
    for step in range(size.steps):
        rows = stream.indices(size.batch * step, size.batch).tolist()
        found = COMPUTE(model, default_collate([text[row] for row in rows]))
        optimizer.zero_grad()
        found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
        curve.append(found.item())
    return curve


def four_workers(size: Size, model: GPT, text: Text, seed: int) -> tuple[GPT, list[float]]:
    """Train a model on workers of speeds 1 : 1 : 2 : 4; return it, and the loss of each step."""
    learner = pl.TorchLearner(
        model,
        COMPUTE,
        size.optimizer,
        text,
        size.batch,
        scheduler=size.schedule,
        transform=pl.learners.ClipNorm(1.0),
        threads=torch.get_num_threads(),
    )
    laws = [pl.delays.Scaled(pl.delays.Exponential(1.0), 1 / speed) for speed in (1, 1, 2, 4)]
    engine = pl.Simulator(workers=4, delays=laws)
    trainer = pl.Trainer(
        learner, pl.sync(), engine, placement=pl.BySpeed(), seed=seed, progress=False
    )
    run = trainer.fit(steps=size.steps)
    return run.model, run.metrics["loss"].tolist()


def apart(first: list[float], second: list[float]) -> float:
    """Return how far two curves are apart, on average over the second half of the steps.

    Both are averaged over ten steps, so that single batches do not decide.
    """
    ten = [
        [statistics.fmean(curve[i : i + 10]) for i in range(0, len(curve), 10)]
        for curve in (first, second)
    ]
    pairs = list(zip(*ten, strict=True))
    return statistics.fmean(abs(a - b) for a, b in pairs[len(pairs) // 2 :])


def measure(size: Size, content: str) -> dict[str, Any]:
    places = {each: token for token, each in enumerate(sorted(set(content)))}
    tokens = torch.tensor([places[each] for each in content])
    cut = len(tokens) * 9 // 10
    text, test = Text(tokens[:cut]), Text(tokens[cut:])
    plain, ours, rows = [], [], []
    for seed in range(size.seeds):
        alone = size.model(len(places))
        plain.append(one_process(size, alone, text, seed))
        model, curve = four_workers(size, size.model(len(places)), text, seed)
        ours.append(curve)
        losses = [held_out_loss(each, test) for each in (alone, model)]
        difference = apart(plain[-1], curve)
        rows.append([str(seed), *(f"{each:.4f}" for each in (*losses, difference))])
        print(f"seed {seed}: test loss {losses[0]:.4f} and {losses[1]:.4f}", flush=True)
    noise = [apart(a, b) for i, a in enumerate(plain) for b in plain[:i]]
    differences = [apart(a, b) for a, b in zip(plain, ours, strict=True)]
    print(f"\ncurve: {sum(p.numel() for p in alone.parameters()):,} parameters, bfloat16")
    table(["order of data", "test loss, one process", "four workers", "curves apart"], rows)
    print(f"two orders of the data in one process are {min(noise):.4f} to {max(noise):.4f} apart")
    ratio = statistics.fmean(differences) / statistics.fmean(noise)
    return {
        "parameters": sum(p.numel() for p in alone.parameters()),
        "curves": {"one process": plain, "four workers": ours},
        "apart": differences,
        "noise": noise,
        "difference_of_noise": ratio,
    }


def main() -> None:
    arguments = parser(__doc__).parse_args()
    file = None if arguments.quick else text_file()
    quick, full = Size(64, 2, 16, 60, 2), Size(384, 6, 16, 100, 3)
    content = sentences(2000) if file is None else file.read_text(encoding="utf-8")
    figures = measure(quick if arguments.quick else full, content)
    ok = figures["difference_of_noise"] < BOUNDS["difference_of_noise"]
    finish("curve", figures, BOUNDS, ok, machine("torch"), arguments)


if __name__ == "__main__":
    main()
