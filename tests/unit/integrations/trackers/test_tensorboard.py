"""TensorBoard: what its own reader finds in the files."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline as pl
from paceline.report.callbacks import Progress

pytest.importorskip("tensorboard")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData


def train(callbacks: list[pl.Callback], steps: int = 6) -> pl.Run:
    learner = pl.learners.Quadratic((1.0, 0.3), noise=0.3, lr=0.2, batch_size=6)
    engine = pl.Simulator(3, pl.delays.Exponential(0.1), unit=1)
    trainer = pl.Trainer(learner, pl.k_sync(2), engine, callbacks=callbacks, progress=False)
    return trainer.fit(steps=steps)


def read(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def text(found: EventAccumulator, tag: str) -> str:
    (event,) = found.Tensors(f"{tag}/text_summary")
    return str(event.tensor_proto.string_val[0].decode())


def test_what_is_written_is_what_the_run_did(tmp_path: Path) -> None:
    run = train([pl.trackers.TensorBoard(tmp_path / "run")])
    found = read(tmp_path / "run")
    for name, column in {"train/loss": "loss", "time/seconds": "seconds"}.items():
        scalars = found.Scalars(name)
        assert [each.step for each in scalars] == [1, 2, 3, 4, 5, 6]
        # Event files hold 32 bits of each value.
        assert [each.value for each in scalars] == run.metrics[column].astype(np.float32).tolist()
    assert found.Scalars("worker_speed/w2")[-1].value > 0
    assert "train/epoch" not in found.Tags()["scalars"]
    assert "|policy|k_sync(2)|" in text(found, "run/configuration")
    assert text(found, "run/ended").startswith("6 steps taken\n\n```\n6 steps in ")
    # What the page of hyperparameters is made of.
    content = found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    started = HParamsPluginData.FromString(content).session_start_info
    assert started.hparams["policy"].string_value == "k_sync(2)"
    assert started.hparams["batch_size"].number_value == 6


def test_it_is_closed_when_training_fails(tmp_path: Path) -> None:
    class Breaks(pl.Callback):
        def stepped(self, progress: Progress) -> None:
            if progress.step == 3:
                raise RuntimeError("of the user")

    with pytest.raises(RuntimeError, match="of the user"):
        train([pl.trackers.TensorBoard(tmp_path), Breaks()])
    found = read(tmp_path)
    assert [each.step for each in found.Scalars("train/loss")] == [1, 2, 3]
    assert text(found, "run/ended").startswith("failed\n")


# The thread of tensorboard that writes tells of its error twice: to pytest, and to the tracker.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_folder_that_is_gone_does_not_end_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Moves(pl.Callback):
        def stepped(self, progress: Progress) -> None:
            if progress.step == 2:
                (tmp_path / "run").rename(tmp_path / "elsewhere")

    before = set(threading.enumerate())
    run = train([pl.trackers.TensorBoard(tmp_path / "run"), Moves()])
    for thread in set(threading.enumerate()) - before:
        thread.join(10)  # or pytest may be told during the next test
    assert run.steps == 6
    told = [record.getMessage() for record in caplog.records if "paceline" in record.name]
    assert len(told) == 1
    assert told[0].startswith("TensorBoard ")
    assert "gets no more metrics; the run continues (FileNotFoundError" in told[0]


def test_a_folder_that_cannot_be_made_reaches_the_user(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        train([pl.trackers.TensorBoard(tmp_path / "file" / "run")])


def test_what_cannot_be_written_at_the_start_leaves_no_thread(tmp_path: Path) -> None:
    class Odd(pl.learners.Quadratic):
        def about(self) -> dict[str, Any]:
            return {**super().about(), "note": "\ud800"}  # half a character

    before = set(threading.enumerate())
    engine = pl.Simulator(3, pl.delays.Exponential(0.1), unit=1)
    trainer = pl.Trainer(
        Odd(), pl.sync(), engine, callbacks=[pl.trackers.TensorBoard(tmp_path)], progress=False
    )
    with pytest.raises(UnicodeEncodeError):
        trainer.fit(steps=1)
    assert set(threading.enumerate()) <= before  # the writer's has ended


def test_a_missing_package_names_the_command() -> None:
    code = (
        "import sys; sys.modules['tensorboard'] = None\n"
        "import paceline as pl\n"
        "try: pl.trackers.TensorBoard('runs')\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'paceline[tensorboard]'" in done.stdout
