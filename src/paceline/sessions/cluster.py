"""The Ray cluster that sessions join."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

import ray

from paceline.engines.ray.cluster.join import connect

NAMESPACE = "paceline"
"""Of the hubs among the named actors of a cluster."""


def ensure_ray(address: str | None, allow_insecure: bool = False) -> None:
    """Connect this process to a cluster; raise RuntimeError if none is named."""
    if ray.is_initialized():
        return
    wished = address or os.environ.get("RAY_ADDRESS")
    if wished is None:
        raise RuntimeError(
            "a session joins a Ray cluster, and none is named; start the script by `paceline "
            "launch --workers 4 script.py`, or start `paceline serve` and set RAY_ADDRESS to the "
            "address that it prints, or give address="
        )
    connect(wished, 1, 0, allow_insecure)


def start_ray(address: str | None, workers: int, store_bytes: int = 2**30) -> bool:
    """Join a cluster, or start Ray on this machine; return whether it was started here."""
    return connect(address, workers, store_bytes)


def gcs_address() -> str:
    """Return the address at which other processes join the cluster of this one."""
    found: str = ray.get_runtime_context().gcs_address
    return found


def tell_gone(run: str, pid: int) -> None:
    """Tell a run that a process of this machine has ended; it would notice some seconds later."""
    with contextlib.suppress(ValueError, ray.exceptions.RayError):  # there may be no such run
        ray.get_actor(run, NAMESPACE).gone.remote(note_of(pid))


def note_of(pid: int) -> str:
    """Return how a run names a process of this machine."""
    return f"{socket.gethostname()}:{pid}"


def status_of(hub: Any, timeout: float) -> Any:
    """Return the status of a run; None if its hub does not answer, as while it is restarted."""
    try:
        return ray.get(hub.status.remote(), timeout=timeout)
    except (ray.exceptions.RayError, TimeoutError):
        return None


def is_over(run: str, timeout: float = 30.0) -> bool:
    """Return whether a run has ended, or never began."""
    try:
        status = status_of(ray.get_actor(run, NAMESPACE), timeout)
    except ValueError:
        return True
    return status is not None and bool(status.ended)
