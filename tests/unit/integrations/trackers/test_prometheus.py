"""The metrics that are not about Ray: their names, and the dashboard that shows them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from paceline.integrations.trackers.prometheus import exported

PAGE = Path(__file__).parents[4] / "docs" / "trackers.md"
DASHBOARD: dict[str, Any] = json.loads(PAGE.with_name("grafana.json").read_text())


def test_without_ray_it_says_what_to_do() -> None:
    code = (
        "import paceline as pl\n"
        "class Tells(pl.Callback):\n"
        "    def stepped(self, progress): print('stepped')\n"
        "    def ended(self, reason): print(reason)\n"
        "engine, callbacks = pl.Simulator(2), [Tells(), pl.trackers.Prometheus()]\n"
        "options = dict(callbacks=callbacks, progress=False)\n"
        "try: pl.Trainer(pl.learners.Quadratic(), pl.sync(), engine, **options).fit(steps=2)\n"
        "except RuntimeError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ended, told = done.stdout.splitlines()  # and no step before
    assert ended == "failed"
    assert "Ray, which is not running, and the engine is Simulator(workers=2, " in told
    assert told.endswith("train on pl.Ray(…), or call ray.init() first")
    assert done.stderr == ""  # nothing is logged


def test_if_ray_has_ended_the_run_goes_on() -> None:
    code = (
        "import paceline as pl\n"
        "class Simulated(pl.Simulator):\n"
        "    def __repr__(self): return 'Ray(that never came up)'\n"
        "options = dict(callbacks=[pl.trackers.Prometheus()], progress=False)\n"
        "trainer = pl.Trainer(pl.learners.Quadratic(), pl.sync(), Simulated(2), **options)\n"
        "print(trainer.fit(steps=3).steps)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "3\n"


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
