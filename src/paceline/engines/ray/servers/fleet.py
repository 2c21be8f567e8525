"""The recovery machine's view of the cluster, and the settings of its job."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from paceline.core.protocol import Want
from paceline.learners.base import Layout

if TYPE_CHECKING:  # which needs ray
    from paceline.engines.ray.worker import Token


@dataclass(frozen=True)
class Settings:
    """The settings of a job, which stay constant.

    itemsize: the bytes of a value of the model on its way.
    rounded: whether workers get rounded values only. The exact values are then a part of the state.
    direct: whether results are in the process of their worker, and are lost with it.
    sum_on_nodes: whether results of one node are added up before they leave it.
    chunks: of the model, in each of which every server has a slice. So the slices of one chunk are
        added up and sent on while those of the next are under way.
    adapts: whether a worker whose messages take longer gets fewer samples.
    """

    layout: Layout
    itemsize: int
    needs_totals: bool
    wants: frozenset[Want]
    timeout: float
    direct: bool = False
    rounded: bool = False
    sum_on_nodes: bool = False
    chunks: int = 1
    adapts: bool = False


class Fleet(Protocol):
    """The servers and workers, read-only, current after each call of the machine."""

    @property
    def now(self) -> float:
        """Seconds on the cluster's clock."""

    @property
    def workers(self) -> int:
        """The number of workers."""

    @property
    def probing(self) -> bool:
        """Whether a probe is under way; a second one would be ignored."""

    def alive(self) -> Collection[str]:
        """Return the nodes that the cluster reports as alive."""

    def worker_nodes(self) -> Sequence[str]:
        """Return the nodes that have workers, each once."""

    def has_worker(self, token: Token) -> bool:
        """Return whether the process is there that got a task under this token."""

    def has(self, server: str) -> bool:
        """Return whether a server has a process, or one is being started."""

    def joined(self, server: str) -> bool:
        """Return whether the process of a server has come up."""

    def node(self, server: str) -> str:
        """Return the node of a server, "" until its process has come up."""

    def address(self, node: str) -> str:
        """Return how a message names a node."""
