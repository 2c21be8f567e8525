"""Metrics of a run as Ray metrics, which every node exports to Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from paceline.core.extras import require_ray
from paceline.integrations.trackers.base import Tracker
from paceline.integrations.trackers.figures import FIGURES, WORKER_FIGURES
from paceline.report.callbacks import Live, Progress

_SECONDS = 1.0  # between two updates; Ray itself exports them every ten seconds by default


def exported() -> dict[str, str]:
    """Return the description of each metric, by its name in Prometheus.

    Ray puts `ray_` before the names of all metrics, and `_total` after those of counters.
    """
    names = {f"ray_{f.metric}{'_total' if f.grows else ''}": f.about for f in FIGURES}
    return names | {f"ray_{figure.metric}": figure.about for figure in WORKER_FIGURES}


class Prometheus(Tracker):
    """Keeps metrics of Ray current, at most once a second.

    run: the label that distinguishes this run from others.

    The node of the training script exports the metrics. On the simulator there is no Ray to export
    them, unless the script has called ray.init().
    """

    def __init__(self, run: str = "paceline", clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._ray = _ray()  # now, so that a missing package raises at once
        self._tags, self._clock = {"run": run}, clock
        self._updated = -_SECONDS
        self._metrics: dict[str, Any] = {}
        self._told: dict[str, float] = {}  # the values of the counters so far

    def targets(self) -> list[str]:
        """Return the addresses of the metrics of this cluster's nodes, "host:port" each."""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        return [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in nodes]

    def stepped(self, progress: Progress) -> None:
        self._latest = progress
        if self._clock() - self._updated >= _SECONDS:
            self._updated = self._clock()
            self._send(workers=True)

    def _open(self, live: Live) -> None:
        engine = str((live.header.about or {}).get("engine"))
        if not engine.startswith("Ray(") and not self._ray.is_initialized():
            raise RuntimeError(
                "pl.trackers.Prometheus exports its metrics through Ray, which is not running, "
                f"and the engine is {engine}: train on pl.Ray(…), or call ray.init() first"
            )
        # The engine may start Ray after this, so metrics are created at the first step.
        self._metrics, self._told, self._updated = {}, {}, -_SECONDS

    def _write(self, step: int, figures: Mapping[str, float]) -> None:
        self._metrics = self._metrics or _metrics(self._ray.util.metrics)
        for name, value in figures.items():
            own, _, worker = name.partition("/")
            if own in self._metrics:  # a metric of a worker
                self._metrics[own].set(value, {**self._tags, "worker": worker})
            elif isinstance(metric := self._metrics[name], self._ray.util.metrics.Gauge):
                metric.set(value, self._tags)
            elif (more := value - self._told.get(name, 0.0)) > 0:
                metric.inc(more, self._tags)
                self._told[name] = value

    def _close(self, live: Live, reason: str) -> None:
        """Leave the metrics as they are: Ray releases them itself."""


def _ray() -> Any:
    require_ray()
    import ray
    import ray.util.metrics

    return ray


def _metrics(of_ray: Any) -> dict[str, Any]:
    """Return a new Ray metric for each figure."""
    found: dict[str, Any] = {}
    for figure in FIGURES:
        kind = of_ray.Counter if figure.grows else of_ray.Gauge
        found[figure.name] = kind(figure.metric, figure.about, tag_keys=("run",))
    for each in WORKER_FIGURES:
        found[each.name] = of_ray.Gauge(each.metric, each.about, tag_keys=("run", "worker"))
    return found
