"""Which workers may compute a task again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.core.protocol import Task, Work
from paceline.engines.ray.job import RayJob, _Order
from paceline.engines.ray.place import Place
from paceline.engines.ray.pool import Member


@pytest.mark.parametrize(
    ("avoid", "joined", "may"),
    [
        ("", "ABC", "ABC"),
        ("C", "ABC", "AB"),
        ("C", "AC", "A"),
        ("C", "C", "C"),  # there is no other
        ("D", "ABC", "ABC"),
    ],
)
def test_a_task_avoids_a_node_if_there_are_others(avoid: str, joined: str, may: str) -> None:
    members = {
        node: Member(node, 0, None, Place(node, 1, "0"), joined=node in joined) for node in "ABC"
    }
    job: Any = SimpleNamespace(_pool=SimpleNamespace(members=members))
    order: Any = _Order(Task(0, "C", Work(), 0, 0.0, 8, 0), SimpleNamespace(), avoid=avoid)
    found = [node for node in joined if RayJob._may_have(job, members[node], order)]
    assert "".join(found) == may
