"""Which workers may compute a task again, and when it is sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.core.protocol import Task, Work
from paceline.engines.ray.job import RayJob, _Order
from paceline.engines.ray.place import Place
from paceline.engines.ray.pool import Member
from paceline.engines.ray.servers.slices import Object, Version


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


@pytest.mark.parametrize(
    ("attempts", "taken", "missing", "gone", "ready"),
    [
        (0, False, {0}, False, True),  # its slices are about to be made
        (1, True, {0}, False, False),
        (1, True, set[int](), False, True),
        (1, True, {0}, True, True),  # nothing will come: the attempt fails, and the task is dropped
    ],
)
def test_a_second_attempt_waits_for_a_model_that_can_still_come(
    attempts: int, taken: bool, missing: set[int], gone: bool, ready: bool
) -> None:
    model = Version(3, [(0, 4)], [Object()], taken=taken, missing=missing, gone=gone)
    order: Any = _Order(Task(0, "A", Work(), 3, 0.0, 8, 0), model, attempts)
    assert order.is_ready() is ready
