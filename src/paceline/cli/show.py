"""What commands print: tables or one JSON object on stdout, how long it takes on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, TextIO

import click

PATIENCE = 2.0
"""Seconds after which a command says that it is at work."""
_BAR = 24  # characters

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object, and nothing else."
)


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows under their names, words to the left and numbers to the right.

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


def say(text: str) -> None:
    """Print a line for people, on stderr."""
    click.echo(text, err=True)


def print_json(data: Mapping[str, Any]) -> None:
    """Print one object. What is no number for JSON (nan, infinity) becomes null."""
    click.echo(json.dumps(plain(data), indent=1, ensure_ascii=False, allow_nan=False))


def plain(value: Any) -> Any:
    """Return a value as JSON has it.

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
    """How far something is, as told by who does it."""

    def __init__(self, total: float | None) -> None:
        self._total, self._done = total, 0.0

    def to(self, done: float) -> None:
        """Say that so much of the total is done, or more if that was said before."""
        self._done = max(self._done, done)

    def bar(self, live: bool) -> str:
        """Return it as a bar on a terminal and as a percentage elsewhere, "" without a total."""
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
    seconds: float | None = None,
    after: float = PATIENCE,
    stream: TextIO | None = None,
) -> Iterator[Part]:
    """Say on stderr what goes on and for how long, if it takes longer than two seconds.

    On a terminal one line is kept current; elsewhere there is a line every ten seconds.

    total: of what is to be done, if it is known; `Part.to` then says how much is.
    seconds: that it takes at most, if these are known instead.
    """
    out = stream or sys.stderr
    live = out.isatty()
    done, began = threading.Event(), time.monotonic()
    part = Part(seconds if total is None else total)

    def tell() -> None:
        wait, last = after, ""
        while not done.wait(wait):
            passed = time.monotonic() - began
            if total is None:
                part.to(passed)
            line = f"{text}: {passed:.0f} s{part.bar(live)}"
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
        thread.join(PATIENCE)  # a terminal that takes no line must not keep the answer back
