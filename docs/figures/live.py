"""Draw live.svg: the live view of a real run, 8 workers on Ray of which one is really slow.

Run it:  python docs/figures/live.py
Data:    apt-get install dataset-fashion-mnist
"""

import io
import re
import sys
import threading
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.terminal_theme import MONOKAI
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.report.callbacks import Live

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from fashion_mnist import fashion_mnist
from paceline.report.live import Noted, moment, render
from paceline.testing import SlowWorkers


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images / 255), labels)


class Picture(pl.Callback):
    """Takes a picture some seconds after the first step, between two of them."""

    def __init__(self, seconds: float) -> None:
        self._timer, self._noted = threading.Timer(seconds, self._take), Noted()

    def started(self, live: Live) -> None:
        self._live = live

    def stepped(self, progress: pl.Progress) -> None:
        self._noted = Noted(progress.epoch)
        if progress.step == 1:
            self._timer.start()

    def _take(self) -> None:
        console = Console(record=True, width=80, file=io.StringIO(), force_terminal=True)
        console.print(render(self._live, moment(self._live), 80, noted=self._noted))
        svg = console.export_svg(
            title="8 workers on Ray, of which w7 gets a tenth of the time", theme=MONOKAI
        )
        svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S)  # from the network
        svg = svg.replace("Fira Code, monospace", "Menlo, Consolas, DejaVu Sans Mono, monospace")
        Path(__file__).with_name("live.svg").write_text(svg)


data = fashion_mnist()
images = torch.from_numpy(data.train_images).unsqueeze(1)
train = TensorDataset(images, torch.from_numpy(data.train_labels).long())
torch.manual_seed(0)
net = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
sgd = partial(torch.optim.SGD, lr=0.1)
learner = pl.TorchLearner(net, loss, optimizer=sgd, dataset=train, batch_size=4096)
engine = pl.Ray(workers=8)
watching = [Picture(9.0), SlowWorkers(engine, {"w7": 0.1})]
prices = pl.Prices(per_hour=0.4)
pl.Trainer(learner, pl.k_async(4), engine, callbacks=watching, prices=prices).fit(seconds=12)
