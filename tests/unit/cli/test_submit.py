"""`paceline submit` on the simulator: restarts, their limit, refusals and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import paceline as pl
from paceline.training.observers import Observer, observing

SCRIPT = """
import os, signal, sys
import paceline as pl

class Act(pl.Callback):
    def stepped(self, progress):
        {act}

saves = {saves}
pl.Trainer(
    pl.learners.Quadratic(), pl.sync(), pl.Simulator(2), callbacks=[Act()], progress=False,
    checkpoints=saves,
).fit(steps={steps})
"""
SAVES = "pl.Checkpoints('saved', every=5)"


@contextmanager
def submitted(folder: Path, script: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    (folder / "train.py").write_text(script)
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "submit", *options, "train.py"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_restarts_without_progress_are_bounded(tmp_path: Path) -> None:
    """The first driver reaches a checkpoint; later ones always die at the same step."""
    act = "if progress.step == 7: os.kill(os.getpid(), signal.SIGKILL)"
    script = SCRIPT.format(act=act, saves=SAVES, steps=20)
    with submitted(tmp_path, script, "--restarts", "1", "--json") as process:
        out, told = process.communicate(timeout=120)
    assert process.returncode == 137
    assert out.split() == ["{", '"exit_code":', "137,", '"restarts":', "2", "}"]
    assert told.count("the driver ended with exit code 137; it is started again") == 2
    assert told.count("training continues: step 6") == 2  # the second is without progress
    assert "1 restarts without progress; the driver is not started again" in told


def test_a_trainer_without_checkpoints_is_refused_once(tmp_path: Path) -> None:
    with submitted(tmp_path, SCRIPT.format(act="pass", saves="None", steps=9)) as process:
        _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "give Trainer(…, checkpoints=pl.Checkpoints(folder, every=…))" in told
    assert "started again" not in told


def test_a_signal_ends_the_driver_with_a_checkpoint(tmp_path: Path) -> None:
    act = "progress.step == 3 and print('training', flush=True)"
    script = SCRIPT.format(act=act, saves="pl.Checkpoints('saved', every=10**9)", steps=10**9)
    with submitted(tmp_path, script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "training\n"
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "started again" not in told
    assert len(list((tmp_path / "saved").glob("step-*"))) == 1


class Resuming(Observer):
    resumes = True


def test_an_observer_has_trainers_resume_from_their_own_checkpoints(tmp_path: Path) -> None:
    def trainer(saves: pl.Checkpoints | None) -> pl.Trainer:
        learner = pl.learners.Quadratic(batch_size=8)
        return pl.Trainer(learner, pl.sync(), pl.Simulator(2), checkpoints=saves, progress=False)

    saves = pl.Checkpoints(tmp_path, every=5, keep=9)
    trainer(saves).fit(steps=7)
    with observing(Resuming()):
        again = trainer(saves)
        assert again.fit(steps=9).metrics["step"].tolist() == [8.0, 9.0]
        assert again.fit(steps=10).metrics["step"].tolist() == [10.0]
        chosen = trainer(saves).resume(tmp_path / "step-00000005")  # the script's own choice
        assert chosen.fit(steps=7).metrics["step"].tolist() == [6.0, 7.0]
        with pytest.raises(ValueError, match="this Trainer has no checkpoints"):
            trainer(None).fit(steps=1)
    assert trainer(saves).fit(steps=2).metrics["step"].tolist() == [1.0, 2.0]
