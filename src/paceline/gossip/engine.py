"""The engines of decentralized training: one node on each worker of a training engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from paceline.core.journal import Entry
from paceline.core.protocol import WorkerId
from paceline.engines.base import TrainingEngine
from paceline.engines.simulator import SimulatedWorkers
from paceline.gossip.job import GossipJob, NodeState
from paceline.gossip.simulated import SimulatedGossip
from paceline.learners.base import Array


class GossipEngine(Protocol):
    """Runs a node on each worker, each with a coordinator of its own."""

    reason: str | None  # why `stop` was called

    def entries(self, job: GossipJob) -> Iterator[tuple[WorkerId, Entry]]:
        """Train until `stop` is called; yield the journal entries of all nodes."""

    def stop(self, reason: str) -> None:
        """Stop all nodes. A signal handler may call it."""

    def now(self) -> float:
        """Return the seconds that have passed on this engine's clock."""

    def vectors(self) -> dict[WorkerId, Array]:
        """Return the models of all nodes that are connected."""

    def states(self) -> dict[WorkerId, NodeState]:
        """Return the states of all nodes; that of a lost node has a neighbor's model."""

    def close(self) -> None: ...


def gossip_engine(engine: TrainingEngine) -> GossipEngine:
    """Return the engine that runs nodes on the workers that another engine lends."""
    match engine.lend():
        case SimulatedWorkers() as workers:
            return SimulatedGossip(workers)
        case workers:
            from paceline.gossip.ray.driver import RayGossip  # which needs ray

            return RayGossip(workers)
