"""The bounds of benchmarks: ratios and counts, never seconds, which depend on the machine."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from _report import Pace

SCRIPTS = sorted(Path(__file__).parents[3].glob("benchmarks/*.py"))
WORDS = {"second", "seconds", "ms", "us", "s"}


def keys(source: str) -> list[str]:
    """Return the keys of all dictionaries that are assigned to a name with `bounds` in it."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(t, ast.Name) and "bounds" in t.id.lower() for t in targets):
            found += [
                key.value
                for inner in ast.walk(node)
                if isinstance(inner, ast.Dict)
                for key in inner.keys
                if isinstance(key, ast.Constant) and isinstance(key.value, str)
            ]
    return found


def in_seconds(key: str) -> bool:
    return bool(WORDS & set(key.replace(",", " ").replace("_", " ").split()))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_no_bound_is_in_seconds(script: Path) -> None:
    assert not [key for key in keys(script.read_text()) if in_seconds(key)]


def test_the_test_sees_bounds_in_seconds() -> None:
    found = keys('BOUNDS = {"choice_ms": 1.0}\nbounds = {"seconds_60k": 1, "growth": 3}')
    assert [key for key in found if in_seconds(key)] == ["choice_ms", "seconds_60k"]
    assert sum(len(keys(script.read_text())) for script in SCRIPTS) > 40


def test_two_looks_at_the_pace_agree() -> None:
    first, second = Pace(), Pace()
    for _ in range(2):
        first.look()
        second.look()
    assert 0.2 < first.seconds() / second.seconds() < 5  # of CPU time, also on a busy machine
