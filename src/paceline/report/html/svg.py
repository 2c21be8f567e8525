"""Drawing for the page of a run: axes, lines, bars and strips as SVG.

It uses no plotting library for three reasons. Figures follow light and dark mode by the variables
of the style sheet. The page stays small enough to be mailed. A screen reader can describe figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, log10

import numpy as np
from markupsafe import Markup, escape

from paceline.report.html.timeline import Floats

WIDTH = 720.0
"""The width of a figure, in its own units; the page scales it, on a phone the texts less."""
LEFT, RIGHT, TOP, BOTTOM = 62.0, 14.0, 12.0, 46.0


def plain(value: float) -> str:
    """Return a number with four significant digits, in plain notation.

    >>> plain(1234567.0), plain(12.3456), plain(0.5), plain(0.0000123), plain(0)
    ('1,234,567', '12.35', '0.5', '1.23e-05', '0')
    """
    if value != value:
        return "not a number"
    if abs(value) >= 1e12:
        return f"{value:.3g}"
    if abs(value) >= 999.95:
        return f"{value:,.0f}"
    return f"{value:.3g}" if 0 < abs(value) < 0.001 else f"{value:.4g}"


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Return about so many round numbers between two values.

    >>> ticks(0, 97), ticks(0.2, 0.9, 4)
    ([0.0, 20.0, 40.0, 60.0, 80.0], [0.2, 0.4, 0.6, 0.8])
    """
    if not high > low:
        return [low]
    rough = (high - low) / max(count - 1, 1)
    power = 10.0 ** floor(log10(rough))
    step = next((power * each for each in (1, 2, 5) if power * each >= rough * 0.7), 10 * power)
    begin, end = ceil(low / step - 1e-9), floor(high / step + 1e-9)
    return [float(f"{i * step:.10g}") for i in range(begin, end + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten between two values, or powers only if many.

    >>> log_ticks(0.4, 30)
    [0.5, 1.0, 2.0, 5.0, 10.0, 20.0]
    """
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    for factors in ((1, 2, 5), (1,)):
        found = [float(f"{f}e{p}") for p in powers for f in factors]
        found = [each for each in found if low * 0.999 <= each <= high * 1.001]
        if len(found) <= 7:
            break
    else:
        found = found[:: ceil(len(found) / 7)]
    return found or [low]


@dataclass(frozen=True)
class Axis:
    """Maps values to places in a figure."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def at(self, values: Floats | Sequence[float] | float) -> Floats:
        """Return the places of values."""
        found, low, high = np.asarray(values, dtype=float), self.low, self.high
        if self.log:
            found, low, high = np.log10(found), log10(low), log10(high)
        share = (found - low) / (high - low) if high > low else np.full_like(found, 0.5)
        return np.asarray(self.begin + share * (self.end - self.begin))

    def ticks(self, count: int = 6) -> list[float]:
        return log_ticks(self.low, self.high) if self.log else ticks(self.low, self.high, count)


def place(value: float) -> str:
    """Return a coordinate in as few characters as possible.

    >>> place(12.0), place(0.25), place(-0.04)
    ('12', '0.2', '0')
    """
    text = f"{value:.1f}"
    text = text.removesuffix(".0")
    return "0" if text == "-0" else text


def polyline(x: Floats, y: Floats) -> str:
    """Return the path of a line; it has a gap where there is no number."""
    words: list[str] = []
    pen = "M"
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        if a - a == 0 and b - b == 0:
            words.append(f"{pen}{place(a)} {place(b)}")
            pen = "L"
        else:
            pen = "M"
    return "".join(words)


def dots(x: Floats, y: Floats) -> str:
    """Return the path of points, which a round line cap makes visible."""
    both = zip(x.tolist(), y.tolist(), strict=True)
    return "".join(f"M{place(a)} {place(b)}h0" for a, b in both if a - a == 0 and b - b == 0)


def boxes(parts: Iterable[tuple[float, float, float, float]]) -> str:
    """Return the path of boxes: left, top, width and height of each."""
    return "".join(
        f"M{place(x)} {place(y)}h{place(w)}v{place(h)}h{place(-w)}z" for x, y, w, h in parts
    )


def skyline(heights: Sequence[int], lefts: Floats, bottom: float, unit: float) -> str:
    """Return the path of columns side by side, those of equal height drawn as one.

    lefts: the left edge of each column, then the right edge of the last.
    """
    words: list[str] = []
    i, count = 0, len(heights)
    while i < count:
        if not heights[i]:
            i += 1
            continue
        words.append(f"M{place(lefts[i])} {place(bottom)}")
        level = 0
        while i < count and heights[i]:
            j = i
            while j < count and heights[j] == heights[i]:
                j += 1
            words.append(f"V{place(bottom - heights[i] * unit)}H{place(lefts[j])}")
            level, i = heights[i], j
        words.append(f"V{place(bottom)}z" if level else "")
    return "".join(words)


@dataclass
class Drawing:
    """A figure that is being drawn."""

    height: float
    title: str
    description: str
    name: str = ""  # its class in the style sheet
    parts: list[str] = field(default_factory=list)

    def path(self, kind: str, d: str) -> None:
        if d:
            self.parts.append(f'<path class="{kind}" d="{d}"/>')

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        name = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text x="{place(x)}" y="{place(y)}"{name}>{escape(text)}</text>')

    def axes(self, x: Axis, y: Axis, x_label: str, y_label: str) -> None:
        """Draw the frame: thin lines at round values, and their labels."""
        values, at = y.ticks(5), y.at(y.ticks(5))
        self.path("grid", "".join(f"M{place(x.begin)} {place(b)}H{place(x.end)}" for b in at))
        for value, b in zip(values, at.tolist(), strict=True):
            self.text(x.begin - 6, b, plain(value), "end")
        self.time(x, y.begin, x_label)
        self.parts.append(
            f'<text class="label turned" transform="translate(11 {place((y.begin + y.end) / 2)}) '
            f'rotate(-90)">{escape(y_label)}</text>'
        )

    def time(self, x: Axis, bottom: float, label: str) -> None:
        """Draw the lower axis."""
        values, at = x.ticks(), x.at(x.ticks())
        self.path("axis", f"M{place(x.begin)} {place(bottom)}H{place(x.end)}")
        self.path("axis", "".join(f"M{place(a)} {place(bottom)}v4" for a in at))
        for value, a in zip(values, at.tolist(), strict=True):
            self.text(a, bottom + 15, plain(value), "middle")
        self.text((x.begin + x.end) / 2, bottom + 33, label, "label middle")

    def render(self) -> Markup:
        name = f' class="{self.name}"' if self.name else ""
        return Markup(
            f'<svg{name} role="img" viewBox="0 0 {place(WIDTH)} {place(self.height)}">'
            f"<title>{escape(self.title)}</title><desc>{escape(self.description)}</desc>"
            f"{''.join(self.parts)}</svg>"
        )
