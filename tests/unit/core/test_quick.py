"""Values that are made quickly are the same values as ever: frozen, equal, copied and explained."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, replace
from typing import Any

import pytest

from paceline.core.protocol import Assign, Finished, Result, Step, Stepped, Task, Work
from paceline.core.quick import quick

TASK = Task(3, "w1", Work(samples=4), 7, 0.25, 4, 12)
VALUES: list[Any] = [
    *(Work(), Work({2: -1.0}, 4, 2), TASK, Result(TASK, 2.0, 8, 0.5, {"loss": 1.0})),
    *(Finished(1, 8), Stepped(3, {"dot": -1.0}), Assign("w0"), Step({1: 1.0}, {"w1": 0.5}, True)),
]
IDS = [f"{type(value).__name__}-{at}" for at, value in enumerate(VALUES)]


@dataclass(frozen=True, slots=True)
class Slow:
    """As `Quick`, made as dataclasses are."""

    a: int
    b: float = 0.5
    c: dict[str, int] = field(default_factory=dict)


@quick
@dataclass(frozen=True, slots=True)
class Quick:
    """One field of each sort."""

    a: int
    b: float = 0.5
    c: dict[str, int] = field(default_factory=dict)


@pytest.mark.parametrize("value", VALUES, ids=IDS)
def test_a_value_is_of_its_class_and_frozen(value: Any) -> None:
    kind = type(value)
    assert kind.__name__ in ("Work", "Task", "Result", "Finished", "Stepped", "Assign", "Step")
    name = next(iter(kind.__slots__))
    for change in (lambda: setattr(value, name, 5), lambda: delattr(value, name)):
        with pytest.raises(FrozenInstanceError):
            change()
    with pytest.raises((AttributeError, TypeError)):
        value.other = 5


@pytest.mark.parametrize("value", VALUES, ids=IDS)
def test_a_value_is_copied_whole(value: Any) -> None:
    for other in (copy.deepcopy(value), pickle.loads(pickle.dumps(value)), replace(value)):  # noqa: S301
        assert other == value and type(other) is type(value) and repr(other) == repr(value)


@pytest.mark.parametrize(
    ("given", "named"),
    [((1,), {}), ((1, 2.0), {}), ((), {"a": 1, "c": {"x": 1}}), ((1, 2.0, {}), {})],
)
def test_arguments_mean_the_same(given: tuple[Any, ...], named: dict[str, Any]) -> None:
    slow, made = Slow(*given, **named), Quick(*given, **named)
    assert repr(made) == repr(slow).replace("Slow", "Quick")
    assert inspect.signature(Quick) == inspect.signature(Slow)


@pytest.mark.parametrize(
    ("given", "named"), [((), {}), ((1, 2.0, {}, 4), {}), ((1,), {"d": 1}), ((1,), {"a": 1})]
)
def test_mistakes_are_explained_in_the_same_words(
    given: tuple[Any, ...], named: dict[str, Any]
) -> None:
    with pytest.raises(TypeError) as slow:
        Slow(*given, **named)
    with pytest.raises(TypeError) as made:
        Quick(*given, **named)
    assert str(made.value) == str(slow.value).replace("Slow", "Quick")


def test_a_default_that_is_made_is_made_anew() -> None:
    one, other = Quick(1), Quick(1)
    assert one == other and hash(Quick(1, c=None)) == hash(Quick(1, c=None))  # type: ignore[arg-type]
    one.c["x"] = 1
    assert not other.c and one != other


def test_a_class_made_from_one_has_its_own_fields() -> None:
    class Plain(Quick):
        pass

    @dataclass(frozen=True, slots=True)
    class More(Quick):
        d: int = 4

    plain, more = Plain(1, 2.0), More(1, 2.0, {}, 5)
    assert type(plain) is Plain and (plain.a, plain.b, plain.c) == (1, 2.0, {})
    assert type(more) is More and (more.a, more.d) == (1, 5)


def test_what_cannot_be_set_so_is_refused() -> None:
    @dataclass(frozen=True, slots=True)
    class Checked:
        a: int

        def __post_init__(self) -> None:
            raise AssertionError

    @dataclass(frozen=True, slots=True)
    class Named:
        a: int = field(kw_only=True)

    for kind in (Checked, Named):
        with pytest.raises(TypeError, match=f"{kind.__name__}: only plain fields"):
            quick(kind)
