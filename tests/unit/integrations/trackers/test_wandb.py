"""Weights & Biases: what is in the files of an offline run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.report.callbacks import Progress

pytest.importorskip("wandb")

_BLOCK = 32768  # of LevelDB's log format, which a .wandb file has after a header of 7 bytes


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def records(folder: Path) -> Iterator[Any]:
    """Yield the records of the only run below a folder."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # until when its own process may still be writing
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if _BLOCK - place % _BLOCK < 7:  # too little for a header: filled up
            place += _BLOCK - place % _BLOCK
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # all of a record, or the last part
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def items(updates: Any) -> dict[str, Any]:
    return {each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in updates}


def train(callbacks: list[pl.Callback], steps: int = 5) -> pl.Run:
    learner = pl.learners.Quadratic((1.0, 0.3), noise=0.3, lr=0.2, batch_size=6)
    engine = pl.Simulator(3, pl.delays.Exponential(0.1), unit=1)
    trainer = pl.Trainer(learner, pl.k_sync(2), engine, callbacks=callbacks, progress=False)
    return trainer.fit(steps=steps)


def test_what_is_written_is_what_the_run_did(tmp_path: Path) -> None:
    tracker = pl.trackers.WandB("digits", mode="offline", dir=str(tmp_path), config={"mine": 5})
    run = train([tracker])
    history, codes = [], []
    config, summary = dict[str, Any](), dict[str, Any]()
    for record in records(tmp_path):
        match record.WhichOneof("record_type"):
            case "history":
                history.append(items(record.history.item))
            case "run":
                assert record.run.project == "digits"
                config |= items(record.run.config.update)
            case "summary":
                summary |= items(record.summary.update)
            case "exit":
                codes.append(record.exit.exit_code)
    assert [row["_step"] for row in history] == [1, 2, 3, 4, 5]
    for name, column in {"train/loss": "loss", "time/seconds": "seconds"}.items():
        assert [row[name] for row in history] == run.metrics[column].tolist()
    assert history[-1]["worker_speed/w2"] > 0
    assert "train/epoch" not in history[-1]
    assert (config["policy"], config["seed"], config["mine"]) == ("k_sync(2)", 0, 5)
    assert summary["ended"] == "5 steps taken"
    assert summary["report"] == run.summary()
    assert codes == [0]


def test_a_run_that_fails_says_so(tmp_path: Path) -> None:
    class Breaks(pl.Callback):
        def stepped(self, progress: Progress) -> None:
            if progress.step == 2:
                raise RuntimeError("of the user")

    with pytest.raises(RuntimeError, match="of the user"):
        train([pl.trackers.WandB("digits", mode="offline", dir=str(tmp_path)), Breaks()])
    codes = [r.exit.exit_code for r in records(tmp_path) if r.WhichOneof("record_type") == "exit"]
    assert codes == [1]


def test_a_run_that_is_ended_by_others_does_not_end_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = pl.trackers.WandB("digits", mode="offline", dir=str(tmp_path))

    class Finishes(pl.Callback):
        def stepped(self, progress: Progress) -> None:
            if progress.step == 2:
                tracker._run.finish()

    assert train([tracker, Finishes()]).steps == 5
    told = [record.getMessage() for record in caplog.records if "paceline" in record.name]
    assert len(told) == 1
    assert told[0].startswith("WandB failed at step 3 and gets no more metrics; the run continues")


def test_a_missing_package_names_the_command() -> None:
    code = (
        "import sys; sys.modules['wandb'] = None\n"
        "import paceline as pl\n"
        "try: pl.trackers.WandB('digits')\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'paceline[wandb]'" in done.stdout
