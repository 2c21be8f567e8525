"""Placement on GPUs that Ray only claims to have: nothing is computed on them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

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
