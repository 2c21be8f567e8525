"""Frozen values that are made nearly as quickly as objects that are not.

Every task, result and entry of a journal is one, so that what a value costs is what a run costs.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from functools import update_wrapper
from typing import Any, TypeVar

T = TypeVar("T")


def quick(kind: type[T]) -> type[T]:
    """Give a frozen dataclass with slots an `__init__` that does the same in a third of the time.

    The one that it has calls `object.__setattr__` for each field. Here the object is, while its
    fields are set, of a class with the same slots that lets them be set.
    """
    given = fields(kind)  # type: ignore[arg-type]
    if hasattr(kind, "__post_init__") or any(not f.init or f.kw_only for f in given):
        raise TypeError(f"{kind.__name__}: only plain fields can be set so; leave @quick out")
    names = [field.name for field in given]
    known: dict[str, Any] = {
        "kind": kind,
        "open": type(kind.__name__, (), {"__slots__": tuple(names)}),
        "become": object.__setattr__,
        "slow": kind.__init__,
    }
    lines = []
    for name, default, field in zip(names, _defaults(kind, len(names)), given, strict=True):
        if field.default_factory is MISSING:
            lines.append(f"self.{name} = {name}")
        else:
            known[f"{name}_absent"], known[f"{name}_made"] = default, field.default_factory
            lines.append(f"self.{name} = {name}_made() if {name} is {name}_absent else {name}")
    listed = ", ".join(names)
    body = "\n        ".join(
        [
            f"if type(self) is not kind:  # but of a class made from it, which may have more\n"
            f"            return slow(self, {listed})",
            'become(self, "__class__", open)',
            *lines,
            "self.__class__ = kind",
        ]
    )
    text = f"def make({', '.join(known)}):\n    def __init__(self, {listed}):\n        {body}\n"
    made: dict[str, Any] = {}
    exec(f"{text}    return __init__", made)  # as dataclasses make theirs
    init = made["make"](**known)
    init.__defaults__ = kind.__init__.__defaults__
    kind.__init__ = update_wrapper(init, kind.__init__)  # type: ignore[method-assign]
    return kind


def _defaults(kind: type[Any], count: int) -> list[Any]:
    """Return what each argument of a dataclass is if it is left out; None if it must be given."""
    known = list(kind.__init__.__defaults__ or ())
    return [None] * (count - len(known)) + known
