"""The driver's side of files that servers write."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import ray

from paceline.core.logs import logger_of
from paceline.engines.base import Writing
from paceline.engines.ray.failures import reason_of
from paceline.engines.ray.servers.machine import Machine
from paceline.engines.ray.servers.processes import Processes
from paceline.engines.ray.servers.shared_folder import is_answered, offer

logger = logger_of(__name__)
_PROBE_SECONDS = 15.0


class SliceWriter:
    """Has the servers of a job write their slices."""

    def __init__(self, machine: Machine, processes: Processes) -> None:
        self._machine, self._calls = machine, processes.calls
        self._cluster = processes.servers.cluster

    def begin(self, folder: Path, timeout: float) -> Writing:
        writing = Writing(self._machine.steps.model.number, folder.resolve())
        try:
            token = offer(writing.folder)
        except OSError as error:
            writing.failure = str(error)
        else:
            self._machine.files.begin(writing, token, timeout)
        return writing

    def wait(self, writing: Writing, timeout: float) -> None:
        until = self._cluster.clock() + timeout
        while writing.under_way and self._cluster.clock() < until:
            if not self._calls.wait(until):
                return

    def give_up(self, writing: Writing) -> None:
        self._machine.files.give_up(writing)


def writer_into(folder: Path, machine: Machine, processes: Processes) -> SliceWriter | None:
    """Return the writer into a folder if every server sees that folder; otherwise log why not."""
    why = _unseen(folder, processes)
    if why is None:
        return SliceWriter(machine, processes)
    logger.info(
        "checkpoints are gathered and written by the driver, and training waits for it: %s; use a "
        "folder that all servers share to have them write",
        why,
    )
    return None


def _unseen(folder: Path, processes: Processes) -> str | None:
    """Return why a server cannot write into a folder; None if all can, or if one is lost now: each
    file has its own check of the folder."""
    members, cluster = processes.servers.members, processes.servers.cluster
    try:
        made = Path(tempfile.mkdtemp(prefix=".paceline-probe-", dir=folder)).resolve()
    except OSError as error:
        return str(error)
    try:
        token = offer(made)
        asked = [m.actor.show.remote(str(made), token, name) for name, m in members.items()]
        cluster.get(asked, _PROBE_SECONDS)
        unseen = [name for name in members if not is_answered(made, token, name)]
        return f"what {unseen[0]} writes to {folder} is not seen here" if unseen else None
    except ray.exceptions.RayTaskError as error:
        return reason_of(error)
    except ray.exceptions.RayError:
        return None
    except OSError as error:
        return str(error)
    finally:
        shutil.rmtree(made, ignore_errors=True)
