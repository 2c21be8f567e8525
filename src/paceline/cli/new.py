"""`paceline new`: a script to start from."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.cli.show import json_option, print_json

SCRIPT = '''\
"""Trains a small classifier on four machines, one of them ten times as slow as the others."""

from functools import partial

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl

# Your data: any dataset of PyTorch. Here the label is a function of 20 random numbers.
torch.manual_seed(0)
inputs = torch.randn(8192, 20)
labels = (inputs @ torch.randn(20, 5)).argmax(dim=1)


def loss(model, batch):  # the mean over the samples that a worker was given
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


learner = pl.TorchLearner(
    nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)),  # your model
    loss,
    optimizer=partial(torch.optim.AdamW, lr=3e-3),
    dataset=TensorDataset(inputs, labels),
    batch_size=256,  # samples of all workers together
)

# A step uses the first 3 results. pl.sync() waits for all workers.
policy = pl.k_sync(3)

# Virtual time: seconds for a quarter of the batch. For real processes: engine = pl.Ray(workers=4)
engine = pl.Simulator(workers=4, delays=[pl.delays.Fixed(s) for s in (0.1, 0.1, 0.1, 1.0)])

run = pl.Trainer(learner, policy, engine, journal="run.jsonl").fit(epochs=5)
print(run.summary())
torch.save(run.model.state_dict(), "model.pt")
'''


@click.command()
@click.argument("file", default="train.py", type=click.Path(dir_okay=False, path_type=Path))
@json_option
def new(file: Path, as_json: bool) -> None:
    """Write a script to start from, train.py unless FILE has another name.

    The script trains a small model on simulated machines. It runs as it is. An existing file is
    never overwritten.
    """
    try:
        with file.open("x", encoding="utf-8") as script:
            script.write(SCRIPT)
    except FileExistsError:
        raise ValueError(f"{file} exists and is not overwritten; give another name") from None
    except FileNotFoundError:
        raise ValueError(f"there is no folder {file.parent} for {file.name}; make it") from None
    if as_json:
        print_json({"output": str(file)})
        return
    click.echo(f"wrote {file}; run it with: paceline train {file}")
    click.echo("then put in your model and data, and change the line engine = … for real machines")
