"""The communication hooks under the real torchrun: exact where they must be, and honest counts."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.data.sampling import Stream
from tests.cluster.ddp_hooks import (
    BATCH,
    CASES,
    QUADRATICS,
    RANKS,
    RESUMED,
    SAMPLES,
    STEPS,
    Quadratic,
    flat,
    make_data,
    make_model,
    make_optimizer,
)
from tests.cluster.test_ddp import torchrun

pytestmark = [pytest.mark.cluster, pytest.mark.long]

ROOT = Path(__file__).parents[2]
HOOKED = sorted(CASES.keys() - {"plain"})


class Outcome(NamedTuple):
    ranks: list[dict[str, Any]]
    tensors: list[dict[str, Any]]  # of each rank


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("hooks")
    torchrun(ROOT / "tests/cluster/ddp_hooks.py", str(folder), seconds=120)
    found = Outcome(
        [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)],
        [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)],
    )
    assert found.ranks[0]["file"] == paceline.__file__
    return found


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_all_ranks_have_the_same_model(outcome: Outcome) -> None:
    names = outcome.tensors[0].keys()
    assert len(names) >= len(CASES) + len(RESUMED) + len(QUADRATICS)
    for name in names:
        models = [
            torch.cat([each[name][part].flatten() for part in ("weight", "other")])
            if name in QUADRATICS
            else each[name]
            for each in outcome.tensors
        ]
        assert torch.equal(models[0], models[1]), name
        assert torch.equal(models[0], models[2]), name


@pytest.mark.parametrize("name", ["identity", "dense", "always"])
def test_whole_gradients_give_the_model_of_plain_ddp(outcome: Outcome, name: str) -> None:
    plain, start = outcome.tensors[0]["plain"], flat(make_model())
    assert distance(outcome.tensors[0][name], plain) < 1e-6
    assert distance(start, plain) > 0.1  # there was something to get wrong


@pytest.mark.parametrize("name", ["one bucket", "views"])
def test_buckets_make_no_difference(outcome: Outcome, name: str) -> None:
    found = outcome.tensors[0]
    assert torch.equal(found[name], found["feedback"])
    assert distance(found["feedback"], found["plain"]) > 1e-3  # which is not plain DDP


def test_buckets_were_several_and_were_rebuilt(outcome: Outcome) -> None:
    for name in HOOKED:
        buckets = outcome.ranks[0][name]["buckets"]
        assert len(buckets) == STEPS
        assert buckets[1] == buckets[-1]
        if name != "one bucket":
            assert len(buckets[1]) > 2
            assert buckets[0] != buckets[1]
    assert len(outcome.ranks[0]["one bucket"]["buckets"][1]) == 1


def test_feedback_converges_where_top_k_alone_does_not(outcome: Outcome) -> None:
    found = outcome.tensors[0]
    start = float(Quadratic(0).target.square().sum() / 2)
    assert found["q plain"]["loss"] < 1e-6 * start
    assert found["q feedback"]["loss"] < 0.005 * start
    assert found["q topk"]["loss"] > 0.5 * start
    sent = [found[name]["state"]["bytes_sent"] for name in ("q feedback", "q topk")]
    assert sent[0] == pytest.approx(sent[1], rel=0.01)


def test_nothing_is_lost(outcome: Outcome) -> None:
    """x - mean(e_r) is where SGD with all these gradients would be, also with unused parameters."""
    for part in ("weight", "other"):
        ranks = [each["q feedback"] for each in outcome.tensors]
        memories = [rank["state"]["parameters"][part]["sender"]["error"] for rank in ranks]
        error = torch.stack(memories).double().mean(0).view_as(ranks[0][part])
        wanted = torch.stack([rank["wanted"][part] for rank in ranks]).mean(0)
        assert float(error.norm()) > 1e-2
        missing = ranks[0][part].double() - error + wanted  # from x = 0
        assert float(missing.abs().max()) < 2e-4, part


def test_lag_saves_with_whole_gradients_and_nothing_with_samples(outcome: Outcome) -> None:
    found = outcome.tensors[0]
    state = found["q lag"]["state"]
    assert found["q lag"]["loss"] < 1e-6
    assert state["bytes_sent"] < 0.5 * state["bytes_dense"]
    noisy = outcome.ranks[0]["noisy lag"]
    assert noisy["sent"] > noisy["dense"]  # all of it, and a byte for each tensor


def test_when_one_rank_asks_all_give(outcome: Outcome) -> None:
    for rank in outcome.ranks:
        assert rank["asked"] == pytest.approx([1.0, 6.4 / 3, 6.4 / 3])


def test_a_lazy_hook_sends_less(outcome: Outcome) -> None:
    found = outcome.ranks[0]["lazy"]
    assert 0.2 < found["sent"] / found["dense"] < 0.8
    assert distance(outcome.tensors[0]["lazy"], outcome.tensors[0]["plain"]) > 1e-4


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_that_is_resumed_is_the_same(outcome: Outcome, name: str) -> None:
    """To the bit, except where all-reduce adds in another order in other buckets, as in DDP."""
    for rank in range(RANKS):
        tensors, found = outcome.tensors[rank], outcome.ranks[rank]
        if name == "lazy":
            assert distance(tensors[f"{name} resumed"], tensors[name]) < 1e-6
        else:
            assert torch.equal(tensors[f"{name} resumed"], tensors[name])
        for count in ("sent", "dense"):  # a step in the first buckets has other headers
            assert found[f"{name} resumed"][count] == pytest.approx(found[name][count], rel=0.01)


@pytest.mark.parametrize("name", HOOKED)
def test_bytes_are_those_of_the_collectives(outcome: Outcome, name: str) -> None:
    numbers = sum(parameter.numel() for parameter in make_model().parameters())
    for rank in outcome.ranks:
        found, carried = rank[name], rank[name]["carried"]
        ring = 2 * (RANKS - 1) / RANKS
        expected = (RANKS - 1) * carried["gathered"] + ring * carried["reduced"]
        assert found["sent"] == pytest.approx(expected, abs=carried["calls"])  # rounded in each
        assert found["dense"] == pytest.approx(STEPS * ring * 4 * numbers, abs=carried["calls"])
        assert carried["calls"] > STEPS


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel, in /proc/self/io")
def test_bytes_are_those_that_the_kernel_saw(outcome: Outcome) -> None:
    for rank in outcome.ranks:
        found = rank["wire"]
        assert found["codec"]["sent"] == pytest.approx(found["codec"]["written"], rel=0.05)
        assert found["triggered"]["sent"] == pytest.approx(found["triggered"]["written"], rel=0.01)
        for name in ("codec", "triggered"):
            assert found[name]["dense"] == pytest.approx(found["plain"]["written"], rel=0.01)
        assert found["codec"]["written"] < 0.05 * found["plain"]["written"]


def test_top_k_is_short(outcome: Outcome) -> None:
    found = outcome.ranks[0]["one bucket"]
    assert found["sent"] < 0.35 * found["dense"]  # 3/2 of a tenth, places, biases and a header


@pytest.mark.parametrize("name", ["identity", "always"])
def test_shares_by_speed_still_make_the_gradient_of_the_batch(outcome: Outcome, name: str) -> None:
    model, stream = make_model(), Stream(SAMPLES, seed=0)
    inputs, labels = make_data().tensors
    optimizer = make_optimizer(model)
    for step in range(STEPS):
        chosen = torch.from_numpy(stream.indices(step * BATCH, BATCH))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
        optimizer.step()
    assert distance(outcome.tensors[0][f"{name} by speed"], flat(model)) < 1e-5


def test_the_script_of_the_documentation_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs/ddp.md").read_text()
    [snippet] = re.findall(r"^```python\n(# hook.py.*?)^```", page, re.M | re.S)
    script = tmp_path / "hook.py"
    script.write_text(snippet)
    printed = torchrun(script, seconds=90)
    shares = [float(each) for each in re.findall(r"sent (0\.\d+) of", printed)]
    assert len(shares) == RANKS
    assert max(shares) < 0.1
