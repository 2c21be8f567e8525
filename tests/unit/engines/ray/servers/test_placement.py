"""A server goes to the alive worker node with the fewest servers."""

from __future__ import annotations

from collections import Counter

from paceline.engines.ray.servers.placement import Placement

NAMES = ["s0", "s1", "s2", "s3"]


def test_servers_stay_spread_as_all_nodes_are_replaced() -> None:
    workers = ["A", "B", "C", "D"]
    placement = Placement(dict(zip(NAMES, workers, strict=True)), lambda: workers)
    for i in range(8):
        lost = workers[i % 4]
        workers[i % 4] = f"x{i}"
        for name in [name for name, node in placement.nodes.items() if node == lost]:
            placement.choose(name, workers)
        assert Counter(placement.nodes.values()) == Counter(workers)


def test_a_new_node_is_chosen_before_one_that_has_a_server() -> None:
    workers = ["D", "x1", "x2", "x3"]
    placement = Placement(dict(zip(NAMES, "ABCD", strict=True)), lambda: workers)
    for name in NAMES[:3]:
        placement.choose(name, workers)
    assert sorted(placement.nodes.values()) == workers


def test_a_process_that_died_starts_again_where_its_copies_are() -> None:
    workers = ["A", "B", "C"]
    placement = Placement({"s0": "B", "s1": "C"}, lambda: workers)
    assert placement.choose("s0", workers) == "B"
    placement.avoid("s0")
    assert placement.choose("s0", workers) == "A"
    assert placement.choose("s0", ["B"]) == "B"  # better than none
    assert placement.choose("s0", []) is None


def test_nodes_without_workers_are_the_last_choice() -> None:
    placement = Placement({"s0": "A", "s1": "B"}, lambda: ["B"])
    assert placement.choose("s0", ["B", "head"]) == "B"
    assert Placement({"s0": "A"}, lambda: ["A"]).choose("s0", ["head"]) == "head"


def test_a_server_leaves_the_only_node_with_workers_if_it_does_not_start_there() -> None:
    """Its copies may be on a node that this one cannot fetch from."""
    placement = Placement({"s0": "a"}, lambda: ["a"])
    placement.avoid("s0")
    assert placement.choose("s0", {"a", "b"}) == "a"  # a second chance
    placement.avoid("s0")
    assert placement.choose("s0", {"a"}) == "a"
    assert placement.choose("s0", {"a", "b"}) == "b"


def test_a_server_that_fails_tries_all_nodes_in_turn_until_it_works() -> None:
    """Its slices may have copies on two nodes, which only a third one can fetch."""
    placement = Placement({"s0": "a"}, lambda: ["a", "b"])
    tried = []
    for _ in range(8):
        placement.avoid("s0")
        tried.append(placement.choose("s0", "abc"))
    assert tried == [*"bbacccab"]
    placement.works("s0")
    placement.avoid("s0")
    assert placement.choose("s0", "abc") == "a"


def test_a_server_goes_where_all_workers_can_be_reached() -> None:
    workers = ["A", "B", "C"]
    placement = Placement({"s0": "A", "s1": "B", "s2": "C"}, lambda: workers)
    placement.cut.add(frozenset("AB"))
    assert placement.choose("s0", workers) == "C" and placement.choose("s1", workers) == "C"
    assert placement.cut_off("A") == ["B"] and not placement.has_reaching("AB")
    assert placement.choose("s2", ["A", "B", "head"]) == "head"


def test_a_server_that_is_left_out_does_not_count() -> None:
    placement = Placement({"s0": "A", "s1": "B", "s2": "A"}, lambda: ["A", "B"])
    placement.release("s0")
    placement.release("s2")
    assert placement.choose("s1", ["A", "B"]) == "B" and placement.choose("s0", ["A", "B"]) == "A"
