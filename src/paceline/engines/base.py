"""What the trainer needs of an engine beyond carrying commands out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Protocol

from paceline.core.coordinator import Coordinator
from paceline.core.journal import Entry, Header, Journal
from paceline.core.protocol import Engine, Policy, Want, WorkerId
from paceline.data.partition.base import Partition
from paceline.data.seeding import generator
from paceline.engines.node import Node
from paceline.learners.base import Array, Learner, Saved, Server

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec


@dataclass(frozen=True)
class Job:
    """One run, as an engine is told of it."""

    learner: Learner
    server: Server
    wants: frozenset[Want] = frozenset()
    seed: int = 0
    began: float = 0.0  # the time already spent when a run is resumed
    steps: int = 0  # the version already reached
    min_workers: int = 1  # how many must be up before the clock starts
    tiles: Partition | None = None  # of the data, where each has samples of its own
    codec: Codec | None = None  # of results on their way
    down: Codec | None = None  # of models on theirs


class TrainingEngine(Engine, Protocol):
    """An engine with workers of its own. Between `open` and `close` it serves one job."""

    @property
    def size(self) -> int:
        """The number of workers it will report as joined."""

    def open(self, job: Job, saved: Saved | None = None) -> None:
        """Begin a job; with `saved`, exactly where an earlier one was."""

    def save(self) -> Saved | None:
        """Return what `open` needs to go on exactly here; None if work in flight cannot be."""

    def settle(self) -> None:
        """Bring the job's server to the newest version, wherever the engine keeps the model."""

    def interrupt(self, reason: str) -> None:
        """Report `Interrupted` next. May be called from a signal handler."""

    def now(self) -> float:
        """Return the seconds that have passed on this engine's clock."""

    def close(self) -> None: ...

    def peers(self) -> PeersEngine:
        """Return what runs jobs without a main node on the same workers."""


@dataclass(frozen=True)
class PeersJob:
    """One run without a main node, as an engine is told of it."""

    learner: Learner
    policy: Policy  # of each node: a recipe
    headers: Mapping[WorkerId, Header]  # of each node's journal
    seed: int = 0
    tiles: Partition | None = None  # of the data, one for each node
    codec: Codec | None = None  # of letters
    seconds: float = inf  # after which it ends, also if nothing happens any more

    def coordinator(self, node: WorkerId) -> Coordinator:
        """Make the coordinator of a node, whose journal is kept elsewhere."""
        header = self.headers[node]
        return Coordinator(self.policy, header.batch, Journal(header, keep=False))

    def node(self, name: WorkerId) -> Node:
        """Make a node."""
        peer = self.headers[name].peer
        assert peer is not None
        wants = self.policy.wants
        seed = self.seed
        if self.tiles is None:  # equal draws would otherwise be the same on all nodes
            seed = int(generator(seed, list(self.headers).index(name)).integers(1 << 62))
        return Node(peer, self.learner, seed, self.tiles, self.codec, wants)


class PeersEngine(Protocol):
    """Runs a node on each worker, each with a coordinator of its own."""

    reason: str | None  # why it was stopped

    def entries(self, job: PeersJob) -> Iterator[tuple[WorkerId, Entry]]:
        """Train until `stop` is called, yielding what happened at each node."""

    def stop(self, reason: str) -> None:
        """Have all nodes stop. May be called from a signal handler."""

    def now(self) -> float:
        """Return the seconds that have passed on this engine's clock."""

    def vectors(self) -> dict[WorkerId, Array]:
        """Return the models of all nodes that are there."""

    def close(self) -> None: ...
