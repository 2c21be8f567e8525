"""Communication graphs of decentralized training, and the weights of their links.

Every node computes the graph for itself, so a graph is a pure function of its arguments. Weights
are those of Metropolis and Hastings: symmetric, and adding up to 1 for every node (Xiao, Boyd and
Kim, 2007). The larger the spectral gap, the faster updates spread. A ring of n has one of about
13 / n^2, which is 1.3e-7 for 10,000 nodes. An exponential graph has one of the order of 1 / log n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, count, pairwise

import numpy as np
from numpy.typing import NDArray

from paceline.codes.placements import regular_graph
from paceline.core.protocol import WorkerId
from paceline.data.seeding import generator


@dataclass(frozen=True)
class Graph:
    """A connected graph without loops, given by the neighbors of each node."""

    neighbors: Mapping[WorkerId, tuple[WorkerId, ...]]

    def __post_init__(self) -> None:
        if not self.neighbors:
            raise ValueError("a graph needs at least one node")
        # A copy as plain data, in one order, which the caller cannot change.
        place = {node: at for at, node in enumerate(self.neighbors)}
        plain: dict[WorkerId, tuple[WorkerId, ...]] = {}
        for node, others in self.neighbors.items():
            for other in others:
                if other == node:
                    raise ValueError(
                        f"{node!r} is its own neighbor; leave it out, since every node counts "
                        "itself anyway"
                    )
                if node not in self.neighbors.get(other, ()):
                    raise ValueError(
                        f"{node!r} has the neighbor {other!r}, but not the other way round; "
                        "updates go both ways along a link"
                    )
            plain[node] = tuple(sorted(set(others), key=place.__getitem__))
        object.__setattr__(self, "neighbors", plain)
        if len(parts := _parts(plain)) > 1:
            raise ValueError(
                f"no path leads from {parts[0][0]!r} to {parts[1][0]!r}: the graph falls into "
                f"{len(parts)} parts; link them"
            )

    @property
    def nodes(self) -> tuple[WorkerId, ...]:
        return tuple(self.neighbors)

    @property
    def edges(self) -> list[tuple[WorkerId, WorkerId]]:
        """Every link once, the earlier node first."""
        place = {node: at for at, node in enumerate(self.neighbors)}
        pairs = ((node, other) for node, others in self.neighbors.items() for other in others)
        return [(node, other) for node, other in pairs if place[node] < place[other]]

    def weights(self, node: WorkerId) -> dict[WorkerId, float]:
        """Return the weight of each neighbor: 1 / (1 + the larger of both degrees).

        The rest of 1 is the node's own weight.
        """
        degree = len(self._of(node))
        return {
            other: 1 / (1 + max(degree, len(self.neighbors[other]))) for other in self._of(node)
        }

    @property
    def matrix(self) -> NDArray[np.float64]:
        """The weights of all nodes, in their order: symmetric, with rows and columns of sum 1."""
        place = {node: at for at, node in enumerate(self.neighbors)}
        matrix = np.zeros((len(place), len(place)))
        for node, at in place.items():
            for other, weight in self.weights(node).items():
                matrix[at, place[other]] = weight
        matrix[np.diag_indices_from(matrix)] = 1 - matrix.sum(axis=1)
        return matrix

    @property
    def spectral_gap(self) -> float:
        """1 less the factor by which a round of averaging shrinks differences; costs n^3."""
        if len(self.neighbors) == 1:
            return 1.0
        return 1.0 - float(np.sort(np.abs(np.linalg.eigvalsh(self.matrix)))[-2])

    def without(self, *gone: WorkerId) -> Graph:
        """Return the graph without some nodes, repaired where they were.

        Nodes are removed in the order of the graph, not in the order given. So nodes that learn of
        deaths in different orders compute the same graph. This holds if they start from the same
        first graph and remove all dead nodes.
        """
        for node in gone:
            self._of(node)
        links = {node: set(others) for node, others in self.neighbors.items()}
        place, dead = {node: at for at, node in enumerate(links)}, set(gone)
        for node in sorted(dead, key=place.__getitem__):
            others = sorted(links.pop(node), key=place.__getitem__)
            for other in others:
                links[other].remove(node)
            _pair(links, others)
        if not links:
            raise ValueError(f"all {len(place)} nodes are gone; no graph is left")
        # Few graphs are still disconnected. The node that lost most links joins each part.
        for parts in pairwise(_parts(links)):
            one, other = (
                min(
                    part,
                    key=lambda node: (len(links[node]) - len(self.neighbors[node]), place[node]),
                )
                for part in parts
            )
            _link(links, one, other)
        return Graph({node: tuple(others) for node, others in links.items()})

    def named(self, nodes: Sequence[WorkerId]) -> Graph:
        """Return the same graph with other names, in the order of its nodes."""
        if len(nodes) != len(self.neighbors) or len(set(nodes)) != len(nodes):
            raise ValueError(
                f"got {len(nodes)} names, {len(set(nodes))} of them distinct, for "
                f"{len(self.neighbors)} nodes; give each node its own name"
            )
        name = dict(zip(self.neighbors, nodes, strict=True))
        links = self.neighbors.items()
        return Graph({name[node]: tuple(name[other] for other in of) for node, of in links})

    def _of(self, node: WorkerId) -> tuple[WorkerId, ...]:
        if node not in self.neighbors:
            some = ", ".join([*map(repr, self.nodes[:5])] + ["…"] * (len(self.nodes) > 5))
            raise ValueError(f"the graph has no node {node!r}; it has {some}")
        return self.neighbors[node]


# --- constructors: nodes are w0, w1, … as the engines name them ----------------------------------


def ring(n: int) -> Graph:
    """Link every node with the one before and the one after it: 1/3 each.

    >>> ring(4).weights("w0")
    {'w1': 0.3333333333333333, 'w3': 0.3333333333333333}
    """
    _at_least(n, 2, "a ring")
    return _graph(n, ((i, (i + 1) % n) for i in range(n)))


def torus(rows: int, columns: int) -> Graph:
    """Link every node with those above, below, left and right, around the borders."""
    if min(rows, columns) < 2:
        raise ValueError(f"a torus of {rows} x {columns} nodes; use 2 or more each way, or ring(n)")
    down = ((at, (at + columns) % (rows * columns)) for at in range(rows * columns))
    right = ((at, at - at % columns + (at + 1) % columns) for at in range(rows * columns))
    return _graph(rows * columns, [*down, *right])


def exponential(n: int) -> Graph:
    """Link every node with those 1, 2, 4, … places before and after it.

    The static exponential graph of Ying et al. (2021, arXiv 2110.13363), where links go one way,
    made symmetric.
    """
    _at_least(n, 2, "an exponential graph")
    steps = [1 << k for k in range((n - 1).bit_length())]
    return _graph(n, ((i, (i + step) % n) for i in range(n) for step in steps))


def complete(n: int) -> Graph:
    """Link all pairs of nodes: one round of averaging is exact."""
    _at_least(n, 2, "a complete graph")
    return _graph(n, combinations(range(n), 2))


def random_regular(n: int, degree: int, seed: int = 0) -> Graph:
    """Link every node with `degree` others at random; from degree 3 on, n hardly changes the gap.

    The graph is drawn again until it is connected; from degree 3 on nearly every draw is.
    """
    _at_least(n, 2, "a random graph")
    if not 1 <= degree < n or n * degree % 2 or (degree == 1 and n > 2):
        raise ValueError(
            f"degree={degree} with n={n}: use 2 <= degree < n, and an even degree if n is odd"
        )
    # For more than half of all links, draw the missing ones, which are fewer.
    drawn = min(degree, n - 1 - degree)
    for attempt in count():
        chosen = int(generator(seed, attempt).integers(1 << 62))
        edges = regular_graph(n, drawn, chosen) if drawn else []
        if drawn < degree:
            missing = set(edges)
            edges = [pair for pair in combinations(range(n), 2) if pair not in missing]
        if len(_parts(_linked(n, edges))) == 1:
            return _graph(n, edges)
    raise AssertionError("unreachable: count() never ends")


def hierarchical(
    sites: Sequence[int],
    inside: Callable[[int], Graph] = complete,
    between: Callable[[int], Graph] = ring,
) -> Graph:
    """Link nodes within each site, and each pair of neighboring sites by one link.

    sites: the number of nodes of each site, which are numbered site by site. A site uses a
        different node for each link to another site, as long as it has enough nodes.
    """
    if not sites or min(sites) < 1 or sum(sites) < 2:
        raise ValueError(f"sites={sites!r}: give each site's nodes, at least 1, and 2 in all")
    first = [sum(sites[:at]) for at in range(len(sites))]
    edges = [
        (begin + i, begin + j)
        for begin, size in zip(first, sites, strict=True)
        if size > 1
        for i, j in _numbered(inside(size))
    ]
    turn = [0] * len(sites)
    for pair in _numbered(between(len(sites))) if len(sites) > 1 else ():
        i, j = (first[site] + turn[site] % sites[site] for site in pair)
        edges.append((i, j))
        for site in pair:
            turn[site] += 1
    return _graph(sum(sites), edges)


def _at_least(n: int, least: int, what: str) -> None:
    if n < least:
        raise ValueError(f"{what} of {n} nodes; use n >= {least}")


def _linked(n: int, edges: Iterable[tuple[int, int]]) -> dict[WorkerId, set[WorkerId]]:
    links: dict[WorkerId, set[WorkerId]] = {f"w{i}": set() for i in range(n)}
    for i, j in edges:
        _link(links, f"w{i}", f"w{j}")
    return links


def _graph(n: int, edges: Iterable[tuple[int, int]]) -> Graph:
    return Graph({node: tuple(others) for node, others in _linked(n, edges).items()})


def _numbered(graph: Graph) -> list[tuple[int, int]]:
    place = {node: at for at, node in enumerate(graph.nodes)}
    return [(place[one], place[other]) for one, other in graph.edges]


def _parts(links: Mapping[WorkerId, Iterable[WorkerId]]) -> list[list[WorkerId]]:
    """Return the nodes of each connected part, parts in the order of their first nodes."""
    parts: list[list[WorkerId]] = []
    seen: set[WorkerId] = set()
    for start in links:
        if start not in seen:
            seen.add(start)
            part = [start]
            for node in part:  # grows meanwhile
                new = [other for other in links[node] if other not in seen]
                seen.update(new)
                part += new
            parts.append(part)
    return parts


def _link(links: dict[WorkerId, set[WorkerId]], one: WorkerId, other: WorkerId) -> None:
    links[one].add(other)
    links[other].add(one)


def _pair(links: dict[WorkerId, set[WorkerId]], orphans: list[WorkerId]) -> None:
    """Link in pairs the nodes that lost a neighbor: a ring stays a ring, and no degree grows."""
    while orphans:
        one, *orphans = orphans
        other = next((each for each in orphans if each not in links[one]), None)
        if other is not None:
            orphans.remove(other)
            _link(links, one, other)
