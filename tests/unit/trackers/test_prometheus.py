"""The metrics that are not about Ray: their names, and the dashboard that shows them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from paceline.trackers.prometheus import exported

PAGE = Path(__file__).parents[3] / "docs" / "trackers.md"
DASHBOARD: dict[str, Any] = json.loads(PAGE.with_name("grafana.json").read_text())


def test_without_ray_it_says_what_to_do() -> None:
    code = (
        "import paceline as pl\n"
        "engine, callbacks = pl.Simulator(2), [pl.Prometheus()]\n"
        "trainer = pl.Trainer(pl.Quadratic(), pl.sync(), engine, callbacks=callbacks)\n"
        "try: trainer.fit(steps=2)\n"
        "except RuntimeError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "through Ray, which does not run: train on pl.Ray(…), or call ray.init()" in done.stdout


def test_the_dashboard_shows_metrics_that_there_are() -> None:
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    variables = [each["query"]["query"] for each in DASHBOARD["templating"]["list"][1:]]
    used = {name for text in expressions + variables for name in re.findall(r"\bray_\w+", text)}
    assert used <= set(exported())
    # What is not shown: the same in another form.
    assert set(exported()) - used == {
        "ray_paceline_cost_gigabytes_total",
        "ray_paceline_tasks_started_total",
        "ray_paceline_worker_present",
        "ray_paceline_time_seconds",
        "ray_paceline_train_samples",
    }
    assert all('run=~"$run"' in text for text in expressions)


def test_the_dashboard_is_laid_out() -> None:
    panels = DASHBOARD["panels"]
    assert DASHBOARD["schemaVersion"] >= 39
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) >= 1
    (source,) = (v for v in DASHBOARD["templating"]["list"] if v["type"] == "datasource")
    assert source["query"] == "prometheus"


def test_the_page_names_every_metric() -> None:
    text = PAGE.read_text()
    assert set(re.findall(r"`(ray_paceline_\w+)`", text)) == set(exported())
