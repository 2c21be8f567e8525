"""The node and the process of a worker or server."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import ray

from paceline.engines.ray.transport.link import Address


@dataclass(frozen=True, slots=True)
class Place:
    """The node and the process of a worker or server."""

    node: str
    pid: int
    started: str  # distinguishes the process from a later one with the same pid
    address: Address | None = None  # of its direct transport


def here() -> Place:
    """Return the node and the pid of this process."""
    pid = os.getpid()
    return Place(ray.get_runtime_context().get_node_id(), pid, start_time(pid))


def start_time(pid: int) -> str:
    """Return the start time of a process of this host, as Linux counts it; empty if it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
