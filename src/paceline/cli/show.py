"""Output of commands: tables or one JSON object on stdout, progress on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, TextIO

import click

PATIENCE = 2.0
"""Seconds after which a command shows its progress."""
_BAR = 24  # characters

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object, and nothing else."
)


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows under their names, words aligned to the left and numbers to the right.

    >>> print(table(["worker", "s"], [["w0", "1.5"], ["w1", "12"]]))
    worker    s
    w0      1.5
    w1       12
    """
    columns = []
    for name, *cells in zip(names, *rows, strict=True):
        width = max(map(len, (name, *cells)))
        words = any(cell[:1].isalpha() for cell in cells)
        columns.append([f"{cell:{'<' if words else '>'}{width}}" for cell in (name, *cells)])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def spare_journal(output: Path) -> None:
    """Refuse to overwrite a journal."""
    from paceline.core.journal import read_header

    if not output.is_file():
        return
    try:
        read_header(output)
    except (ValueError, TypeError):
        return  # it is no journal
    raise ValueError(f"{output} is a journal and would be overwritten; give -o another name")


def say(text: str) -> None:
    """Print a line for people, on stderr."""
    click.echo(text, err=True)


def print_json(data: Mapping[str, Any]) -> None:
    """Print one object; numbers that JSON does not have (nan, infinity) become null."""
    click.echo(json.dumps(plain(data), indent=1, ensure_ascii=False, allow_nan=False))


def plain(value: Any) -> Any:
    """Return a value in the types of JSON.

    >>> plain({"a": (1.5, float("inf"))})
    {'a': [1.5, None]}
    """
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


class Part:
    """The progress of an operation, as the operation reports it."""

    def __init__(self, total: float | None) -> None:
        self._total, self._done = total, 0.0
        self.what = ""  # the current stage

    def at(self, what: str, share: float) -> None:
        """Set the current stage, and the share of it that is done."""
        self.what, self._total, self._done = f" {what}", 1.0, share

    def to(self, done: float) -> None:
        """Set how much of the total is done; a smaller value than before is ignored."""
        self._done = max(self._done, done)

    def bar(self, live: bool) -> str:
        """Return a bar on a terminal and a percentage elsewhere; "" without a total."""
        if not self._total:
            return ""
        part = min(max(self._done / self._total, 0.0), 1.0)
        full = round(part * _BAR)
        return f"  [{'#' * full}{'-' * (_BAR - full)}] {part:.0%}" if live else f", {part:.0%}"


@contextlib.contextmanager
def patience(
    text: str,
    total: float | None = None,
    *,
    after: float = PATIENCE,
    stream: TextIO | None = None,
) -> Iterator[Part]:
    """Show on stderr the operation and its time, if it takes longer than two seconds.

    On a terminal one line is kept current; elsewhere a line is printed every ten seconds.

    total: the amount of work, if known; `Part.to` then sets how much is done.
    """
    out = stream or sys.stderr
    live = out.isatty()
    done, began = threading.Event(), time.monotonic()
    part = Part(total)

    def tell() -> None:
        wait, last = after, ""
        while not done.wait(wait):
            passed = time.monotonic() - began
            line = f"{text}{part.what}: {passed:.0f} s{part.bar(live)}"
            out.write(f"\r\033[K{line}" if live else f"{line}\n")
            out.flush()
            wait, last = (1.0, "\r\033[K") if live else (10.0, "")
        out.write(last)
        out.flush()

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield part
    finally:
        done.set()
        thread.join(PATIENCE)  # a blocked terminal must not delay the answer
