"""Values and states as plain JSON: everything comes back, and only what is known is built."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf, isnan, nan
from typing import Any

import pytest

import paceline as pl
from paceline.core import protocol
from paceline.core.ledger import Ledger
from paceline.core.protocol import (
    Assign,
    Cancel,
    Discard,
    Event,
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
from paceline.core.state import decode, describe, encode, load_state, save_state

TASK = Task(3, "w1", Work({2: -1.0}, 4, 2, 1.5, ("row", 1)), 7, 0.25, 4, 12, 2)

VALUES: list[Any] = [
    *(None, True, 0, -5, 2**70, 0.1, -0.0, 1e-300, inf, -inf, "", "é\n", "type"),
    *([], [1, [2.5, None]], (), (1, ("a", inf)), {1, 2}, frozenset({"a", "b"}), set()),
    *({}, {"a": {"b": [1]}}, {"type": "Task"}, {"type": None}, {"nested": {"type": (1,)}}),
    *({1: "a", "1": "b"}, {(1, "x"): inf}, {None: 1, True: 2}),
    OrderedDict([("z", 1), ("a", 2)]),
    OrderedDict([(5, TASK), (1, None)]),
    *(Work(), Work(samples=3), TASK, Result(TASK, 2.0, 8, 0.5, {"loss": 1.0})),
    *(Joined("w0"), Left("w0"), Received("w1"), TimerFired("t"), Interrupted("why")),
    *(Finished(1, 8), Finished(1, 8, 2.0, {"loss": inf}), Stepped(3), Stepped(3, {"dot": -1.0})),
    *(Assign("w0"), Assign("w0", Work(steps=2), 4), Start(TASK), Cancel(1), Discard(2)),
    *(Step({1: 0.5, 0: 0.5}), Step({1: 1.0}, {"w1": 0.5}, True), Send("w1")),
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


# --- states --------------------------------------------------------------------------------------


@dataclass
class Arm:
    pulls: int = 0
    mean: float = inf


@dataclass(frozen=True)
class Choice:
    arm: Arm = field(default_factory=Arm)
    seen: tuple[str, ...] = ()


def double(value: float) -> float:
    return 2 * value


def triple(value: float) -> float:
    return 3 * value


@dataclass
class Thinker:
    """A policy with everything a policy may have."""

    choice: Choice = field(default_factory=Choice)
    rule: Callable[[float], float] = double
    kind: type[Arm] = Arm
    work: Work = Work()
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    history: list[float] = field(default_factory=list)
    best: dict[int, float] = field(default_factory=dict)
    wants: frozenset[Any] = frozenset({"loss"})

    def react(self, view: View, event: Event) -> Any:
        return iter(())


def saved_thinker() -> tuple[Thinker, Any]:
    thinker = Thinker()
    thinker.choice.arm.pulls, thinker.choice.arm.mean = 3, 0.5
    object.__setattr__(thinker.choice, "seen", ("w1", "w2"))
    thinker.rng.random()
    thinker.history.append(1.5)
    thinker.best[4] = -inf
    thinker.work = Work(samples=3)
    return thinker, json.loads(json.dumps(save_state(thinker), allow_nan=False))


def test_a_policy_with_objects_within_comes_back() -> None:
    thinker, data = saved_thinker()
    fresh = Thinker()
    arm = fresh.choice.arm
    load_state(fresh, data)
    assert fresh.choice == thinker.choice
    assert fresh.choice.arm is arm  # filled, not replaced
    assert (fresh.history, fresh.best, fresh.work) == ([1.5], {4: -inf}, Work(samples=3))
    assert fresh.rng.random() == thinker.rng.random()


def test_functions_and_classes_are_never_saved() -> None:
    _, data = saved_thinker()
    assert set(data["fields"]) == {"choice", "work", "rng", "history", "best", "wants"}
    assert "double" not in json.dumps(data)
    other = Thinker(rule=triple)
    load_state(other, data)
    assert other.rule is triple  # code is the recipe's
    assert other.kind is Arm


def test_a_function_with_arguments_bound_is_left_as_it_is() -> None:
    first, second = Thinker(rule=partial(pow, 2)), Thinker(rule=partial(pow, 3))
    data = save_state(first)
    load_state(second, json.loads(json.dumps(data)))
    assert second.rule(2) == 9
    assert "rule" not in data["fields"]


class Hooked:
    def __init__(self, value: int) -> None:
        self.value = value
        self.scratch = object()  # could not be saved

    def state_dict(self) -> dict[str, Any]:
        return {"value": (self.value,)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (self.value,) = state["value"]


def test_a_policy_may_say_itself_what_it_keeps() -> None:
    data = json.loads(json.dumps(save_state(Hooked(7))))
    assert data == {
        "class": "Hooked",
        "state": {"value": {"type": "tuple", "items": [7]}},
    }
    fresh = Hooked(0)
    load_state(fresh, data)
    assert fresh.value == 7


def test_the_hooks_of_an_object_within_are_used() -> None:
    outer, fresh = pl.MinWorkers(2, Hooked(7)), pl.MinWorkers(2, Hooked(0))  # type: ignore[arg-type]
    load_state(fresh, save_state(outer))
    assert fresh.inner.value == 7  # type: ignore[attr-defined]


def test_the_state_of_another_class_is_refused() -> None:
    with pytest.raises(ValueError) as refusal:
        load_state(pl.deadline(1.0), save_state(pl.sync()))
    assert str(refusal.value) == (
        "the saved state is of Gather, but Deadline was given; "
        "resume with the policy that the run was started with"
    )
    with pytest.raises(ValueError, match="is of Gather, but Deadline was given"):
        load_state(pl.Until(pl.deadline(1.0)), save_state(pl.Until(pl.sync())))


def test_a_field_of_another_version_is_refused() -> None:
    data = save_state(pl.sync())
    data["fields"]["patience"] = {"value": 1}
    with pytest.raises(ValueError, match="Gather has no field 'patience'; was it saved by another"):
        load_state(pl.sync(), data)


def test_what_cannot_be_saved_is_told_when_saving() -> None:
    thinker = Thinker()
    thinker.history.append(object())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"define state_dict\(\) and load_state_dict\(\)"):
        save_state(thinker)


def test_the_books_come_back() -> None:
    ledger = Ledger(8)
    for worker in ("w2", "w0", "w1"):
        ledger.record(0.0, Joined(worker))
    ledger.apply(Assign("w0"))
    ledger.apply(Assign("w2", Work(budget=inf)))
    ledger.record(1.0, Finished(1, 8, 1.0, {"loss": 2.0}))
    ledger.record(1.0, Left("w0"))
    fresh = Ledger(1)
    load_state(fresh, json.loads(json.dumps(save_state(ledger), allow_nan=False)))
    assert same(vars(fresh), vars(ledger))


def test_books_from_before_shares_were_counted_come_back_as_well() -> None:
    ledger = Ledger(8)
    for worker in ("w0", "w1", "w2"):
        ledger.record(0.0, Joined(worker))
        ledger.apply(Assign(worker))
    ledger.record(1.0, Finished(0, 8))
    old = save_state(ledger)
    for name in ("gathered", "_shares", "message_bytes", "prices"):
        del old["fields"][name]
    fresh = Ledger(8)
    fresh.restore(old)
    assert same(vars(fresh), vars(ledger))
    assert (fresh.gathered, fresh.outstanding(inf)) == (1, 2)


# --- descriptions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("thing", "told"),
    [
        (pl.sync(), "Gather()"),
        (pl.k_sync(3), "Gather(k=3)"),
        (
            pl.asynchronous(4),
            "Gather(k=1, max_delay=4, refill=True, preempt=False, combine=faded)",
        ),
        (
            pl.Until(pl.deadline(2.0, 1.0), steps=5),
            "Until(inner=Deadline(period=2.0, budget=1.0), steps=5)",
        ),
        (pl.MinWorkers(2, pl.sync()), "MinWorkers(n=2, inner=Gather())"),
        (pl.Gather(work=Work(steps=3)), "Gather(work=Work(steps=3))"),
        (partial(double, value=Work(steps=2)), "partial(double, value=Work(steps=2))"),
        (pl.Gather(combine=partial(triple, 2.0)), "Gather(combine=partial(triple, 2.0))"),
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
        protocol.Task(1, "w0", protocol.Work(tiles={0: 2, 3: 1}), 2, 0.5, 3, 0, draws=(4, 5)),
        protocol.Task(1, "w0", protocol.Work(steps=3, tag=("row", 1)), 2, 0.5, 8, 16, 3),
        protocol.Task(1, "w0", protocol.Work({0: (1.0, 2.0)}, cut=4), 2, 0.5, 8, 16),
    ],
    ids=describe,
)
def test_tasks_are_read_back_however_odd(task: protocol.Task) -> None:
    data = json.loads(json.dumps(encode(protocol.Start(task)), allow_nan=False))
    assert decode(data) == protocol.Start(task)
