"""Runs that real processes join: same bits as a Trainer, kills, late workers, a hub that dies."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import paceline as pl
from paceline.core.protocol import Finished, Joined, Left, Start
from paceline.engines.ray.place import start_time
from paceline.learners.transforms import ClipNorm
from paceline.report.samples import sample_fates
from tests.cluster.session_script import BATCH, SAMPLES, loss_of, make_data, make_model

pytestmark = pytest.mark.cluster

HERE = Path(__file__).parent
SCRIPT = HERE / "session_script.py"
PATH = {"PYTHONPATH": str(HERE.parents[1]), "RAY_USAGE_STATS_ENABLED": "0"}


def command(workers: int, folder: Path, *options: str, **given: object) -> list[str]:
    settings = [f"{name}={json.dumps(value)}" for name, value in given.items()]
    launch = [sys.executable, "-m", "paceline", "launch", "--workers", str(workers), *options]
    return [*launch, str(SCRIPT), str(folder), *settings]


def launch(workers: int, folder: Path, *options: str, **given: object) -> None:
    done = subprocess.run(
        command(workers, folder, *options, **given),
        env={**os.environ, **PATH},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@contextmanager
def launched(workers: int, folder: Path, *options: str, **given: object) -> Iterator[list[int]]:
    """Start a launch; yield a list with its exit code when it has ended."""
    code: list[int] = []
    process = subprocess.Popen(
        command(workers, folder, *options, **given), env={**os.environ, **PATH}
    )
    try:
        yield code
        code.append(process.wait(timeout=400))
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=60)


def reference(steps: int, workers: int) -> nn.Module:
    """Train with a Trainer on the same samples."""
    learner = pl.TorchLearner(
        make_model(),
        loss_of,
        partial(torch.optim.AdamW, lr=0.01),
        make_data(),
        BATCH,
        scheduler=partial(CosineAnnealingLR, T_max=50),
        transform=ClipNorm(1.0),
    )
    engine = pl.Simulator(workers=workers, delays=pl.delays.Fixed(1.0))
    model: nn.Module = pl.Trainer(learner, pl.sync(), engine, progress=False).fit(steps=steps).model
    return model


def models(folder: Path) -> list[dict[str, torch.Tensor]]:
    return [torch.load(path, weights_only=True) for path in sorted(folder.glob("*.pt"))]


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


def versions(folder: Path) -> dict[str, int]:
    """Return how far each process is."""
    found = {}
    for path in folder.glob("*.version"):
        if text := path.read_text().split():
            found[path.stem] = int(text[0])
    return found


def wait_for(what: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def every_sample_is_told(journal: pl.Journal) -> None:
    """Each sample that was handed out is used once, or listed with what became of it."""
    used: list[tuple[int, int]] = []
    for each in sample_fates(journal):
        if each.fate == "used":
            used.append((each.offset, each.offset + each.samples))
    used.sort()
    assert all(before[1] <= after[0] for before, after in pairwise(used))


@pytest.mark.long
def test_the_bits_of_a_trainer(tmp_path: Path) -> None:
    launch(4, tmp_path, loader=2)
    found = models(tmp_path)
    assert len(found) == 4
    expected = reference(50, 4).state_dict()
    assert all(equal(each, expected) for each in found)
    wasted = [json.loads(path.read_text())["wasted"] for path in tmp_path.glob("*.json")]
    assert sum(wasted) == 0
    run = pl.Journal.load(tmp_path / "run.jsonl")
    assert sum(isinstance(entry.event, Finished) for entry in run) == 200


@pytest.mark.long
@pytest.mark.parametrize(
    ("kills", "steps"), [(4, 40), pytest.param(20, 200, marks=pytest.mark.timing)]
)
def test_processes_are_killed_and_stopped(tmp_path: Path, kills: int, steps: int) -> None:
    """With four shares a step, the bits do not depend on who computes them."""
    chance = random.Random(0)

    def alive(place: int) -> list[int]:
        there = [int(name.split("-")[1]) for name in versions(tmp_path)]
        found = [pid for pid in there if Path(f"/proc/{pid}").exists()]
        late = max(versions(tmp_path).values(), default=0) < place * (steps - 10) // kills
        return [] if late else found

    def ended() -> bool:
        return any(tmp_path.glob("*.json"))

    with launched(4, tmp_path, "--restarts", "99", shares=4, steps=steps, pause=0.3) as code:
        for place in range(kills):
            wait_for(lambda: len(alive(place)) > 1 or ended())  # noqa: B023
            if ended():  # processes start slowly here
                break
            pid = chance.choice(alive(place))
            if place % 10 == 3:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(12)
                os.kill(pid, signal.SIGCONT)
            else:
                os.kill(pid, signal.SIGKILL)
    assert code == [0]
    expected = reference(steps, 4).state_dict()
    found = models(tmp_path)
    assert found and all(equal(each, expected) for each in found)
    run = pl.Journal.load(tmp_path / "run.jsonl")
    every_sample_is_told(run)
    assert sum(isinstance(entry.event, Left) for entry in run) >= kills // 2


@pytest.mark.long
def test_a_process_that_joins_late(tmp_path: Path) -> None:
    environment = {**os.environ, **PATH}
    with launched(2, tmp_path, "--run", "late", join=[2, 3], pause=0.1, steps=400) as code:
        wait_for(lambda: max(versions(tmp_path).values(), default=0) > 5)
        pid = int(next(iter(versions(tmp_path))).split("-")[1])
        inherited = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        address = next(line for line in inherited if line.startswith(b"RAY_ADDRESS="))
        environment |= {"RAY_ADDRESS": address.decode().partition("=")[2], "PACELINE_RUN": "late"}
        third = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(tmp_path), "join=[2, 3]", "pause=0.1", "steps=400"],
            env=environment,
        )
        try:
            assert third.wait(timeout=300) == 0
        finally:
            third.kill()
    assert code == [0]
    run = pl.Journal.load(tmp_path / "run.jsonl")
    joined = next(e.now for e in run if isinstance(e.event, Joined) and e.event.worker == "w2")
    started = [c.task for e in run for c in e.commands if isinstance(c, Start)]
    of_w2 = {task.id for task in started if task.worker == "w2"}
    first = next(e.now for e in run if isinstance(e.event, Finished) and e.event.task in of_w2)
    assert first - joined < 10
    assert len(models(tmp_path)) == 3


@pytest.mark.long
def test_the_hub_dies(tmp_path: Path) -> None:
    with launched(2, tmp_path, steps=120, save=20, pause=0.05, shares=2) as code:
        wait_for(lambda: max(versions(tmp_path).values(), default=0) > 50)
        os.kill(hub_pid(), signal.SIGKILL)
    assert code == [0]
    expected = reference(120, 2).state_dict()
    found = models(tmp_path)
    assert len(found) == 2 and all(equal(each, expected) for each in found)
    assert (tmp_path / "run-40.jsonl").exists() or list(tmp_path.glob("run-*.jsonl"))


def hub_pid() -> int:
    """Return the youngest process of a hub: Ray names a process after its actor."""
    found = {
        int(path.name): int(start_time(int(path.name)) or 0)
        for path in Path("/proc").iterdir()
        if path.name.isdigit() and _title(path).startswith("ray::Hub")
    }
    return max(found, key=found.__getitem__)


def _title(path: Path) -> str:
    try:
        return (path / "cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def test_all_samples_are_handed_out_once(tmp_path: Path) -> None:
    launch(2, tmp_path, steps=SAMPLES // BATCH)
    run = pl.Journal.load(tmp_path / "run.jsonl")
    every_sample_is_told(run)
    used = sum(each.samples for each in sample_fates(run) if each.fate == "used")
    assert used == SAMPLES


def test_a_run_that_is_served(tmp_path: Path) -> None:
    """`serve` prints what other terminals need, and the result at the end."""
    options = ["--batch-size", str(BATCH), "--workers", "1-2", "--steps", "30", "--json"]
    served = subprocess.Popen(
        [sys.executable, "-u", "-m", "paceline", "serve", "--run", "shown", *options],
        env={**os.environ, **PATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert served.stderr is not None and served.stdout is not None
        assert "waits for workers" in served.stderr.readline()
        words = served.stderr.readline().split()
        assert words[0] == "export"
        told = dict(word.split("=", 1) for word in words[1:])
        script = [sys.executable, str(SCRIPT), str(tmp_path), "join=[1, 2]", "steps=30"]
        done = subprocess.run(script, env={**os.environ, **PATH, **told}, timeout=200)
        assert done.returncode == 0
        output, errors = served.communicate(timeout=120)
    finally:
        served.kill()
    assert served.returncode == 0, errors
    assert json.loads(output)["step"] == 30
    assert "step 30" in errors
