"""Trains on text files as shards with 8 workers: python shards_script.py FOLDER STEPS"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import paceline as pl
from paceline.data.shards import Shards

SHARDS, LENGTH, BATCH, WORKERS = 64, 40, 64, 8


def opened(path: Path) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the lines of a file as numbers; note that it was opened."""
    with open(path.parent.parent / "opened.txt", "a") as notes:
        notes.write(f"{os.getpid()} {path.name}\n")
    for line in path.read_text().splitlines():
        value = float(line)
        yield torch.tensor([value / (SHARDS * LENGTH), 1.0]), torch.tensor([value % 7])


def shards(folder: Path) -> Shards:
    files = [folder / "files" / f"{shard}.txt" for shard in range(SHARDS)]
    return Shards(files, opened, [LENGTH] * SHARDS, lanes=WORKERS, window=8)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


class Told(pl.Callback):
    """Writes the steps taken and the processes of the workers; each step takes a while."""

    def __init__(self, folder: Path, engine: pl.Ray) -> None:
        self._folder, self._engine = folder, engine

    def stepped(self, progress: pl.Progress) -> None:
        pids = " ".join(map(str, self._engine.pids().values()))
        new = self._folder / "state.new"
        new.write_text(f"{progress.step} {progress.workers} {pids}")
        new.replace(self._folder / "state.txt")
        time.sleep(0.2 if progress.workers == WORKERS else 1.0)  # so that faults come in between


def main(folder: Path, steps: int) -> None:
    torch.manual_seed(0)
    learner = pl.TorchLearner(
        nn.Linear(2, 1), loss, partial(torch.optim.SGD, lr=0.01), partial(shards, folder), BATCH
    )
    engine = pl.Ray(WORKERS, cpus=0.1, timeout=60, respawns=50)
    trainer = pl.Trainer(
        learner,
        pl.sync(shares=WORKERS),
        engine,
        progress=False,
        callbacks=[Told(folder, engine)],
        checkpoints=pl.Checkpoints(folder / "saved", every=5),
        journal=folder / "run.jsonl",
    )
    trainer.resume(folder / "saved", missing_ok=True)
    (folder / "began.txt").write_text(str(trainer.step))
    trainer.fit(steps=steps)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
