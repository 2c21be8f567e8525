"""What launchers tell a process: the name of its run, and how many processes they started."""

from __future__ import annotations

import os
from typing import Any


def run_name() -> str:
    """Return the name that a launcher has given to the run; torchrun's port tells runs apart."""
    if name := os.environ.get("PACELINE_RUN"):
        return name
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return f"torchrun-{os.environ.get('MASTER_ADDR', '')}-{os.environ.get('MASTER_PORT', '')}"
    return "main"


def started_workers(process_group: Any = None) -> tuple[int, int] | None:
    """Return the number of workers that a launcher has started; None if it does not say.

    The processes of a group are one worker, and nothing says how many groups there are.
    """
    names = ["PACELINE_WORKERS"]
    if process_group is None:
        names += ["SLURM_NTASKS"] if "SLURM_PROCID" in os.environ else ["WORLD_SIZE"]
    for name in names:
        if (text := os.environ.get(name, "")).isdigit() and int(text) > 0:
            return int(text), int(text)
    return None
