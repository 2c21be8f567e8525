"""Files, classes and functions are small; docs/design.md has a reason for each exception."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import paceline

ROOT = Path(paceline.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "design.md"
LINES, METHODS, BODY, PARAMETERS = 400, 30, 60, 8


def too_large(path: Path) -> Iterator[str]:
    """Yield what is too large in a file."""
    text = path.read_text()
    if text.count("\n") > LINES:
        yield f"{text.count(chr(10))} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(each, ast.FunctionDef) for each in node.body)
            if methods > METHODS:
                yield f"{node.name} has {methods} methods"
        elif isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
            count = len(names) + len(node.args.kwonlyargs) - (names[:1] in (["self"], ["cls"]))
            if (length := node.end_lineno - node.lineno + 1) > BODY:
                yield f"{node.name} has {length} lines"
            if count > PARAMETERS:
                yield f"{node.name} has {count} parameters"


def test_what_is_large_has_a_reason() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): reasons
        for path in sorted(ROOT.rglob("*.py"))
        if (reasons := list(too_large(path)))
    }
    _, _, section = PAGE.read_text().partition("\n## Sizes\n")
    listed = set(re.findall(r"^- `([\w/.]+)`: .", section.partition("\n## ")[0], re.M))
    assert set(found) == listed, {name: found.get(name) for name in set(found) ^ listed}
