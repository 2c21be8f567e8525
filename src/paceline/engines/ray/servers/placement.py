"""The node of each server: the alive worker node with the fewest servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

Pair = frozenset[str]
"""Two nodes."""


class Placement:
    """Chooses a node for each server process.

    nodes: of each server at the start.
    workers: returns the nodes that have workers, in a fixed order.
    """

    def __init__(self, nodes: Mapping[str, str], workers: Callable[[], Sequence[str]]) -> None:
        self.nodes, self.workers = dict(nodes), workers
        self.cut: set[Pair] = set()  # nodes that cannot fetch objects from each other
        self.leaving: frozenset[str] = frozenset()  # nodes that will be taken away
        self._failed: dict[str, Counter[str]] = {}  # how often a server failed on a node lately

    def avoid(self, name: str) -> None:
        """Start a server on another node, until it works or has failed on all."""
        self._failed.setdefault(name, Counter())[self.nodes[name]] += 1

    def works(self, name: str) -> None:
        """Forget where a server failed."""
        self._failed.pop(name, None)

    def release(self, name: str) -> None:
        """Stop counting a server."""
        self.nodes.pop(name, None)
        self._failed.pop(name, None)

    def choose(self, name: str, alive: Collection[str]) -> str | None:
        """Return the node for a new process of a server, and count it there; None if none is alive.

        Candidates are the worker nodes that stay and reach all others, without those where the
        server failed lately. If it has failed on all of them, each gets a second chance before the
        nodes without workers. The criteria, in this order:

        - the fewest other servers;
        - the node where the server was, since its copies are in that node's store;
        - the order of the nodes.
        """
        nodes = self._candidates(name, alive)
        count = Counter(node for other, node in self.nodes.items() if other != name)
        before = self.nodes.get(name)

        def rank(node: str) -> tuple[int, bool]:
            return count[node], node != before

        chosen = min(nodes, key=rank, default=None)
        if chosen is not None:
            self.nodes[name] = chosen
        return chosen

    def has_reaching(self, alive: Collection[str]) -> bool:
        """Return whether a node reaches all nodes that have workers, as far as is known."""
        return any(not self.cut_off(node) for node in alive)

    def _candidates(self, name: str, alive: Collection[str]) -> Sequence[str]:
        alive = {*alive} - self.leaving or alive
        workers = [node for node in self.workers() if node in alive]
        failed = self._failed.get(name, Counter())  # maybe they cannot fetch its copies
        for nodes, most in (workers, 0), (workers, 1), (sorted(alive), 1):
            reaching = [node for node in nodes if not self.cut_off(node)]
            if others := [node for node in reaching if failed[node] <= most]:
                return others
        nodes = reaching or workers or sorted(alive)
        fewest = min((failed[node] for node in nodes), default=0)
        return [node for node in nodes if failed[node] == fewest]

    def cut_off(self, node: str) -> list[str]:
        """Return the worker nodes that a node cannot reach."""
        return [other for other in self.workers() if frozenset((node, other)) in self.cut]
