"""Values as plain JSON: everything comes back, and only what is known is built."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Collection
from functools import partial
from math import inf, isnan, nan
from typing import Any

import pytest

import paceline as pl
from paceline.core import protocol
from paceline.core.protocol import (
    Assign,
    Cancel,
    Discard,
    Evaluated,
    Finished,
    Interrupted,
    Joined,
    Left,
    Received,
    Result,
    Send,
    SetTimer,
    Start,
    Step,
    Stepped,
    Stop,
    Task,
    TimerFired,
    View,
    Work,
)
from paceline.core.state import decode, describe, encode

TASK = Task(3, "w1", Work({2: -1.0}, 4, 2, budget=1.5, tag=("row", 1)), 7, 0.25, 4, 12, 2)

VALUES: list[Any] = [
    *(None, True, 0, -5, 2**70, 0.1, -0.0, 1e-300, inf, -inf, "", "é\n", "type"),
    *([], [1, [2.5, None]], (), (1, ("a", inf)), {1, 2}, frozenset({"a", "b"}), set()),
    *({}, {"a": {"b": [1]}}, {"type": "Task"}, {"type": None}, {"nested": {"type": (1,)}}),
    *({1: "a", "1": "b"}, {(1, "x"): inf}, {None: 1, True: 2}),
    OrderedDict([("z", 1), ("a", 2)]),
    OrderedDict([(5, TASK), (1, None)]),
    *(Work(), Work(samples=3), TASK, Result(TASK, 2.0, 8, 0.5, {"loss": 1.0})),
    *(Joined("w0"), Left("w0"), Received("w1"), TimerFired("t"), Interrupted("why")),
    *(Evaluated(3, {"loss": 1.0}), Evaluated(3, {"loss": inf}, "max")),
    *(Finished(1, 8), Finished(1, 8, 2.0, {"loss": inf}), Stepped(3), Stepped(3, {"dot": -1.0})),
    *(Assign("w0"), Assign("w0", Work(steps=2), 4), Start(TASK), Cancel(1), Discard(2)),
    *(Step({1: 0.5, 0: 0.5}), Step({1: 1.0}, {"w1": 0.5}, True), Send(("w1",))),
    *(SetTimer("t", 1.5), SetTimer("t", inf), Stop("done")),
]


def through_json(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value), allow_nan=False)))


def same(one: Any, other: Any) -> bool:
    """Hold two values against each other with their types, orders and signs."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)


@pytest.mark.parametrize(
    "value", VALUES, ids=[f"{type(value).__name__}-{at}" for at, value in enumerate(VALUES)]
)
def test_every_value_comes_back(value: Any) -> None:
    back = through_json(value)
    assert back == value
    assert type(back) is type(value)
    if not isinstance(value, set | frozenset):
        assert same(back, value)


def test_a_nan_comes_back() -> None:
    back = through_json(Finished(1, 8, 0.0, {"loss": nan}))
    assert isnan(back.stats["loss"])
    assert back == through_json(Finished(1, 8, 0.0, {"loss": float("nan")}))  # though nan != nan


def test_a_step_keeps_the_order_of_its_weights() -> None:
    weights = {5: 0.25, 1: 0.5, 3: 0.25}
    assert list(through_json(Step(weights)).weights) == [5, 1, 3]


def test_a_random_generator_goes_on_where_it_was() -> None:
    generator = random.Random(7)
    generator.gauss(0, 1)  # keeps a second value in hand
    back = through_json(generator)
    assert [back.gauss(0, 1) for _ in range(5)] == [generator.gauss(0, 1) for _ in range(5)]
    assert back.random() == generator.random()


def test_the_written_form() -> None:
    """A file of today must be readable tomorrow, so the form is spelled out here."""
    assert encode(Work()) == {"type": "Work"}  # defaults are left out
    assert encode(Finished(3, 8, 0.5)) == {
        "type": "Finished",
        "task": 3,
        "samples": 8,
        "seconds": 0.5,
    }
    assert encode(Step({1: 0.5})) == {
        "type": "Step",
        "weights": {"type": "dict", "items": [[1, 0.5]]},
    }
    assert encode(inf) == {"type": "float", "value": "inf"}
    assert encode({3, 1, 2}) == {"type": "set", "items": [1, 2, 3]}
    assert encode({"a": (1,)}) == {"a": {"type": "tuple", "items": [1]}}


@pytest.mark.parametrize(
    "data",
    [
        {"type": "os.system", "command": "true"},
        {"type": "Ledger"},
        {"type": "Random2", "state": []},
        {"type": 5},
        {"type": ["Task"]},
        [1, {"a": {"type": "builtins.eval", "items": []}}],
        {"type": "tuple", "items": [{"type": "object"}]},
        {"type": "Start", "task": {"type": "subprocess.Popen", "args": ["true"]}},
    ],
    ids=describe,
)
def test_only_known_types_are_built(data: Any) -> None:
    with pytest.raises(ValueError, match=r"unknown type .* in saved data; known: \['Assign', "):
        decode(data)


@pytest.mark.parametrize(
    "value",
    [object(), b"bytes", 1j, [object()], {"a": print}],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_plain_form_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"cannot be saved; policies keep numbers, strings, lists"):
        encode(value)


class Arm:
    pass


def double(value: Work) -> Work:
    return Work(steps=2 * value.steps)


def triple(weight: float, view: View, results: Collection[Result]) -> dict[int, float]:
    return {result.task.id: 3 * weight for result in results}


# --- descriptions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("thing", "told"),
    [
        (pl.sync(), "Gather()"),
        (pl.k_sync(3), "Gather(k=3)"),
        (
            pl.asynchronous(4),
            "Gather(k=1, max_staleness=4, refill=True, preempt=False, combine=staleness_weighted)",
        ),
        (
            pl.policies.Until(pl.deadline(2.0, 1.0), steps=5),
            "Until(inner=Deadline(period=2.0, budget=1.0), steps=5)",
        ),
        (pl.policies.MinWorkers(2, pl.sync()), "MinWorkers(n=2, inner=Gather())"),
        (pl.policies.Gather(work=Work(steps=3)), "Gather(work=Work(steps=3))"),
        (partial(double, value=Work(steps=2)), "partial(double, value=Work(steps=2))"),
        (pl.policies.Gather(combine=partial(triple, 2.0)), "Gather(combine=partial(triple, 2.0))"),
        (len, "len"),
        (Arm, "Arm"),
        ([1, "a"], "[1, 'a']"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_recipe_is_told_as_its_user_would_write_it(thing: Any, told: str) -> None:
    assert describe(thing) == told


def test_what_a_policy_has_come_to_is_no_part_of_its_recipe() -> None:
    policy = pl.sync()
    before = describe(policy)
    policy._quota = 5
    assert describe(policy) == before


@pytest.mark.parametrize("seconds", [0.0, 1.5, inf, nan])
@pytest.mark.parametrize("waited", [0.0, 2.0, inf])
@pytest.mark.parametrize("stats", [{}, {"loss": 1.0}, {"loss": nan}, {"loss": inf, "norm": 1.0}])
def test_results_are_read_back_however_odd(seconds: float, waited: float, stats: Any) -> None:
    event = protocol.Finished(3, 8, seconds, stats, waited, sent=5)
    data = json.loads(json.dumps(encode(event), allow_nan=False))
    assert repr(decode(data)) == repr(event)


@pytest.mark.parametrize(
    "task",
    [
        protocol.Task(1, "w0", protocol.Work(), 2, 0.5, 8, 16),
        protocol.Task(1, "w0", protocol.Work(samples=4), 2, 0.5, 4, 16, attempt=2),
        protocol.Task(1, "w0", protocol.Work(samples=4, shares=2), 2, inf, 4, 16),
        protocol.Task(
            1, "w0", protocol.Work(tiles={0: 2, 3: 1}), 2, 0.5, 3, 0, tile_offsets=(4, 5)
        ),
        protocol.Task(1, "w0", protocol.Work(steps=3, tag=("row", 1)), 2, 0.5, 8, 16, 3),
        protocol.Task(1, "w0", protocol.Work({0: (1.0, 2.0)}, n_parts=4), 2, 0.5, 8, 16),
    ],
    ids=describe,
)
def test_tasks_are_read_back_however_odd(task: protocol.Task) -> None:
    data = json.loads(json.dumps(encode(protocol.Start(task)), allow_nan=False))
    assert decode(data) == protocol.Start(task)
