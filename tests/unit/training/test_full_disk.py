"""A disk that is full, for real: a small tmpfs under the journal."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline as pl


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder on a disk of 256 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"a tmpfs needs root and the right to mount: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=30)


def trained(steps: int, journal: Path | None) -> pl.Run:
    learner, engine = pl.learners.Quadratic(noise=0.1, lr=0.01), pl.Simulator(4)
    return pl.Trainer(learner, pl.sync(), engine, journal=journal, progress=False).fit(steps=steps)


def test_a_full_disk_under_the_journal_warns_once_and_training_goes_on(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, steps = trained(2000, disk / "run.jsonl"), 2000
    assert run.steps == steps
    assert (run.model == trained(steps, None).model).all()
    told = [
        r.getMessage() for r in caplog.records if "run.jsonl cannot be written" in r.getMessage()
    ]
    assert len(told) == 1
    assert "No space left on device" in told[0]
    assert os.statvfs(disk).f_bavail == 0
    entries = list(run.journal)  # up to the last whole line
    assert 0 < len(entries) == len(run.journal) < 2 * steps
    assert entries == list(trained(steps, None).journal)[: len(entries)]
    assert run.metrics["step"].tolist() == list(range(1, steps + 1))  # which need the disk as well
    assert "2000 steps" in run.summary()
