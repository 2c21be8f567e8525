"""Lanes of workers over time: their tasks, and the share of steps that used them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.core.protocol import WorkerId
from paceline.report.html.charts import Figure, Scale, Table, of_time, short
from paceline.report.html.collect import Record
from paceline.report.html.svg import BOTTOM, LEFT, RIGHT, TOP, WIDTH, Axis, Drawing, boxes, skyline
from paceline.report.html.timeline import Bins

ROWS = 64
"""The most workers that are shown."""
_CELLS = 19_200  # the most time intervals of a timeline, over all workers
_LEVELS = 6  # heights of a column in a timeline


def picked(workers: Sequence[WorkerId], speeds: Sequence[float]) -> list[int]:
    """Return the workers to show: all, or if too many, as many slowest as quickest ones."""
    if len(workers) <= ROWS:
        return list(range(len(workers)))
    order = sorted(range(len(workers)), key=lambda i: (speeds[i], i))
    return sorted(order[: ROWS // 2] + order[-ROWS // 2 :])


def timeline(record: Record, title: str) -> Figure:
    """Draw a lane for each worker: its used tasks, its wasted tasks, and its absences."""
    tallies = record.workers
    workers = list(tallies)
    shown = [workers[i] for i in picked(workers, [t.speed(record.end) for t in tallies.values()])]
    begin, end = record.timeline.origin, max(record.end, record.timeline.origin + 1e-9)
    across = of_time(end)
    tall = 15.0 if len(shown) <= 24 else 9.0
    gap = 5.0 if len(shown) <= 24 else 2.0
    bottom = TOP + len(shown) * (tall + gap)
    x = Axis(begin / across.factor, end / across.factor, LEFT, WIDTH - RIGHT)
    columns = int(min(600, _CELLS // max(len(shown), 1)))
    edges = np.linspace(begin, end, columns + 1)
    lefts = x.at(edges / across.factor)
    width = (end - begin) / columns
    rows = [record.row(worker) for worker in shown]
    used = record.timeline.used.over(max(rows, default=-1) + 1, edges)[rows] / width
    wasted = record.timeline.wasted.over(max(rows, default=-1) + 1, edges)[rows] / width
    total = record.timeline.there(workers, np.array([begin, end]))[:, 0]
    drawing = Drawing(bottom + BOTTOM, title, "", "timeline")
    drawing.time(x, bottom, across.label)
    exact = record.timeline.exact
    for lane, (worker, row) in enumerate(zip(shown, rows, strict=True)):
        top = TOP + lane * (tall + gap)
        stays = [
            (x.at(a / across.factor), x.at((end if b is None else b) / across.factor))
            for a, b in record.timeline.presence.get(worker, ())
        ]
        drawing.text(LEFT - 6, top + tall / 2, short(worker), "end" if tall > 10 else "end dense")
        drawing.path("gone", f"M{LEFT:g} {top + tall / 2:.1f}H{WIDTH - RIGHT:g}")
        drawing.path("there", boxes((float(a), top, float(b - a), tall) for a, b in stays))
        if exact is not None:
            for kind, wanted in (("used", True), ("wasted", False)):
                drawing.path(kind, boxes(_tasks(exact, row, wanted, x, across, top, tall)))
            continue
        low = np.rint(np.clip(used[lane], 0, 1) * _LEVELS).astype(int)
        both = np.rint(np.clip(used[lane] + wasted[lane], 0, 1) * _LEVELS).astype(int)
        unit = tall / _LEVELS
        drawing.path("wasted", skyline(both.tolist(), lefts, top + tall, unit))
        drawing.path("cover", skyline(low.tolist(), lefts, top + tall, unit))
        drawing.path("used", skyline(low.tolist(), lefts, top + tall, unit))
    table = [
        [
            worker,
            _share(tally.used_seconds, there),
            _share(max(tally.busy_seconds(record.end) - tally.used_seconds, 0.0), there),
            _share(there - tally.busy_seconds(record.end), there),
            f"{1 - there / (end - begin):.0%}",
        ]
        for (worker, tally), there in zip(tallies.items(), total.tolist(), strict=True)
        if worker in set(shown)
    ]
    drawing.description = "; ".join(
        f"{row[0]}: {row[1]} computing results that were used, {row[2]} computing wasted results, "
        f"{row[3]} waiting, {row[4]} gone"
        for row in table[:12]
    )
    head = ["worker", "computing, used", "computing, wasted", "waiting", "gone"]
    return Figure(drawing.render(), Table(head, table))


def _share(seconds: float, there: float) -> str:
    return f"{min(max(seconds / there, 0.0), 1.0):.0%}" if there > 0 else "–"


def _tasks(
    exact: Sequence[tuple[int, float, float, bool]],
    row: int,
    wanted: bool,
    x: Axis,
    across: Scale,
    top: float,
    tall: float,
) -> list[tuple[float, float, float, float]]:
    """Return the boxes of single tasks, with a thin gap between two."""
    mine = np.array([(a, b) for r, a, b, used in exact if r == row and used == wanted])
    if not len(mine):
        return []
    at = x.at(mine / across.factor)
    return [(a, top, max(b - a - 0.6, 0.4), tall) for a, b in at.tolist() if b > a]


def selection(record: Record, title: str) -> Figure:
    """Draw for each worker the share of the steps that used it, over time: darker is more."""
    tallies = record.workers
    workers = list(tallies)
    shown = [workers[i] for i in picked(workers, [t.speed(record.end) for t in tallies.values()])]
    seconds = np.array(record.meter.columns["seconds"])
    begin, end = record.timeline.origin, float(seconds[-1])
    across = of_time(end)
    columns = int(np.clip(len(seconds) // 8, 1, 120))
    edges = np.linspace(begin, end, columns + 1)
    rows = [record.row(worker) for worker in shown]
    chosen = record.timeline.chosen.over(max(rows) + 1, edges)[rows]
    bins = Bins(begin)  # counts steps in the same intervals as their results
    bins.count(np.zeros(len(seconds), dtype=np.int64), seconds)
    steps = bins.over(1, edges)[0]
    share = np.divide(chosen, steps, out=np.zeros_like(chosen), where=steps > 1e-9)
    usual = float(np.quantile(share, 0.99)) if share.size else 1.0
    full = next((each for each in (0.1, 0.2, 0.5) if usual <= each), 1.0)
    level = np.ceil(np.clip(share / full, 0, 1) * 5 - 0.05).astype(int)
    tall, gap = (15.0, 3.0) if len(shown) <= 24 else (8.0, 1.0)
    bottom = TOP + len(shown) * (tall + gap)
    x = Axis(begin / across.factor, end / across.factor, LEFT, WIDTH - RIGHT)
    lefts = x.at(edges / across.factor).tolist()
    total = {worker: record.steps_used.get(worker, 0) / len(seconds) for worker in workers}
    few = sorted(shown, key=lambda worker: total[worker])
    drawing = Drawing(
        bottom + BOTTOM, title,
        f"The least chosen: {', '.join(f'{w} in {total[w]:.0%}' for w in few[:5])} of the steps.",
        "strip",
    )  # fmt: skip
    cells: dict[int, list[tuple[float, float, float, float]]] = {}
    for lane, worker in enumerate(shown):
        top, start = TOP + lane * (tall + gap), 0
        drawing.text(LEFT - 6, top + tall / 2, short(worker), "end" if tall > 10 else "end dense")
        for i in range(1, columns + 1):
            if i == columns or level[lane, i] != level[lane, start]:
                box = (lefts[start], top, lefts[i] - lefts[start], tall)
                cells.setdefault(int(level[lane, start]), []).append(box)
                start = i
    for each, parts in sorted(cells.items()):
        drawing.path(f"q{each}", boxes(parts))
    drawing.time(x, bottom, across.label)
    table = [[worker, f"{total[worker]:.0%}"] for worker in shown]
    names = ["none", *(f"up to {full * each / 5:.0%}" for each in (1, 2, 3, 4, 5))]
    names[-1] = "all" if full == 1.0 else f"up to {full:.0%} or more"
    head = ["worker", "share of all steps that used it"]
    return Figure(drawing.render(), Table(head, table), names)
