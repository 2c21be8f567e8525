"""Train a small CNN on Fashion-MNIST with 8 workers, one of them a straggler.

Run it:  python examples/quickstart.py
Data:    apt-get install dataset-fashion-mnist
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline as pl
from fashion_mnist import fashion_mnist
from paceline.testing import SlowWorkers


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 5, stride=2), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.Flatten()),
        nn.Linear(16 * 5 * 5, 10),
    )


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images / 255), labels)


def main() -> None:
    data = fashion_mnist()
    train = TensorDataset(
        torch.from_numpy(data.train_images).unsqueeze(1), torch.from_numpy(data.train_labels).long()
    )
    learner = pl.TorchLearner(
        make_model(),
        loss,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        dataset=train,
        batch_size=256,  # samples of all workers together
    )
    engine = pl.Ray(workers=8)
    slow = SlowWorkers(engine, {"w7": 0.05})  # w7 runs a twentieth of the time
    run = pl.Trainer(learner, pl.k_sync(7), engine, callbacks=[slow]).fit(epochs=1)
    print(run.summary())

    images = torch.from_numpy(data.test_images).unsqueeze(1)
    with torch.no_grad():
        guesses = run.model(images / 255).argmax(dim=1)
    accuracy = (guesses == torch.from_numpy(data.test_labels)).float().mean()
    print(f"test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
