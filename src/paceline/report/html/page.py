"""The report of a run: one HTML page that opens offline and is small enough to be mailed."""

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
from paceline.report.atomic import whole
from paceline.report.html.charts import Figure, Scale, bars, curve, of_bytes, of_time
from paceline.report.html.collect import Meters, Record, collected
from paceline.report.html.lanes import ROWS, selection, timeline
from paceline.report.html.sentences import (
    diverged,
    duration,
    evaluated,
    losses,
    three,
    warnings,
)
from paceline.report.html.svg import plain
from paceline.report.html.tables import forecast_rows, settings, workers_table
from paceline.report.text import (
    FORGOTTEN,
    changed_line,
    forecast_line,
    in_bytes,
    in_dollars,
    summary,
)
from paceline.report.words import in_time, number, shortened

_ENVIRONMENT = Environment(
    loader=PackageLoader("paceline.report.html"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


@dataclass(frozen=True)
class Tab:
    """A figure on one of several tabs."""

    name: str
    figure: Figure


@dataclass(frozen=True)
class Big:
    """A large number at the top of the page."""

    name: str
    value: str
    more: str = ""


def page(
    record: Record,
    journals: Sequence[str] = (),
    changes: Sequence[str] | None = None,
    advice: str = "",
) -> str:
    """Return the page of a run.

    journals: the names of the journal files.
    changes: the changes by replanning, None if they are not known.
    advice: what to change, if it is known.
    """
    header, meter = record.header, record.meter
    about = dict(header.about or {})
    policy = header.written or "an unknown policy"
    engine = str(about.get("engine", "")) or "an unknown engine"
    steps = len(meter.columns["step"])
    forecast = about.get("forecast")
    template = _ENVIRONMENT.get_template("page.html")
    return template.render(
        title=brief(policy),
        engine=engine.partition("(")[0],
        workers=number(len(record.workers), "node" if record.is_decentralized else "worker"),
        sentences=three(record),
        advice=advice,
        warnings=warnings(record),
        numbers=_numbers(record),
        summary=_text(record),
        losses=_losses(record) if losses(meter) else [],
        told=meter.last_loss is not None,
        metrics=_metrics(record),
        timeline=timeline(record, "What every worker did over time") if record.workers else None,
        exact=record.timeline.exact is not None,
        hidden=max(len(record.workers) - ROWS, 0),
        slow=workers_table(record),
        asynchronous=record.is_asynchronous,
        refilling=record.is_refilling,
        awaited=not (record.is_asynchronous or record.is_refilling),
        decentralized=record.is_decentralized,
        figures=_over_time(record) if steps else [],
        selection=(
            selection(record, "Which workers' results the steps used")
            if steps and not record.is_decentralized and record.workers
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
    advice: str = "",
) -> Path:
    """Write the page of a run and return its path."""
    target = Path(path)
    if target.resolve() in [Path(name).resolve() for name in journals]:
        raise ValueError(f"{path} is the journal itself; give another name, such as run.html")
    with whole(target) as partial:
        partial.write_text(page(record, journals, changes, advice), encoding="utf-8")
    return target


def record_of(
    journals: Mapping[WorkerId, Journal],
    reason: str | None = None,
    metrics: Meters | None = None,
) -> Record:
    """Return the record of a run from its journals in memory."""
    headers: dict[WorkerId, Header] = {node: each.header for node, each in journals.items()}
    entries: dict[WorkerId, Iterable[Entry]] = dict(journals)
    return collected(headers, entries, reason, metrics)


def brief(policy: str) -> str:
    """Return a policy's text without the inner arguments of its arguments.

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
    if record.is_decentralized:  # a node receives what another sends
        more = number(record.metrics.messages, "message")
        found.append(Big("sent", in_bytes(meter.up_bytes), more))
    elif sent:
        more = f"{in_bytes(meter.down_bytes)} down, {in_bytes(meter.up_bytes)} up"
        found.append(Big("messages", in_bytes(sent), more))
    if meter.priced:
        more = "idle time included" if meter.prices.idle else "busy time alone"
        found.append(Big("cost", in_dollars(meter.dollars), more))
    return found


def _text(record: Record) -> str:
    nodes = len(record.headers) if record.is_decentralized else None
    text = summary(record.meter, record.reason, record.header.batch, nodes)
    if lines := record.metrics.lines():
        text += f"\n{lines}"
    about = record.header.about or {}
    if (changed := about.get("changed")) is not None:
        text += f"\n{changed_line(changed)}"
    if (forecast := about.get("forecast")) is not None:
        text += f"\n{forecast_line(forecast, record.meter)}"
    return text


def _losses(record: Record) -> list[Tab]:
    """Draw the loss against time, samples, dollars and bytes."""
    columns = {name: np.array(values) for name, values in record.meter.columns.items()}
    loss, meter = columns["loss"], record.meter
    forecast = (record.header.about or {}).get("forecast")
    target = None if forecast is None else float(forecast["target"])
    sent = columns["up_bytes"]
    if not record.is_decentralized:  # decentralized: a node receives what another sends
        sent = sent + columns["down_bytes"]
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


def _metrics(record: Record) -> list[tuple[str, Figure, str]]:
    """Draw each metric of the evaluations over time, with a sentence on it."""
    found = record.meter.evaluations
    across = of_time(found[-1].seconds) if found else of_time(1.0)
    drawn = []
    for name in dict.fromkeys(name for each in found for name in each.metrics):
        own = [each for each in found if name in each.metrics]
        x, y = (np.array(v) for v in zip(*((e.seconds, e.metrics[name]) for e in own), strict=True))
        figure = curve(x, y, across, name, f"{name} against time", joined=True)
        drawn.append((name, figure, evaluated(name, own)))
    return drawn


def _of_count(most: float, name: str) -> Scale:
    units = (("billions", 1e9), ("millions", 1e6), ("thousands", 1e3))
    unit = next((each for each in units if most >= 10 * each[1]), ("", 1.0))
    return Scale(name, *unit)


def _over_time(record: Record) -> list[tuple[str, Figure | None, str]]:
    """Draw the number of results that steps used, and their staleness."""
    columns = {name: np.array(values) for name, values in record.meter.columns.items()}
    across = of_time(float(columns["seconds"][-1]))
    found: list[tuple[str, Figure | None, str]] = []
    for name, up, title in (
        ("results", "results a step", "Results that each step used"),
        ("staleness", "staleness, versions", "Mean staleness of the results of each step"),
    ):
        values = columns[name]
        if values.min() == values.max():
            found.append((title, None, f"{plain(float(values[0]))} in every step."))
            continue
        figure = curve(columns["seconds"], values, across, up, title, from_zero=True)
        told = (
            f"{plain(float(values.mean()))} on average, between {plain(float(values.min()))} and "
            f"{plain(float(values.max()))}."
        )
        found.append((title, figure, told))
    return found


def _parts(record: Record) -> dict[str, Any] | None:
    """Draw the weight of each tile (data shard), or the samples of each worker."""
    represented = record.meter.represented()
    if len(represented):
        names = [f"shard {i}" for i in range(len(represented))]
        few = int((represented < FORGOTTEN).sum())
        return {
            "placed": True,
            "few": few,
            "figure": bars(
                [str(i) for i in range(len(names))],
                represented,
                "Weight of each data shard over the weight due to its size",
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
