"""Frames of a terminal as an SVG that plays them in a loop, by CSS alone.

All frames are one strip, which moves behind a window. A cell that several frames have is stored
once, and equal neighbors are one frame.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from xml.sax.saxutils import escape

from rich.console import Console
from rich.text import Text

WIDE, HIGH, SIZE = 8.4, 20, 14  # pixels of a character, of a line, and of the font
EDGE, GAP = 14, 10  # pixels around the window, and below the note
STYLES = {
    "bold": "font-weight:bold",
    "dim": "fill:#9aa3ae",
    "cyan": "fill:#58d1eb",
    "green": "fill:#8fd64a",
    "yellow": "fill:#fdb04f",
    "red": "fill:#ff8080",
}
RULES = f"""
text{{font:{SIZE}px Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace;fill:#e2e5e9}}
.panel{{fill:#1b1d21;stroke:#4b5563}} .line{{fill:#4b5563}} .lost{{fill:#ff8080}}
.head{{fill:#e2e5e9}}
"""
STILL = "@media (prefers-reduced-motion:reduce){.strip,.head{animation:none}}"

Line = tuple[tuple[str, str], ...]  # texts from left to right, each with its style: "bold yellow"


@dataclass(frozen=True)
class Frame:
    """A terminal from a moment on, with a note above it."""

    seconds: float
    note: str
    lines: tuple[Line, ...]
    lost: bool = False  # red in the line of time below the window

    @property
    def picture(self) -> tuple[tuple[Line, ...], bool]:
        return (((self.note, "red" if self.lost else "dim"),), *self.lines), self.lost


@dataclass(frozen=True)
class Cell:
    """A text at its place in a frame; the note is in row 0."""

    row: int
    column: int
    text: str
    style: str

    def drawn(self, name: str) -> str:
        kind = f' class="{self.style}"' if self.style else ""
        x, y = self.column * WIDE, self.row * HIGH + SIZE + (GAP if self.row else 0)
        length = len(self.text) * WIDE  # whatever the width of the font
        return (
            f'<text id="{name}"{kind} x="{x:.5g}" y="{y}" textLength="{length:.5g}">'
            f"{escape(self.text)}</text>"
        )


def lines_of(text: Text, width: int) -> tuple[Line, ...]:
    """Return the lines that a terminal of this width shows of a text."""
    console = Console(width=width, file=io.StringIO(), force_terminal=True)
    rows = console.render_lines(text, pad=False)
    return tuple(
        tuple(
            (part.text, " ".join(word for word in str(part.style).split() if word in STYLES))
            for part in row
        )
        for row in rows
    )


def film(
    frames: Sequence[Frame], title: str, description: str, speed: float = 1.0, hold: float = 2.0
) -> str:
    """Return frames as an animated SVG.

    speed: seconds of the frames in a second of the film.
    hold: seconds of the film after the last frame, before it begins again.
    """
    shown = distinct(frames)
    begin, end = frames[0].seconds, frames[-1].seconds + hold * speed
    parts = [(frame.seconds - begin) / (end - begin) for frame in shown]
    still = next((i for i, frame in enumerate(shown) if frame.lost), 0)
    pictures = [list(_cells(frame.picture[0])) for frame in shown]
    every = [cell for cells in pictures for cell in cells]
    width = max(cell.column + len(cell.text) for cell in every) * WIDE
    height = (max(cell.row for cell in every) + 1) * HIGH + GAP
    panel = width + 2 * EDGE, height + 2 * EDGE + 8
    told = f"{speed:g}× speed" if speed != 1 else ""
    size = f'width="{panel[0]:.5g}" height="{panel[1]:.5g}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {panel[0]:.5g} '
            f'{panel[1]:.5g}" role="img" aria-labelledby="title desc">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="desc">{escape(description)}</desc>',
            f"<style>{_rules(parts, width, height, (end - begin) / speed)}</style>",
            f'<rect class="panel" {size} rx="8"/>',
            f'<g transform="translate({EDGE} {EDGE})">',
            f'<rect class="line" y="{HIGH + GAP // 2}" width="{width:.5g}" height="1"/>',
            f'<text class="dim" x="{width:.5g}" y="{SIZE}" text-anchor="end">{told}</text>',
            *_time(shown, [*parts, 1.0], width, height + 6, parts[still]),
            f'<svg width="{width:.5g}" height="{height}">',
            *_strip(pictures, height, still),
            "</svg></g></svg>\n",
        ]
    )


def distinct(frames: Sequence[Frame]) -> list[Frame]:
    """Return the frames that differ from the one before."""
    if not frames:
        raise ValueError("there are no frames to draw; give at least one")
    changed = [b for a, b in pairwise(frames) if a.picture != b.picture]
    return [frames[0], *changed]


def _cells(lines: Sequence[Line]) -> Iterator[Cell]:
    """Yield the texts of a frame; two spaces end one."""
    for row, line in enumerate(lines):
        column = 0
        for text, style in line:
            for found in re.finditer(r"\S+(?: \S+)*", text):
                yield Cell(row, column + found.start(), found[0], style)
            column += len(text)


def _rules(parts: Sequence[float], width: float, height: int, length: float) -> str:
    """Return the style sheet: the strip jumps to each frame, the head of the time line moves."""
    jumps = "".join(
        f"{100 * part:.5g}%{{transform:translateY({-i * height}px)}}"
        for i, part in enumerate(parts)
    )
    return "\n".join(
        [
            RULES + " ".join(f".{name}{{{rule}}}" for name, rule in STYLES.items()),
            f".strip{{animation:strip {length:.5g}s step-end infinite}}",
            f".head{{animation:head {length:.5g}s linear infinite}}",
            f"@keyframes head{{from{{transform:none}}to{{transform:translateX({width:.5g}px)}}}}",
            f"@keyframes strip{{{jumps}}}",
            STILL,
        ]
    )


def _time(
    shown: Sequence[Frame], parts: Sequence[float], width: float, top: int, still: float
) -> Iterator[str]:
    """Yield the line of time: red while a worker is lost, and a head that moves."""
    yield f'<rect class="line" y="{top}" width="{width:.5g}" height="4" rx="2"/>'
    for lost, group in groupby(range(len(shown)), lambda i: shown[i].lost):
        first, *_, last = [*group] * 2
        x, long = parts[first] * width, (parts[last + 1] - parts[first]) * width
        if lost:
            yield f'<rect class="lost" x="{x:.5g}" y="{top}" width="{long:.5g}" height="4"/>'
    moved = f'transform="translate({still * width:.5g} 0)"'
    yield f'<rect class="head" x="-2" y="{top - 2}" width="4" height="8" rx="2" {moved}/>'


def _strip(pictures: Sequence[Sequence[Cell]], height: int, still: int) -> Iterator[str]:
    """Yield all frames below each other; without animation, the frame `still` is seen."""
    common = Counter(cell for cells in pictures for cell in cells).most_common()
    names = {cell: f"c{number:x}" for number, (cell, _) in enumerate(common)}
    yield "<defs>"
    yield from (cell.drawn(name) for cell, name in names.items())
    yield f'</defs><g class="strip" transform="translate(0 {-still * height})">'
    for i, cells in enumerate(pictures):
        uses = "".join(f'<use href="#{names[cell]}"/>' for cell in cells)
        yield f'<g class="frame" transform="translate(0 {i * height})">{uses}</g>'
    yield "</g>"
