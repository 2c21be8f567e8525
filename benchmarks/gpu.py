"""Checks training on this machine's GPUs: placement, numbers, precision, faults, speed, peers.

Run it on a machine with one GPU or more. It takes about ten minutes and writes a JSON report
(`--report`, by default gpu_report.json). It exits with 0 if all checks hold, and with 1 if a
check fails. It exits with 3 if torch sees no GPU, so that nothing was tested.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import gpu_peers
import paceline as pl
from _fashion import images
from _report import machine

NO_GPU = 3
INPUTS, CLASSES, SAMPLES = 64, 10, 4096
CLOSE = 1e-3  # relative: another device adds float32 in another order


def examples() -> TensorDataset:
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, INPUTS, generator=random)
    labels = (inputs @ torch.randn(INPUTS, CLASSES, generator=random)).argmax(dim=1)
    return TensorDataset(inputs, labels)


class Net(nn.Module):
    """A frozen bfloat16 layer, a trained one with batch statistics, and a constant buffer."""

    mask: Tensor

    def __init__(self, hidden: int = 256) -> None:
        super().__init__()
        self.base = nn.Linear(INPUTS, hidden).to(torch.bfloat16).requires_grad_(False)
        self.norm = nn.BatchNorm1d(hidden)
        self.head = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))
        self.register_buffer("mask", torch.ones(200, 200).tril())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.base(x.to(torch.bfloat16)).float())
        return torch.as_tensor(self.head(hidden) * self.mask[0, 0])


def entropy(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def entropy_in_half(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return entropy(model, batch)


def which(model: nn.Module, batch: Any) -> Tensor:
    """Return the number of the batch's GPU as a loss; -1 for none."""
    number = -1.0
    if batch[0].is_cuda:
        number = float(os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0])
    loss: Tensor = model(batch[0]).sum() * 0.0 + number
    return loss


def learner(device: str, loss: Any = entropy, hidden: int = 256) -> pl.TorchLearner:
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    return pl.TorchLearner(partial(Net, hidden), loss, sgd, examples, 256, device=device)


def train(engine: Any, recipe: pl.TorchLearner, steps: int, **options: Any) -> pl.Run:
    return pl.Trainer(recipe, pl.sync(), engine, progress=False, **options).fit(steps=steps)


def vector(run: pl.Run) -> np.ndarray[Any, Any]:
    return np.concatenate([t.double().reshape(-1) for t in run.model.state_dict().values()])


def apart(one: pl.Run, other: pl.Run) -> float:
    a, b = vector(one), vector(other)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


# --- the checks ----------------------------------------------------------------------------------


def placement(gpus: int) -> dict[str, Any]:
    """Each worker has a GPU of its own, and with device="auto" one more is on the CPU."""
    seen = []
    with pl.Ray(workers=gpus + 1, cpus=0.5, timeout=120) as engine:
        run = train(engine, learner("auto", which), 2)
        for entry in run.journal:
            if getattr(entry.event, "samples", None):
                seen.append(entry.event.stats["loss"])  # type: ignore[union-attr]
    return {"seen": sorted(set(seen)), "ok": sorted(set(seen)) == [-1.0, *map(float, range(gpus))]}


def numbers(gpus: int) -> dict[str, Any]:
    """Twenty steps on GPUs are those on the CPU up to rounding, and the same twice."""
    plain = train(pl.Simulator(gpus), learner("cpu"), 20)
    with pl.Ray(workers=gpus, timeout=120) as engine:
        one, again = (train(engine, learner("cuda"), 20) for _ in range(2))
    found = {"to_cpu": apart(one, plain), "twice": apart(one, again)}
    return found | {"ok": found["to_cpu"] < CLOSE and found["twice"] < CLOSE}


def precision(gpus: int) -> dict[str, Any]:
    """bfloat16 autocast learns, and frozen bfloat16 weights come back as they were."""
    with pl.Ray(workers=gpus, timeout=120) as engine:
        run = train(engine, learner("cuda", entropy_in_half), 60)
    losses = run.metrics["loss"]
    again = learner("cpu").server().model().state_dict()["base.weight"]
    same = torch.equal(run.model.state_dict()["base.weight"].cpu(), again)
    return {
        "loss": [float(losses[0]), float(losses[-1])],
        "frozen_weights_stay": same,
        "ok": bool(losses[-1] < 0.7 * losses[0]) and same,
    }


class KillOne(pl.Callback):
    def __init__(self, engine: pl.Ray) -> None:
        self._engine, self.killed = engine, 0

    def stepped(self, progress: pl.Progress) -> None:
        if progress.step == 5:
            os.kill(self._engine.pids()["w0"], signal.SIGKILL)
            self.killed += 1


def faults(gpus: int) -> dict[str, Any]:
    """A worker that is killed is replaced on the same GPU, and the trajectory is the same."""
    with pl.Ray(workers=gpus, timeout=120) as engine:
        whole = train(engine, learner("cuda"), 15)
        kill = KillOne(engine)
        run = train(engine, learner("cuda"), 15, callbacks=[kill])
    off = apart(run, whole)
    return {"killed": kill.killed, "to_whole": off, "ok": kill.killed == 1 and off < CLOSE}


def speed(gpus: int) -> dict[str, Any]:
    """Seconds a step, with the model in the driver and on servers, of 4M and of 64M values."""
    found: dict[str, Any] = {}
    for hidden, steps in ((2_000, 20), (8_000, 8)):
        for servers in ("driver", gpus):
            with pl.Ray(workers=gpus, timeout=300, servers=servers) as engine:
                run = train(engine, learner("cuda", hidden=hidden), steps)
            seconds = np.diff(run.metrics["seconds"])[2:]
            found[f"{hidden} wide, servers={servers}"] = round(float(np.median(seconds)), 4)
    return {"seconds_per_step": found, "ok": True}


def peers(gpus: int) -> dict[str, Any]:
    """Seconds a step beside DDP and DiLoCo."""
    try:
        images()
    except FileNotFoundError as error:  # the other checks need no dataset
        return {"not_run": str(error), "ok": True}
    return gpu_peers.measure(gpus) | {"ok": True}


CHECKS: dict[str, Callable[[int], dict[str, Any]]] = {
    check.__name__: check for check in (placement, numbers, precision, faults, speed, peers)
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--report", type=Path, default=Path("gpu_report.json"))
    given = arguments.parse_args()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        print(
            f"torch {torch.__version__} sees no GPU on this machine, so nothing was tested; run "
            "this on a machine with a GPU, with a build of torch for it"
        )
        sys.exit(NO_GPU)
    report: dict[str, Any] = {
        "machine": machine("torch", "ray", "numpy", "paceline"),
        "gpus": [torch.cuda.get_device_name(i) for i in range(gpus)],
        "cuda": torch.version.cuda,
        "checks": {},
    }
    for name, check in CHECKS.items():
        begin = time.monotonic()
        try:
            found = check(gpus)
        except Exception as error:  # a failed check is reported, and the others still run
            found = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        report["checks"][name] = found | {"seconds": round(time.monotonic() - begin, 1)}
        print(f"{name}: {'ok' if found['ok'] else 'NOT OK'} {json.dumps(found)}", flush=True)
    report["ok"] = all(found["ok"] for found in report["checks"].values())
    given.report.write_text(json.dumps(report, indent=1))
    print(f"the report is in {given.report}; ok: {report['ok']}")
    sys.exit(0 if report["ok"] else 1)


if __name__ == "__main__":
    main()
