"""Converts values to plain JSON and describes recipes, without pickle and without executing code.

A value whose type JSON lacks is stored with its type: `{"type": "Task", …}`. Only the types listed
here are ever built, whatever a file contains.
"""

from __future__ import annotations

import dataclasses
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from math import inf, isfinite, nan
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from paceline.core import protocol

# One object each, so that two entries with nan in the same place compare equal.
_NOT_FINITE = {"nan": nan, "inf": inf, "-inf": -inf}
_VALUES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(protocol.Work, protocol.Task, protocol.Result, protocol.Prices),
        *(protocol.Joined, protocol.Left, protocol.Finished, protocol.Stepped),
        *(protocol.Draining, protocol.Release),
        *(protocol.Received, protocol.TimerFired, protocol.Interrupted),
        *(protocol.Evaluated, protocol.LrScaled),
        *(protocol.Assign, protocol.Start, protocol.Cancel, protocol.Discard, protocol.Step),
        *(protocol.Send, protocol.SetTimer, protocol.Stop),
    )
}
_FIELDS = {
    kind: tuple(
        (f.name, f.default_factory() if callable(f.default_factory) else f.default)
        for f in dataclasses.fields(kind)
    )
    for kind in _VALUES.values()
}


def encode(value: Any) -> Any:
    """Return a value of the protocol or of plain Python as JSON data.

    >>> encode(protocol.Step({3: 0.5}))
    {'type': 'Step', 'weights': {'type': 'dict', 'items': [[3, 0.5]]}}
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if isfinite(value) else {"type": "float", "value": repr(value)}
    if kind in _FIELDS:
        fields = {
            name: encode(item)
            for name, default in _FIELDS[kind]
            if (item := getattr(value, name)) is not default and item != default
        }
        return {"type": kind.__name__, **fields}
    if kind is list:
        return [encode(item) for item in value]
    if kind in (tuple, frozenset, set):
        ordered = value if kind is tuple else sorted(value)
        return {"type": kind.__name__, "items": [encode(item) for item in ordered]}
    if isinstance(value, random.Random):
        return {"type": "Random", "state": encode(value.getstate())}
    if isinstance(value, Mapping):
        if kind is dict and "type" not in value and all(type(key) is str for key in value):
            return {key: encode(item) for key, item in value.items()}
        name = "OrderedDict" if kind is OrderedDict else "dict"
        return {"type": name, "items": [[encode(k), encode(v)] for k, v in value.items()]}
    raise TypeError(
        f"{value!r} of type {kind.__name__} cannot be saved; policies keep numbers, strings, "
        "lists, tuples, sets, dicts, random.Random, or define state_dict() and load_state_dict()"
    )


def decode(data: Any) -> Any:
    """Invert `encode`."""
    kind = type(data)
    if kind is dict:
        name = data.get("type")
        if name is None:
            return {key: decode(item) for key, item in data.items()}
        reader = _READERS.get(name) if type(name) is str else None
        if reader is None:
            raise ValueError(f"unknown type {name!r} in saved data; known: {sorted(_VALUES)}")
        return reader(data)
    if kind is list:
        return [decode(item) for item in data]
    return data


def _float(data: dict[str, Any]) -> float:
    return _NOT_FINITE[data["value"]]


def _items(data: dict[str, Any]) -> list[Any]:
    return [decode(item) for item in data["items"]]


def _pairs(data: dict[str, Any]) -> list[Any]:
    pairs: list[Any] = data["items"]
    if any(type(key) is not int or type(item) is not float for key, item in pairs):
        return [(decode(key), decode(item)) for key, item in pairs]
    return pairs


def _random(data: dict[str, Any]) -> random.Random:
    generator = random.Random()
    generator.setstate(decode(data["state"]))
    return generator


def _value(data: dict[str, Any]) -> Any:
    return _VALUES[data["type"]](**{k: decode(v) for k, v in data.items() if k != "type"})


# A long run's journal consists mostly of the following types. Most values have only the common
# fields, in plain JSON, and these readers take a third of the time. Other values go to `_value`.


def _start(data: dict[str, Any]) -> Any:
    task = data["task"]
    plain = type(task) is dict and task.get("type") == "Task"
    return protocol.Start(_task(task) if plain else decode(task))


def _task(data: dict[str, Any]) -> Any:
    if len(data) > _PLAIN_TASK or "attempt" in data or type(since := data["since"]) is not float:
        return _value(data)
    work = data["work"]
    if len(work) == 2 and type(samples := work.get("samples")) is int:
        made = _of_samples(samples)
    else:
        made = decode(work)
    return protocol.Task(
        data["id"], data["worker"], made, data["version"], since, data["samples"], data["offset"]
    )


def _cancel(data: dict[str, Any]) -> Any:
    if len(data) == 2 and type(task := data.get("task")) is int:
        return protocol.Cancel(task)
    return _value(data)


@lru_cache(maxsize=1024)
def _of_samples(samples: int) -> protocol.Work:
    return protocol.Work(samples=samples)


def _finished(data: dict[str, Any]) -> Any:
    get = data.get
    stats, seconds, waited = get("stats"), get("seconds", 0.0), get("waited", 0.0)
    if stats is None or type(seconds) is not float or type(waited) is not float:
        return _value(data)
    for number in stats.values():
        if type(number) is not float:
            return _value(data)
    return protocol.Finished(
        *(data["task"], data["samples"], seconds, stats, waited, get("sent"), get("got")),
        get("skipped", 0),
    )


_PLAIN_TASK = 8
_READERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    **dict.fromkeys(_VALUES, _value),
    "float": _float,
    "tuple": lambda data: tuple(_items(data)),
    "set": lambda data: set(_items(data)),
    "frozenset": lambda data: frozenset(_items(data)),
    "dict": lambda data: dict(_pairs(data)),
    "OrderedDict": lambda data: OrderedDict(_pairs(data)),
    "Random": _random,
    "Start": _start,
    "Task": _task,
    "Finished": _finished,
    "Cancel": _cancel,
}


def describe(thing: Any, known: Callable[[Any], str | None] = lambda thing: None) -> str:
    """Return a recipe as Python code, without defaults and with functions by name.

    known: returns the text of an object that has a shorter one, else None.

    >>> describe(protocol.Work(samples=8))
    'Work(samples=8)'
    """
    if (text := known(thing)) is not None:
        return text
    if isinstance(thing, FUNCTIONS):
        return thing.__name__
    if isinstance(thing, partial):
        given = [describe(value, known) for value in thing.args]
        given += [f"{name}={describe(value, known)}" for name, value in thing.keywords.items()]
        return f"partial({', '.join([describe(thing.func), *given])})"
    if not dataclasses.is_dataclass(thing) or isinstance(thing, type):
        # Python's default repr contains an address, which differs in each process.
        plain = type(thing).__repr__ is not object.__repr__
        return repr(thing) if plain else f"{type(thing).__name__}()"
    given = [
        f"{f.name}={describe(value, known)}"
        for f in dataclasses.fields(thing)
        if f.init and (value := getattr(thing, f.name)) != f.default
    ]
    return f"{type(thing).__name__}({', '.join(given)})"


FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, type)


def has_fields(item: Any) -> bool:
    """Return whether an object has its own fields and is neither code nor plain data."""
    plain = (Mapping, list, tuple, set, frozenset, random.Random, int, float, str)
    return hasattr(item, "__dict__") and not isinstance(item, (*FUNCTIONS, partial, *plain))
