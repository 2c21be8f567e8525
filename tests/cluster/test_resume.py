"""The driver of a run on Ray, killed for real and started again until the run has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import paceline as pl
from chaos_resume import EVERY, cluster, kills, learner

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with cluster() as started:
        yield started


@pytest.mark.parametrize(
    ("policy", "count", "seed"),
    [
        ("sync", 1, 1),
        pytest.param("sync", 3, 1, marks=pytest.mark.long),
        pytest.param("k_sync", 2, 7, marks=pytest.mark.long),
    ],
)
def test_a_killed_driver_leaves_no_trace(policy: str, count: int, seed: int, address: str) -> None:
    """Bits, samples, processes: `kills` raises if any of them is not as it should be."""
    told = kills(count, policy, seed, address)
    assert told["kills"] == count
    assert told["torn"] >= 1  # in the middle of a checkpoint too
    assert 0 < told["most_redone"] <= EVERY
    assert told["workers_gone_seconds"] < 30


SCRIPT = """
import sys
from pathlib import Path
import numpy as np
import paceline as pl
from chaos_resume import learner

class Say(pl.Callback):
    def stepped(self, progress):
        if progress.step == 20:
            print("training", flush=True)

folder, address, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
engine = pl.Ray(workers=2, address=address, cpus=0.1, timeout=60)
trainer = pl.Trainer(
    learner(), pl.sync(), engine, callbacks=[Say()], progress=False,
    checkpoints=pl.Checkpoints(folder / "saved", every=10**9),
).resume(folder / "saved", missing_ok=True)
run = trainer.fit(steps=steps)
np.save(folder / "model.npy", run.model)
"""


def test_a_driver_that_gets_sigterm_saves_and_exits_with_143(tmp_path: Path, address: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    start = [sys.executable, str(script), str(tmp_path), address]
    process = subprocess.Popen([*start, str(10**9)], stdout=subprocess.PIPE, text=True, env=root)
    try:
        assert process.stdout is not None
        assert "training\n" in iter(process.stdout.readline, "")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143
    (saved,) = (tmp_path / "saved").glob("step-*")
    steps = int(saved.name.removeprefix("step-")) + 3
    subprocess.run([*start, str(steps)], check=True, timeout=120, env=root)
    whole = pl.Trainer(learner(), pl.sync(), pl.Simulator(2), progress=False).fit(steps=steps)
    assert np.array_equal(np.load(tmp_path / "model.npy"), whole.model)


def test_a_run_goes_on_under_another_policy(tmp_path: Path) -> None:
    """From four workers to two, with tasks in flight: each sample is used once."""
    saves = pl.Checkpoints(tmp_path)
    small = pl.learners.Quadratic(noise=0.1, batch_size=8)
    engine = pl.Simulator(4, [pl.delays.Fixed(1.0 + i) for i in range(4)])
    first = pl.Trainer(small, pl.asynchronous(), engine, checkpoints=saves, progress=False)
    before = first.fit(steps=9)
    ray = pl.Ray(workers=2, timeout=60)
    second = pl.Trainer(small, pl.sync(), ray, backups=False, progress=False)
    after = second.resume(tmp_path, allow={"policy"}).fit(steps=15)
    used, again = (
        [each.offset + i for each in run.samples() if each.fate == "used"
         for i in range(each.samples)]
        for run in (before, after)
    )  # fmt: skip
    assert sorted([*used, *again]) == list(range(len(used) + len(again)))
    assert "another policy: Gather(" in after.summary() and "-> sync()" in after.summary()
