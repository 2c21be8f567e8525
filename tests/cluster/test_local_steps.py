"""Local steps in users' own loops: DiLoCo as it is published, alone and in groups of processes."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.core.protocol import Step
from paceline.sessions.local_steps import NESTEROV, tree_of
from tests.cluster.local_script import EVERY, RATE, ROUNDS, batch, make_model

pytestmark = pytest.mark.cluster

HERE = Path(__file__).parent
SCRIPT = HERE / "local_script.py"
PATH = {
    **{"PYTHONPATH": str(HERE.parents[1]), "RAY_USAGE_STATS_ENABLED": "0"},
    **{"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
}


def by_hand(ranks: int) -> dict[str, torch.Tensor]:
    """Train two workers by the published rule, in this process."""
    shared = make_model()
    outer = NESTEROV(shared.parameters())  # type: ignore[arg-type]
    models = [copy.deepcopy(shared) for _ in range(2)]
    inner = [torch.optim.AdamW(model.parameters(), lr=RATE) for model in models]
    for round in range(ROUNDS):
        for worker, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            for step in range(round * EVERY, (round + 1) * EVERY):
                optimizer.zero_grad()
                for rank in range(ranks):
                    inputs, targets = batch(worker, rank, step)
                    (nn.functional.mse_loss(model(inputs), targets) / ranks).backward()
                optimizer.step()
        for mine, *theirs in zip(
            shared.parameters(), *(model.parameters() for model in models), strict=True
        ):
            mine.grad = torch.stack([mine.detach() - each.detach() for each in theirs]).mean(dim=0)
        outer.step()
        for model in models:
            model.load_state_dict(shared.state_dict())
    return shared.state_dict()


def found(folder: Path) -> list[dict[str, torch.Tensor]]:
    return [torch.load(folder / f"{worker}.pt", weights_only=True) for worker in range(2)]


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return set(one) == set(other) and all(
        torch.allclose(one[name], other[name], atol=1e-5) for name in other
    )


def launch(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "paceline", "launch", "--workers", "2"]
    done = subprocess.run(
        [*command, str(SCRIPT), str(folder), *arguments],
        env={**os.environ, **PATH},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_it_is_diloco(tmp_path: Path) -> None:
    launch(tmp_path, "alone")
    one, other = found(tmp_path)
    assert close(one, other) and close(one, by_hand(1))
    run = pl.Journal.load(tmp_path / "run.jsonl")
    assert sum(isinstance(c, Step) for e in run for c in e.commands) == ROUNDS


@pytest.mark.long
def test_steps_go_on_while_changes_travel(tmp_path: Path) -> None:
    launch(tmp_path, "alone", "overlap", "silent")  # and without a loss, which is for reports only
    one, other = found(tmp_path)
    assert close(one, other)
    inputs, targets = batch(7, 7, 7)
    first, last = make_model(), make_model()
    last.load_state_dict(one)
    before, after = (nn.functional.mse_loss(m(inputs), targets).item() for m in (first, last))
    assert after < before


GROUPS = """
import os, subprocess, sys
from paceline.sessions.cluster import gcs_address, start_ray
start_ray(None, 2)
shared = {**os.environ, "RAY_ADDRESS": gcs_address(), "PACELINE_RUN": "groups"}
run = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
groups = [
    subprocess.Popen(
        [sys.executable, *run, "--rdzv-endpoint=127.0.0.1:0", *sys.argv[1:]],
        env={**shared, "PACELINE_WORKER": str(worker)},
    )
    for worker in range(2)
]
sys.exit(max(group.wait(timeout=200) for group in groups))
"""


@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.long), "fsdp"])
def test_two_groups_of_two_processes(tmp_path: Path, kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", GROUPS, str(SCRIPT), str(tmp_path), kind],
        env={**os.environ, **PATH},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, other = found(tmp_path)
    assert close(one, other) and close(one, by_hand(2))


def test_a_tree_has_the_tensors_of_a_module() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    tree = tree_of(model.state_dict(), {name for name, _ in model.named_parameters()})
    assert {name for name, _ in tree.named_parameters()} == dict(model.named_parameters()).keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tree.state_dict()[name], tensor)
