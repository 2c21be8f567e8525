"""Placement on GPUs that Ray only claims to have: nothing is computed on them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fashion_mnist import FASHION_MNIST

pytestmark = pytest.mark.cluster


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPUs here are real")
@pytest.mark.long
def test_placement_on_claimed_gpus_and_a_small_store() -> None:
    command = [sys.executable, "-m", "tests.cluster.gpu_run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["auto"] == [-1.0, 0.0, 1.0]  # two workers have a GPU each, the third has none
    assert found["cpu"] == [-1.0]
    assert found["refused"].startswith("device='cuda' and gpus=0 for w0: such workers would share")
    assert found["stores"] == found["stores of 3"] == []
    (told,) = found["stores of 8"]
    assert told.startswith("node 127.0.0.2 has an object store of 0.1 GB and this job needs 0.2 GB")
    assert told.endswith("start Ray there with --object-store-memory=172800216")


@pytest.mark.skipif(not FASHION_MNIST.is_dir(), reason="apt install dataset-fashion-mnist")
@pytest.mark.long
def test_the_arms_beside_ddp_train_on_two_processes() -> None:
    """As on GPUs, but for the device and the backend."""
    script = Path(__file__).parents[2] / "benchmarks" / "gpu_peers.py"
    command = [sys.executable, str(script), "--cpu", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert set(found["to_ddp"]) > {"ddp", "ddp + shares", "diloco", "sync", "local_sgd"}
    assert found["to_ddp"]["ddp"] == [1.0, 1.0, 1.0]
    for middle, least, most in found["seconds_per_step"].values():
        assert 0 < least <= middle <= most
