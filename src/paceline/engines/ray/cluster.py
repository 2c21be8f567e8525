"""Joining a cluster that lets nobody else in, or starting Ray on this machine."""

from __future__ import annotations

import os
import sys
from typing import Any

import ray

from paceline.engines.ray import preflight, token_file
from paceline.engines.ray.settings import SETTINGS

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": SETTINGS["RAY_worker_niceness"],
    # Notes of every call for a dashboard, which is not started: up to 100,000 of them in memory.
    "RAY_task_events_report_interval_ms": "0",
}


# Ray takes 127.0.0.1 for a mistake and uses the network's address instead; this is as local.
_LOOPBACK = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"


def connect(
    address: str | None, workers: int, message_bytes: int, allow_insecure: bool = False
) -> bool:
    """Make sure that Ray runs; return whether it was started here and is ours to stop.

    A cluster that other machines can reach, and that wants no token, is refused unless insecure
    ones are allowed. Room in the object store is for the model and a result of each worker, thrice
    over, and at least a gigabyte, since a dataset that is given as such goes through it.
    """
    _refuse_torchrun(workers)
    # What comes of every call is seen to; the other objects of a failed one are no news.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    if ray.is_initialized():
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
    ray.init(
        address="local",  # never join a cluster that happens to be running
        include_dashboard=False,
        object_store_memory=max(2**30, 3 * (workers + 2) * message_bytes),
        _node_ip_address=_LOOPBACK,
        **quiet,
    )
    return True


def _join(address: str, allow_insecure: bool, quiet: dict[str, Any]) -> None:
    """Join a cluster, if a look at it finds nothing wrong."""
    answer = preflight.look(address)
    if not allow_insecure:
        preflight.refuse_open(answer)  # before any of it runs here
    preflight.refuse_mixed(answer)
    if not answer.open:
        token_file.warn_if_readable()
    ray.init(address=address, **quiet)
    try:
        if answer.open and not allow_insecure:
            preflight.refuse_open(answer, node_addresses())
    except preflight.InsecureCluster:
        ray.shutdown()
        raise


def _refuse_insecure() -> None:
    """Look at the cluster that this process is in, unless only this machine reaches it."""
    nodes = node_addresses()
    if not all(map(preflight.is_loopback, nodes)):
        preflight.refuse_open(preflight.look(preflight.joined_address()), nodes)


def node_addresses() -> list[str]:
    """Return the addresses of the nodes that there are."""
    return [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]


def _refuse_torchrun(workers: int) -> None:
    """Refuse to be one of several drivers, each of which would train a model of its own."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" in os.environ and ranks != "1":
        raise RuntimeError(
            f"torchrun started this script {ranks} times (this is RANK="
            f"{os.environ.get('RANK', '?')}), and each would start {workers} workers and train by "
            f"itself; start it once, with plain python, and use pl.Ray(workers={ranks})"
        )
