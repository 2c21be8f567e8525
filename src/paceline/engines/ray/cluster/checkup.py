"""Describes and measures a cluster: `python -m paceline.engines.ray.cluster.checkup '{…}'`.

It is a process of its own, since Ray may wait for very long: its caller can kill it. The answer is
one line of JSON.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import ray

from paceline.core.errors import ClusterError
from paceline.core.protocol import worker_names
from paceline.engines.ray.cluster import preflight
from paceline.engines.ray.cluster.join import connect

PACKAGES = ("paceline", "torch", "ray", "numpy")
_SIZE = 4 * 2**20  # bytes of the array that is sent there and back
_MATRIX, _SECONDS, _TRIES = 256, 0.5, 3
_LOCAL = 4  # default number of workers on one machine


def versions() -> dict[str, str]:
    """Return the versions of the packages here, without importing them."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def host() -> dict[str, Any]:
    """Return the resources of this machine, and the thread limits of this process."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {
        "host": socket.gethostname(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "load": os.getloadavg()[0],
        "memory": _meminfo("MemTotal"),
        "free_memory": _meminfo("MemAvailable"),
        "shared_memory": _shared_memory(),
        "threads": {name: os.environ[name] for name in names if name in os.environ},
        "versions": versions(),
    }


def _meminfo(name: str) -> int | None:
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


def _shared_memory() -> int | None:
    with suppress(OSError):
        found = os.statvfs("/dev/shm")
        return found.f_bavail * found.f_frsize
    return None


class Patient:
    """A worker that is examined."""

    def about(self) -> dict[str, Any]:
        node = ray.get_runtime_context().get_node_id()
        return {**host(), "node": node}

    def multiply(self, seconds: float) -> float:
        """Return its speed in billions of additions and multiplications per second."""
        matrix = np.ones((_MATRIX, _MATRIX), np.float32)
        matrix @ matrix  # the first one starts threads
        began, done = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            matrix @ matrix
            done += 1
        return 2 * _MATRIX**3 * done / (time.perf_counter() - began) / 1e9

    def echo(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return array.copy()


def examine(address: str | None, workers: int | None, timeout: float) -> dict[str, Any]:
    """Connect, and measure each worker; wait for no answer beyond the timeout."""
    deadline = time.monotonic() + timeout

    def get(calls: Any) -> Any:
        return ray.get(calls, timeout=max(deadline - time.monotonic(), 0.1))

    ours = connect(address, workers or _LOCAL, _SIZE, allow_insecure=True)  # the answer reports it
    nodes = [node for node in ray.nodes() if node["Alive"]]
    cores = ray.cluster_resources().get("CPU", 0.0)
    if workers is None:
        workers = len(nodes) if len(nodes) > 1 else max(min(int(cores), _LOCAL), 1)
    free = ray.available_resources().get("CPU", 0.0)
    share = min(1.0, int(free / workers * 1000) / 1000)
    actor: Any = ray.remote(num_cpus=share, scheduling_strategy="SPREAD")(Patient)
    patients = {name: actor.remote() for name in worker_names(workers)}
    about = get([each.about.remote() for each in patients.values()])
    speeds = get([each.multiply.remote(_SECONDS) for each in patients.values()])  # all at a time
    found = {}
    for (name, each), facts, speed in zip(patients.items(), about, speeds, strict=True):
        ways = {}
        for size in (1, _SIZE):
            array, times = np.zeros(size, np.uint8), []
            for _ in range(_TRIES):
                began = time.perf_counter()
                get(each.echo.remote(array))
                times.append(time.perf_counter() - began)
            ways[size] = min(times)
        seconds = max(ways[_SIZE] - ways[1], 1e-6)
        found[name] = {
            **facts,
            "gigaflops": speed,
            "latency": ways[1],
            "bytes_per_second": 2 * _SIZE / seconds,
        }
    return {
        "started": ours,
        "ray": ray.__version__,
        "authentication": "disabled"
        if preflight.look(preflight.joined_address()).open
        else "token",
        "nodes": [
            {
                "node": node["NodeID"],
                "address": node["NodeManagerAddress"],
                "cpus": node["Resources"].get("CPU", 0.0),
                "memory": node["Resources"].get("memory"),
                "object_store": node["Resources"].get("object_store_memory"),
            }
            for node in nodes
        ],
        "workers": found,
    }


def main() -> None:
    given = json.loads(sys.argv[1])
    try:
        answer = examine(given["address"], given["workers"], given["timeout"])
    except Exception as error:  # the answer reports any error
        first = (str(error).strip().splitlines() or [""])[0]
        known = isinstance(error, ClusterError)
        answer = {"error": first if known else f"{type(error).__name__}: {first}"}
    finally:
        ray.shutdown()
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
