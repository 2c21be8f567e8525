"""Policies and codecs as text, `k_sync(6)`: parsed as data, never run as code."""

from __future__ import annotations

import ast
from collections.abc import Collection
from math import inf
from typing import Any

import click

import paceline

POLICIES = frozenset(
    {
        *("sync", "k_sync", "bandit", "ata", "rennala", "ringmaster", "asynchronous", "k_async"),
        *("local_sgd", "async_local_sgd", "ringleader", "deadline", "coded"),
        *("Gather", "Deadline", "OnlyWorkers", "Until", "MinWorkers", "Backups"),
    }
)
CODECS = frozenset(
    {
        "BFloat16",
        "Half",
        "Int8",
        "Sign",
        "TwoBit",
        "TopK",
        "RandomK",
        "LowRank",
        "Feedback",
        "Chain",
    }
)
_PARTS = frozenset(
    {
        *("BySpeed", "Work", "Bandit", "Allocate"),
        *("KL", "LCB", "Thompson", "SubExponential", "Bounded", "FiniteVariance", "Greedy"),
        *("Schedule", "bound_optimal", "GrowWhenStationary", "GrowOnNoise"),
    }
)
_VALUES = frozenset({"mean", "staleness_weighted"})  # functions that are passed, not called
_LONGEST = 10_000  # characters


def policy_given(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
    """Read the value of an option that takes a policy."""
    return _given(value, POLICIES)


def codec_given(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
    """Read the value of an option that takes a codec."""
    return _given(value, CODECS)


def _given(value: str | None, outer: Collection[str]) -> Any:
    try:
        return None if value is None else parse(value, outer)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def parse(text: str, outer: Collection[str] = POLICIES) -> Any:
    """Build the object that a text describes: calls of known names with literal arguments.

    A placement may follow a policy, as in the tables of a plan.
    outer: the names that the text may begin with.

    >>> parse("k_sync(6)").k
    6
    >>> parse("sync(), placement=BySpeed()").placement.smoothing
    0.3
    >>> parse("k_sync(2 ** 9)")
    Traceback (most recent call last):
    ValueError: '2 ** 9' in 'k_sync(2 ** 9)': use numbers, strings, lists, and calls of known names
    """
    policy, comma, placement = text.rpartition(", placement=")
    if comma and not policy.count("(") > policy.count(")"):  # after the policy, not inside it
        return parse(policy, outer).placed(_build(parsed(placement), text))
    node = parsed(text)
    if isinstance(node, ast.Name) and node.id in outer:
        raise ValueError(f"{text!r} lacks its arguments; write {node.id}(…), or {node.id}()")
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        raise ValueError(f"{text!r} is not a call; call one of {', '.join(sorted(outer))}")
    if node.func.id not in outer:
        raise ValueError(f"{node.func.id!r} is unknown; known are {', '.join(sorted(outer))}")
    return _build(node, text)


def parsed(text: str) -> ast.expr:
    """Return the syntax tree of an expression; nothing of it is executed."""
    try:
        if len(text) > _LONGEST:
            raise ValueError(f"the expression has {len(text)} characters; use at most {_LONGEST}")
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r} cannot be read: {error}; write it as in Python") from None


def _build(node: ast.expr, text: str) -> Any:
    """Build the object of a node of the syntax tree."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None):
            return node.value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.Name(id="inf"):
            return inf
        case ast.Name(id=name) if name in _VALUES:
            return _named(name)
        case ast.List(items) | ast.Tuple(items):
            return [_build(item, text) for item in items]
        case ast.Dict(keys, values) if all(isinstance(key, ast.Constant) for key in keys):
            pairs = zip(keys, values, strict=True)
            return {_build(key, text): _build(value, text) for key, value in pairs if key}
        case ast.Call(func=ast.Name(id=name)) if name in POLICIES | _PARTS | CODECS:
            return _call(name, node, text)
        case ast.Call(func=ast.Name(id=name)):
            known = ", ".join(sorted(POLICIES | _PARTS | CODECS))
            raise ValueError(f"{name!r} in {text!r} is unknown; known are {known}")
    raise ValueError(
        f"{ast.unparse(node)!r} in {text!r}: use numbers, strings, lists, and calls of known names"
    )


def _call(name: str, node: ast.Call, text: str) -> Any:
    given = [_build(item, text) for item in node.args]
    named = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError(f"'**' in {text!r}: name the arguments one by one")
        named[keyword.arg] = _build(keyword.value, text)
    try:
        return _named(name)(*given, **named)
    except (TypeError, AttributeError) as error:  # too few arguments, or of a wrong kind
        raise ValueError(f"{ast.unparse(node)}: {error}") from None


def _named(name: str) -> Any:
    """Return the object of a name; the package's names come before those of its namespaces."""
    places = (paceline, paceline.policies, paceline.selection, paceline.codecs, paceline.protocol)
    return next(getattr(place, name) for place in places if name in place.__all__)
