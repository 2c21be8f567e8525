"""Argument checks: each error names the argument, the value, and what to use instead."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any


def check_whole(name: str, value: Any, least: int = 1) -> None:
    """Raise ValueError unless the value is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name}={value!r}: use a whole number from {least} on")
    if int(value) < least:
        raise ValueError(f"{name}={value}: use at least {least}")


def check_seconds(name: str, value: Any) -> None:
    """Raise ValueError unless the value is a number above 0."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not (number and value > 0):
        raise ValueError(f"{name}={value!r}: use a number of seconds above 0")
