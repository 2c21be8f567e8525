"""`paceline report` and `paceline compare`: summaries of runs, from their journals."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli.figures import compared, figures
from paceline.cli.show import json_option, patience, print_json, say, spare_journal

if TYPE_CHECKING:
    from paceline.core.journal import Entry, Journal
    from paceline.report.html.collect import Record

JOURNAL = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("journals", metavar="JOURNAL…", type=JOURNAL, nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PAGE",
    help="Write a page of HTML as well, which opens offline and can be mailed.",
)
@json_option
def report(journals: Sequence[Path], output: Path | None, as_json: bool) -> None:
    """Print what the run of JOURNAL did, used, wasted and cost.

    Several JOURNALs are those of the nodes of one decentralized run.
    """
    if output is not None:
        spare_journal(output)
    names = [str(path) for path in journals]
    what = f"reading {names[0]}" if len(names) == 1 else f"reading {len(names)} journals"
    with patience(what, _size(journals)) as part:
        record = read_record(journals, part.to)
        told = "" if len(journals) > 1 else _advice(journals[0], record)
        if output is not None:
            from paceline.report.html.page import write_page

            write_page(output, record, names, advice=told)
    if as_json:
        which = {"journal": names[0]} if len(names) == 1 else {"journals": names}
        print_json({**which, **figures(record.meter, record.header, record.reason)})
    else:
        click.echo(as_text(record))
        if told:
            click.echo(f"  instead   {told}")
    if output is not None:
        say(f"wrote {output}")


@click.command()
@click.argument("journals", type=JOURNAL, nargs=-1, required=True)
@json_option
def compare(journals: Sequence[Path], as_json: bool) -> None:
    """Put the runs of several JOURNALS side by side."""
    runs, done = [], 0
    with patience("reading journals", _size(journals)) as part:
        for path in journals:
            before = done
            record = read_record([path], lambda read: part.to(before + read))  # noqa: B023
            done += path.stat().st_size
            runs.append(figures(record.meter, record.header, record.reason))
    names = [str(path) for path in journals]
    if as_json:
        rows = [{"journal": name, **run} for name, run in zip(names, runs, strict=True)]
        print_json({"runs": rows})
    else:
        click.echo(compared(names, runs))


def as_text(record: Record) -> str:
    """Return a run in a few lines."""
    from paceline.report.text import changed_line, forecast_line, summary
    from paceline.report.words import shortened

    header, about = record.header, record.header.about or {}
    engine = shortened(str(about.get("engine", "an unknown engine")))
    lines = [f"{header.written} on {engine}"]
    nodes = len(record.headers) if record.is_decentralized else None
    lines.append(summary(record.meter, record.reason, header.batch, nodes))
    if more := record.metrics.lines():
        lines.append(more)
    if (changed := about.get("changed")) is not None:
        lines.append(changed_line(changed))
    if (forecast := about.get("forecast")) is not None:
        lines.append(forecast_line(forecast, record.meter))
    return "\n".join(lines)


def _advice(path: Path, record: Record) -> str:
    """Return what would have been faster; an empty text if it cannot be told."""
    from paceline.core.journal import Journal
    from paceline.planner.advice import EVENTS, advice
    from paceline.report.html.sentences import duration

    if record.is_decentralized:
        return ""
    found = advice(
        Journal.load(path, most=EVENTS), duration(record.meter), len(record.meter.columns["step"])
    )
    return "" if found is None else str(found)


def _size(paths: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def read_record(
    paths: Sequence[Path], on_progress: Callable[[float], None] | None = None
) -> Record:
    """Read the journals of one run, entry by entry, so that memory does not grow with their length.

    on_progress: called with the number of bytes read so far.
    """
    from paceline.core.journal import read_entries, read_header
    from paceline.gossip.metrics import meters_of
    from paceline.report.html.collect import collected, named

    if len(set(paths)) < len(paths):
        raise ValueError(
            "the same journal is given twice; give one journal for each node of the run"
        )
    headers = {}
    for path in paths:
        with _journal(path):
            headers[str(path)] = read_header(path)
    nodes = named(headers)

    read = dict.fromkeys(headers, 0.0)

    def entries(path: str) -> Iterator[Entry]:
        def here(done: float) -> None:
            read[path] = done
            if on_progress is not None:
                on_progress(sum(read.values()))

        with _journal(path):
            yield from read_entries(path, here)

    found = {node: headers[name] for node, name in nodes.items()}
    return collected(
        found,
        {node: entries(name) for node, name in nodes.items()},
        metrics=meters_of(found),
    )


def load_journal(path: Path, on_progress: Callable[[float], None] | None = None) -> Journal:
    """Read a journal; refuse a file that is not one, by its name."""
    from paceline.core.journal import Journal

    with _journal(path):
        return Journal.load(path, on_progress)


@contextlib.contextmanager
def _journal(path: Path | str) -> Iterator[None]:
    """Turn an error of reading into one that names the file."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a journal ({error}); give a file that Trainer(journal=…) wrote"
        ) from None
