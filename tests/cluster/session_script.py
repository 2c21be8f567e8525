"""A user's script with a session: trains a small net, and writes what came of it.

python session_script.py FOLDER [name=value …]
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl

SAMPLES, BATCH = 512, 64


def make_data() -> TensorDataset:
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 20, generator=random)
    return TensorDataset(inputs, inputs @ torch.randn(20, 1, generator=random))


def make_model(width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 1))


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def train(folder: Path, given: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    data, model, steps = make_data(), make_model(), given.get("steps", 50)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = CosineAnnealingLR(optimizer, 50)
    every = given.get("save")
    session = pl.session(
        model,
        optimizer,
        policy=pl.sync(shares=given.get("shares")),
        batch_size=BATCH,
        steps=steps,
        scheduler=schedule,
        clip_norm=1.0,
        workers=tuple(given["join"]) if "join" in given else None,
        journal=folder / "run.jsonl",
        checkpoints=pl.Checkpoints(folder / "saved", every=every) if every else None,
    )
    loader = DataLoader(
        data, batch_sampler=session.batches(data), num_workers=given.get("loader", 0)
    )
    name = f"{os.environ.get('PACELINE_WORKER', 'x')}-{os.getpid()}"
    while not session.ended:
        for batch in loader:
            loss = loss_of(model, batch)
            loss.backward()
            time.sleep(given.get("pause", 0.0))
            session.step(loss)
            (folder / f"{name}.version").write_text(f"{session.version} {time.time()}")
    torch.save(model.state_dict(), folder / f"{name}.pt")
    found = {"ended": session.ended, "wasted": session.wasted}
    (folder / f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    train(Path(sys.argv[1]), {k: json.loads(v) for k, v in (a.split("=") for a in sys.argv[2:])})
