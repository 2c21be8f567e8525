"""Shares by speed and data that stay, on a real Ray: processes slowed, quickened and killed."""

from __future__ import annotations

import os
import signal
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch

import paceline as pl
from paceline.core.protocol import Left, Start
from paceline.data.partition.base import Partition
from paceline.testing import SlowWorkers
from tests.cluster.test_faults import At
from tests.cluster.test_selection import make_learner
from tests.conftest import flat

pytestmark = pytest.mark.cluster

# All four together need less than the cores have, so that who is not slowed is not disturbed.
FREE = 0.8 * min(1.0, len(os.sched_getaffinity(0)) / 4)
BATCH, EXAMPLES = 192, 512


def shares(run: pl.Run) -> dict[int, dict[str, int]]:
    """Return the samples of each worker's task, by version."""
    found: dict[int, dict[str, int]] = defaultdict(dict)
    for entry in run.journal:
        for command in entry.commands:
            if isinstance(command, Start):
                found[command.task.version][command.task.worker] = command.task.samples
    return found


@pytest.mark.timing
def test_shares_follow_real_speeds_while_they_change(ray_workers: pl.Ray) -> None:
    """w0 runs a quarter of the time, and from step 25 on w3 does instead."""

    def slow(worker: str) -> dict[str, float]:
        return {f"w{i}": FREE / (4 if f"w{i}" == worker else 1) for i in range(4)}

    throttle = SlowWorkers(ray_workers, slow("w0"), period=0.05)
    change = At(25, lambda: throttle.change(slow("w3")))
    trainer = pl.Trainer(
        make_learner(), pl.sync(), ray_workers, progress=False, callbacks=[throttle, change],
        placement=pl.BySpeed(),
    )  # fmt: skip
    run = trainer.fit(steps=50)
    given = shares(run)
    assert set(given[0].values()) == {BATCH // 4}  # nothing is known
    assert set(run.metrics["samples"]) == {BATCH}
    for worker, versions in (("w0", range(12, 25)), ("w3", range(38, 50))):
        for other in {"w1", "w2", "w0", "w3"} - {worker}:
            its = np.median([given[version][worker] for version in versions])
            assert its < 0.6 * np.median([given[version][other] for version in versions])
    assert pl.protocol.replay(run.driven_policy, run.journal) == run.journal
    # The steps are those of equal shares, whoever computed what.
    same = pl.Trainer(make_learner(), pl.sync(), pl.Simulator(4), progress=False).fit(steps=50)
    assert torch.allclose(flat(run.model), flat(same.model), atol=1e-5)


def test_tiles_of_a_killed_worker_go_on_where_they_were(ray_workers: pl.Ray) -> None:
    tiles = Partition(np.arange(EXAMPLES) % 16)

    def kill() -> None:
        os.kill(ray_workers.pids()["w1"], signal.SIGKILL)

    trainer = pl.Trainer(
        make_learner(), pl.sync(), ray_workers, progress=False, callbacks=[At(6, kill)],
        placement=pl.policies.Placed(tiles),
    )  # fmt: skip
    run = trainer.fit(steps=20)
    assert any(entry.event == Left("w1") for entry in run.journal)
    places, fates = Counter[int | None](), set()
    for stretch in run.samples():
        assert stretch.offset == places[stretch.tile], "no gap, no overlap"
        places[stretch.tile] += stretch.samples
        fates.add(stretch.fate)
    assert fates == {"used", "unfinished"} and len(places) == 16
    assert run.meter.represented() == pytest.approx(np.ones(16), abs=0.1)
    assert run.policy.placement.moved > 0  # type: ignore[attr-defined]
    assert pl.protocol.replay(run.driven_policy, run.journal) == run.journal


@pytest.mark.timing
def test_a_slow_workers_data_are_not_forgotten(ray_workers: pl.Ray) -> None:
    """Each has a quarter of the data for itself; the fastest three are awaited, and w2 is slow."""
    part = Partition(np.arange(EXAMPLES) // 128)
    throttle = SlowWorkers(ray_workers, {"w2": FREE / 10}, period=0.05)
    least = {}
    for bound in (None, 2.0):
        trainer = pl.Trainer(
            make_learner(micro_batch=8), pl.k_sync(3), ray_workers, progress=False,
            callbacks=[throttle], placement=pl.policies.Placed(part, move=False, bound=bound),
        )  # fmt: skip
        run = trainer.fit(steps=40)
        least[bound] = float(run.meter.represented()[2])
        assert ("WARNING" in run.summary()) == (bound is None)
    assert least[None] < 0.3 and least[2.0] > 0.75
