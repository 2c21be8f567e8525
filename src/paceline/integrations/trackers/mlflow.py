"""Metrics of a run in MLflow."""

from __future__ import annotations

import posixpath
import re
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, count
from typing import Any

from paceline.integrations.trackers.base import Tracker
from paceline.integrations.trackers.figures import configuration, report
from paceline.report.callbacks import FAILED, Live

# The limits of MLflow's REST API: https://mlflow.org/docs/latest/rest-api.html#request-limits
_METRICS, _PARAMS = 1000, 100  # in one request
_LONGEST = 6000  # characters of a parameter, and of a tag at least
_LONGEST_NAME = 250  # characters of a parameter's name
_REFUSED = re.compile(r"[^/\w.\- ]")  # not allowed in a name, a colon on Windows only
_SECONDS = 5.0  # between two requests, since each may take a while


class MLflow(Tracker):
    """Sends metrics to a new run of an experiment, which is created if it does not exist.

    tracking_uri: "http://…" of a server, or "sqlite:///…"; by default that of MLflow.
    every: steps between two records; the last step is always recorded. Records are sent together,
        every few seconds.
    workers_every: the same for the metrics of each worker.
    name: the name of the run; by default MLflow invents one.
    tags: the tags of the run, such as {"team": "vision"}.
    """

    def __init__(
        self,
        experiment: str = "paceline",
        tracking_uri: str | None = None,
        every: int = 1,
        workers_every: int = 10,
        name: str | None = None,
        tags: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(every, workers_every)
        self._mlflow = _mlflow()  # now, so that a missing package raises at once
        self._experiment, self._uri, self._name = experiment, tracking_uri, name
        self._tags, self._clock = dict(tags or {}), clock
        self._client: Any = None
        self._id = ""
        self._metrics: list[Any] = []  # not sent yet
        self._flushed = 0.0

    def _open(self, live: Live) -> None:
        self._id, self._metrics, self._flushed = "", [], self._clock()
        try:
            self._client = client = self._mlflow.MlflowClient(tracking_uri=self._uri)
            known = client.get_experiment_by_name(self._experiment)
            experiment = (
                client.create_experiment(self._experiment) if known is None else known.experiment_id
            )
            run = client.create_run(experiment, run_name=self._name, tags=self._tags)
        except self._mlflow.exceptions.MlflowException as error:
            raise ValueError(
                f"MLflow takes no runs at tracking_uri={self._uri!r}: {error} Give the address of "
                "a server, or 'sqlite:///mlflow.db', which needs more than paceline[mlflow] "
                "brings: pip install mlflow"
            ) from error
        self._id = run.info.run_id
        given = configuration(live.header)
        params = [
            self._mlflow.entities.Param(name, str(value)[:_LONGEST])
            for name, value in zip(_allowed(given), given.values(), strict=True)
        ]
        try:
            for first in range(0, len(params), _PARAMS):
                client.log_batch(self._id, params=params[first : first + _PARAMS])
        except self._mlflow.exceptions.MlflowException as error:
            raise ValueError(
                f"MLflow made a run at tracking_uri={self._uri!r} and refused its parameters: "
                f"{error} The parameters are the settings of the run; check what about() of the "
                "learner returns"
            ) from error

    def _abandon(self) -> None:
        if self._id:
            self._client.set_terminated(self._id, "FAILED")

    def _write(self, step: int, figures: Mapping[str, float]) -> None:
        stamp, metric = int(time.time() * 1000), self._mlflow.entities.Metric
        self._metrics += [
            metric(name, float(value), stamp, step) for name, value in figures.items()
        ]
        if len(self._metrics) >= _METRICS or self._clock() - self._flushed >= _SECONDS:
            self._flush()

    def _flush(self) -> None:
        waiting, self._metrics = self._metrics, []
        for first in range(0, len(waiting), _METRICS):
            self._client.log_batch(self._id, metrics=waiting[first : first + _METRICS])
        self._flushed = self._clock()

    def _close(self, live: Live, reason: str) -> None:
        try:
            self._flush()
            self._client.set_tag(self._id, "ended", reason[:_LONGEST])
            # MLflow shows this tag as the run's description.
            told = f"```\n{report(live, reason)}\n```"[:_LONGEST]
            self._client.set_tag(self._id, "mlflow.note.content", told)
        finally:
            status = "FAILED" if reason == FAILED else "FINISHED"
            self._client.set_terminated(self._id, status)


def _allowed(names: Iterable[str]) -> list[str]:
    """Return names that MLflow accepts, without repetitions.

    >>> _allowed(["seed", "what: #1", "what? #1"])
    ['seed', 'what_ _1', 'what_ _1_2']
    """
    found: list[str] = []
    for name in names:
        clean = _REFUSED.sub("_", name)
        if posixpath.normpath(clean) != clean or clean.startswith((".", "/")):  # no file path
            clean = "_" + clean.replace("/", "_")
        clean = clean[:_LONGEST_NAME]
        numbered = (f"{clean[: _LONGEST_NAME - 9]}_{number}" for number in count(2))
        found.append(next(each for each in chain([clean], numbered) if each not in found))
    return found


def _mlflow() -> Any:
    try:
        import mlflow
    except ImportError as error:
        raise ImportError(
            f"MLflow is not installed ({error}): pip install 'paceline[mlflow]'"
        ) from None
    return mlflow
