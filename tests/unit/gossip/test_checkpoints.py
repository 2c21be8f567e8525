"""Checkpoints of decentralized runs: every node goes on with its own model, at its next sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import paceline as pl
from paceline.core.errors import CheckpointError
from paceline.core.protocol import Left
from paceline.training.checkpoint.files import Files
from tests.conftest import flat, make_learner, module_of
from tests.unit.gossip.journals import offsets

RING = pl.gossip.Gossip(
    pl.gossip.ring(4), pl.gossip.Difference(0.5), pl.gossip.OnChange(0.1, every=5)
)


def trainer(folder: Path, learner: Any = None, **more: Any) -> pl.Trainer:
    engine = pl.Simulator(4, pl.delays.Exponential(1.0), schedule=more.pop("schedule", ()))
    saves = pl.Checkpoints(folder, every=10)
    return pl.Trainer(
        learner or make_learner(), RING, engine, checkpoints=saves, progress=False, **more
    )


def test_every_node_goes_on_where_it_was(tmp_path: Path) -> None:
    first = trainer(tmp_path).fit(steps=25)
    names = sorted(folder.name for folder in tmp_path.iterdir())
    assert names == ["step-00000010", "step-00000020", "step-00000025"]
    resumed = trainer(tmp_path).resume(tmp_path)
    assert resumed.step == 25
    start = {n: s.server.arrays["values"] for n, s in (resumed._start.nodes or {}).items()}
    for node, model in first.models.items():
        np.testing.assert_array_equal(start[node], flat(model).float().numpy())
    second = resumed.fit(steps=60)
    assert second.meter.version == 240 and len(second.metrics["loss"]) == 240 - 100
    for node in RING.graph.nodes:
        both = offsets(first, node) + offsets(second, node)
        assert both == list(range(0, 16 * len(both), 16))
        assert (
            pl.protocol.replay(second.driven_policy, second.journals[node]) == second.journals[node]
        )
    assert second.seconds > first.seconds
    whole = pl.Trainer(make_learner(), RING, pl.Simulator(4, pl.delays.Exponential(1.0)),
                       progress=False).fit(steps=60)  # fmt: skip
    losses = [run.metrics["loss"] for run in (first, second, whole)]
    assert losses[1][:20].mean() < 1.3 * losses[0][-20:].mean()
    assert losses[1][-40:].mean() < 1.3 * losses[2][-40:].mean()


def test_momentum_and_the_mean_model_are_saved(tmp_path: Path) -> None:
    run = trainer(tmp_path).fit(steps=10)
    nodes = trainer(tmp_path).resume(tmp_path)._start.nodes
    assert nodes is not None
    for state in nodes.values():
        assert any(
            "momentum" in name and array.any() for name, array in state.server.arrays.items()
        )
    module = pl.Checkpoints(tmp_path).load(module_of(make_learner()))
    torch.testing.assert_close(flat(module), flat(run.model))


def test_a_node_that_was_away_starts_again(tmp_path: Path) -> None:
    schedule = [(8.0, Left("w2"))]
    run = trainer(tmp_path, schedule=schedule).fit(steps=20)
    assert "w2" not in run.models
    second = trainer(tmp_path, schedule=schedule).resume(tmp_path).fit(steps=40)
    assert set(second.models) == set(RING.graph.nodes)
    both = offsets(run, "w2") + offsets(second, "w2")
    assert both == list(range(0, 16 * len(both), 16)) and len(offsets(second, "w2")) > 5


def test_damaged_and_foreign_checkpoints_are_refused(tmp_path: Path) -> None:
    trainer(tmp_path).fit(steps=20)
    newest = tmp_path / "step-00000020"
    state = newest / "w1" / "state.json"
    state.write_text(state.read_text().replace('"now"', '"then"', 1))
    assert trainer(tmp_path).resume(tmp_path).step == 10  # the one before
    with pytest.raises(CheckpointError, match=r"w1.state.json is missing or differs"):
        trainer(tmp_path).resume(newest)
    manifest = newest / "w1" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"step": 1}))
    with pytest.raises(CheckpointError, match="differs from its hash"):
        trainer(tmp_path).resume(newest)
    with pytest.raises(CheckpointError, match="is not of this run: "):
        pl.Trainer(make_learner(), pl.sync(), pl.Simulator(4), progress=False).resume(tmp_path)
    with pytest.raises(ValueError, match="are written to a folder, not to a store yet"):
        pl.Trainer(make_learner(), RING, pl.Simulator(4), checkpoints=pl.Checkpoints("s3://x/y"))


def test_files_of_nodes_hold_no_code(tmp_path: Path) -> None:
    trainer(tmp_path).fit(steps=10)
    files = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"manifest.json", "state.json", "model.safetensors", "state.safetensors"}
    assert set(Files(tmp_path / "step-00000010").data["coordinator"]["nodes"]) == {
        *RING.graph.nodes
    }
