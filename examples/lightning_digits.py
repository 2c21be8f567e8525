"""Train a LightningModule on pictures of digits with 3 workers, one of them a straggler.

Run it:  pip install lightning && python examples/lightning_digits.py
Data:    generated here: digits of a seven-segment display, with noise
"""

import lightning
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.testing import SlowWorkers

# The seven bars of a display, by row and column of a 7 x 5 picture, and the bars of each digit.
BARS: dict[str, tuple[int | slice, int | slice]] = {
    "a": (0, slice(1, 4)),
    "b": (slice(1, 3), 4),
    "c": (slice(4, 6), 4),
    "d": (6, slice(1, 4)),
    "e": (slice(4, 6), 0),
    "f": (slice(1, 3), 0),
    "g": (3, slice(1, 4)),
}
DIGITS = ["abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg"]


class Pictures(lightning.LightningDataModule):
    def setup(self, stage: str) -> None:
        digits = torch.zeros(10, 1, 7, 5)
        for digit, bars in enumerate(DIGITS):
            for bar in bars:
                row, column = BARS[bar]
                digits[digit, 0, row, column] = 1
        random = torch.Generator().manual_seed(0)
        labels = torch.randint(10, (4096,), generator=random)
        pictures = digits[labels] + 0.5 * torch.randn(4096, 1, 7, 5, generator=random)
        self.train = TensorDataset(pictures[:3584], labels[:3584])
        self.test = TensorDataset(pictures[3584:], labels[3584:])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train, batch_size=96, shuffle=True)


class Reader(lightning.LightningModule):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(16 * 5 * 3, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10)),
        )

    def forward(self, pictures: Tensor) -> Tensor:
        scores: Tensor = self.layers(pictures)
        return scores

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        pictures, labels = batch
        loss = nn.functional.cross_entropy(self(pictures), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.hparams["steps"])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cosine, "interval": "step"}}


def main() -> None:
    steps, data = 200, Pictures()
    lightning.seed_everything(0)
    engine = pl.Ray(workers=3)
    slow = SlowWorkers(engine, {"w2": 0.2})  # w2 runs a fifth of the time
    trainer = pl.Trainer.from_lightning(
        Reader(steps), data, pl.k_sync(2), engine, callbacks=[slow]
    )  # in Lightning: lightning.Trainer(max_steps=steps).fit(Reader(steps), data)
    run = trainer.fit(steps=steps)
    print(run.summary())

    losses = run.metrics["loss"]
    print(f"loss before {losses[0]:.3f}, after {losses[-10:].mean():.3f}")
    pictures, labels = data.test.tensors
    with torch.no_grad():
        accuracy = (run.model(pictures).argmax(dim=1) == labels).float().mean()
    print(f"{type(run.model).__name__}: test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
