"""The report of a run: one page of HTML that opens offline, small enough to be mailed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from paceline.core.journal import Entry, Header, Journal
from paceline.core.protocol import WorkerId
from paceline.report.charts import Figure, Scale, bars, curve, of_bytes, of_time
from paceline.report.collect import Record, collected
from paceline.report.lanes import ROWS, selection, timeline
from paceline.report.sentences import (
    diverged,
    duration,
    losses,
    three,
    warnings,
)
from paceline.report.svg import plain
from paceline.report.tables import forecast_rows, settings, workers_table
from paceline.report.text import FORGOTTEN, forecast_line, in_bytes, in_dollars, summary
from paceline.report.whole import whole
from paceline.report.words import in_time, number, shortened

_ENVIRONMENT = Environment(
    loader=PackageLoader("paceline.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


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


def page(record: Record, journals: Sequence[str] = (), changes: Sequence[str] | None = None) -> str:
    """Return the page of a run.

    journals: the names of its files.
    changes: what was planned anew, None if that is not known.
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
        told=meter.last_loss is not None,
        timeline=timeline(record, "What every worker did over time") if record.workers else None,
        exact=record.timeline.exact is not None,
        hidden=max(len(record.workers) - ROWS, 0),
        slow=workers_table(record),
        asynchronous=record.is_asynchronous,
        refilling=record.is_refilling,
        awaited=not (record.is_asynchronous or record.is_refilling),
        peers=record.is_peers,
        figures=_over_time(record) if steps else [],
        selection=(
            selection(record, "Which workers' results the steps used")
            if steps and not record.is_peers and record.workers
            else None
        ),
        parts=_parts(record),
        forecast=None if forecast is None else forecast_rows(forecast, record),
        forecast_about=forecast,
        changes=changes,
        auto=policy.startswith("Auto("),
        settings=settings(record, about, engine),
        full_policy=header.policy,
        journals=journals,
        replays=[f"paceline replay {quote(name)}" for name in journals],
    )


def write_page(
    path: Path | str,
    record: Record,
    journals: Sequence[str] = (),
    changes: Sequence[str] | None = None,
) -> Path:
    """Write the page of a run, and return where it is."""
    target = Path(path)
    if target.resolve() in [Path(name).resolve() for name in journals]:
        raise ValueError(f"{path} is the journal itself; give another name, such as run.html")
    with whole(target) as partial:
        partial.write_text(page(record, journals, changes), encoding="utf-8")
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
    return shortened("".join(words))


def _numbers(record: Record) -> list[Big]:
    meter = record.meter
    columns, known = meter.columns, losses(meter)
    seconds, samples = duration(meter), sum(columns["samples"])
    last = plain(known[-1]) if known else "–"
    if diverged(meter):
        last = str(meter.last_loss)
    found = [
        Big("time", in_time(seconds), number(len(columns["step"]), "step")),
        Big("loss", last, f"from {plain(known[0])}" if known else ""),
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
