"""Nodes that Ray drains: those of `ray drain-node`, and those that a worker has notice of."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

import ray
from ray._private.state import state
from ray.core.generated.autoscaler_pb2 import DrainNodeReason

from paceline.core.logs import logger_of

logger = logger_of(__name__)

_EVERY = 1.0  # seconds between two looks
_LEFT = 120.0  # seconds that a node may have left; AWS gives two minutes, the others less
_PREEMPTED = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")


def draining_nodes() -> set[str]:
    """Return the nodes that Ray will take away."""
    return set(state.get_draining_nodes())


def drain_node(node: str, why: str) -> None:
    """Have Ray start nothing more on a node, as `ray drain-node` does."""
    until = int(1000 * (time.time() + _LEFT))
    try:
        gcs = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
        accepted, reason = gcs.drain_node(node, _PREEMPTED, why, until)
    except Exception as error:  # of Ray; the workers leave all the same
        accepted, reason = False, str(error)
    if not accepted:
        logger.warning("Ray may start more processes on node %s: %s", node[:8], reason)


class Notices:
    """Looks in a thread which nodes Ray drains, and tells of each change.

    draining: returns the nodes that Ray drains now.
    tell: is called in the thread with all of them, when there are others than before.
    """

    def __init__(
        self, draining: Callable[[], Collection[str]], tell: Callable[[frozenset[str]], None]
    ) -> None:
        self._draining, self._tell = draining, tell
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True, name="paceline notices")
        self._thread.start()

    def end(self) -> None:
        """Stop looking."""
        self._ended.set()
        self._thread.join(timeout=10.0)

    def _look(self) -> None:
        known: frozenset[str] = frozenset()
        while not self._ended.wait(timeout=_EVERY):
            try:
                found = frozenset(self._draining())
            except Exception as error:  # Ray may be shutting down; the run must not end by it
                logger.debug("cannot ask Ray which nodes it drains: %s", error)
                continue
            if found != known and not self._ended.is_set():
                known = found
                self._tell(found)
