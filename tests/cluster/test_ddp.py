"""Shares by speed under the real torchrun: the model of one process, and a relieved slow rank."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.data.sampling import Stream
from tests.cluster.ddp_proportional import (
    BATCH,
    EPOCHS,
    ITEMS,
    RANKS,
    SAMPLES,
    SLOW,
    SMALL,
    STEPS,
    make_data,
    make_model,
)

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]


class Outcome(NamedTuple):
    ranks: list[dict[str, Any]]
    models: dict[str, dict[str, Tensor]]


def torchrun(script: Path, *arguments: str, seconds: float, ranks: int = RANKS) -> str:
    """Run a script on all ranks over the loopback interface, and return what it prints.

    On a busy machine torch's gloo now and then aborts a rank that has done all its work, in scripts
    without anything of ours as well: then the script is run again.
    """
    for _ in range(3):
        code, printed, errors = launched(script, arguments, seconds, ranks)
        if code == 0:
            return printed
        if "terminate called without an active exception" not in errors:
            break
    raise AssertionError(f"{script.name} ended with {code}:\n{errors}")


def launched(
    script: Path, arguments: Sequence[str], seconds: float, ranks: int
) -> tuple[int, str, str]:
    """Run a script once, and return its exit code, output and errors."""
    launch = [
        *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
        *(str(script), *arguments),
    ]
    paths = os.pathsep.join([str(Path(paceline.__file__).parents[1]), str(ROOT)])
    settings = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    process = subprocess.Popen(
        launch, env={**os.environ, **settings}, cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        printed, errors = process.communicate(timeout=seconds)
    finally:
        process.terminate()  # it ends its ranks
        try:
            process.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
    return process.returncode, printed, errors


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("ddp")
    torchrun(ROOT / "tests/cluster/ddp_proportional.py", str(folder), seconds=90)
    return Outcome(
        [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)],
        {
            name: torch.load(folder / f"{name}.pt", weights_only=True)
            for name in ("fixed", "measured")
        },
    )


@pytest.fixture(scope="module")
def alone() -> dict[str, Tensor]:
    """Train in one process on the global batches."""
    model, stream = make_model(), Stream(SAMPLES, seed=0)
    inputs, labels = make_data().tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    places = [
        (epoch * SAMPLES + at, min(BATCH, SAMPLES - at))
        for epoch in range(STEPS)
        for at in range(0, SAMPLES, BATCH)
    ]
    for start, count in places[:STEPS]:
        chosen = torch.from_numpy(stream.indices(start, count))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("name", ["fixed", "measured"])
def test_the_model_is_that_of_one_process(
    outcome: Outcome, alone: dict[str, Tensor], name: str
) -> None:
    for key, theirs in alone.items():
        difference = (outcome.models[name][key] - theirs).norm() / theirs.norm()
        assert difference < 1e-5, key
    moved = torch.cat([(v - w).flatten() for v, w in zip(
        alone.values(), make_model().state_dict().values(), strict=True)])  # fmt: skip
    assert moved.norm() > 0.1  # there was something to get wrong


def test_fixed_shares_are_what_was_asked_for(outcome: Outcome) -> None:
    for rank in outcome.ranks:
        assert rank["fixed"]["shares"] == [[384, 128, 256]] * STEPS


@pytest.mark.timing
def test_a_rank_that_is_really_slow_gets_less(outcome: Outcome) -> None:
    """It runs 0.15 of the time its equal share of the cores would let it."""
    shares = [rank["measured"]["shares"] for rank in outcome.ranks]
    assert shares[0] == shares[1] == shares[2]
    assert shares[0][0] == [256, 256, 256]
    assert shares[0][-1][SLOW] < 0.5 * BATCH / RANKS
    assert min(shares[0][-1][:SLOW]) > BATCH / RANKS


def test_loaders_that_draw_ahead_have_every_sample_once(outcome: Outcome) -> None:
    ranks = [rank["workers"] for rank in outcome.ranks]
    stream = Stream(ITEMS, seed=0)
    expected = [
        stream.indices(epoch * ITEMS + at, min(SMALL, ITEMS - at)).tolist()
        for epoch in range(EPOCHS)
        for at in range(0, ITEMS, SMALL)
    ]
    parts = zip(*(rank["seen"] for rank in ranks), strict=True)
    assert [[*chain(*batch)] for batch in parts] == expected
    changes = [tuple(shares) for shares in ranks[0]["shares"]]
    assert len(set(changes)) >= 3  # the shares did turn around meanwhile


def test_the_script_of_the_documentation_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs/ddp.md").read_text()
    [snippet] = re.findall(r"^```python\n(# after.py.*?)^```", page, re.M | re.S)
    script = tmp_path / "after.py"
    script.write_text(snippet)
    printed = torchrun(script, seconds=90)
    assert all(f"rank {rank}: loss 0." in printed for rank in range(RANKS))
