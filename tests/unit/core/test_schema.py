"""Saved state has names and a version of its own, and a load that does not fit is refused."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.core.coordinator import Coordinator, replay
from paceline.core.journal import Header, Journal
from paceline.core.ledger import Ledger
from paceline.core.protocol import Assign, Event, Finished, Joined, Left, View, Work
from paceline.core.schema import Schema, SchemaError, converted, load_state, save_state
from paceline.core.state import describe
from tests.golden.checkpoints import declared


def through_json(thing: Any) -> Any:
    return json.loads(json.dumps(save_state(thing), allow_nan=False))


# --- declared ------------------------------------------------------------------------------------


@dataclass
class Average:
    weight: float = 0.5
    _mean: float = field(default=0.0, init=False)
    schema = Schema("average", 1, {"mean": "_mean"})


@dataclass
class Renamed:
    """What becomes of `Average` when its private field gets another name."""

    weight: float = 0.5
    _estimate: float = field(default=0.0, init=False)
    schema = Schema("average", 1, {"mean": "_estimate"})


@dataclass
class Pair:
    first: Any = field(default_factory=Average)
    second: Any = None
    _seen: tuple[str, ...] = field(default=(), init=False)
    schema = Schema("pair", 2, {"seen": "_seen"}, {"first": "first", "second": "second"})


def a_pair() -> Pair:
    pair = Pair(Average(0.1))
    pair.first._mean, pair._seen = 2.5, ("w0", "w1")
    return pair


def test_the_written_form() -> None:
    assert through_json(a_pair()) == {
        "schema": "pair",
        "version": 2,
        "state": {
            "seen": {"type": "tuple", "items": ["w0", "w1"]},
            "first": {"schema": "average", "version": 1, "state": {"mean": 2.5}},
            "second": None,
        },
    }


def test_state_comes_back_and_settings_stay() -> None:
    fresh = Pair(Average(0.9))
    first = fresh.first
    load_state(fresh, through_json(a_pair()))
    assert (fresh._seen, fresh.first._mean, fresh.first.weight) == (("w0", "w1"), 2.5, 0.9)
    assert fresh.first is first  # filled, not replaced


def test_a_private_field_may_be_renamed() -> None:
    old, new = Average(), Renamed()
    old._mean = 4.0
    assert through_json(old) == {"schema": "average", "version": 1, "state": {"mean": 4.0}}
    load_state(new, through_json(old))
    assert new._estimate == 4.0
    assert through_json(new) == through_json(old)


def changed(*path: str, to: Any) -> Any:
    data = through_json(a_pair())
    inner = data
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = to
    return data


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (changed("version", to=1), "the state of pair has version 1, and this paceline reads "
         "version 2; use the paceline that saved it, or start a new run from its model"),
        (changed("version", to="2"), "the state of pair has version '2', and"),
        (changed("version", to=2.0), "the state of pair has version 2.0, and"),
        (changed("schema", to="average"), "the saved state is of average, but pair was given; "
         "resume with the policy that the run was started with"),
        (changed("more", to=1), "the state of pair must have exactly the keys schema, version"),
        (changed("state", to=[]), "the state of pair is not a JSON object"),
        (changed("state", "more", to=1), "'more' unknown in the state of pair; version 2 has "
         "first, second, seen"),
        (changed("state", to={}), "'first', 'second', 'seen' missing in the state of pair"),
        (changed("state", "seen", to=5), "pair.seen has the type "),
        (changed("state", "first", to=None), "the state of average must have exactly the keys"),
        (changed("state", "second", to={}), "pair.second has saved state, but the given None has"),
        (changed("state", "first", "state", to={}), "'mean' missing in the state of average"),
        (5, "the state of pair must have exactly the keys schema, version"),
        ({"class": "Pair", "fields": {}}, "the state of Pair was saved before formats had "
         "versions; finish the run with the version of paceline that saved it, or start a new "),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_another_format_is_refused(data: Any, told: str) -> None:
    with pytest.raises(SchemaError) as refusal:
        load_state(Pair(), data)
    assert str(refusal.value).startswith(told)


def test_the_state_of_another_policy_is_refused() -> None:
    with pytest.raises(SchemaError, match="saved state is of gather, but deadline was given"):
        load_state(pl.deadline(1.0), save_state(pl.sync()))
    with pytest.raises(SchemaError, match="saved state is of gather, but deadline was given"):
        load_state(pl.policies.Until(pl.deadline(1.0)), save_state(pl.policies.Until(pl.sync())))
    with pytest.raises(
        SchemaError, match=r"gather\.placement has saved state, but the given None has"
    ):
        load_state(pl.sync(), save_state(pl.policies.Gather(placement=pl.BySpeed())))


class Converts:
    schema = converted("converts", 1, "value")

    def __init__(self, value: int) -> None:
        self.value = value
        self.scratch = object()  # could not be saved

    def state_dict(self) -> dict[str, Any]:
        return {"value": (self.value,)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (self.value,) = state["value"]


def test_a_class_may_convert_its_values() -> None:
    data = through_json(Converts(7))
    assert data["state"] == {"value": {"type": "tuple", "items": [7]}}
    fresh = Converts(0)
    load_state(fresh, data)
    assert fresh.value == 7
    with pytest.raises(SchemaError, match="'value' missing in the state of converts"):
        load_state(fresh, {**data, "state": {}})


class Grown(Converts):
    schema = dataclasses.replace(Converts.schema, added={"later": "later"})
    later = 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.later = state.get("later", 0)


def test_values_may_be_added_to_a_class_that_converts_its_own() -> None:
    grown, fresh = Grown(7), Grown(0)
    load_state(fresh, through_json(Converts(7)))  # a file of before
    assert (fresh.value, fresh.later) == (7, 0)
    assert through_json(grown) == through_json(Converts(7))
    grown.later = 3
    load_state(fresh, through_json(grown))
    assert fresh.later == 3


class Forgetful(Converts):
    def state_dict(self) -> dict[str, Any]:
        return {"value": (self.value,), "new": 1}


def test_names_that_are_not_declared_are_told_when_saving() -> None:
    with pytest.raises(TypeError, match=r"state_dict\(\) of Forgetful and its schema differ in "):
        save_state(Forgetful(1))


@dataclass
class Wider(Average):
    extra: int = 0


def test_a_subclass_with_more_fields_declares_its_own() -> None:
    with pytest.raises(TypeError) as refusal:
        save_state(Wider())
    assert str(refusal.value) == (
        "Wider adds extra to Average and declares no schema of its own; add schema = "
        "Schema('Wider', 1, …), with the names of Average.schema"
    )


FOUND_AGAIN = {
    "by_speed": {"_room"},
    "coded": {"_made", "_collector", "_open", "_short", "_resumed", "_idle", "_seated"},
    "schedule": {"_starts", "_sizes"},
}
"""Fields that follow from others, and are no part of the state."""


@pytest.mark.parametrize("name", declared())
def test_every_field_that_is_no_setting_is_saved(name: str) -> None:
    kind = declared()[name]
    schema = kind.schema
    if not dataclasses.is_dataclass(kind):
        return
    memory = {f.name for f in dataclasses.fields(kind) if not f.init}
    known = {*schema.values.values(), *schema.parts.values()}
    if hasattr(kind, "state_dict"):
        known |= {f"_{value}" for value in schema.values}
    assert memory - known == FOUND_AGAIN.get(name, set())


def test_policies_and_the_ledger_are_declared() -> None:
    names = {"ledger", "gather", "deadline", "coded", "until", "min_workers", "among", "auto"}
    assert names < declared().keys()


# --- the ledger and journals ---------------------------------------------------------------------


def some_ledger() -> Ledger:
    ledger = Ledger(8)
    for worker in ("w2", "w0", "w1"):
        ledger.record(0.0, Joined(worker))
    ledger.apply(Assign("w0"))
    ledger.apply(Assign("w2", Work(budget=inf, shares=3)))
    ledger.apply(Assign("w1", Work(shares=2)))
    ledger.record(1.0, Finished(1, 8, 1.0, {"loss": 2.0}))
    ledger.record(1.0, Left("w0"))
    return ledger


def test_the_ledger_comes_back() -> None:
    ledger, fresh = some_ledger(), Ledger(1)
    fresh.restore(through_json(ledger))
    assert save_state(fresh) == save_state(ledger)
    assert (fresh.held_shares, fresh.outstanding(inf), fresh.outstanding(0)) == (3, 2, 2)
    assert (fresh.batch, fresh.lost, list(fresh.idle)) == (8, ledger.lost, ["w2"])
    for each in (fresh, ledger):
        each.record(2.0, Left("w1"))
        each.record(2.0, Left("w2"))
    assert save_state(fresh) == save_state(ledger)


@pytest.mark.parametrize("name", ["running", "held", "lost"])
def test_a_ledger_of_other_values_is_refused(name: str) -> None:
    data = through_json(some_ledger())
    data["state"][name] = {"type": "OrderedDict", "items": [[0, 5]]}
    with pytest.raises(SchemaError, match=f"ledger.{name} has values other than (Task|Result)"):
        Ledger(8).restore(data)


def test_a_journal_of_a_resumed_run_of_the_old_format_is_refused(tmp_path: Path) -> None:
    old = {"policy": {"class": "Gather", "fields": {}}, "ledger": {"class": "Ledger", "fields": {}}}
    Journal(Header(describe(pl.sync()), 8, None, old), tmp_path / "old.jsonl").close()
    with pytest.raises(SchemaError, match="saved before formats had versions; finish the run"):
        replay(pl.sync(), Journal.load(tmp_path / "old.jsonl"))


def test_a_journal_says_from_which_version_it_goes_on() -> None:
    coordinator = Coordinator(pl.sync(), 8)
    coordinator.ledger.version = 7
    assert Header("", 8, None, coordinator.state()).version == 7
    assert Header("", 8).version == 0


# --- policies that declare nothing ---------------------------------------------------------------


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
    """A user's policy with everything that a policy may have."""

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
    return thinker, through_json(thinker)


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
    assert set(data["state"]) == {"choice", "work", "rng", "history", "best", "wants"}
    assert "double" not in json.dumps(data)
    other = Thinker(rule=triple)
    load_state(other, data)
    assert other.rule is triple  # code is a setting
    assert other.kind is Arm


def test_a_function_with_arguments_bound_is_left_as_it_is() -> None:
    first, second = Thinker(rule=partial(pow, 2)), Thinker(rule=partial(pow, 3))
    data = through_json(first)
    load_state(second, data)
    assert second.rule(2) == 9
    assert "rule" not in data["state"]


class Late:
    """Sets a field when it is needed; the class has its default."""

    count = 0

    def go(self) -> None:
        self.count += 1


def test_a_field_that_is_set_later_comes_back() -> None:
    late, fresh = Late(), Late()
    late.go()
    load_state(fresh, through_json(late))
    assert fresh.count == 1
    data = {"schema": "Late", "version": 1, "state": {"go": 1}}
    with pytest.raises(SchemaError, match="'go' unknown in the state of Late; version 1 has no"):
        load_state(Late(), data)


class Hooked:
    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": (self.value,)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (self.value,) = state["value"]


def test_the_hooks_of_an_object_within_are_used() -> None:
    outer, fresh = pl.policies.MinWorkers(2, Hooked(7)), pl.policies.MinWorkers(2, Hooked(0))  # type: ignore[arg-type]
    load_state(fresh, save_state(outer))
    assert fresh.inner.value == 7  # type: ignore[attr-defined]


def test_what_cannot_be_saved_is_told_when_saving() -> None:
    thinker = Thinker()
    thinker.history.append(object())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"define state_dict\(\) and load_state_dict\(\)"):
        save_state(thinker)
