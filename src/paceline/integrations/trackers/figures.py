"""The metrics of a run and their names, the same for all trackers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import isfinite, nan
from typing import Any, TypeAlias

from paceline.core.journal import Header
from paceline.report.callbacks import Live, Progress
from paceline.report.text import summary
from paceline.report.workers import Tally

Plain: TypeAlias = str | int | float | bool


@dataclass(frozen=True)
class Figure:
    """A metric of a run after a step; it is not sent if it is not finite."""

    name: str
    about: str
    value: Callable[[Progress, Live], float]
    grows: bool = False  # it is a total, which begins at 0 when the run is (re)started

    @property
    def metric(self) -> str:
        """Its name without slashes."""
        return _metric(self.name)


@dataclass(frozen=True)
class WorkerFigure:
    """A metric of one worker, at a time of the run."""

    name: str
    about: str
    value: Callable[[Tally, float], float]

    @property
    def metric(self) -> str:
        """Its name without slashes; the worker is a label."""
        return _metric(self.name)


FIGURES = (
    Figure("train/loss", "mean loss over the samples of the step", lambda p, _: p.loss),
    Figure("train/epoch", "passes over the data; absent without a dataset", lambda p, _: p.epoch),
    # Includes the samples before a resume, so it may begin above 0.
    Figure("train/samples", "samples used so far", lambda p, _: p.samples),
    Figure("train/samples_per_second", "samples used per second so far", lambda p, _: p.throughput),
    Figure("time/seconds", "seconds of the run", lambda p, _: p.seconds),
    Figure("step/number", "version of the model", lambda p, _: p.step),
    Figure("step/results", "results that the step used (k)", lambda p, _: p.results),
    Figure(
        "step/staleness", "mean staleness of its results, in versions", lambda p, _: p.staleness
    ),
    Figure("workers/present", "connected workers", lambda p, _: p.workers),
    Figure("workers/waiting", "share of their time without a task", lambda p, _: p.waiting),
    Figure("tasks/started", "tasks so far", lambda p, _: p.started, grows=True),
    Figure("tasks/wasted", "tasks whose results were not used", lambda p, _: p.wasted, grows=True),
    Figure(
        "tasks/wasted_share", "wasted tasks over all tasks so far", lambda p, _: _wasted_share(p)
    ),
    Figure(
        "cost/gigabytes_down",
        "gigabytes sent to workers",
        lambda p, _: p.down_bytes / 1e9,
        grows=True,
    ),
    Figure(
        "cost/gigabytes_up",
        "gigabytes received from workers",
        lambda p, _: p.up_bytes / 1e9,
        grows=True,
    ),
    Figure("cost/gigabytes", "both", lambda p, _: (p.down_bytes + p.up_bytes) / 1e9, grows=True),
    Figure(
        "cost/dollars",
        "dollars so far; absent without prices",
        lambda p, live: _dollars(p, live),
        grows=True,
    ),
)
WORKER_FIGURES = (
    WorkerFigure(
        "worker_speed",
        "samples of its results per second of all its tasks",
        lambda t, now: t.speed(now),
    ),
    WorkerFigure(
        "worker_share_used",
        "share of its busy time that used results took",
        lambda t, now: t.share_used(now),
    ),
    WorkerFigure(
        "worker_staleness",
        "mean staleness of its results, in versions",
        lambda t, _: t.mean_staleness,
    ),
    WorkerFigure("worker_present", "1 if it is connected, 0 if not", lambda t, _: float(t.present)),
)


def values(progress: Progress, live: Live) -> dict[str, float]:
    """Return the metrics of a run after a step."""
    found = {figure.name: figure.value(progress, live) for figure in FIGURES}
    return {name: value for name, value in found.items() if isfinite(value)}


def worker_values(progress: Progress, live: Live) -> dict[str, float]:
    """Return the metrics of each worker after a step, such as `worker_speed/w0`."""
    workers, now = live.workers().items(), progress.seconds
    return {
        f"{figure.name}/{worker}": figure.value(tally, now)
        for figure in WORKER_FIGURES
        for worker, tally in workers
    }


def configuration(header: Header) -> dict[str, Plain]:
    """Return the settings of a run without nesting: `versions.torch` is an inner value.

    >>> configuration(Header("Gather()", 8, {"seed": 0, "versions": {"ray": "2.60.0"}}))["seed"]
    0
    """
    nested = {
        **(header.about or {}),
        "batch_size": header.batch,
        "message_bytes": header.message_bytes,
        "driven": header.policy,  # with its MinWorkers and Until
    }
    if (written := nested.pop("written", None)) is not None:
        nested["policy"] = written
    if header.prices.charges_hours or header.prices.charges_bytes:
        nested["prices"] = asdict(header.prices)
    if header.tiles:
        nested["tiles"] = len(header.tiles)
    return dict(sorted(_flat(nested)))


def report(live: Live, reason: str) -> str:
    """Return a summary of a run in a few lines."""
    nodes = None if len(live.meters) == 1 else len(live.meters)
    return summary(live.total, reason, live.header.batch, nodes)


def _flat(nested: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Plain]]:
    found: list[tuple[str, Plain]] = []
    for name, value in nested.items():
        match value:
            case None:
                continue
            case Mapping():
                found += _flat(value, f"{prefix}{name}.")
            case str() | int() | float():
                found.append((prefix + name, value))
            case list() | tuple():
                found.append((prefix + name, json.dumps(value, default=str)))
            case _:
                found.append((prefix + name, str(value)))
    return found


def _metric(name: str) -> str:
    return "paceline_" + name.replace("/", "_")


def _wasted_share(progress: Progress) -> float:
    return progress.wasted / progress.started if progress.started else 0.0


def _dollars(progress: Progress, live: Live) -> float:
    return progress.dollars if live.total.priced else nan
