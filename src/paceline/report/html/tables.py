"""The tables of the page: workers, forecast and outcome, and settings to repeat the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any

from paceline.core.protocol import WorkerId
from paceline.report.html.charts import Scale, of_bytes, of_time
from paceline.report.html.collect import Record
from paceline.report.html.lanes import picked
from paceline.report.html.sentences import reached, reached_before, within
from paceline.report.html.slow import Price
from paceline.report.html.svg import plain
from paceline.report.text import in_bytes, in_dollars
from paceline.report.words import in_time
from paceline.report.workers import Tally

_SHOWN = {"policy", "written", "engine", "seed", "batch_size", "codec", "model_codec"}
_SHOWN |= {"versions", "forecast"}


def workers_table(record: Record) -> dict[str, Any]:
    """Return a row for each worker, the slowest first, and the units of the columns."""
    now, tallies = record.end, record.workers
    workers = list(tallies)
    prices: dict[WorkerId, Price] = {}
    if not (record.is_asynchronous or record.is_refilling):
        prices = record.waits.prices(sorted(workers, key=record.row), tallies)
    waited = {name: record.waits.waited(record.row(name)) for name in workers}
    longest = [seconds for seconds, _ in waited.values()] + [p.seconds for p in prices.values()]
    time = of_time(max(longest, default=0.0))
    sizes = [size for tally in tallies.values() for size in (tally.down_bytes, tally.up_bytes)]
    data = of_bytes(max(sizes, default=0), "")
    rows: list[dict[str, str]] = []
    speeds = {name: tally.speed(now) for name, tally in tallies.items()}
    shown = picked(workers, list(speeds.values()))
    for worker in sorted((workers[i] for i in shown), key=lambda each: speeds[each]):
        tally, (seconds, times) = tallies[worker], waited[worker]
        busy, there = tally.busy_seconds(now), tally.there_seconds(now)
        rows.append(
            {
                "worker": worker,
                "speed": _speed(tally, speeds[worker]),
                "tasks": f"{tally.started:,}",
                "used": f"{tally.used:,}",
                "wasted": f"{tally.wasted:,}",
                "busy": f"{busy / there:.0%}" if there > 0 else "–",
                "waiting": f"{max(1 - busy / there, 0):.0%}" if there > 0 else "–",
                "staleness": f"{tally.mean_staleness:.3g}" if tally.used else "–",
                "down": f"{tally.down_bytes / data.factor:.3g}",
                "up": f"{tally.up_bytes / data.factor:.3g}",
                "losses": str(tally.losses),
                "waited": _in(time, seconds) if times else "–",
                "waited_steps": f"{times:,}" if times else "–",
                "added": _added(prices.get(worker), time),
            }
        )
    return {"rows": rows, "time": time.unit, "data": data.unit}


def _in(scale: Scale, value: float) -> str:
    """Return a value in the unit of its column, with few digits."""
    value /= scale.factor
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _speed(tally: Tally, speed: float) -> str:
    if speed:
        return f"{'≤ ' if tally.is_bound else ''}{plain(speed)}"
    if tally.given_up_seconds:  # none of its tasks ended
        return f"≤ {plain(tally.given_up_samples / tally.given_up_seconds)}"
    return "–"


def _added(price: Price | None, scale: Scale) -> str:
    if price is None:
        return "–"
    return f"{'≥ ' if price.least else ''}{_in(scale, price.seconds)}"


def forecast_rows(forecast: Mapping[str, Any], record: Record) -> list[dict[str, str]]:
    """Return rows of forecast and outcome.

    The journal of a resumed run has time and steps since the start, but no costs before the resume.
    """
    meter = record.meter
    before = reached_before(forecast, meter)
    fact = None if before else reached(forecast, meter)
    missing = "before this run was resumed" if before else "not reached"
    told = {"seconds": in_time, "steps": plain, "dollars": in_dollars, "bytes": in_bytes}
    rows = []
    for name, say in told.items():
        middle = forecast.get(name)
        low, high = forecast["intervals"].get(name, (None, None))
        known = name in forecast["intervals"]
        value, unknown = None if fact is None else getattr(fact, name), missing
        if meter.began and fact is not None and name in ("dollars", "bytes"):
            value, unknown = None, "not known: the run was resumed"
        if name == "dollars" and not (middle or value):
            continue
        rows.append(
            {
                "name": {"seconds": "time", "bytes": "messages", "dollars": "cost"}.get(name, name),
                "forecast": "never" if middle is None else say(middle),
                "interval": (
                    " to ".join("never" if each is None else say(each) for each in (low, high))
                    if known
                    else "–"
                ),
                "fact": unknown if value is None else say(value),
                "inside": (
                    "–" if value is None or not known
                    else "inside" if within(value, (low, high)) else "outside"
                ),
                "ratio": (
                    f"{value / middle:.2f}" if value is not None and middle else "–"
                ),
            }
        )  # fmt: skip
    return rows


def settings(record: Record, about: Mapping[str, Any], engine: str) -> list[tuple[str, str]]:
    """Return all settings that are needed to repeat the run."""
    header = record.header
    found = [
        ("policy", header.written),
        ("engine", engine),
        ("seed", str(about.get("seed", "not known"))),
        ("batch size", f"{header.batch:,}"),
    ]
    for name, text in (("codec", "codec of results"), ("model_codec", "codec of models")):
        if name in about:
            found.append((text, str(about[name])))
    if header.message_bytes:
        found.append(("size of a model", in_bytes(header.message_bytes)))
    if header.tiles:
        sizes = sorted(set(header.tiles))
        each = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
        found.append(("data shards", f"{len(header.tiles):,}, of {each} samples"))
    if record.meter.priced:
        prices = header.prices
        idle = "; hours without a task are paid as well" if prices.idle else ""
        found.append(
            (
                "prices",
                f"$ an hour: {_told(prices.per_hour)}; $ a GB: {_told(prices.per_gigabyte)}{idle}",
            )
        )
    found += [
        (name.replace("_", " "), _told(value))
        for name, value in about.items()
        if name not in _SHOWN
    ]
    if isinstance(versions := about.get("versions"), Mapping):
        found.append(("versions", ", ".join(f"{name} {v}" for name, v in versions.items())))
    return found


def _told(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float) and isfinite(value):
        return f"{value:g}"
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)
