"""Seconds a step beside DDP and DiLoCo, on the GPUs of one machine.

The arms of `peers.py` that need neither slow links nor an optional install: DDP on NCCL, the same
with shares by speed, DiLoCo written by hand, and Paceline. A CNN learns Fashion-MNIST, 512 samples
a step. `make gpu` runs it. `--cpu 2` trains on two processes without a GPU, to try the script.

    python benchmarks/gpu_peers.py [--cpu PROCESSES]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import paceline as pl
from arms.ours import Data
from arms.rates import RATES
from arms.task import LOCAL, Order, as_it_is, loss_of, reported

BLOCKS = 3  # of each arm, in turn with the others
STEPS, WARM = 40, 10  # of a block; WARM: the first of them, which are not counted
KINDS = {  # kind of learning rate of each arm
    "ddp": "step",
    "ddp + shares": "step",
    "diloco": "local",
    "sync": "step",
    "sync + shares": "step",
    "local_sgd": "local",
    "local_sgd + shares": "local",
}
OURS = ("sync", "sync + shares", "local_sgd", "local_sgd + shares")


class Rank(subprocess.Popen[str]):
    """A process that says words in lines of JSON; a thread of this one counts them."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.said: Counter[str] = Counter()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.stdout or ():
            if line.startswith("{"):
                self.said.update(json.loads(line).keys())


class Ranks:
    """One process of `arms.ddp` for each device, all on this machine."""

    def __init__(self, size: int, device: str, stack: ExitStack) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        here = Path(__file__).parent
        paths = Path(pl.__file__).parents[1], here, here.parent / "examples"
        found = os.pathsep.join(map(str, paths))
        self._processes = [
            Rank(
                [sys.executable, "-m", "arms.ddp", str(rank), str(size), address, device],
                env={**os.environ, "PYTHONPATH": found}, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, text=True,
            )
            for rank in range(size)
        ]  # fmt: skip
        for process in self._processes:
            stack.callback(process.wait, 20)
            stack.callback(process.kill)
        self._answers("ready")

    def train(self, order: Order) -> list[float]:
        """Return the times at which the steps ended."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(asdict(order)) + "\n")
            process.stdin.flush()
        self._answers("end")
        return [at for at, _, _ in reported(Path(order.folder))]

    def _answers(self, word: str) -> None:
        """Wait until all ranks have said a word; raise if one has ended before."""
        for process in self._processes:
            while not process.said[word]:
                if process.poll() is not None:
                    raise RuntimeError("a process of DDP ended; what it printed says why")
                time.sleep(0.05)
            process.said[word] -= 1


def ours(order: Order, engine: pl.Ray, device: str) -> list[float]:
    """Return the times at which the steps of an arm of Paceline ended."""
    local = "local_sgd" in order.arm
    learner = pl.TorchLearner(
        order.module(), loss_of(order.model), order.optimizer, Data(order.model), order.batch,
        collate=as_it_is, outer=order.outer_optimizer if local else None, device=device,
    )  # fmt: skip
    policy = pl.local_sgd(LOCAL) if local else pl.sync()
    placement = pl.BySpeed() if "shares" in order.arm else None
    trainer = pl.Trainer(learner, policy, engine, placement=placement, progress=False)
    run = trainer.fit(steps=STEPS // (LOCAL if local else 1))
    return [float(at) for at in run.metrics["seconds"]]


def measure(size: int, device: str = "cuda") -> dict[str, Any]:
    """Train all arms in turn; return seconds of 512 samples, the median and range of blocks."""
    found: dict[str, list[float]] = {arm: [] for arm in KINDS}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ranks = Ranks(size, device, stack)
        engine = stack.enter_context(pl.Ray(workers=size, timeout=300))
        for number, arm in enumerate([*KINDS] * BLOCKS):
            lr, outer = RATES[KINDS[arm], "cnn"]
            own = folder / str(number)
            own.mkdir()
            (own / "last").write_text(str(STEPS))
            order = Order(arm, str(own), lr=lr, outer=outer, hosts=size, first=size, least=size)
            times = ours(order, engine, device) if arm in OURS else ranks.train(order)
            each = LOCAL if "local_sgd" in arm else 1  # optimizer steps of a time
            first = WARM // each - 1
            found[arm].append((times[-1] - times[first]) / (STEPS - WARM))
    to_ddp = {
        arm: [s / ddp for s, ddp in zip(seconds, found["ddp"], strict=True)]
        for arm, seconds in found.items()
    }
    return {"seconds_per_step": _told(found), "to_ddp": _told(to_ddp)}


def _told(blocks: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return median, minimum and maximum of each arm."""
    return {
        arm: [round(float(each), 5) for each in (np.median(of), min(of), max(of))]
        for arm, of in blocks.items()
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--cpu", type=int, default=0, metavar="PROCESSES", help="without a GPU")
    given = arguments.parse_args()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not (given.cpu or gpus):
        raise SystemExit("torch sees no GPU on this machine; --cpu 2 tries the script without one")
    print(json.dumps(measure(given.cpu or gpus, "cpu" if given.cpu else "cuda"), indent=1))


if __name__ == "__main__":
    main()
