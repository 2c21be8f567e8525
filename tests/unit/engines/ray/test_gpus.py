"""How many GPUs Ray reserves for each worker, and settings that would share one silently."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import paceline as pl
from paceline.engines.ray.pool import Gpus, gpus_each
from paceline.engines.ray.worker import Worker
from paceline.learners.replica import device_of
from tests.conftest import make_learner

NAMES = ["w0", "w1", "w2"]


def test_a_cuda_learner_implies_a_gpu_for_each_worker() -> None:
    assert gpus_each(None, "cuda", NAMES, 3) == dict.fromkeys(NAMES, 1.0)
    assert gpus_each(None, "cpu", NAMES, 3) == dict.fromkeys(NAMES, 0.0)
    assert gpus_each(0.5, "cuda", NAMES, 3) == dict.fromkeys(NAMES, 0.5)
    assert gpus_each(0.0, "cpu", NAMES, 3) == dict.fromkeys(NAMES, 0.0)


def test_auto_gives_gpus_to_as_many_workers_as_there_are() -> None:
    assert gpus_each(None, "auto", NAMES, 0) == {"w0": 0.0, "w1": 0.0, "w2": 0.0}
    assert gpus_each(None, "auto", NAMES, 2) == {"w0": 1.0, "w1": 1.0, "w2": 0.0}
    assert gpus_each(None, "auto", NAMES, 8) == {"w0": 1.0, "w1": 1.0, "w2": 1.0}
    assert gpus_each({"w1": 1}, "auto", NAMES, 2) == {"w0": 0.0, "w1": 1.0, "w2": 0.0}


@pytest.mark.parametrize("gpus", [0.0, {"w0": 1.0}])
def test_workers_on_cuda_without_a_gpu_of_their_own_are_refused(gpus: Gpus) -> None:
    with pytest.raises(ValueError, match=r"device='cuda' and gpus=0 for w[01]: such workers would"):
        gpus_each(gpus, "cuda", NAMES, 3)


def test_a_device_that_a_worker_cannot_see_is_refused() -> None:
    with pytest.raises(ValueError, match="a worker sees its own GPUs alone, counted from 0"):
        gpus_each(None, "cuda:1", NAMES, 3)
    assert gpus_each(2, "cuda:1", NAMES, 6) == dict.fromkeys(NAMES, 2.0)
    with pytest.raises(ValueError, match=r"gpus= names \['w3'\]; the workers are w0 to w2"):
        gpus_each({"w3": 1}, "auto", NAMES, 3)


def test_a_worker_without_gpus_sees_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    Worker(gpus=1.0)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"  # as Ray set it
    Worker(gpus=0.0)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_auto_is_the_processor_where_there_is_no_gpu() -> None:
    assert device_of("cuda") == "cuda" and device_of("cpu") == "cpu"
    assert device_of("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    plain = make_learner()
    fields = plain.model, plain.loss, plain.optimizer, plain.dataset, plain.batch_size
    runs = [
        pl.Trainer(learner, pl.sync(), pl.Simulator(2), progress=False).fit(steps=2)
        for learner in (pl.TorchLearner(*fields, device="auto"), pl.TorchLearner(*fields))
    ]
    assert runs[0].metrics["loss"] == pytest.approx(runs[1].metrics["loss"], rel=1e-4)


@pytest.mark.parametrize("device", ["gpu", "cuda:x", ""])
def test_an_unknown_device_is_refused(device: str) -> None:
    plain = make_learner()
    with pytest.raises(ValueError, match=f"device={device!r}: use"):
        pl.TorchLearner(
            plain.model, plain.loss, plain.optimizer, plain.dataset, plain.batch_size, device=device
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPUs here are real")
def test_the_gpu_script_says_that_it_has_tested_nothing(tmp_path: Path) -> None:
    script = Path(__file__).parents[4] / "benchmarks" / "gpu.py"
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, script, "--report", report],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "sees no GPU on this machine, so nothing was tested" in done.stdout
    assert not report.exists()
