"""A run at a glance: the metrics of the run and of each worker, as short texts and as HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import inf, isfinite, isnan, nan
from statistics import fmean, median
from typing import Any, Literal, TypeAlias

from paceline.core.journal import Header
from paceline.core.protocol import WorkerId
from paceline.report.metrics import Meter
from paceline.report.text import in_bytes, in_dollars, throughput
from paceline.report.words import in_seconds, shortened
from paceline.report.workers import Tally

State: TypeAlias = Literal["computing", "late", "idle", "there", "gone"]

RECENT = 60
"""The number of losses that are drawn."""
MANY = 16
"""The most workers that are shown; of more, the slowest and the quickest are shown."""
LATE = 3.0
"""A task counts as late after this many times the median of the workers' mean task times."""
_BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Row:
    """The row of a worker."""

    state: State
    speed: float  # samples a second, 0.0 if not known
    part: float  # its share of the quickest worker's speed
    cells: Mapping[str, str]  # by the name of the column


@dataclass(frozen=True)
class Outlook:
    """The forecast, and the part of its time that has passed."""

    text: str
    part: float


@dataclass(frozen=True)
class Glance:
    """The view of a run at a moment."""

    policy: str
    figures: Mapping[str, str]
    losses: Sequence[float]  # the most recent ones
    outlook: Outlook | None
    slow: Sequence[Row]  # all, if there are few
    more: str  # the counts of the workers between them
    quick: Sequence[Row]
    reason: str  # why the run ended, "" if it continues


def glance(
    meter: Meter,
    workers: Mapping[WorkerId, Tally],
    header: Header,
    now: float,
    *,
    nodes: int = 1,
    most: int = MANY,
    epoch: float = nan,
    reached: float | None = None,
    reason: str = "",
) -> Glance:
    """Return the view of a run at a moment.

    workers: in the order in which they are shown.
    nodes: the number of coordinators, each of which takes its own steps.
    most: the most rows for workers.
    epoch: nan if it is not known.
    reached: the seconds at which the loss reached the target of the forecast, if it did.
    reason: why the run ended, if it did.
    """
    columns, about = meter.columns, header.about or {}
    figures = {"step": str(meter.version // nodes)}
    if not isnan(epoch):
        figures["epoch"] = f"{epoch:.2f}"
    figures["seconds"] = in_seconds(now) if workers else "–"
    losses = _recent(columns["loss"], nodes)
    figures["loss"] = f"{losses[-1]:.4g}" if losses else "–"
    if meter.evaluations:
        name, value = meter.evaluations[-1].first
        figures[f"evaluated {name}"] = f"{value:.4g}"
    figures["waiting"] = f"{meter.waiting:.0%}"
    figures["samples/s"] = in_short(throughput(meter))
    if meter.priced:
        figures["cost"] = in_dollars(meter.dollars)
    settled = meter.used + meter.wasted
    figures["wasted"] = f"{meter.wasted / settled:.0%}" if settled else "–"
    figures["workers"] = str(sum(tally.present for tally in workers.values()))
    forecast = about.get("forecast")
    outlook = None if forecast is None else outlook_of(forecast, now if workers else 0.0, reached)
    slow, more, quick = chosen(rows_of(workers, now, bool(reason)), most)
    policy = shortened(header.written)
    return Glance(policy, figures, losses, outlook, slow, more, quick, reason)


def _recent(losses: Sequence[float], nodes: int) -> list[float]:
    """Return the last losses, each the mean over as many steps as there are nodes."""
    last = losses[-RECENT * nodes :]
    if nodes == 1:
        return list(last)
    starts = range(len(last) % nodes, len(last), nodes) if len(last) >= nodes else range(0)
    return [fmean(last[start : start + nodes]) for start in starts]


def rows_of(workers: Mapping[WorkerId, Tally], now: float, over: bool = False) -> list[Row]:
    """Return a row for each worker. `over`: the run has ended."""
    speeds = {name: tally.speed(now) for name, tally in workers.items()}
    known = [speeds[name] for name, tally in workers.items() if not tally.is_bound]
    quickest = max(known or speeds.values(), default=0.0)
    took = [tally.finished_seconds / tally.finished for tally in workers.values() if tally.finished]
    late = LATE * median(took) if took else inf
    rows = []
    for name, tally in workers.items():
        unseen = max(now - tally.seen, 0.0)
        # A worker with several tasks begins the next one when the previous one has ended.
        since = max(now - max(tally.began, tally.seen), 0.0)
        state: State
        if not tally.present:
            state, told = "gone", f"gone {in_seconds(unseen)}"
        elif over:
            state, told = "there", "there"
        elif tally.running:
            state, told = "late" if since > late else "computing", f"computing {in_seconds(since)}"
        else:
            state, told = "idle", "idle"
        settled = tally.used + tally.wasted
        cells = {
            "worker": name,
            "state": told,
            "speed": _speed(tally, speeds[name]),
            "used": f"{min(tally.share_used(now), 1.0):.0%}" if settled else "–",
            "wasted": f"{tally.wasted / settled:.0%}" if settled else "–",
            "stale": _versions(tally.mean_staleness) if tally.used else "–",
            "up": in_bytes(tally.up_bytes),
            "down": in_bytes(tally.down_bytes),
            "seen": in_seconds(unseen),
        }
        part = min(speeds[name] / quickest, 1.0) if quickest else 0.0
        rows.append(Row(state, speeds[name], part, cells))
    return rows


def _speed(tally: Tally, speed: float) -> str:
    if not speed:
        return "–"
    return f"≤{in_short(float(f'{speed:.2g}'))}" if tally.is_bound else in_short(speed)


def _versions(staleness: float) -> str:
    return f"{staleness:.1f}" if staleness < 99.95 else in_short(staleness)


def chosen(rows: Sequence[Row], most: int) -> tuple[list[Row], str, list[Row]]:
    """Return all rows; if too many, the slowest, counts of the others, and the quickest."""
    if len(rows) <= most:
        return list(rows), "", []
    ranked = sorted(rows, key=lambda row: (row.state != "gone", row.speed))
    room = max(most - 1, 1)  # one line is for the others
    quick = max(room // 3, 1) if room > 1 else 0
    slow = room - quick
    between = ranked[slow : len(ranked) - quick]
    counts = {state: [row.state for row in between].count(state) for state in _ORDER}
    told = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    return ranked[:slow], f"… {len(between)} more: {told}", ranked[len(ranked) - quick :]


_ORDER: tuple[State, ...] = ("computing", "late", "idle", "there", "gone")


def outlook_of(forecast: Mapping[str, Any], now: float, reached: float | None) -> Outlook:
    """Return the forecast as a text, and the part of its time that has passed.

    >>> known = {"target": 0.2, "seconds": 40.0, "intervals": {"seconds": [35.0, None]}}
    >>> outlook_of(known, 10.0, None)
    Outlook(text='loss 0.2 in 40 s [35 s-never]', part=0.25)
    """
    middle, low, high = (
        "never" if seconds is None else in_seconds(seconds)
        for seconds in (forecast["seconds"], *forecast["intervals"]["seconds"])
    )
    text = f"loss {forecast['target']:g} in {middle} [{low}-{high}]"
    if reached is not None:
        return Outlook(f"{text}, reached in {in_seconds(reached)}", 1.0)
    return Outlook(text, now / forecast["seconds"] if forecast["seconds"] else nan)


def sparkline(values: Sequence[float]) -> str:
    """Return values as a row of bars, the smallest the lowest; × is a value that is not finite.

    >>> sparkline([3, 2, float("nan"), 1])
    '█▅×▁'
    """
    finite = [value for value in values if isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        _BLOCKS[round((value - low) * scale)] if isfinite(value) else "×" for value in values
    )


def in_short(number: float) -> str:
    """Return a number in five characters or fewer.

    >>> [in_short(each) for each in (0.0, 0.0012, 12.34, 1234.5, 1.5e6, 2e10)]
    ['0', '0.001', '12.3', '1234', '1.5M', '20G']
    """
    if number >= 99_999.5:
        for unit in "kMG":
            number /= 1000
            if number < 999.5:
                return f"{number:.3g}{unit}"
        return f"{number:.0f}G"
    if number >= 999.5:
        return f"{number:.0f}"
    return f"{number:.3g}" if number >= 0.1 or not number else f"{number:.3f}"


# --- in a notebook ---------------------------------------------------------------------------


def as_html(seen: Glance) -> str:
    """Return the view as two small tables that inherit the colors around them."""
    policy = escape(seen.policy)
    title = f"<b>{policy}</b>" + (f" – ended: {escape(seen.reason)}" if seen.reason else "")
    figures = dict(seen.figures)
    if seen.outlook is not None:
        figures["forecast"] = seen.outlook.text
        if not isnan(seen.outlook.part) and not seen.reason:
            figures["of its time"] = f"{seen.outlook.part:.0%}"
    parts = [title, _table([[*figures.values()]], [*figures])]
    if seen.losses:
        parts.append(f"<div style='line-height:1.2'>loss {sparkline(seen.losses)}</div>")
    rows = [[*row.cells.values()] for row in seen.slow]
    if seen.more:
        rows.append([seen.more])
        rows += [[*row.cells.values()] for row in seen.quick]
    if rows:
        parts.append(_table(rows, [*seen.slow[0].cells]))
    return f"<div>{''.join(parts)}</div>"


def _table(rows: Sequence[Sequence[str]], names: Sequence[str]) -> str:
    style = "padding:0 .6em;text-align:right;white-space:nowrap"
    width = len(names)
    lines = ["".join(f"<th style='{style};opacity:.7'>{escape(name)}</th>" for name in names)]
    for cells in rows:
        span = f" colspan='{width}'" if len(cells) == 1 < width else ""
        lines.append("".join(f"<td{span} style='{style}'>{escape(cell)}</td>" for cell in cells))
    body = "".join(f"<tr style='background:none'>{line}</tr>" for line in lines)
    return (
        "<table style='border-collapse:collapse;font-variant-numeric:tabular-nums;"
        f"color:inherit;font-size:90%;margin:.2em 0'>{body}</table>"
    )
