"""Plain JSON for values, and for the state of policies and books: no pickle, nothing executed.

A value names its type where JSON has none of it: `{"type": "Task", …}`. Only the types listed
here are ever built, whatever a file says.
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

# One object each: then entries with a nan in the same place are equal.
_NOT_FINITE = {"nan": nan, "inf": inf, "-inf": -inf}
_VALUES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(protocol.Work, protocol.Task, protocol.Result, protocol.Prices),
        *(protocol.Joined, protocol.Left, protocol.Finished, protocol.Stepped),
        *(protocol.Received, protocol.TimerFired, protocol.Interrupted),
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
    """Return a value of the protocol, or of plain Python, as JSON data.

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


# A long run's journal is made of the following. Most have only the fields that all of them have,
# each as JSON has it, and are read in a third of the time; whatever is not so is read as any value.


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
        data["id"], data["worker"], made, data["version"], since, data["samples"], data["draw"]
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
        data["task"], data["samples"], seconds, stats, waited, get("sent"), get("got")
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


def save_state(thing: Any) -> dict[str, Any]:
    """Return the fields of an object as JSON data; objects within it are saved the same way."""
    if hasattr(thing, "state_dict"):
        return {"class": type(thing).__name__, "state": encode(thing.state_dict())}
    fields = {
        name: {"object": save_state(item)} if _has_fields(item) else {"value": encode(item)}
        for name, item in vars(thing).items()
        if not isinstance(item, _CODE)  # code is the recipe's, never the file's
    }
    return {"class": type(thing).__name__, "fields": fields}


def load_state(thing: Any, data: Mapping[str, Any]) -> None:
    """Put saved fields back into an object made from the same recipe."""
    if type(thing).__name__ != data["class"]:
        raise ValueError(
            f"the saved state is of {data['class']}, but {type(thing).__name__} was given; "
            "resume with the policy that the run was started with"
        )
    if "state" in data:
        thing.load_state_dict(decode(data["state"]))
        return
    for name, item in data["fields"].items():
        if not hasattr(thing, name):
            raise ValueError(
                f"{data['class']} has no field {name!r}; was it saved by another version?"
            )
        if "object" in item:
            load_state(getattr(thing, name), item["object"])
        else:
            object.__setattr__(thing, name, decode(item["value"]))


def describe(thing: Any) -> str:
    """Return a recipe as its user would write it: defaults left out, functions by name.

    >>> describe(protocol.Work(samples=8))
    'Work(samples=8)'
    """
    if isinstance(thing, _FUNCTIONS):
        return thing.__name__
    if isinstance(thing, partial):
        given = [*map(describe, thing.args)]
        given += [f"{name}={describe(value)}" for name, value in thing.keywords.items()]
        return f"partial({', '.join([describe(thing.func), *given])})"
    if not dataclasses.is_dataclass(thing) or isinstance(thing, type):
        # Python's own repr of an object is an address, which is another in each process.
        plain = type(thing).__repr__ is not object.__repr__
        return repr(thing) if plain else f"{type(thing).__name__}()"
    given = [
        f"{f.name}={describe(value)}"
        for f in dataclasses.fields(thing)
        if f.init and (value := getattr(thing, f.name)) != f.default
    ]
    return f"{type(thing).__name__}({', '.join(given)})"


_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, type)
_CODE = (*_FUNCTIONS, partial)
_PLAIN = (Mapping, list, tuple, set, frozenset, random.Random, int, float, str)


def _has_fields(item: Any) -> bool:
    return hasattr(item, "__dict__") and not isinstance(item, (*_CODE, *_PLAIN))
