"""Boxes, texts, lines and arrows as SVG, in a light and in a dark version.

Coordinates are pixels of a picture that is 600 wide. A phone shows it at about 360, so that a text
of 16 has 10 pixels there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

FOLDER = Path(__file__).parent
WIDTH = 600
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
CODE = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


@dataclass(frozen=True)
class Theme:
    """The colors of one version: pairs are (fill, line)."""

    name: str
    back: tuple[str, str]
    text: str
    muted: str
    blue: tuple[str, str]
    amber: tuple[str, str]
    green: tuple[str, str]
    plain: tuple[str, str]


LIGHT = Theme(
    name="light",
    back=("#ffffff", "#d1d5db"),
    text="#1f2937",
    muted="#4b5563",
    blue=("#bfdbfe", "#2563eb"),
    amber=("#fef3c7", "#b45309"),
    green=("#d1fae5", "#047857"),
    plain=("#f3f4f6", "#9ca3af"),
)
DARK = Theme(
    name="dark",
    back=("#131416", "#3f4247"),
    text="#e5e7eb",
    muted="#b4b8bf",
    blue=("#1d4ed8", "#93c5fd"),
    amber=("#3b2a10", "#f59e0b"),
    green=("#064e3b", "#34d399"),
    plain=("#22252a", "#6b7280"),
)


class Drawing:
    """Parts of a picture, in the order in which they are painted."""

    def __init__(self, theme: Theme, height: float, title: str) -> None:
        self.theme = theme
        self._title, self._height = title, height
        self._parts: list[str] = []
        self.box(0.5, 0.5, WIDTH - 1, height - 1, theme.back, radius=8)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        colors: tuple[str, str],
        radius: float = 4,
    ) -> None:
        fill, line = colors
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
            f'fill="{fill}" stroke="{line}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: int = 16,
        anchor: str = "start",
        color: str = "",
        bold: bool = False,
        code: bool = False,
    ) -> None:
        look = ' font-weight="bold"' if bold else ""
        look += f' font-family="{CODE}"' if code else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" '
            f'fill="{color or self.theme.text}"{look}>{escape(words)}</text>'
        )

    def path(self, d: str, color: str, width: float = 1, fill: str = "none") -> None:
        self._parts.append(
            f'<path d="{d}" stroke="{color}" stroke-width="{width:g}" fill="{fill}"/>'
        )

    def arrow(self, points: Sequence[tuple[float, float]], color: str = "") -> None:
        """Draw a line of horizontal and vertical pieces with a head at its end."""
        color = color or self.theme.muted
        (px, py), (x, y) = points[-2], points[-1]
        dx, dy = (x > px) - (x < px), (y > py) - (y < py)
        short = [*points[:-1], (x - 6 * dx, y - 6 * dy)]
        self.path("M" + "L".join(f"{a:g} {b:g}" for a, b in short), color, 1.8)
        left, right = ((x - 9 * dx + side * 5 * dy, y - 9 * dy + side * 5 * dx) for side in (-1, 1))
        tip = f"M{x:g} {y:g}L{left[0]:g} {left[1]:g}L{right[0]:g} {right[1]:g}Z"
        self.path(tip, color, fill=color)

    def hatch(self, x: float, y: float, width: float, height: float, color: str) -> None:
        """Draw diagonal lines in a box; as plain lines, since not every viewer has patterns."""
        lines, at = [], 5.0
        while at < width + height:
            begin = (x + min(at, width), y + max(0.0, at - width))
            end = (x + max(0.0, at - height), y + min(at, height))
            lines.append(f"M{begin[0]:.4g} {begin[1]:.4g}L{end[0]:.4g} {end[1]:.4g}")
            at += 7
        self.path("".join(lines), color, 1.2)

    def svg(self) -> str:
        size = f'viewBox="0 0 {WIDTH} {self._height:g}" width="{WIDTH}" height="{self._height:g}"'
        label = quoteattr(self._title)
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" role="img" '
        return "\n".join([f"{head}aria-label={label}>", *self._parts, "</svg>\n"])


def save(name: str, draw: Callable[[Theme], str], folder: Path = FOLDER) -> None:
    """Write name-light.svg and name-dark.svg."""
    for theme in (LIGHT, DARK):
        (folder / f"{name}-{theme.name}.svg").write_text(draw(theme))
