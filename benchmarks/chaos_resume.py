"""Kill the driver of a run on Ray repeatedly, and check that the result is not affected.

Each driver resumes from the newest checkpoint. SIGKILL ends it after a random number of steps or
while it writes a checkpoint; it must leave no worker behind. Under `sync`, the final weights equal
those of an undisturbed run. They also equal the weights that a serial replay of the journals gives.
Each kill repeats at most one checkpoint interval. Each sample is used once, or listed as given up.

    python benchmarks/chaos_resume.py --kills 30
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import paceline as pl
from paceline.core.journal import read_entries, read_header
from paceline.engines.ray.cluster.join import connect
from paceline.training.checkpoint import read

sys.path.append(str(Path(__file__).parents[1]))
from tests.storms.serial import History, serial
from tests.storms.storm import check_samples

EVERY = 10
WAIT = 60.0  # seconds, for anything that has to happen
POLICIES = {"sync": pl.sync(), "k_sync": pl.k_sync(1)}


def learner() -> pl.learners.Quadratic:
    """Return a model of 800 kB, so that a kill can hit the writing of a checkpoint."""
    return pl.learners.Quadratic(
        tuple(np.linspace(1, 0.1, 100_000)), noise=0.1, lr=0.05, batch_size=8
    )


# --- the process that is killed ------------------------------------------------------------------


class Diary(pl.Callback):
    """Writes each step to a file, with the process ids of the workers."""

    def __init__(self, file: Path, engine: pl.Ray) -> None:
        self._file, self._engine = file, engine

    def stepped(self, progress: pl.Progress) -> None:
        pids = sorted(self._engine.pids().values())
        with open(self._file, "a", encoding="utf-8") as file:
            file.write(json.dumps([progress.step, pids]) + "\n")


def train(folder: Path, address: str, policy: str, steps: int) -> None:
    """Train to the end, from the newest checkpoint of former drivers."""
    engine = pl.Ray(workers=2, address=address, cpus=0.1, timeout=60)
    saves = pl.Checkpoints(folder / "saved", every=EVERY, keep=10**6)
    trainer = pl.Trainer(
        learner(),
        POLICIES[policy],
        engine,
        checkpoints=saves,
        journal=folder / "run.jsonl",
        callbacks=[Diary(folder / f"diary-{os.getpid()}", engine)],
        progress=False,
    )
    run = trainer.resume(saves, missing_ok=True).fit(steps=steps)
    np.save(folder / "unfinished.npy", run.model)
    (folder / "unfinished.npy").rename(folder / "final.npy")


def hold() -> None:
    """Keep a Ray cluster running until standard input ends."""
    import ray

    connect(None, 2, 2**20)  # on this machine only, as an engine starts it
    print(f"address {ray.get_runtime_context().gcs_address}", flush=True)
    sys.stdin.read()
    ray.shutdown()


# --- the process that kills ----------------------------------------------------------------------


@contextlib.contextmanager
def cluster() -> Iterator[str]:
    """Start one cluster for all drivers, so that each starts quickly."""
    holder = _python("--hold", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        words = next((line.split() for line in holder.stdout if line.startswith("address ")), None)
        if words is None:
            raise RuntimeError("Ray did not start")
        yield words[1]
    finally:
        assert holder.stdin is not None and holder.stdout is not None
        holder.stdin.close()
        try:
            holder.wait(WAIT)
        except subprocess.TimeoutExpired:
            holder.kill()
            holder.wait()
        holder.stdout.close()


def kills(
    count: int, policy: str = "sync", seed: int = 0, address: str | None = None
) -> dict[str, Any]:
    """Kill a driver `count` times; return the metrics, and raise if an invariant is violated.

    address: of a running cluster; by default a new one is started.
    """
    if address is None:
        with cluster() as started:
            return kills(count, policy, seed, started)
    rng = random.Random(seed)
    steps = (2 * EVERY + 4) * count  # so many that no driver finishes before the last kill
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as made:
        folder, alone = Path(made) / "killed", Path(made) / "alone"
        folder.mkdir()
        lives = [_life(folder, address, policy, steps, rng) for _ in range(count)]
        _finish(folder, address, policy, steps)
        final = np.load(folder / "final.npy")
        if policy == "sync":
            alone.mkdir()
            _finish(alone, address, policy, steps)
            assert final.tobytes() == np.load(alone / "final.npy").tobytes(), "other weights"
        segments = sorted(folder.glob("run*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
        histories = [_history(path, folder) for path in segments]
        _check(histories, lives, steps, final)
    return {
        "ok": True,
        "policy": policy,
        "kills": count,
        "torn": sum(life["torn"] for life in lives),
        "steps": steps,
        "redone": sum(life["redone"] for life in lives),
        "most_redone": max((life["redone"] for life in lives), default=0),
        "every": EVERY,
        "workers_gone_seconds": max((life["gone"] for life in lives), default=0.0),
        "seconds": round(time.monotonic() - began, 1),
    }


def _life(
    folder: Path, address: str, policy: str, steps: int, rng: random.Random
) -> dict[str, Any]:
    """Start the driver, kill it, and check what it leaves."""
    saved = folder / "saved"
    torn = rng.random() < 0.4
    after = rng.randint(1, 2 * EVERY)  # steps, counted from its first
    moment = rng.random() * 0.02
    before = _halves(saved)
    driver = _train(folder, address, policy, steps)
    diary = folder / f"diary-{driver.pid}"
    try:
        _until(diary.exists, driver)
        if torn:
            _until(lambda: _halves(saved) - before, driver)
        else:
            _until(lambda: diary.read_text().count("\n") >= after, driver)
            time.sleep(moment)
    finally:
        driver.kill()
        driver.wait()
    lines = [line for line in diary.read_text().splitlines() if line.endswith("]]")]
    reached, pids = json.loads(lines[-1])
    killed = time.monotonic()
    _until(lambda: not any(map(_is_alive, pids)))
    gone = time.monotonic() - killed
    whole = [int(path.name.removeprefix("step-")) for path in saved.glob("step-*")]
    redone = reached - max(whole, default=0)
    assert 0 <= redone <= EVERY, f"at step {reached}, and the checkpoints are {sorted(whole)}"
    left = bool(_halves(saved) - before)
    return {"torn": left, "redone": redone, "gone": round(gone, 2), "from": max(whole, default=0)}


def _halves(saved: Path) -> set[tuple[str, int]]:
    """Return the checkpoints that are only partly written."""
    found = set()
    for path in saved.glob(".*.partial"):
        with contextlib.suppress(FileNotFoundError):  # it was completed just now
            found.add((path.name, path.stat().st_mtime_ns))
    return found


def _finish(folder: Path, address: str, policy: str, steps: int) -> None:
    driver = _train(folder, address, policy, steps)
    try:
        assert driver.wait(5 * WAIT) == 0, f"the driver failed; see {folder}/errors"
    finally:
        driver.kill()
        driver.wait()


def _history(path: Path, folder: Path) -> History:
    """Replay one driver's run from its journal."""
    header, server = read_header(path), learner().server()
    if header.state is not None:
        server.load(read(pl.Checkpoints(folder / "saved").folder(header.version)).server)
    return serial(header, list(read_entries(path)), learner(), server, seed=0)


def _check(
    histories: list[History], lives: list[dict[str, Any]], steps: int, final: np.ndarray
) -> None:
    for before, after in pairwise(histories):
        same = before.models[after.began].tobytes() == after.models[after.began].tobytes()
        assert same, f"resumed at step {after.began} with another model"
    assert [h.began for h in histories] == [0, *(life["from"] for life in lives)]
    last = histories[-1].models[steps]
    assert last.tobytes() == final.tobytes(), "the journals lead to other weights"
    check_samples(histories, steps)


def _until(holds: Any, driver: subprocess.Popen[str] | None = None) -> None:
    until = time.monotonic() + WAIT
    while not holds():
        if driver is not None and driver.poll() is not None:
            raise RuntimeError(f"the driver ended by itself, with {driver.returncode}")
        if time.monotonic() > until:
            raise TimeoutError(f"nothing happened for {WAIT:g} s")
        time.sleep(0.001)


def _is_alive(pid: int) -> bool:
    """Return whether a process is alive; a zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _train(folder: Path, address: str, policy: str, steps: int) -> subprocess.Popen[str]:
    given = ["--train", str(folder), "--address", address, "--policy", policy]
    with open(folder / "errors", "a", encoding="utf-8") as errors:
        return _python(*given, "--steps", str(steps), stderr=errors)


def _python(*given: str, **more: Any) -> subprocess.Popen[str]:
    # A new session, so that Ctrl-C reaches only the process that kills.
    return subprocess.Popen([sys.executable, __file__, *given], start_new_session=True, **more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--policy", choices=sorted(POLICIES), default="sync")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.hold:
        hold()
    elif given.train is not None:
        train(given.train, given.address, given.policy, given.steps)
    else:
        print(json.dumps(kills(given.kills, given.policy, given.seed)))


if __name__ == "__main__":
    main()
