"""What the doctor thinks of machines and clusters, well and ill."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from paceline.cli.doctor import answer_of, of_cluster, of_host

HOST: dict[str, Any] = {
    "host": "here",
    "cores": 2,
    "load": 0.5,
    "memory": 8 * 2**30,
    "free_memory": 4 * 2**30,
    "shared_memory": 4 * 2**30,
    "threads": {},
    "versions": {"python": "3.11.7", "paceline": "0.1.0", "torch": "2.13.0", "ray": "2.60.0"},
}


def worker(node: str = "a", gigaflops: float = 10.0, **more: Any) -> dict[str, Any]:
    facts = {"node": node, "gigaflops": gigaflops, "latency": 1e-3, "bytes_per_second": 1e9}
    return {**HOST, "threads": {"OMP_NUM_THREADS": "1"}, **facts, **more}


def cluster(**more: Any) -> dict[str, Any]:
    node = {"node": "a", "address": "127.0.0.2", "cpus": 2.0}
    found = {"started": True, "ray": "2.60.0", "authentication": "token", "nodes": [node]}
    return {**found, "workers": {"w0": worker(), "w1": worker()}, **more}


def test_a_machine_that_is_well() -> None:
    assert {finding.level for finding in of_host(HOST)} == {"ok"}


@pytest.mark.parametrize(
    ("ill", "level", "told", "fix"),
    [
        ({"missing": "Ray is not installed"}, "error", "not installed", "paceline[ray]"),
        ({"versions": {**HOST["versions"], "ray": "2.9.3"}}, "error", "too old", ">=2.59"),
        ({"versions": {"ray": "2.60.0"}}, "error", "PyTorch is missing", "pip install torch"),
        ({"load": 5.0}, "warning", "a load of 5.0 on 2 cores", "expect Ray to start slowly"),
        ({"free_memory": 2**28}, "warning", "memory free", "end processes that use much memory"),
        ({"shared_memory": 64 * 2**20}, "warning", "67.1 MB of shared memory", "--shm-size"),
        ({"threads": {"OMP_NUM_THREADS": "64"}}, "warning", "more threads", "OMP_NUM_THREADS=2"),
    ],
)
def test_a_machine_that_is_not(ill: dict[str, Any], level: str, told: str, fix: str) -> None:
    (found,) = (finding for finding in of_host({**HOST, **ill}) if finding.level != "ok")
    assert found.level == level and told in found.text and fix in found.fix


def test_what_is_not_known_is_no_reason_to_worry() -> None:
    unknown = {**HOST, "memory": None, "free_memory": None, "shared_memory": None, "cores": None}
    assert {finding.level for finding in of_host(unknown)} == {"ok"}


def test_a_cluster_that_is_well() -> None:
    assert {finding.level for finding in of_cluster(cluster(), HOST, None)} == {"ok"}


FAR = [{"node": n, "address": f"10.0.0.{i}", "cpus": 2.0} for i, n in enumerate("ab")]
OLD = {**HOST["versions"], "torch": "2.6.0"}


@pytest.mark.parametrize(
    ("ill", "level", "told", "fix"),
    [
        ({"error": "no cluster answers at x:1"}, "error", "no cluster answers", "ray start --head"),
        (
            {"nodes": FAR, "started": False, "authentication": "disabled"},
            *("warning", "not authenticated", "RAY_AUTH_MODE=token"),
        ),
        (
            {"authentication": "disabled"},
            *("warning", "Ray listens on all addresses", "unset RAY_AUTH_MODE"),
        ),
        (
            {"workers": {"w0": worker(), "w1": worker("b", versions=OLD)}},
            *(
                "error",
                "torch is 2.13.0 here, but differs on workers: w1 2.6.0",
                "install torch 2.13.0",
            ),
        ),
        (
            {"workers": {"w0": worker(), "w1": worker("b", versions={"python": "3.11.7"})}},
            *(
                "error",
                "paceline is 0.1.0 here, but differs on workers: w1 missing",
                "install paceline",
            ),
        ),
        (
            {"workers": {"w0": worker(threads={}), "w1": worker()}},
            *("warning", "2 cores for 2 workers of 2 threads", "OMP_NUM_THREADS=1"),
        ),
        (
            {"workers": {f"w{i}": worker() for i in range(3)}},
            *("warning", "2 cores for 3 workers of 1 threads", "use 2 workers there"),
        ),
        (
            {"workers": {"w0": worker(), "w1": worker("b", 2.0)}},
            *("warning", "w1 is 5.0 times as slow as w0", "paceline profile"),
        ),
    ],
)
def test_a_cluster_that_is_not(ill: dict[str, Any], level: str, told: str, fix: str) -> None:
    findings = [f for f in of_cluster(cluster(**ill), HOST, "x:1") if f.level != "ok"]
    found = findings[0]
    assert found.level == level and told in found.text and fix in found.fix


def test_a_token_is_enough_far_away() -> None:
    found = of_cluster(cluster(nodes=FAR, started=False), HOST, "x:1")
    assert {finding.level for finding in found} == {"ok"}


def test_whoever_does_not_answer_is_ended_with_what_it_started(tmp_path: Path) -> None:
    path = tmp_path / "alive"
    os.mkfifo(path)
    alive = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    code = (
        "import subprocess, time\n"
        f"pipe = open({str(path)!r}, 'w')\n"
        "subprocess.Popen(['sleep', '600'], stdout=pipe)\n"
        "print('x', file=pipe, flush=True)\n"
        "time.sleep(600)"
    )
    assert answer_of([sys.executable, "-c", code], 2.0) == {"error": "no answer in 2 s"}
    os.set_blocking(alive, True)
    assert os.read(alive, 9) == b"x\n"
    assert os.read(alive, 9) == b""  # which comes when nobody is left to write
    os.close(alive)


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("print('noise'); print('{\"ray\": 1}')", {"ray": 1}),
        ("print('noise')", {"error": "Ray exited with code 0 and gave no answer"}),
        ("import sys; sys.exit(3)", {"error": "Ray exited with code 3 and gave no answer"}),
    ],
)
def test_answers_are_the_last_line(code: str, answer: dict[str, Any]) -> None:
    assert answer_of([sys.executable, "-c", code], 60) == answer


def test_an_address_where_nobody_is(paceline: Callable[..., Result]) -> None:
    found = paceline("doctor", "--address", "127.0.0.1:1", "--json")
    assert found.exit_code == 1
    last = json.loads(found.stdout)["findings"][-1]
    assert last["level"] == "error" and "no cluster answers at 127.0.0.1:1" in last["text"]
