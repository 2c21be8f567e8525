"""Where parts lie: allocation by speed, and random designs."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.codes.placements import around, loads, regular_graph, scattered

SPEEDS = [1, 1, 1, 2, 2, 4, 4, 8]


@pytest.mark.parametrize(
    ("copies", "expected", "makespan"),
    [(2, [2, 2, 2, 4, 4, 9, 8, 17], 2.25), (4, [5, 5, 5, 10, 9, 19, 19, 24], 5.0)],
)
def test_loads_by_speed(copies: int, expected: list[int], makespan: float) -> None:
    given_ = loads(SPEEDS, 24, copies)
    assert given_ == expected
    assert max(load / speed for load, speed in zip(given_, SPEEDS, strict=True)) == makespan


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(1, 30), st.data())
def test_every_part_has_as_many_different_holders(
    speeds: list[int], parts: int, data: st.DataObject
) -> None:
    copies = data.draw(st.integers(1, len(speeds)))
    shares = loads(speeds, parts, copies)
    assert sum(shares) == parts * copies and max(shares) <= parts
    for rows in around(shares, parts):
        assert len(set(rows)) == len(rows) == copies


def test_speeds_that_cannot_be() -> None:
    for speeds in ([1.0, -1.0], [1.0, float("nan")], [1.0, 0.0], [1.0, float("inf")]):
        with pytest.raises(ValueError, match="2 copies of every part need as many workers"):
            loads(speeds, 4, 2)


@given(st.integers(1, 12), st.integers(1, 30), st.integers(0, 9), st.data())
def test_scattered(n: int, parts: int, seed: int, data: st.DataObject) -> None:
    copies = data.draw(st.integers(1, n))
    holders = scattered(n, parts, copies, seed)
    assert len(holders) == parts and all(len(set(rows)) == copies for rows in holders)
    count = Counter(row for rows in holders for row in rows)
    assert max(count[row] for row in range(n)) - min(count[row] for row in range(n)) <= 2


@given(st.integers(2, 24), st.integers(1, 6), st.integers(0, 9))
@settings(deadline=None)
def test_regular_graphs_are_simple(vertices: int, degree: int, seed: int) -> None:
    if degree >= vertices or vertices * degree % 2:
        with pytest.raises(ValueError, match="an even product"):
            regular_graph(vertices, degree, seed)
        return
    edges = regular_graph(vertices, degree, seed)
    assert all(u < v for u, v in edges) and len(set(edges)) == len(edges)
    assert Counter(v for edge in edges for v in edge) == dict.fromkeys(range(vertices), degree)
