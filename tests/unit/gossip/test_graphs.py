"""Graphs of neighbors: weights that keep the mean, closed forms of the gap, and lost nodes."""

from __future__ import annotations

from math import cos, log2, pi
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.gossip.graphs import (
    Graph,
    complete,
    exponential,
    hierarchical,
    random_regular,
    ring,
    torus,
)

LINE = Graph({"a": ("b",), "b": ("a", "c"), "c": ("b", "d"), "d": ("c",)})
STAR = Graph({"hub": ("a", "b", "c"), "a": ("hub",), "b": ("hub",), "c": ("hub",)})
GRAPHS = {
    **{f"ring{n}": ring(n) for n in (2, 3, 4, 5, 8, 13)},
    "torus": torus(3, 4),
    "torus2": torus(2, 2),
    "exponential": exponential(11),
    "exponential2": exponential(2),
    "regular": random_regular(12, 3),
    "dense": random_regular(9, 6),
    "complete": complete(5),
    "hierarchical": hierarchical([4, 3, 1, 2]),
    "two_sites": hierarchical([2, 5]),
    "line": LINE,
    "star": STAR,
}


def connected(matrix: np.ndarray[Any, Any]) -> bool:
    """Tell by powers of the matrix, not by the search that the graph itself uses."""
    return bool((np.linalg.matrix_power(matrix + np.eye(len(matrix)), len(matrix)) > 0).all())


def check(graph: Graph) -> None:
    matrix = graph.matrix
    assert (matrix == matrix.T).all()
    assert matrix.sum(axis=0) == pytest.approx(np.ones(len(matrix)), abs=1e-12)
    assert matrix.min() >= 0 and np.diag(matrix).min() > 0
    assert connected(matrix)
    for at, (node, others) in enumerate(graph.neighbors.items()):
        assert node not in others and len(set(others)) == len(others)
        weights = graph.weights(node)
        assert tuple(weights) == others
        row = {graph.nodes[j]: matrix[at, j] for j in np.flatnonzero(matrix[at]) if j != at}
        assert row == weights


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS.keys())
def test_weights_are_doubly_stochastic(graph: Graph) -> None:
    check(graph)


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS.keys())
def test_without_any_node_the_rest_goes_on(graph: Graph) -> None:
    for node in graph.nodes:
        left = graph.without(node)
        assert left.nodes == tuple(other for other in graph.nodes if other != node)
        check(left)


def test_a_round_of_averaging_keeps_the_mean() -> None:
    x = np.random.default_rng(0).standard_normal((12, 3))
    assert (GRAPHS["torus"].matrix @ x).mean(0) == pytest.approx(x.mean(0), abs=1e-14)


# --- the gap -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [3, 4, 5, 8, 17, 100])
def test_the_gap_of_a_ring(n: int) -> None:
    assert set(ring(n).weights("w0").values()) == {1 / 3}
    assert ring(n).spectral_gap == pytest.approx(2 / 3 * (1 - cos(2 * pi / n)), rel=1e-9)


def test_the_gaps_of_the_digest() -> None:
    assert ring(8).spectral_gap == pytest.approx(0.195, abs=5e-4)
    assert ring(100).spectral_gap == pytest.approx(1.3e-3, abs=5e-5)


@pytest.mark.parametrize("n", [2, 3, 5, 9])
def test_the_gap_of_a_complete_graph_is_1(n: int) -> None:
    assert complete(n).spectral_gap == pytest.approx(1.0)


@pytest.mark.parametrize("n", [4, 8, 32, 256])
def test_the_gap_of_an_exponential_graph_falls_with_the_logarithm(n: int) -> None:
    # 2 log2(n) - 1 neighbors; the slowest pattern alternates, and only links of length 1 see it.
    assert len(exponential(n).neighbors["w0"]) == 2 * log2(n) - 1
    assert exponential(n).spectral_gap == pytest.approx(min(2 / log2(n), 1.0))
    assert exponential(n).spectral_gap > ring(n).spectral_gap


def test_the_gap_of_a_torus() -> None:
    # Weights of 1/5: the slowest pattern is a wave along the longer side.
    assert torus(4, 6).spectral_gap == pytest.approx(2 / 5 * (1 - cos(2 * pi / 6)))


def test_the_gap_sees_the_negative_end() -> None:
    # K_(3,3) has the eigenvalues 1, 1/4 and -1/2: the negative one is slower.
    one, other = ("a", "b", "c"), ("d", "e", "f")
    graph = Graph({**dict.fromkeys(one, other), **dict.fromkeys(other, one)})
    assert graph.spectral_gap == pytest.approx(0.5)


def test_of_random_graphs_the_gap_stays() -> None:
    gaps = [random_regular(n, 4, seed=1).spectral_gap for n in (50, 200, 500)]
    assert min(gaps) > 0.08
    assert ring(500).spectral_gap < 1e-4


# --- shapes --------------------------------------------------------------------------------------


def test_a_ring_of_two_has_one_link() -> None:
    assert ring(2).neighbors == {"w0": ("w1",), "w1": ("w0",)}
    assert ring(2).weights("w0") == {"w1": 0.5}


def test_a_torus_has_four_neighbors_around_the_borders() -> None:
    assert torus(3, 4).neighbors["w0"] == ("w1", "w3", "w4", "w8")
    assert torus(3, 4).neighbors["w6"] == ("w2", "w5", "w7", "w10")


def test_an_exponential_graph_has_powers_of_two() -> None:
    assert exponential(11).neighbors["w0"] == (*("w1", "w2", "w3", "w4", "w7", "w8", "w9", "w10"),)


def test_sites_are_dense_inside_and_linked_once() -> None:
    graph = hierarchical([3, 2, 4])
    site = {
        f"w{i}": at for at, nodes in enumerate(([0, 1, 2], [3, 4], [5, 6, 7, 8])) for i in nodes
    }
    across = [(i, j) for i, j in graph.edges if site[i] != site[j]]
    assert across == [("w0", "w3"), ("w1", "w5"), ("w4", "w6")]  # of six different nodes
    assert len(graph.edges) == 3 + 1 + 6 + 3
    assert len(hierarchical([3, 3]).edges) == 3 + 3 + 1
    assert hierarchical([5]) == complete(5)
    assert hierarchical([1, 1, 1, 1]) == ring(4)
    assert len(hierarchical([8] * 4, inside=exponential, between=complete).edges) == 4 * 20 + 6


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 24), st.data(), st.integers(0, 1 << 40))
def test_random_graphs_are_regular_and_seeded(n: int, data: st.DataObject, seed: int) -> None:
    legal = [d for d in range(1, n) if n * d % 2 == 0 and (d > 1 or n == 2)]
    degree = data.draw(st.sampled_from(legal))
    graph = random_regular(n, degree, seed)
    assert {len(others) for others in graph.neighbors.values()} == {degree}
    assert connected(graph.matrix)
    assert random_regular(n, degree, seed) == graph


def test_another_seed_is_another_graph() -> None:
    assert random_regular(20, 3, seed=0) != random_regular(20, 3, seed=1)
    # About one draw in seven is two rings of three, which are not connected.
    assert all(connected(random_regular(6, 2, seed).matrix) for seed in range(30))


# --- lost nodes ----------------------------------------------------------------------------------


def test_a_ring_stays_a_ring() -> None:
    left = ring(6).without("w2", "w3")
    assert left.neighbors == {
        **{"w0": ("w1", "w5"), "w1": ("w0", "w4")},
        **{"w4": ("w1", "w5"), "w5": ("w0", "w4")},
    }
    assert left.spectral_gap == pytest.approx(ring(4).spectral_gap)


def test_a_lost_hub_is_replaced_by_a_line() -> None:
    assert STAR.without("hub").edges == [("a", "b"), ("a", "c")]
    assert LINE.without("b").edges == [("a", "c"), ("c", "d")]


def test_a_lost_bridge_between_sites_is_replaced_by_another_node_of_its_site() -> None:
    left = hierarchical([3, 3]).without("w0")  # which was linked with w3
    across = [(i, j) for i, j in left.edges if i in ("w1", "w2") and j not in ("w1", "w2")]
    assert across == [("w1", "w3")]
    # Where all still hear of one another, around the ring of sites, it is replaced all the same.
    assert ("w1", "w3") in hierarchical([3, 3, 3]).without("w0").edges


def test_parts_are_linked_by_those_who_have_lost_most() -> None:
    graph = Graph(
        {"hub": ("a", "b", "c"), "a": ("hub",), "b": ("hub",), "z": ("c",), "c": ("hub", "z")}
    )
    assert graph.without("hub").edges == [("a", "b"), ("a", "c"), ("z", "c")]


def test_degrees_do_not_grow_with_every_death() -> None:
    graph = torus(6, 6)
    for lost in range(1, 30):
        left = graph.without(*graph.nodes[:lost])
        assert max(len(others) for others in left.neighbors.values()) <= 4
    assert random_regular(40, 4).without(*(f"w{i}" for i in range(0, 40, 2))).spectral_gap > 0.1


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(list(GRAPHS.values())), st.data())
def test_whoever_is_lost_in_whatever_order(graph: Graph, data: st.DataObject) -> None:
    gone = data.draw(st.permutations(graph.nodes)).copy()
    gone = gone[: data.draw(st.integers(0, len(gone) - 1))]
    left = graph.without(*gone)
    check(left)
    assert left == graph.without(*sorted(gone)) == graph.without(*gone, *gone)
    assert left.nodes == tuple(node for node in graph.nodes if node not in gone)
    kept = {edge for edge in graph.edges if not set(edge) & set(gone)}
    assert kept <= set(left.edges)  # nobody who is here is cut off from a neighbor
    if not gone:
        assert left == graph


# --- values --------------------------------------------------------------------------------------


def test_names() -> None:
    graph = ring(3).named(["x", "a", "m"])
    assert graph.nodes == ("x", "a", "m")
    assert graph.neighbors["a"] == ("x", "m")
    assert (graph.matrix == ring(3).matrix).all()


def test_the_order_of_neighbors_is_that_of_the_nodes() -> None:
    one = Graph({"a": ("b", "c"), "b": ("a", "c"), "c": ("b", "a")})
    other = Graph({"a": ("c", "b", "b"), "b": ("c", "a"), "c": ("a", "b")})
    assert one == other


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: ring(1), "a ring of 1 nodes; use n >= 2"),
        (lambda: complete(0), "use n >= 2"),
        (lambda: exponential(1), "use n >= 2"),
        (lambda: torus(1, 5), r"torus of 1 x 5 nodes.*ring\(n\)"),
        (lambda: random_regular(5, 3), "degree=3 with n=5.*an even degree if n is odd"),
        (lambda: random_regular(4, 4), "degree < n"),
        (lambda: random_regular(4, 1), "2 <= degree"),
        (lambda: hierarchical([]), r"sites=\[\]"),
        (lambda: hierarchical([3, 0]), "at least 1"),
        (lambda: ring(3).without("w3"), "no node 'w3'; it has 'w0', 'w1', 'w2'"),
        (lambda: ring(9).weights("x"), "'w4', …"),
        (lambda: ring(2).without("w0", "w1"), "nodes are gone"),
        (lambda: ring(3).named(["a", "b", "a"]), "got 3 names, 2 of them distinct, for 3 nodes"),
        (lambda: Graph({}), "at least one node"),
        (lambda: Graph({"a": ("a",)}), "'a' is its own neighbor"),
        (lambda: Graph({"a": ("b",), "b": ()}), "not the other way round"),
        (lambda: Graph({"a": ("b",)}), "not the other way round"),
        (
            lambda: Graph({"a": ("b",), "b": ("a",), "c": ("d",), "d": ("c",)}),
            "no path leads from 'a' to 'c': the graph falls into 2 parts",
        ),
    ],
)
def test_what_cannot_be_is_refused(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()
