"""The report of a run: one page of HTML that opens offline, small enough to be mailed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from paceline.core.journal import Entry, Header, Journal
from paceline.core.protocol import WorkerId
from paceline.report.charts import (
    ROWS,
    Figure,
    Scale,
    bars,
    curve,
    of_bytes,
    of_time,
    picked,
    selection,
    timeline,
)
from paceline.report.collect import Record, collected
from paceline.report.sentences import (
    duration,
    in_time,
    losses,
    number,
    reached,
    three,
    warnings,
    within,
)
from paceline.report.slow import Price
from paceline.report.svg import plain
from paceline.report.text import FORGOTTEN, forecast_line, in_bytes, in_dollars, summary

_ENVIRONMENT = Environment(
    loader=PackageLoader("paceline.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_LONGEST = 120  # characters of a title
_SHOWN = ("policy", "engine", "seed", "versions", "forecast", "codec", "down", "batch_size")


@dataclass(frozen=True)
class Tab:
    """A figure that is chosen among others."""

    name: str
    figure: Figure


@dataclass(frozen=True)
class Big:
    """A number to be seen first."""

    name: str
    value: str
    more: str = ""


def page(record: Record, journals: Sequence[str] = (), changes: Sequence[str] = ()) -> str:
    """Return the page of a run.

    journals: the names of its files.
    changes: what was planned anew, if that is known.
    """
    header, meter = record.header, record.meter
    about = dict(header.about or {})
    policy = str(about.get("policy", header.policy)) or "an unknown policy"
    engine = str(about.get("engine", "")) or "an unknown engine"
    steps = len(meter.columns["step"])
    forecast = about.get("forecast")
    template = _ENVIRONMENT.get_template("page.html")
    return template.render(
        title=brief(policy),
        engine=engine.partition("(")[0],
        workers=number(len(record.workers), "node" if record.is_peers else "worker"),
        sentences=three(record),
        warnings=warnings(record),
        numbers=_numbers(record),
        summary=_text(record),
        losses=_losses(record) if losses(meter) else [],
        timeline=timeline(record, "What every worker did over time") if record.workers else None,
        exact=record.timeline.exact is not None,
        hidden=max(len(record.workers) - ROWS, 0),
        slow=_slow(record),
        asynchronous=record.is_asynchronous,
        peers=record.is_peers,
        figures=_over_time(record) if steps else [],
        selection=(
            selection(record, "Which workers' results the steps used")
            if steps and not record.is_peers and record.workers
            else None
        ),
        parts=_parts(record),
        forecast=None if forecast is None else _forecast(forecast, record),
        forecast_about=forecast,
        changes=changes,
        auto=policy.startswith("Auto("),
        settings=_settings(record, about, engine),
        full_policy=header.policy,
        journals=journals,
    )


def write_page(
    path: Path | str, record: Record, journals: Sequence[str] = (), changes: Sequence[str] = ()
) -> Path:
    """Write the page of a run, and return where it is."""
    target = Path(path)
    if target.resolve() in [Path(name).resolve() for name in journals]:
        raise ValueError(f"{path} is the journal itself; give another name, such as run.html")
    text = page(record, journals, changes)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    return target


def record_of(journals: Mapping[WorkerId, Journal], reason: str | None = None) -> Record:
    """Read the journals of a run that is at hand."""
    headers: dict[WorkerId, Header] = {node: each.header for node, each in journals.items()}
    entries: dict[WorkerId, Iterable[Entry]] = dict(journals)
    return collected(headers, entries, reason)


def brief(policy: str) -> str:
    """Return a policy's text without what its arguments are made of.

    >>> brief("Gather(k=6, placement=Placed(tiles=Partition(…), move=False), trigger=Always())")
    'Gather(k=6, placement=Placed(…), trigger=Always())'
    """
    words: list[str] = []
    depth = 0
    for char in policy:
        if char in ")]}":
            depth -= 1
        if depth < 2:
            words.append(char)
        elif words[-1] != "…":
            words.append("…")
        if char in "([{":
            depth += 1
    text = "".join(words)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _numbers(record: Record) -> list[Big]:
    meter = record.meter
    columns, known = meter.columns, losses(meter)
    seconds, samples = duration(meter), sum(columns["samples"])
    found = [
        Big("time", in_time(seconds), number(len(columns["step"]), "step")),
        Big("loss", plain(known[-1]) if known else "–", f"from {plain(known[0])}" if known else ""),
        Big(
            "samples/s",
            plain(samples / seconds) if seconds > 0 else "–",
            f"{samples:,.0f} used",
        ),
        Big("waiting", f"{meter.waiting:.0%}", "of workers’ time"),
        Big(
            "wasted tasks",
            f"{meter.wasted / meter.started:.0%}" if meter.started else "–",
            f"{meter.wasted:,} of {meter.started:,}",
        ),
    ]
    sent = meter.down_bytes + meter.up_bytes
    if record.is_peers:  # what one sends another receives
        found.append(Big("sent", in_bytes(meter.up_bytes), number(meter.letters, "letter")))
    elif sent:
        more = f"{in_bytes(meter.down_bytes)} down, {in_bytes(meter.up_bytes)} up"
        found.append(Big("messages", in_bytes(sent), more))
    if meter.priced:
        more = "idle time included" if meter.prices.idle else "busy time alone"
        found.append(Big("cost", in_dollars(meter.dollars), more))
    return found


def _text(record: Record) -> str:
    nodes = len(record.headers) if record.is_peers else None
    text = summary(record.meter, record.reason, record.header.batch, nodes)
    if record.peers is not None:
        text += f"\n{record.peers.lines()}"
    if (forecast := (record.header.about or {}).get("forecast")) is not None:
        text += f"\n{forecast_line(forecast, record.meter)}"
    return text


def _losses(record: Record) -> list[Tab]:
    """Draw the loss against all that it took."""
    columns = {name: np.array(values) for name, values in record.meter.columns.items()}
    loss, meter = columns["loss"], record.meter
    forecast = (record.header.about or {}).get("forecast")
    target = None if forecast is None else float(forecast["target"])
    # Without a main node what one sends another receives.
    sent = columns["up_bytes"] if record.is_peers else columns["down_bytes"] + columns["up_bytes"]
    samples = np.cumsum(columns["samples"]) + (meter.samples_used - columns["samples"].sum())
    scales = [
        ("time", columns["seconds"], of_time(float(columns["seconds"][-1]))),
        ("samples", samples, _of_count(float(samples[-1]), "samples used")),
    ]
    if meter.priced and columns["dollars"][-1] > 0:
        scales.append(("dollars", columns["dollars"], Scale("cost", "$")))
    if sent[-1] > 0:
        scales.append(("bytes", sent, of_bytes(float(sent[-1]), "messages")))
    return [
        Tab(name, curve(x, loss, across, "loss", f"Loss against {name}", target=target))
        for name, x, across in scales
        if x[-1] > x[0] or len(x) == 1
    ]


def _of_count(most: float, name: str) -> Scale:
    units = (("billions", 1e9), ("millions", 1e6), ("thousands", 1e3))
    unit = next((each for each in units if most >= 10 * each[1]), ("", 1.0))
    return Scale(name, *unit)


def _over_time(record: Record) -> list[tuple[str, Figure | None, str]]:
    """Draw how many results steps used, and how old they were."""
    columns = {name: np.array(values) for name, values in record.meter.columns.items()}
    across = of_time(float(columns["seconds"][-1]))
    found: list[tuple[str, Figure | None, str]] = []
    for name, up, title in (
        ("results", "results a step", "Results that each step used"),
        ("delay", "delay, versions", "Mean delay of the results of each step"),
    ):
        values = columns[name]
        if values.min() == values.max():
            found.append((title, None, f"{plain(float(values[0]))} in every step."))
            continue
        figure = curve(columns["seconds"], values, across, up, title, height=210.0, from_zero=True)
        told = (
            f"{plain(float(values.mean()))} on average, between {plain(float(values.min()))} and "
            f"{plain(float(values.max()))}."
        )
        found.append((title, figure, told))
    return found


def _slow(record: Record) -> dict[str, Any]:
    """Return a row for each worker, the slowest first, and the units of their figures."""
    now, tallies = record.end, record.workers
    workers = list(tallies)
    prices: dict[WorkerId, Price] = {}
    if not record.is_asynchronous:
        prices = record.waits.prices(sorted(workers, key=record.row), tallies)
    waited = {name: record.waits.waited(record.row(name)) for name in workers}
    longest = [seconds for seconds, _ in waited.values()] + [p.seconds for p in prices.values()]
    time = of_time(max(longest, default=0.0))
    sizes = [size for tally in tallies.values() for size in (tally.down_bytes, tally.up_bytes)]
    data = of_bytes(max(sizes, default=0), "")
    rows: list[dict[str, str]] = []
    shown = picked(workers, [tally.speed for tally in tallies.values()])
    for worker in sorted((workers[i] for i in shown), key=lambda each: tallies[each].speed):
        tally, (seconds, times) = tallies[worker], waited[worker]
        busy, there = tally.busy_seconds(now), tally.there_seconds(now)
        rows.append(
            {
                "worker": worker,
                "speed": plain(tally.speed) if tally.finished else "–",
                "tasks": f"{tally.started:,}",
                "used": f"{tally.used:,}",
                "wasted": f"{tally.wasted:,}",
                "busy": f"{busy / there:.0%}" if there > 0 else "–",
                "waiting": f"{max(1 - busy / there, 0):.0%}" if there > 0 else "–",
                "delay": f"{tally.mean_delay:.3g}" if tally.used else "–",
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
    """Return a value in the unit of its column, with no more digits than say something."""
    value /= scale.factor
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _added(price: Price | None, scale: Scale) -> str:
    if price is None:
        return "–"
    return f"{'≥ ' if price.least else ''}{_in(scale, price.seconds)}"


def _parts(record: Record) -> dict[str, Any] | None:
    """Draw whose data have been learned from, or who has done the work."""
    represented = record.meter.represented()
    if len(represented):
        names = [f"tile {i}" for i in range(len(represented))]
        few = int((represented < FORGOTTEN).sum())
        return {
            "placed": True,
            "few": few,
            "figure": bars(
                [str(i) for i in range(len(names))],
                represented,
                "Weight of each tile of the data over what its size calls for",
                "of the due weight",
            ),
        }
    samples = np.array([tally.samples for tally in record.workers.values()], dtype=float)
    if not samples.sum():
        return None
    share = samples / samples.mean()
    return {
        "placed": False,
        "few": int((share < FORGOTTEN).sum()),
        "figure": bars(
            list(record.workers), share, "Samples used of each worker over equal shares",
            "of an equal share",
        ),
    }  # fmt: skip


def _forecast(forecast: Mapping[str, Any], record: Record) -> list[dict[str, str]]:
    """Return what was forecast beside what it was."""
    fact = None if record.meter.began else reached(forecast, record.meter)
    told = {"seconds": in_time, "steps": plain, "dollars": in_dollars, "bytes": in_bytes}
    rows = []
    for name, say in told.items():
        middle = forecast.get(name)
        low, high = forecast["intervals"].get(name, (None, None))
        known = name in forecast["intervals"]
        value = None if fact is None else getattr(fact, name)
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
                "fact": "not reached" if value is None else say(value),
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


def _settings(record: Record, about: Mapping[str, Any], engine: str) -> list[tuple[str, str]]:
    """Return all that is needed to make the same run again."""
    header = record.header
    found = [
        ("policy", str(about.get("policy", header.policy))),
        ("engine", engine),
        ("seed", str(about.get("seed", "not known"))),
        ("batch size", f"{header.batch:,}"),
    ]
    for name, text in (("codec", "codec of results"), ("down", "codec of models")):
        if name in about:
            found.append((text, str(about[name])))
    if header.message_bytes:
        found.append(("size of a model", in_bytes(header.message_bytes)))
    if header.tiles:
        sizes = sorted(set(header.tiles))
        each = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
        found.append(("tiles", f"{len(header.tiles):,}, of {each} samples"))
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
