"""MLflow: what its client reads back from a store."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.report.callbacks import Progress

mlflow = pytest.importorskip("mlflow")
# SQLAlchemy's own news about what MLflow calls.
pytestmark = pytest.mark.filterwarnings(r"ignore:The ``noload`` loader strategy:DeprecationWarning")


@pytest.fixture(params=["file", "sqlite"])
def uri(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store without a server: of files, which has to be allowed, or of a database."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    if request.param == "sqlite":
        pytest.importorskip("sqlalchemy", reason="comes with mlflow, not with mlflow-skinny")
        pytest.importorskip("alembic")
        return f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return (tmp_path / "store").as_uri()


class Tells(pl.learners.Quadratic):
    """A learner that tells more about itself."""

    def __init__(self, more: dict[str, Any]) -> None:
        super().__init__((1.0, 0.3), noise=0.3, lr=0.2, batch_size=6)
        self.more = more

    def about(self) -> dict[str, Any]:
        return {**super().about(), **self.more}


def train(
    callbacks: list[pl.Callback], steps: int = 5, more: dict[str, Any] | None = None
) -> pl.Run:
    learner = Tells(more or {})
    engine = pl.Simulator(3, pl.delays.Exponential(0.1), unit=1)
    trainer = pl.Trainer(learner, pl.k_sync(2), engine, callbacks=callbacks, progress=False)
    return trainer.fit(steps=steps)


def stored(client: Any) -> Any:
    experiment = client.get_experiment_by_name("digits")
    (found,) = client.search_runs([experiment.experiment_id])
    return found


def test_what_is_written_is_what_the_run_did(uri: str) -> None:
    tracker = pl.trackers.MLflow("digits", uri, name="first", tags={"team": "vision"})
    steps = 120  # more than one request holds: 20 figures and more of each
    run = train([tracker], steps)
    client = mlflow.MlflowClient(tracking_uri=uri)
    found = stored(client)
    for name, column in {"train/loss": "loss", "time/seconds": "seconds"}.items():
        history = client.get_metric_history(found.info.run_id, name)
        assert [each.step for each in history] == list(range(1, steps + 1))
        assert [each.value for each in history] == run.metrics[column].tolist()
    assert found.data.metrics["worker_speed/w2"] > 0
    assert "train/epoch" not in found.data.metrics
    assert found.data.params["policy"] == "k_sync(2)"
    assert found.data.params["seed"] == "0"
    assert found.data.tags["ended"] == "120 steps taken"
    assert found.data.tags["team"] == "vision"
    assert run.summary() in found.data.tags["mlflow.note.content"]
    assert (found.info.status, found.info.run_name) == ("FINISHED", "first")


def test_a_second_run_goes_into_the_same_experiment(uri: str) -> None:
    tracker = pl.trackers.MLflow("digits", uri)
    train([tracker], 2)
    train([tracker], 3)
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("digits")
    last = {
        run.data.metrics["step/number"] for run in client.search_runs([experiment.experiment_id])
    }
    assert last == {2, 3}


def test_figures_are_sent_together_every_few_seconds(uri: str) -> None:
    now, waiting = [0.0], []
    tracker = pl.trackers.MLflow("digits", uri, clock=lambda: now[0])

    class Looks(pl.Callback):
        def stepped(self, progress: Progress) -> None:
            waiting.append(len(tracker._metrics) > 0)
            now[0] += 2.0

    train([tracker, Looks()], 7)
    assert waiting == [True, True, True, False, True, True, False]


def test_a_run_that_fails_says_so(uri: str) -> None:
    class Breaks(pl.Callback):
        def stepped(self, progress: Progress) -> None:
            if progress.step == 2:
                raise RuntimeError("of the user")

    with pytest.raises(RuntimeError, match="of the user"):
        train([pl.trackers.MLflow("digits", uri), Breaks()])
    found = stored(mlflow.MlflowClient(tracking_uri=uri))
    assert found.info.status == "FAILED"
    assert found.data.metrics["step/number"] == 2


def test_names_that_mlflow_refuses_are_changed(uri: str) -> None:
    names = ["note: #1?", "note: #2?", "note; #1?", "/root", "../up", "a//b", ".", "", "x" * 300]
    more = {name: index for index, name in enumerate(names)}
    train([pl.trackers.MLflow("digits", uri)], more=more)
    found = stored(mlflow.MlflowClient(tracking_uri=uri))
    assert found.info.status == "FINISHED"
    given = found.data.params
    assert (given["note_ _1_"], given["note_ _2_"], given["note_ _1__2"]) == ("0", "1", "2")
    assert (given["__root"], given["_.._up"], given["_a__b"], given["_."]) == ("3", "4", "5", "6")
    assert given["x" * 250] == "8"
    assert {*map(str, range(len(names)))} <= {*given.values()}


def test_a_run_whose_parameters_are_refused_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "store").as_uri()
    more = {"a": 1, "a/b": 2}  # a file, and a folder of the same name
    with pytest.raises(ValueError, match=r"refused its parameters: .*about\(\) of the learner"):
        train([pl.trackers.MLflow("digits", uri)], more=more)
    assert stored(mlflow.MlflowClient(tracking_uri=uri)).info.status == "FAILED"


def test_a_store_that_is_gone_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = tmp_path / "store"

    class Removes(pl.Callback):
        def stepped(self, progress: Progress) -> None:
            if progress.step == 2:
                shutil.rmtree(store)

    tracker = pl.trackers.MLflow(
        "digits", store.as_uri(), clock=lambda: 0.0
    )  # all is sent in the end
    assert train([tracker, Removes()]).steps == 5
    told = [record.getMessage() for record in caplog.records if "paceline" in record.name]
    assert len(told) == 1
    assert told[0].startswith("MLflow could not be closed and gets no more metrics")


def test_a_store_that_takes_nothing_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    with pytest.raises(ValueError, match=r"MLflow takes no runs at tracking_uri='.*Give the addre"):
        train([pl.trackers.MLflow("digits", "nowhere://at/all")])


def test_a_missing_package_names_the_command() -> None:
    code = (
        "import sys; sys.modules['mlflow'] = None\n"
        "import paceline as pl\n"
        "try: pl.trackers.MLflow('digits')\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'paceline[mlflow]'" in done.stdout
