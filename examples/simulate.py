"""Simulate policies in virtual time: what does a straggler cost, and which policy helps?

Run it:  python examples/simulate.py
Data:    apt-get install dataset-fashion-mnist
"""

from functools import partial

import torch
from torch.utils.data import TensorDataset

import paceline as pl
from fashion_mnist import fashion_mnist
from quickstart import loss, make_model

# Eight workers: 32 samples take 80 ms, plus 20 ms on average. One worker takes ten times as long.
# The links to the server have a latency of 10 ms and 12.5 MB/s (100 Mbit/s).
DELAY = pl.delays.ShiftedExponential(0.08, 0.02)
SLOW = pl.delays.Scaled(DELAY, 10)
LINK = pl.delays.Link(latency=0.01, down=12.5e6, up=12.5e6)

# With ringmaster every result is a step of fewer samples, so the learning rate is lower.
METHODS = [
    ("sync()", pl.sync(), 256, 0.2),
    ("k_sync(7)", pl.k_sync(7), 256, 0.2),
    ("rennala(8)", pl.rennala(8), 256, 0.2),
    ("ringmaster(16)", pl.ringmaster(16), 32, 0.05),
]


def main() -> None:
    data = fashion_mnist()
    images = torch.from_numpy(data.train_images).unsqueeze(1)
    train = TensorDataset(images, torch.from_numpy(data.train_labels).long())
    print(f"{'policy':<16} {'steps':>6} {'virtual seconds':>16} {'loss':>7} {'waiting':>8}")
    for name, policy, batch_size, lr in METHODS:
        sgd = partial(torch.optim.SGD, lr=lr)
        learner = pl.TorchLearner(make_model(), loss, sgd, train, batch_size)
        engine = pl.Simulator(workers=8, delays=[*[DELAY] * 7, SLOW], link=LINK, unit=32)
        run = pl.Trainer(learner, policy, engine, progress=False).fit(seconds=20)
        recent = run.metrics["seconds"] > run.seconds - 2
        last, waiting = run.metrics["loss"][recent].mean(), run.meter.waiting
        print(f"{name:<16} {run.steps:>6} {run.seconds:>16.1f} {last:>7.3f} {waiting:>8.0%}")


if __name__ == "__main__":
    main()
