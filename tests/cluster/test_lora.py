"""LoRA on hosts behind slow links: the kernel counts what is sent at the start and in steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from paceline.testing.hosts import Hosts, missing

pytestmark = [pytest.mark.cluster, pytest.mark.long]
ROOT = Path(__file__).parents[2]
HOSTS, STEPS = 2, 4  # a worker on each; steps between two counts


def settled(hosts: Hosts) -> dict[int, tuple[int, int]]:
    """Wait until the links carry next to nothing; return the bytes so far."""
    counts = hosts.carried()
    for _ in range(40):  # twenty seconds
        time.sleep(0.5)
        before, counts = counts, hosts.carried()
        if sum(counts[1]) - sum(before[1]) < 100_000:
            return counts
    raise AssertionError("the links are never idle")


def measure(folder: Path) -> dict[str, dict[str, Any]]:
    """Train on all hosts, driven from host 0; return what each arm told, with its counts."""
    found: dict[str, dict[str, Any]] = {}
    counts: dict[str, dict[int, tuple[int, int]]] = {}
    env = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src")))}
    with Hosts(HOSTS, delay=0.005, rate=100e6, queue=512 << 10) as hosts:
        address = hosts.start_ray(env=env)
        script = str(Path(__file__).with_name("lora_run.py"))
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        command = [sys.executable, script, address, str(HOSTS), str(folder)]
        with hosts.popen(0, command, env, text=True, **pipes) as process:
            deadline = threading.Timer(240, process.kill)
            deadline.start()
            assert process.stdin is not None and process.stdout is not None
            for line in process.stdout:  # ends with the process
                if not line.startswith("{"):
                    continue
                told = json.loads(line)
                if "mark" in told:
                    counts[told["mark"]] = settled(hosts) if told["wait"] else hosts.carried()
                    process.stdin.write("\n")
                    process.stdin.flush()
                else:
                    found[told["arm"]] = {**told, "counts": dict(counts)}
            deadline.cancel()
        assert process.returncode == 0
    return found


@pytest.mark.skipif(
    not (find_spec("peft") and find_spec("transformers")) and not os.environ.get("CI"),
    reason="the packages peft and transformers are not installed",
)
def test_only_the_adapter_crosses_the_links(tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    found = measure(tmp_path)
    assert len(found) == 3
    for name, arm in found.items():
        dense, counts = arm["dense"], arm["counts"]
        for host in range(1, HOSTS):
            sent, received = (
                (counts[f"step {STEPS + 1}"][host][way] - counts["step 1"][host][way]) / STEPS
                for way in (0, 1)
            )
            start = counts["end of the start"][host][1] - counts["start"][host][1]
            print(f"{name}, host {host}: dense {dense}, base {arm['base']}, sent {sent:.0f} and "
                  f"received {received:.0f} per step, at the start {start}")  # fmt: skip
            assert arm["base"] > 2 * dense
            limit = (0.5 if "codecs" in name else 1.1) * dense
            assert dense / 100 < sent < limit
            assert dense / 100 < received < (0.6 if "codecs" in name else 1.1) * dense
            # A run of one step sends a model, and mostly that of the next task too.
            assert start < 1_000_000 + 2 * 1.1 * dense < arm["base"] + dense
        assert arm["losses"][-1] < arm["losses"][0]
        adapter = tmp_path / name / "adapter_model.safetensors"
        assert dense <= adapter.stat().st_size < dense + 20_000
