"""The server and worker processes of a job, and how the recovery machine sees them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from paceline.engines.ray.calls import Calls
from paceline.engines.ray.pool import Pool
from paceline.engines.ray.servers.placement import Placement
from paceline.engines.ray.servers.transfers import Transfers
from paceline.engines.ray.transport.calls import Transport
from paceline.engines.ray.worker import Token


@dataclass(frozen=True)
class Processes:
    """The servers and workers of a job, and how to call them.

    secret: of the processes that may connect to each other.
    timeout, start_timeout: seconds for a call, and for the start of a server.
    sum_on_nodes: whether results of one node are added up before they leave it.
    chunks: of the model, in each of which every server has a slice.
    adapts: whether a worker whose messages take longer gets fewer samples.
    """

    servers: Pool
    placement: Placement
    workers: Pool
    transport: Transport
    secret: bytes | None
    calls: Calls
    timeout: float
    start_timeout: float
    sum_on_nodes: bool = False
    chunks: int = 1
    adapts: bool = False


class RayFleet:
    """The machine's view of the processes."""

    def __init__(self, processes: Processes, transfers: Transfers) -> None:
        self._servers, self._workers = processes.servers, processes.workers
        self._cluster, self._transfers = processes.servers.cluster, transfers

    @property
    def now(self) -> float:
        return self._cluster.clock()

    @property
    def workers(self) -> int:
        return len(self._workers.members)

    @property
    def probing(self) -> bool:
        return self._transfers.running

    def alive(self) -> Collection[str]:
        return self._cluster.nodes()

    def worker_nodes(self) -> Sequence[str]:
        return self._workers.nodes()

    def has_worker(self, token: Token) -> bool:
        member = self._workers.members.get(token.worker)
        return member is not None and member.joined and member.incarnation == token.incarnation

    def has(self, server: str) -> bool:
        return server in self._servers.members

    def joined(self, server: str) -> bool:
        return self._servers.members[server].joined

    def node(self, server: str) -> str:
        place = self._servers.members[server].place
        return place.node if place else ""

    def address(self, node: str) -> str:
        return self._cluster.address(node)
