"""`micro_batch="auto"` finds the size that fits, in a process with really little memory."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.core.protocol import Task, Work
from paceline.learners.base import Changed
from paceline.learners.memory import Pieces, is_out_of_memory
from tests.conftest import make_learner, vector_of

ROOT = Path(__file__).parents[3]
WIDTH, BATCH = 512, 64  # the product of a sample has 1 MiB
MIB = 2**20


class Outer(nn.Module):
    """Computes a product of every input with every weight, and a random number for each."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += len(inputs)
        product = inputs.unsqueeze(2) * self.weight
        return (product * torch.rand(len(inputs), 1, 1)).square().mean()


def loss(model: nn.Module, batch: Any) -> Tensor:
    return torch.as_tensor(model(batch[0]))


def computed(micro_batch: Any, steps: int = 1) -> tuple[str, int | None]:
    """Compute a task; return the hash of its result, and the size of micro-batches after it."""
    random = torch.Generator().manual_seed(0)
    learner = pl.TorchLearner(
        Outer(),
        loss,
        partial(torch.optim.SGD, lr=0.1),
        TensorDataset(torch.randn(256, WIDTH, generator=random)),
        BATCH,
        micro_batch=micro_batch,
        outer=partial(torch.optim.SGD, lr=1.0) if steps > 1 else None,
    )
    replica = learner.replica(0)
    task = Task(0, "w0", Work(steps=steps), 0, 0.0, BATCH, 0)
    outcome = replica.compute([learner.server().vector], task, lambda done: True)
    assert outcome.samples == BATCH * steps
    return hashlib.sha256(vector_of(outcome).tobytes()).hexdigest(), replica._micro.size


def limited(room: int) -> None:
    """Let this process have so many bytes more than now."""
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + room
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    computed(1)  # loads what torch loads at first use
    limited(80 * MIB)
    found: dict[str, Any] = {"gradient": computed("auto"), "steps": computed("auto", steps=2)}
    try:
        computed(BATCH)
    except RuntimeError as error:
        found["number"] = is_out_of_memory(error)
    limited(MIB)
    try:
        computed("auto")
    except RuntimeError as error:
        found["one"] = str(error)
    print(json.dumps(found))


@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process on Linux")
def test_a_task_is_repeated_until_it_fits() -> None:
    # Freed memory of 64 KiB and more goes back at once, and does not serve the next attempt.
    settings = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    environment = {**os.environ, **settings, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, __file__],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for name, steps in {"gradient": 1, "steps": 2}.items():
        bits, size = found[name]
        assert 1 < size <= 32
        assert bits == computed(size, steps)[0]  # as if the size had been given
    assert "out of memory with 64 samples at a time" in done.stderr
    assert found["number"]  # a number is not changed: the error is the user's
    assert "does not suffice for one sample; recompute activations" in found["one"]


def test_other_errors_are_not_retried() -> None:
    calls = []

    def attempt() -> None:
        calls.append(1)
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        Pieces("auto").until_it_fits(attempt)
    assert len(calls) == 1


def test_a_gradient_of_which_parts_were_sent_is_computed_as_a_new_task() -> None:
    pieces, told = Pieces("auto"), []
    final = pieces.watched(lambda vector, span: told.append(span))

    def attempt() -> None:
        pieces.of(8)
        assert final is not None
        final(torch.zeros(1).numpy(), (0, 1))
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(Changed):
        pieces.until_it_fits(attempt)
    assert told == [(0, 1)] and pieces.size == 4


def test_what_is_neither_a_number_nor_auto_is_refused() -> None:
    with pytest.raises(ValueError, match="micro_batch='small': use a number"):
        make_learner(micro_batch="small")
    with pytest.raises(ValueError, match="use at least 1"):
        make_learner(micro_batch=0)
    with pytest.raises(ValueError, match="says how large a piece is"):
        make_learner(micro_batch="auto").check(Work(budget=1.0))


if __name__ == "__main__":
    main()
