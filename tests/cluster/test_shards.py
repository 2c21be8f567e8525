"""Shards on a real Ray: workers are killed and replaced, and the driver is killed and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import paceline as pl
from paceline.data.shards import ShardStream
from paceline.report.samples import sample_fates
from tests.cluster.shards_script import BATCH, LENGTH, SHARDS, WORKERS, shards

pytestmark = [pytest.mark.cluster, pytest.mark.long]

EPOCH = SHARDS * LENGTH
STEPS = 2 * EPOCH // BATCH


def state(folder: Path) -> tuple[int, int, list[int]]:
    """Return the steps taken, the workers there, and their processes."""
    try:
        step, workers, *pids = map(int, (folder / "state.txt").read_text().split())
    except (FileNotFoundError, ValueError):
        return 0, 0, []
    return step, workers, pids


def wait_for(what: Callable[[], bool], driver: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 240
    while not what():
        assert time.monotonic() < deadline and driver.poll() is None
        time.sleep(0.05)


def start(folder: Path) -> subprocess.Popen[bytes]:
    script = str(Path(__file__).with_name("shards_script.py"))
    return subprocess.Popen([sys.executable, script, str(folder), str(STEPS)])


def used(journal: Path) -> list[int]:
    """Return the offsets of the samples that a run used, in order."""
    return sorted(
        offset
        for each in sample_fates(pl.Journal.load(journal))
        if each.fate == "used"
        for offset in range(each.offset, each.offset + each.samples)
    )


def test_every_sample_once_an_epoch(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    for shard in range(SHARDS):
        lines = (str(LENGTH * shard + place) for place in range(LENGTH))
        (tmp_path / "files" / f"{shard}.txt").write_text("\n".join(lines))
    driver = start(tmp_path)
    try:
        wait_for(lambda: state(tmp_path)[0] >= 6, driver)
        for pid in state(tmp_path)[2][:3]:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: state(tmp_path)[1] <= WORKERS - 3, driver)
        wait_for(lambda: state(tmp_path)[1] == WORKERS, driver)
        now = state(tmp_path)[0]
        wait_for(lambda: state(tmp_path)[0] >= now + 6, driver)  # a checkpoint later
    finally:
        driver.kill()
        driver.wait(timeout=60)
    before = len((tmp_path / "opened.txt").read_text().splitlines())
    again = start(tmp_path)
    assert again.wait(timeout=240) == 0
    began = int((tmp_path / "began.txt").read_text())
    assert now <= began < STEPS
    second = used(next(tmp_path.glob(f"run-{began}*.jsonl")))
    assert second == list(range(began * BATCH, STEPS * BATCH))
    first = used(tmp_path / "run.jsonl")
    assert first[: began * BATCH] == list(range(began * BATCH))
    stream = ShardStream(shards(tmp_path), 0, BATCH)
    for epoch in range(2):
        assert sorted(stream.indices(epoch * EPOCH, EPOCH).tolist()) == list(range(EPOCH))
    opened = (tmp_path / "opened.txt").read_text().splitlines()
    rest = (STEPS - began) * BATCH / LENGTH  # shards that were not read at all
    assert len(opened) - before <= rest + 2 * WORKERS  # and for each worker the one it was in
