"""Joins a cluster that requires a token, or starts Ray on this machine."""

from __future__ import annotations

import os
import sys
from math import ceil
from typing import Any

import ray

from paceline.core.errors import InsecureCluster
from paceline.core.logs import logger_of
from paceline.engines.ray.cluster import preflight, token_file
from paceline.engines.ray.cluster.settings import SETTINGS

logger = logger_of(__name__)

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": SETTINGS["RAY_worker_niceness"],
    # Records of calls, up to 100,000 in memory, serve the dashboard, which is not started.
    "RAY_task_events_report_interval_ms": "0",
}


# Ray takes 127.0.0.1 for a mistake and uses the network's address instead; 127.0.0.2 is as local.
_LOOPBACK = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"


def store_need(workers: int, model: int, state: int = 0) -> int:
    """Return the bytes of object store that a machine with all workers needs for a job.

    These are a result of each worker, the model that each computes on (one for all under `sync`),
    the newest model and the next. With servers, add two versions of the optimizer's state.
    """
    return (2 * workers + 2) * model + 2 * state


def warn_small_stores(servers: bool, workers: int, model: int, state: int = 0) -> None:
    """Warn of nodes whose object store is too small for the job; see docs/scale.md."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    share = ceil(workers / len(nodes))
    here = ray.get_runtime_context().get_node_id()
    for node in nodes:
        if len(nodes) == 1 or (not servers and node["NodeID"] == here):
            need = store_need(workers, model, state)
        elif servers:
            need = (5 + 2 * share) * model + ceil(6 * state / len(nodes))
        else:
            need = (2 + 2 * share) * model
        there = node["Resources"].get("object_store_memory", 0.0)
        if there < need:
            logger.warning(
                "node %s has an object store of %.1f GB and this job needs %.1f GB there, so that "
                "Ray will write to disk and steps will be slow; start Ray there with "
                "--object-store-memory=%d",
                node["NodeManagerAddress"], there / 1e9, need / 1e9, need,
            )  # fmt: skip


def connect(
    address: str | None, workers: int, store_bytes: int, allow_insecure: bool = False
) -> bool:
    """Make sure that Ray runs; return whether this call started it, so the caller must stop it.

    A cluster that other machines can reach must require a token, unless `allow_insecure`. A store
    that is started here has `store_bytes`, and a gigabyte more for a dataset that is given as an
    object, not as a function.
    """
    # Every call has a callback and a deadline; Ray need not report the objects of failed ones.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    if ray.is_initialized():
        joined = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", joined):
            logger.warning(
                "this process is connected to the Ray cluster at %s, and uses that one instead of "
                "address=%r; call ray.shutdown() before to join another",
                joined, address,
            )  # fmt: skip
        if not allow_insecure:
            _refuse_insecure()
        return False
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address not in (None, "local"):
        _join(str(address), allow_insecure, quiet)
        return False
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if os.environ.get("RAY_AUTH_MODE", "token").lower() == "token":  # as it is by default here
        token_file.make_if_missing()
        token_file.warn_if_readable()
    try:
        ray.init(
            address="local",  # never join a cluster that happens to be running
            include_dashboard=False,
            object_store_memory=2**30 + store_bytes,
            _node_ip_address=_LOOPBACK,
            **quiet,
        )
    except Exception as error:  # Ray raises no narrower one
        if not is_start_timeout(error):
            raise
        raise StartTimeout(os.getloadavg()[0], os.cpu_count()) from None
    return True


def is_start_timeout(error: Exception) -> bool:
    """Return whether Ray gave up waiting for its own processes, which it does after 30 s."""
    return "timed out during startup" in str(error)


class StartTimeout(RuntimeError):
    """Ray's processes did not start in time."""

    def __init__(self, load: float, cores: int | None) -> None:
        super().__init__(
            f"Ray did not start on this machine within its 30 s (load {load:.1f} on {cores} "
            "cores): run it again when the machine is less busy, or start Ray once with `ray "
            "start --head` and use pl.Ray(…, address='auto')"
        )


def _join(address: str, allow_insecure: bool, quiet: dict[str, Any]) -> None:
    """Join a cluster, if the preflight check finds no fault."""
    answer = preflight.look(address)
    if not allow_insecure:
        preflight.refuse_open(answer)  # before Ray connects
    preflight.refuse_mixed(answer)
    if not answer.open:
        token_file.warn_if_readable()
    ray.init(address=address, **quiet)
    try:
        if answer.open and not allow_insecure:
            preflight.refuse_open(answer, node_addresses())
    except InsecureCluster:
        ray.shutdown()
        raise


def _refuse_insecure() -> None:
    """Refuse the joined cluster if it requires no token and other machines reach it."""
    nodes = node_addresses()
    if not all(map(preflight.is_loopback, nodes)):
        preflight.refuse_open(preflight.look(preflight.joined_address()), nodes)


def node_addresses() -> list[str]:
    """Return the addresses of the nodes that are alive."""
    return [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]


def refuse_torchrun(workers: int) -> None:
    """Refuse to be one of several drivers, each of which would train a model of its own."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" in os.environ and ranks != "1":
        raise RuntimeError(
            f"torchrun started this script {ranks} times (this is RANK="
            f"{os.environ.get('RANK', '?')}), and each would start {workers} workers and train by "
            f"itself; start it once, with plain python, and use pl.Ray(workers={ranks})"
        )
