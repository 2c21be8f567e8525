"""What a page of the documentation shows: its files, its edits, and its commands with their output.

A block of Python after "Save this as `name`" is a file, a `diff` block an edit of the file that was
saved last, and a `console` block commands after "$ ", each with what it prints. In what is printed,
"…" stands for anything, and alone on a line for any number of lines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isclose
from pathlib import Path

_BLOCK = re.compile(r"^```(python|console|diff)\n(.*?)^```", re.M | re.S)
_NAMED = re.compile(r"Save this as `([\w./-]+)`[^\n]*\n(?:[^\n]+\n)*\n$")
_WORKER = re.compile(r"^(w\d+ ).*")
_OPEN = re.compile(r"^(?:ok|warning| *[2-9]| *\d\d+) .*")  # a verdict, or a rank below the first
_NUMBER = re.compile(r"(?<![a-z])\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class File:
    """A file that the reader saves."""

    name: str
    text: str


@dataclass(frozen=True)
class Edit:
    """Lines of a file that the reader replaces."""

    name: str
    before: str
    after: str

    def apply(self, folder: Path) -> None:
        path = folder / self.name
        text = path.read_text()
        assert text.count(self.before) == 1, f"{self.name} has no such lines:\n{self.before}"
        path.write_text(text.replace(self.before, self.after))


@dataclass(frozen=True)
class Command:
    """A command that the reader types, what the page shows of its output, and under which title."""

    line: str
    shown: tuple[str, ...]
    section: str


def read(page: Path) -> list[File | Edit | Command]:
    """Return what a reader of the page does, in order."""
    text = page.read_text()
    found: list[File | Edit | Command] = []
    name = ""
    for block in _BLOCK.finditer(text):
        kind, content = block.groups()
        before = text[: block.start()]
        if kind == "console":
            section = re.findall(r"^#+ (.*)$", before, re.M)[-1]
            found.extend(_commands(content, section))
        elif kind == "diff":
            old, new = (
                "".join(line[1:] + "\n" for line in content.splitlines() if line[0] in signs)
                for signs in ("- ", "+ ")
            )
            found.append(Edit(name, old, new))
        elif named := _NAMED.search(before):
            name = named[1]
            found.append(File(name, content))
    return found


def snippets(page: Path) -> list[str]:
    """Return the blocks of Python that are not files to be saved."""
    text = page.read_text()
    return [
        block[2]
        for block in _BLOCK.finditer(text)
        if block[1] == "python" and not _NAMED.search(text[: block.start()])
    ]


def _commands(block: str, section: str) -> list[Command]:
    lines = block.splitlines()
    starts = [*(i for i, line in enumerate(lines) if line.startswith("$ ")), len(lines)]
    return [
        Command(lines[start][2:], tuple(lines[start + 1 : end]), section)
        for start, end in pairwise(starts)
    ]


def loose(shown: Sequence[str]) -> list[str]:
    """Return what holds of a measured output on every machine and with every version of scipy.

    That is all but what was found of a worker (as its law), what a check of the machine says after
    its first line, and which policies come after the best. Numbers may still be any.
    """
    first, *rest = (_WORKER.sub(r"\1…", line) for line in shown)
    return [first, *(_OPEN.sub("…", line) for line in rest)]


def check(shown: Sequence[str], printed: Sequence[str], tolerance: float = 0.0) -> None:
    """Raise unless the output begins as shown, numbers being equal up to a relative tolerance."""
    rest = iter(printed)
    anywhere = False
    for line in shown:
        if line.strip() == "…":
            anywhere = True
            continue
        for real in rest:
            if _alike(line, real, tolerance):
                break
            assert anywhere, f"the page shows\n  {line}\nand the command printed\n  {real}"
        else:
            raise AssertionError(f"the page shows a line that was not printed:\n  {line}")
        anywhere = False


def _alike(shown: str, real: str, tolerance: float) -> bool:
    pattern, at = "", 0
    wanted = list(_NUMBER.finditer(shown))
    for number in wanted:
        pattern += _text(shown[at : number.start()]) + f"({_NUMBER.pattern})"
        at = number.end()
    end = "" if shown.rstrip().endswith("…") else r"\s*$"
    found = re.match(pattern + _text(shown[at:]) + end, real)
    if found is None:
        return False
    if tolerance == inf:
        return True
    pairs = zip((_value(number[0]) for number in wanted), found.groups(), strict=True)
    return all(isclose(a, _value(b), rel_tol=tolerance) for a, b in pairs)


def _text(text: str) -> str:
    """Return a pattern for text between numbers: columns may be wider, "…" is anything."""
    pieces = re.split(r"(\s+|…)", text)
    special = {"…": ".*?"}
    return "".join(
        special.get(piece, r"\s+" if piece.isspace() else re.escape(piece)) for piece in pieces
    )


def _value(number: str) -> float:
    return float(number.replace(",", ""))
