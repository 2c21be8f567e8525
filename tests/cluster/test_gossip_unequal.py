"""Nodes with unequal shards on a real Ray reach the optimum over all samples."""

from __future__ import annotations

import numpy as np
import pytest

import paceline as pl

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def test_the_mean_is_that_of_all_samples() -> None:
    tiles = pl.partition.Partition(np.repeat(range(4), (10, 10, 10, 70)))
    learner = pl.learners.LeastSquares(np.ones((100, 1)), (tiles.of == 3) * 1.0, 0.02, 40)
    run = pl.Trainer(
        learner,
        pl.gossip.Gossip(pl.gossip.complete(4), pl.gossip.Difference(0.5)),
        pl.Ray(4),
        placement=pl.policies.Placed(tiles, move=False),
        progress=False,
    ).fit(steps=600)
    steps = {node: meter.version for node, meter in run.meters.items()}
    # Nodes count by their steps, which on real processes are not quite equal: 0.25 without weights.
    counts = {"w0": 10, "w1": 10, "w2": 10, "w3": 70}
    total = sum(counts[node] * steps[node] for node in counts)
    assert run.model[0] == pytest.approx(70 * steps["w3"] / total, abs=0.1)
    assert run.model[0] > 0.5
