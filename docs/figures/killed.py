"""Draw killed.svg: the live view of a real run while one of its hosts is killed and comes back.

Four hosts are network namespaces of this machine, each with a Ray node and a worker. Every process
of one of them is killed. Three seconds later Ray is started there again.

Run it:  python docs/figures/killed.py
Needs:   root on Linux, for network namespaces
Data:    apt-get install dataset-fashion-mnist
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict
from functools import partial
from math import ceil
from pathlib import Path

import ray
import torch
from film import Frame, film, lines_of
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.report.callbacks import Live
from paceline.report.live import EVERY, Noted, moment, render
from paceline.testing.hosts import Hosts

HOSTS, VICTIM, WIDTH = 4, 3, 64
KILLED, STARTED, AFTER = 5.0, 8.0, 5.0  # seconds of the run; AFTER: from the return to the end
LONGEST, DEADLINE = 22.0, 300.0  # seconds of the film, and of the script
ROOT = Path(__file__).parents[2]
TARGET = Path(__file__).with_suffix(".svg")


class Camera(pl.Callback):
    """Records the live view as often as a terminal shows it, and says when to kill and start."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self._due = {"kill": KILLED, "start": STARTED}
        self._noted, self._over = Noted(), threading.Event()
        self._lost, self._back = "", 0.0
        self._thread = threading.Thread(target=self._record, daemon=True)

    def started(self, live: Live) -> None:
        self._live = live

    def stepped(self, progress: pl.Progress) -> None:
        self._noted = Noted(progress.epoch)
        if progress.step == 1:
            self._thread.start()
        for word in [word for word, at in self._due.items() if progress.seconds >= at]:
            del self._due[word]
            print(word, flush=True)
        if self._back and progress.seconds > self._back + AFTER:
            progress.stop("recorded")

    def ended(self, reason: str) -> None:
        self._over.set()
        self._thread.join(10)

    def _record(self) -> None:
        while not self._over.wait(EVERY):
            now, workers = moment(self._live), self._live.workers()
            gone = [name for name, tally in workers.items() if not tally.present]
            view = render(self._live, now, WIDTH, noted=self._noted)
            if gone:
                self._lost, note = gone[0], f"{gone[0]} was killed; the others go on"
            elif self._lost:
                self._back, note = self._back or now, f"{self._lost} is back"
            else:
                note = f"{HOSTS} hosts train one model"
            self.frames.append(Frame(now, note, lines_of(view, WIDTH), bool(gone)))


def rows() -> TensorDataset:
    from fashion_mnist import fashion_mnist

    data = fashion_mnist()
    images = torch.from_numpy(data.train_images).unsqueeze(1)
    return TensorDataset(images, torch.from_numpy(data.train_labels).long())


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images / 255), labels)


def train(address: str, target: Path) -> None:
    """Train on the hosts, and write the frames; this runs on host 0."""
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    torch.manual_seed(0)
    convolutions = nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 5, stride=2)
    net = nn.Sequential(*convolutions, nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))
    sgd = partial(torch.optim.SGD, lr=0.1)
    learner = pl.TorchLearner(net, loss, optimizer=sgd, dataset=rows, batch_size=2048)
    engine, camera = pl.Ray(fleet=[pl.Kind("host", count=HOSTS, cpus=1)]), Camera()
    trainer = pl.Trainer(learner, pl.sync(), engine, callbacks=[camera], progress=False)
    trainer.fit(seconds=DEADLINE / 2)
    target.write_text(json.dumps([asdict(frame) for frame in camera.frames]))


def record(target: Path) -> list[Frame]:
    """Start the hosts and the run, kill a host and start it again; return the frames."""
    paths = {"PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("src", "examples"))}
    with Hosts(HOSTS, delay=0.001) as hosts:
        address = hosts.start_ray(object_store=100_000_000, env=paths)
        command = [sys.executable, __file__, address, str(target)]
        with hosts.popen(0, command, env=paths, stdout=subprocess.PIPE, text=True) as process:
            deadline = threading.Timer(DEADLINE, process.kill)
            deadline.start()
            for line in process.stdout:  # ends with the process
                if line == "kill\n":
                    hosts.kill(VICTIM)
                elif line == "start\n":
                    hosts.start_node(VICTIM)
            deadline.cancel()
        if process.wait():
            raise RuntimeError(f"the run ended with {process.returncode}; see its messages above")
    return [
        Frame(
            each["seconds"],
            each["note"],
            tuple(tuple((text, style) for text, style in line) for line in each["lines"]),
            each["lost"],
        )
        for each in json.loads(target.read_text())
    ]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        frames = record(Path(folder) / "frames.json")
    lost = [frame.seconds for frame in frames if frame.lost]
    back = next(frame.seconds for frame in frames if frame.seconds > lost[-1])
    speed = max(ceil((frames[-1].seconds - frames[0].seconds) / LONGEST), 1)
    description = (
        f"A table has a row for each of {HOSTS} workers, each on a host of its own. At "
        f"{lost[0]:.0f} s a host is killed: its row says gone, in red. Step and loss go on with "
        f"three workers. At {back:.0f} s the host is back, and its row says computing again."
    )
    title = "The live view of a run while a host is killed and comes back"
    TARGET.write_text(film(frames[::speed], title, description, speed))
    print(f"{len(frames)} frames, {speed} s in a second, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    if sys.argv[1:]:
        train(sys.argv[1], Path(sys.argv[2]))
    else:
        main()
