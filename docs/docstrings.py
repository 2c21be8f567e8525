"""A Sphinx extension: docstrings that are written for people, as reStructuredText.

They have `names` in single backticks, "name: text" lines that explain arguments and fields, tables
and indented code as in Markdown, and formulas with | and * in plain text. Fields of a dataclass are
explained by comments behind them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import is_dataclass
from typing import Any

_ARGUMENT = re.compile(r"(\w+(?:, \w+)*): +(.*)")
_FIELD = re.compile(r"    ([a-z]\w*): .*?  # (.*)")
_QUOTED = re.compile(r"(``.*?``|`.*?`)")


def names_of(thing: object) -> set[str]:
    """Return the names that a docstring may explain: arguments, and a class's fields."""
    names = set(getattr(thing, "__annotations__", {}))
    with suppress(TypeError, ValueError):  # a constant, or a class without a signature of its own
        names |= set(inspect.signature(thing).parameters)  # type: ignore[arg-type]
    return names


def paragraphs(lines: list[str]) -> Iterator[list[str]]:
    """Cut at empty lines."""
    paragraph: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield paragraph
            paragraph = []


def escaped(text: str) -> str:
    """Escape what reStructuredText would take for markup, outside of backticks."""
    pieces = _QUOTED.split(text)
    return "".join(
        piece if piece.startswith("`") else re.sub(r"([|*]|_(?!\w))", r"\\\1", piece)
        for piece in pieces
    )


def as_table(rows: list[str]) -> list[str]:
    """Turn a Markdown table into a list-table."""
    found = [".. list-table::", "   :header-rows: 1", ""]
    for row in (row for row in rows if not set(row.strip()) <= set("|-: ")):
        cells = [escaped(cell.strip()) for cell in row.strip().strip("|").split("|")]
        found += [f"   {'* -' if at == 0 else '  -'} {cell}" for at, cell in enumerate(cells)]
    return found


def as_text(lines: list[str], names: set[str]) -> list[str]:
    """Turn a paragraph with explained names into text and a list of them."""
    found: list[str] = []
    inside = False
    for line in lines:
        argument = _ARGUMENT.match(line)
        if argument and set(argument[1].split(", ")) <= names:
            told = ", ".join(f"**{name}**" for name in argument[1].split(", "))
            found += [*([] if inside else [""]), f"- {told}: {escaped(argument[2])}"]
            inside = True
        elif inside and not line[0].isspace():  # the list has ended
            found += ["", escaped(line)]
            inside = False
        else:
            found.append(f"  {escaped(line.strip())}" if inside else escaped(line))
    return found


def readable(lines: list[str], names: set[str]) -> list[str]:
    """Return a docstring as reStructuredText."""
    found: list[str] = []
    code = False
    for paragraph in paragraphs(lines):
        indented = all(line.startswith("    ") for line in paragraph)
        if indented:
            found += [*([] if code else ["::", ""]), *paragraph]
        elif paragraph[0].startswith("|") and paragraph[-1].rstrip().endswith("|"):
            found += as_table(paragraph)
        elif paragraph[0].startswith((">>>", "- ", "..")):
            found += paragraph
        else:
            found += as_text(paragraph, names)
        found.append("")
        code = indented
    return found


def commented(thing: object, lines: list[str]) -> list[str]:
    """Return "name: text" lines of a dataclass's fields that have a comment, and no such line."""
    if not (inspect.isclass(thing) and is_dataclass(thing)):
        return []
    found = map(_FIELD.fullmatch, inspect.getsource(thing).splitlines())
    told = {
        name for line in lines if (match := _ARGUMENT.match(line)) for name in match[1].split(", ")
    }
    return [f"{match[1]}: {match[2]}." for match in found if match and match[1] not in told]


def process(
    app: object, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    lines[:] = readable([*lines, "", *commented(thing, lines)], names_of(thing))


def setup(app: Any) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", process)
    return {"parallel_read_safe": True}
