"""Failed calls: the reason in one line, and whether the user's own code is to blame.

An exception means a lost worker at first: a broken GPU, a full disk or a missing mount all arrive
as Python exceptions. The user's code is to blame if the same samples raise on a second worker, or
if set-up raises on every worker. Where workers are on several nodes, the second worker must be on a
second node.
"""

from __future__ import annotations

from collections.abc import Collection

import ray

from paceline.core.protocol import Task, WorkerId
from paceline.engines.checks import Suspects

_LONGEST = 300  # characters of an exception's text in a log line


class Disconnected(Exception):
    """The process of a worker is gone; the text says how that is known."""


def reason_of(error: BaseException) -> str:
    """Return in one line why a call failed.

    >>> reason_of(ray.exceptions.RayTaskError("compute", "", ValueError("no such file"), "", 0, ""))
    'it raised ValueError: no such file'
    """
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        return _short(f"it raised {type(cause).__name__}: {cause}")
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return "Ray ended its process, since its node ran out of memory"
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        return "the connection to its process was lost"
    if isinstance(error, ray.exceptions.RayActorError):
        if "node" in str(error) and "died" in str(error) and "worker process" not in str(error):
            return "its node died"
        return "its process died (killed, out of memory, or crashed)"
    if isinstance(error, ray.exceptions.ObjectLostError):
        return "an object that its task needed or returned was lost with a node"
    if isinstance(error, Disconnected):
        return _short(str(error))
    return _short(f"{type(error).__name__}: {error}")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"


class Raised:
    """Remembers exceptions, to tell a worker's fault from that of the user's code."""

    def __init__(self) -> None:
        self._set_up: set[WorkerId] = set()
        self._samples = Suspects()

    def in_set_up(self, worker: WorkerId, others: Collection[WorkerId]) -> bool:
        """Return whether set-up has now raised on all workers.

        others: the workers that may still come up.
        """
        self._set_up.add(worker)
        return self._set_up.issuperset(others)

    def in_task(self, task: Task, worker: WorkerId, node: str, nodes: int, alone: bool) -> bool:
        """Return whether the same samples raised elsewhere before.

        nodes: the number of nodes now; with several, another worker on one node proves nothing.
        alone: whether there is only one worker; then its next process counts as elsewhere.
        """
        before = self._samples.add(task, (worker, node))
        there = [place for place in before if node not in place]
        others = [place for place in before if worker not in place] if nodes == 1 else []
        return bool(there or others or (before and alone))
