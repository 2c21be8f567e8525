"""Figures of a run as Prometheus gets them: from the port of a real Ray's node."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

import paceline as pl
from paceline.integrations.trackers.prometheus import exported
from paceline.report.callbacks import Live
from tests.conftest import make_learner

pytestmark = pytest.mark.cluster

PATIENCE = 60.0  # seconds; Ray sends its metrics on every ten


def scrape(targets: list[str], run: str) -> dict[tuple[str, str], float]:
    """Return the values of a run by name and worker, as all nodes offer them now."""
    return {
        (sample.name, sample.labels.get("worker", "")): sample.value
        for target in targets
        for sample in samples(target)
        if sample.labels.get("run") == run
    }


def samples(target: str) -> Iterator:  # type: ignore[type-arg]
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
        for family in text_string_to_metric_families(answer.read().decode()):
            yield from family.samples


class Last(pl.Callback):
    """Keeps what was known after the last step."""

    progress: pl.Progress

    def started(self, live: Live) -> None:
        self.live = live

    def stepped(self, progress: pl.Progress) -> None:
        self.progress = progress
        tallies = self.live.workers().items()
        self.speeds = {worker: tally.speed(progress.seconds) for worker, tally in tallies}


def test_every_node_offers_the_figures_to_prometheus(ray_workers: pl.Ray) -> None:
    tracker, last = pl.trackers.Prometheus(run="of this test"), Last()
    trainer = pl.Trainer(
        make_learner(),
        pl.k_sync(3),
        ray_workers,
        callbacks=[tracker, last],
        progress=False,
        prices=pl.Prices(per_hour=3600.0),
    )
    run = trainer.fit(steps=8)
    (target,) = tracker.targets()
    assert target.startswith("127.0.0.")
    found, until = dict[tuple[str, str], float](), time.monotonic() + PATIENCE
    while found.get(("ray_paceline_step_number", "")) != 8:
        assert time.monotonic() < until, f"{target} has {found} after {PATIENCE} s"
        time.sleep(0.5)
        found = scrape([target], "of this test")
    columns = {
        "ray_paceline_train_loss": "loss",
        "ray_paceline_time_seconds": "seconds",
        "ray_paceline_step_results": "results",
        "ray_paceline_step_staleness": "staleness",
        "ray_paceline_cost_dollars_total": "dollars",
    }
    for name, column in columns.items():
        assert found[name, ""] == pytest.approx(run.metrics[column][-1], rel=1e-12), name
    progress = last.progress
    assert found["ray_paceline_tasks_started_total", ""] == progress.started
    bytes_down = found["ray_paceline_cost_gigabytes_down_total", ""] * 1e9
    assert bytes_down == pytest.approx(progress.down_bytes)
    assert found["ray_paceline_workers_present", ""] == 4
    assert len(last.speeds) == 4
    for worker, speed in last.speeds.items():
        assert found["ray_paceline_worker_speed", worker] == pytest.approx(speed), worker
    # A counter is there once it is above 0, and perhaps nothing was wasted.
    names = {name for name, _ in found} | {"ray_paceline_tasks_wasted_total"}
    assert names == set(exported())
