"""The description of one decentralized run that its engine receives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any

from paceline.core.coordinator import Coordinator
from paceline.core.journal import Header, Journal
from paceline.core.policy import Policy
from paceline.core.protocol import Event, Joined, Left, WorkerId
from paceline.data.partition.base import Partition
from paceline.data.seeding import generator
from paceline.gossip.node import Node
from paceline.gossip.policy import Gossip
from paceline.learners.base import Learner, Saved

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec


@dataclass(frozen=True)
class Return:
    """The state in which a node joins again.

    state: of its coordinator, after the node left.
    began: seconds that have passed in the run.
    deaths: of each node so far.
    """

    state: Mapping[str, Any]
    began: float
    deaths: Mapping[WorkerId, int]


@dataclass(frozen=True)
class NodeState:
    """The state of a node, from which it can continue: its server and its coordinator."""

    server: Saved
    coordinator: Mapping[str, Any]


@dataclass(frozen=True)
class GossipJob:
    """The learner, policy, data and codec that all nodes share."""

    learner: Learner
    policy: Policy  # each node runs a copy of it
    headers: Mapping[WorkerId, Header]  # of each node's journal
    seed: int = 0
    tiles: Partition | None = None  # the data shards, one for each node
    codec: Codec | None = None  # encodes messages
    seconds: float = inf  # after which the run ends, even if no event comes
    resumed: Mapping[WorkerId, NodeState] = field(default_factory=dict)  # of all nodes, or none

    @property
    def began(self) -> float:
        """The seconds that had passed in the run before it was resumed."""
        nows = [self.coordinator(node).ledger.now for node in self.resumed]
        return max(nows, default=0.0)

    def coordinator(self, node: WorkerId) -> Coordinator:
        """Make the coordinator of a node; the caller keeps its journal."""
        header = self.headers[node]
        made = Coordinator(self.policy, header.batch, Journal(header, keep=False))
        if node in self.resumed:
            made.load(self.resumed[node].coordinator)
        return made

    def as_left(self, node: WorkerId, state: NodeState) -> NodeState:
        """Return a state as it is after the node left, while all its peers are there.

        All nodes of a resumed run start together and have no copies of each other.
        """
        coordinator = replace(self, resumed={node: state}).coordinator(node)
        ledger, policy = coordinator.ledger, coordinator.policy
        assert isinstance(policy, Gossip)
        ledger.stopped = None
        events: list[Event] = [Left(node)] if node in ledger.workers else []
        events += [Joined(peer) for peer in sorted(policy._gone)]
        for event in events:
            coordinator.handle(ledger.now, event)
        return replace(state, coordinator=coordinator.state())

    def node(self, name: WorkerId) -> Node:
        """Make a node."""
        peer = self.headers[name].peer
        assert peer is not None
        wants = self.policy.wants
        seed = self.seed
        if self.tiles is None:  # with one seed all nodes would sample the same data
            seed = int(generator(seed, list(self.headers).index(name)).integers(1 << 62))
        return Node(peer, self.learner, seed, self.tiles, self.codec, wants)
