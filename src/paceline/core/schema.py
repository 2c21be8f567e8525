"""The versioned format of saved state: which names a class writes to a file, and in which version.

A class declares its format in `schema`. A file uses the names of the declaration, so renaming a
private field does not change the file. State is JSON data, as `encode` makes it:

    {"schema": "until", "version": 1, "state": {"armed": true, "inner": {"schema": "gather", …}}}

A change of names, or of the values stored under them, needs a new version.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from paceline.core.state import FUNCTIONS, decode, encode, has_fields


class SchemaError(ValueError):
    """Saved state does not have the format of the object that loads it."""


@dataclass(frozen=True)
class Schema:
    """The state of a class in a file. Settings are not state: the user gives them again.

    name: the name of the class in files.
    version: the version of the format, from 1 on.
    values: the plain data to save: name in the file -> field of the object. A class with
        `state_dict` and `load_state_dict` converts its values itself, and only the names count.
    parts: the inner objects that have their own state: name in the file -> field.
    added: values that older files of this version lack. They are saved if they are not empty. A
        class with `load_state_dict` finds them among its values if they were saved.

    >>> class Counter:
    ...     schema = Schema("counter", 1, {"count": "_count"})
    ...     def __init__(self) -> None:
    ...         self._count = 3
    >>> save_state(Counter())
    {'schema': 'counter', 'version': 1, 'state': {'count': 3}}
    """

    name: str
    version: int = 1
    values: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    added: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """All names in a file, sorted."""
        return sorted([*self.values, *self.parts])


def converted(name: str, version: int, *values: str, **parts: str) -> Schema:
    """Return the schema of a class that converts its values in `state_dict`."""
    return Schema(name, version, {value: value for value in values}, parts)


def save_state(thing: Any) -> dict[str, Any]:
    """Return the state of an object, and of the objects within it, as JSON data."""
    schema = schema_of(thing)
    parts = {name: _save_part(getattr(thing, of)) for name, of in schema.parts.items()}
    state = _values(thing, schema)
    more = {name: getattr(thing, of) for name, of in schema.added.items()}
    state |= {name: encode(value) for name, value in more.items() if value}
    return {"schema": schema.name, "version": schema.version, "state": {**state, **parts}}


def load_state(thing: Any, data: Any) -> None:
    """Restore saved state into an object that was made with the same settings."""
    schema = schema_of(thing)
    state = _opened(schema, data)
    own = type(thing)
    there = {name: of for name, of in schema.added.items() if name in state}
    schema = dataclasses.replace(schema, values={**schema.values, **there})
    if not _is_declared(own):  # the class holds the default of a field that is set later
        later = {n: n for n in state if n not in schema.names and _is_default(own, n)}
        schema = dataclasses.replace(schema, values={**schema.values, **later})
    if not _chooses_names(own):
        _compare_names(schema, state)
    values = {name: item for name, item in state.items() if name not in schema.parts}
    _load_values(thing, schema, values)
    for name, of in schema.parts.items():
        _load_part(getattr(thing, of), state[name], f"{schema.name}.{name}")


def schema_of(thing: Any) -> Schema:
    """Return the declared schema; without one, every field is saved under its own name."""
    kind = type(thing)
    if _is_declared(kind):
        declared: Schema = kind.schema
        owner = next(each for each in kind.__mro__ if "schema" in vars(each))
        if added := _fields(kind) - _fields(owner):
            raise TypeError(
                f"{kind.__name__} adds {', '.join(sorted(added))} to {owner.__name__} and declares "
                f"no schema of its own; add schema = Schema({kind.__name__!r}, 1, …), with the "
                f"names of {owner.__name__}.schema"
            )
        return declared
    if hasattr(thing, "state_dict"):
        return Schema(kind.__name__)
    fields: dict[str, Any] = getattr(thing, "__dict__", {})
    parts = {name: name for name, item in fields.items() if has_fields(item)}
    values = {
        name: name
        for name, item in fields.items()
        if name not in parts and not isinstance(item, (*FUNCTIONS, partial))  # code is a setting
    }
    return Schema(kind.__name__, 1, values, parts)


def _is_declared(kind: type) -> bool:
    return isinstance(getattr(kind, "schema", None), Schema)


def _is_default(kind: type, name: str) -> bool:
    given = getattr(kind, name, _is_default)
    return not callable(given) and not isinstance(given, property) and not has_fields(given)


def _chooses_names(kind: type) -> bool:
    """Return whether the class checks the names in its state itself."""
    return hasattr(kind, "state_dict") and not _is_declared(kind)


def _fields(kind: type) -> set[str]:
    return {f.name for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()


def _values(thing: Any, schema: Schema) -> dict[str, Any]:
    if not hasattr(thing, "state_dict"):
        return {name: encode(getattr(thing, of)) for name, of in schema.values.items()}
    state: dict[str, Any] = {n: encode(item) for n, item in thing.state_dict().items()}
    names = set(schema.values) - set(schema.added)
    if not _chooses_names(type(thing)) and set(state) != names:
        differing = ", ".join(sorted(set(state) ^ names))
        raise TypeError(
            f"state_dict() of {type(thing).__name__} and its schema differ in {differing}; give "
            "both the same names, and raise the version"
        )
    return state


def _load_values(thing: Any, schema: Schema, state: Mapping[str, Any]) -> None:
    if not _chooses_names(type(thing)):
        for name, fresh in _values(thing, schema).items():
            if not same_kind(state[name], fresh):
                raise SchemaError(
                    f"{schema.name}.{name} has the type {_kind(state[name])}, not {_kind(fresh)}"
                )
    if hasattr(thing, "load_state_dict"):
        thing.load_state_dict({name: decode(item) for name, item in state.items()})
        return
    for name, of in schema.values.items():
        object.__setattr__(thing, of, decode(state[name]))


def _save_part(thing: Any) -> dict[str, Any] | None:
    return save_state(thing) if has_fields(thing) else None


def _load_part(thing: Any, data: Any, where: str) -> None:
    if has_fields(thing):
        load_state(thing, data)
    elif data is not None:
        raise SchemaError(
            f"{where} has saved state, but the given {thing!r} has none; resume with the policy "
            "that the run was started with"
        )


def _opened(schema: Schema, data: Any) -> dict[str, Any]:
    """Return the state within saved data, after checking name and version of the schema."""
    if isinstance(data, Mapping) and "class" in data and "schema" not in data:
        raise SchemaError(
            f"the state of {data['class']} was saved before formats had versions; finish the run "
            "with the version of paceline that saved it, or start a new run from its model"
        )
    if not isinstance(data, Mapping) or set(data) != {"schema", "version", "state"}:
        raise SchemaError(
            f"the state of {schema.name} must have exactly the keys schema, version and state"
        )
    if data["schema"] != schema.name:
        raise SchemaError(
            f"the saved state is of {data['schema']}, but {schema.name} was given; resume with the "
            "policy that the run was started with"
        )
    if type(data["version"]) is not int or data["version"] != schema.version:
        raise SchemaError(
            f"the state of {schema.name} has version {data['version']!r}, and this paceline reads "
            f"version {schema.version}; use the paceline that saved it, or start a new run from "
            "its model"
        )
    if not isinstance(data["state"], dict):
        raise SchemaError(f"the state of {schema.name} is not a JSON object")
    return data["state"]


def _compare_names(schema: Schema, state: Mapping[str, Any]) -> None:
    unknown = sorted(set(state) - set(schema.names))
    missing = sorted(set(schema.names) - set(state))
    for names, told in ((unknown, "unknown"), (missing, "missing")):
        if names:
            raise SchemaError(
                f"{', '.join(map(repr, names))} {told} in the state of {schema.name}; version "
                f"{schema.version} has {', '.join(schema.names) or 'no names'}"
            )


def same_kind(one: Any, other: Any) -> bool:
    """Return whether two JSON values have the same type; None matches every type."""
    return one is None or other is None or _kind(one) == _kind(other)


def _kind(value: Any) -> str:
    """Return the name of a JSON value's type; integers and floats have the same name."""
    if isinstance(value, dict):
        tag = str(value.get("type", "dict"))
        return {"float": "number", "OrderedDict": "dict"}.get(tag, tag)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return "number" if number else type(value).__name__
