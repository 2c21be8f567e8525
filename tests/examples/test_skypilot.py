"""The SkyPilot task among the examples: its shell, its commands, its variables, and its schema."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cli.app import app

FILE = Path(__file__).parents[2] / "examples" / "skypilot.yaml"
TASK: dict[str, Any] = yaml.safe_load(FILE.read_text())
GIVEN = {  # what SkyPilot sets for `run`; docs.skypilot.co, environment variables
    "SKYPILOT_NODE_RANK",
    "SKYPILOT_NODE_IPS",
    "SKYPILOT_NUM_NODES",
    "SKYPILOT_NUM_GPUS_PER_NODE",
    "SKYPILOT_TASK_ID",
    "SKYPILOT_CLUSTER_INFO",
}
PARSE = """
import sys
import sky
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
dag = sky.Dag()
dag.add(task)
dag.validate()
assert task.num_nodes == 4 and resources.use_spot
assert resources.job_recovery["max_restarts_on_errors"] == 3
assert task.storage_mounts["/runs"].mode.value == "MOUNT_CACHED"
"""


def is_bash(script: str) -> bool:
    """Return whether bash can parse a script."""
    done = subprocess.run(
        ["bash", "-n"], input=script, text=True, capture_output=True, timeout=60, check=False
    )
    return done.returncode == 0


@pytest.mark.parametrize("part", ["setup", "run"])
def test_bash_parses_the_script(part: str) -> None:
    script = TASK[part]
    assert script.startswith("set -euo pipefail\n")
    assert is_bash(script)
    assert not is_bash(script + "if true; then\n")


def test_the_commands_of_paceline_exist() -> None:
    called = re.findall(r"\bpaceline ([a-z]+)", TASK["run"])
    assert called == ["env", "submit"]
    assert set(called) <= set(app.commands)


def test_the_variables_are_those_of_skypilot() -> None:
    used = set(re.findall(r"\bSKYPILOT_\w+", TASK["run"]))
    assert used <= GIVEN
    assert {"SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS"} <= used


def test_ray_is_not_that_of_skypilot() -> None:
    commands = re.sub(r"#.*", "", TASK["run"])
    assert "ray stop" not in commands  # which would end SkyPilot's Ray as well
    assert set(re.findall(r"\b6\d{3}\b", commands)) == {"6379"}  # SkyPilot's is 6380


def test_a_recovered_job_finds_its_checkpoints() -> None:
    (folder,) = re.findall(r'paceline submit train\.py "(.*)"', TASK["run"])
    assert folder == "/runs/$SKYPILOT_TASK_ID"  # the same ID in all recoveries of a job
    assert TASK["file_mounts"]["/runs"]["mode"] == "MOUNT_CACHED"
    assert TASK["resources"]["use_spot"]


@pytest.mark.skipif(importlib.util.find_spec("sky") is None, reason="skypilot is not installed")
def test_skypilot_accepts_the_task(tmp_path: Path) -> None:
    text = FILE.read_text().replace("BUCKET: null", "BUCKET: runs")
    text = text.replace("RAY_AUTH_TOKEN: null", "RAY_AUTH_TOKEN: a")

    def parsed(text: str) -> str:
        (tmp_path / "task.yaml").write_text(text)
        command = [sys.executable, "-c", PARSE, str(tmp_path / "task.yaml")]
        settings = {**os.environ, "HOME": str(tmp_path)}  # SkyPilot writes there
        done = subprocess.run(
            command, env=settings, capture_output=True, text=True, timeout=120, check=False
        )
        return done.stderr if done.returncode else ""

    assert parsed(text) == ""
    assert "num_node" in parsed(text.replace("num_nodes:", "num_node:"))
