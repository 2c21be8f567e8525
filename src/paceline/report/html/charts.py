"""Curves and bars of the page: loss, results and staleness over time, and contributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from markupsafe import Markup

from paceline.core.protocol import WorkerId
from paceline.report.html.svg import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Drawing,
    boxes,
    dots,
    plain,
    polyline,
)
from paceline.report.html.timeline import Floats
from paceline.report.words import TIMES

POINTS = 1000
"""The most points of a curve; a longer one shows minimum and maximum of each interval."""
_FEW = 400  # up to so many points are drawn larger
_LOG = 20.0  # a curve whose range exceeds this factor is drawn on a log scale


@dataclass(frozen=True)
class Table:
    """The content of a figure as a table, for screen readers."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Figure:
    svg: Markup
    table: Table | None = None
    levels: Sequence[str] = ()  # the meaning of the shades


@dataclass(frozen=True)
class Scale:
    """A quantity along an axis: its name and its unit."""

    name: str
    unit: str = ""
    factor: float = 1.0  # the size of the unit

    @property
    def label(self) -> str:
        return f"{self.name} ({self.unit})" if self.unit else self.name


def of_time(most: float, name: str = "time") -> Scale:
    """Choose a unit of time.

    >>> of_time(90).unit, of_time(7200).unit, of_time(1e5).unit, of_time(0.01).unit
    ('s', 'min', 'h', 'ms')
    """
    unit = next((each for each in TIMES if most >= 5 * each[1]), TIMES[-1])
    return Scale(name, *unit)


def of_bytes(most: float, name: str) -> Scale:
    units = [("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)]
    return Scale(name, *next((each for each in units if most >= each[1]), units[-1]))


def running_median(values: Floats, window: int) -> Floats:
    """Return the median of each value and its neighbors, fewer of them at the ends.

    >>> running_median(np.array([1.0, 9.0, 2.0, 3.0]), 3)
    array([5. , 2. , 3. , 2.5])
    """
    half = window // 2
    found = [np.median(values[: i + half + 1]) for i in range(half)]
    if len(values) > 2 * half:
        inner = np.lib.stride_tricks.sliding_window_view(values, 2 * half + 1)
        found += np.median(inner, axis=1).tolist()
    found += [np.median(values[i - half :]) for i in range(max(len(found), half), len(values))]
    return np.array(found[: len(values)])


def thinned(x: Floats, y: Floats, most: int = POINTS) -> tuple[Floats, Floats]:
    """Return minimum and maximum of each of equal intervals, in their order."""
    if len(y) <= most:
        return x, y
    edges = np.linspace(0, len(y), most // 2 + 1).astype(int)
    keep = []
    for a, b in pairwise(edges.tolist()):
        keep += sorted({a + int(y[a:b].argmin()), a + int(y[a:b].argmax())})
    return x[keep], y[keep]


def medians(x: Floats, y: Floats, most: int = POINTS) -> tuple[Floats, Floats]:
    """Return the running median, of intervals if there are many values."""
    if len(y) > most:
        edges = np.linspace(0, len(y), most + 1).astype(int)
        pairs = list(pairwise(edges.tolist()))
        x = np.array([x[(a + b) // 2] for a, b in pairs])
        y = np.array([np.median(y[a:b]) for a, b in pairs])
    window = max(len(y) // 60, 2) * 2 + 1
    return x, running_median(y, window)


def curve(
    x: Floats,
    y: Floats,
    across: Scale,
    up: str,
    title: str,
    *,
    target: float | None = None,
    from_zero: bool = False,
    joined: bool = False,
) -> Figure:
    """Draw a quantity against another: every value as a point, and the running median.

    joined: draw a line through all points instead, for values that are few.
    """
    height = 210.0 if from_zero or joined else 310.0
    known = np.isfinite(y) & np.isfinite(x)
    x, y = x[known] / across.factor, y[known]
    shown = f"No values of {up} are known."
    if not len(y):
        empty = Drawing(60.0, title, shown)
        empty.text(WIDTH / 2, 34, shown, "middle label")
        return Figure(empty.render())
    mid_x, mid_y = (x, y) if joined else medians(x, y)
    low, high = float(y.min()), float(y.max())
    if target is not None and np.isfinite(target):
        low, high = min(low, target), max(high, target)
    log = low > 0 and high / low > _LOG and not from_zero
    if log:
        room = (high / low) ** 0.03
        low, high = low / room, high * room
    else:
        room = 0.04 * (high - low) or abs(high) * 0.1 or 1.0
        low, high = (0.0 if from_zero else low - room), high + room
    by, single = ("", "in all") if joined else (" by the running median", "in single steps")
    begin = min(float(x[0]), 0.0) if x[0] < 0.2 * x[-1] else float(x[0])
    axis_x = Axis(begin, float(x[-1]), LEFT, WIDTH - RIGHT)
    axis_y = Axis(low, high, height - BOTTOM, TOP, log)
    drawing = Drawing(
        height, title,
        f"From {plain(mid_y[0])} to {plain(mid_y[-1])}{by}, over "
        f"{plain(x[-1])} {across.unit or across.name}; between {plain(float(y.min()))} and "
        f"{plain(float(y.max()))} {single}.",
    )  # fmt: skip
    drawing.axes(axis_x, axis_y, across.label, f"{up}, log scale" if log else up)
    raw_x, raw_y = thinned(x, y)
    drawing.path(
        "dots" if len(raw_y) > _FEW else "dots few", dots(axis_x.at(raw_x), axis_y.at(raw_y))
    )
    if target is not None and np.isfinite(target):
        at = float(axis_y.at(target))
        drawing.path("target", f"M{LEFT:g} {at:.1f}H{WIDTH - RIGHT:g}")
        drawing.text(WIDTH - RIGHT - 3, at - 9, f"target {plain(target)}", "end mark")
    drawing.path("median", polyline(axis_x.at(mid_x), axis_y.at(mid_y)))
    picks = np.unique(np.linspace(0, len(mid_y) - 1, 12).astype(int))
    rows = [[plain(mid_x[i]), plain(mid_y[i])] for i in picks.tolist()]
    return Figure(
        drawing.render(), Table([across.label, up if joined else f"{up}, running median"], rows)
    )


def short(worker: WorkerId) -> str:
    return worker if len(worker) <= 9 else f"{worker[:8]}…"


def bars(names: Sequence[str], ratios: Floats, title: str, up: str) -> Figure:
    """Draw the share of its due part that each had, with lines at all of it and at half."""
    height = 240.0
    most = max(float(ratios.max(initial=0.0)) * 1.08, 1.2)
    y = Axis(0.0, most, height - 24, TOP)
    drawing = Drawing(
        height, title,
        f"From {ratios.min():.0%} to {ratios.max():.0%} of what is due, over {len(names)} parts.",
        "bars",
    )  # fmt: skip
    for value in y.ticks(5):
        at = float(y.at(value))
        drawing.path("grid", f"M{LEFT:g} {at:.1f}H{WIDTH - RIGHT:g}")
        drawing.text(LEFT - 6, at, f"{value:.0%}", "end")
    room = (WIDTH - RIGHT - LEFT) / len(names)
    wide = room * 0.7 if room > 2 else room
    tops = np.minimum(y.at(ratios), y.begin - 1.5).tolist()  # so that a bar of 0 is visible
    parts = [
        (LEFT + i * room + (room - wide) / 2, top, wide, y.begin - top)
        for i, top in enumerate(tops)
    ]
    few = ratios < 0.5
    drawing.path("used", boxes(p for p, less in zip(parts, few, strict=True) if not less))
    drawing.path("wasted", boxes(p for p, less in zip(parts, few, strict=True) if less))
    at = float(y.at(1.0))
    drawing.path("due", f"M{LEFT:g} {at:.1f}H{WIDTH - RIGHT:g}")
    every = max(1, -(-len(names) // 12))
    for i in range(0, len(names), every):
        drawing.text(LEFT + (i + 0.5) * room, height - 9, short(names[i]), "middle")
    drawing.parts.append(
        f'<text class="label turned" transform="translate(11 {(TOP + y.begin) / 2:.1f}) '
        f'rotate(-90)">{up}</text>'
    )
    order = np.argsort(ratios, kind="stable").tolist()
    picks = order if len(order) <= 24 else [*order[:12], *order[-12:]]
    table = [[names[i], f"{ratios[i]:.0%}"] for i in picks]
    return Figure(drawing.render(), Table(["part", "of what is due"], table))
