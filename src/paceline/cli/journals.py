"""`paceline report` and `paceline compare`: what runs did, read from their journals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli.figures import compared, figures, policy_of
from paceline.cli.show import json_option, patience, print_json

if TYPE_CHECKING:
    from paceline.core.journal import Journal
    from paceline.report.metrics import Meter

JOURNAL = click.Path(exists=True, dir_okay=False, path_type=Path)
_LONGEST = 120  # characters of an engine's text
UNFINISHED = "not yet, or the journal is cut off"


@click.command()
@click.argument("journal", type=JOURNAL)
@json_option
def report(journal: Path, as_json: bool) -> None:
    """Say what the run of JOURNAL did, used, wasted and cost."""
    with patience(f"reading {journal}", journal.stat().st_size) as part:
        loaded = load_journal(journal, part.to)
    with patience("summing up", len(loaded)) as part:
        meter, reason = measured(loaded, part.to)
    if as_json:
        print_json({"journal": str(journal), **figures(meter, loaded.header, reason)})
    else:
        click.echo(as_text(loaded, meter, reason))


@click.command()
@click.argument("journals", type=JOURNAL, nargs=-1, required=True)
@json_option
def compare(journals: Sequence[Path], as_json: bool) -> None:
    """Put the runs of several JOURNALS side by side."""
    runs = []
    sizes = [path.stat().st_size for path in journals]
    with patience("reading journals", sum(sizes)) as part:
        for place, path in enumerate(journals):
            loaded = load_journal(path)
            part.to(sum(sizes[: place + 1]))
            meter, reason = measured(loaded)
            runs.append(figures(meter, loaded.header, reason))
    names = [str(path) for path in journals]
    if as_json:
        rows = [{"journal": name, **run} for name, run in zip(names, runs, strict=True)]
        print_json({"runs": rows})
    else:
        click.echo(compared(names, runs))


def as_text(journal: Journal, meter: Meter, reason: str) -> str:
    """Return a run in a few lines."""
    from paceline.report.text import forecast_line, summary

    header, about = journal.header, journal.header.about or {}
    engine = str(about.get("engine", "an unknown engine"))
    engine = engine if len(engine) <= _LONGEST else f"{engine[: _LONGEST - 1]}…"
    lines = [f"{policy_of(header)} on {engine}"]
    lines.append(summary(meter, reason, header.batch, None if header.peer is None else 1))
    if (forecast := about.get("forecast")) is not None:
        lines.append(forecast_line(forecast, meter))
    return "\n".join(lines)


def load_journal(path: Path, told: Callable[[float], None] | None = None) -> Journal:
    """Read a journal, and say in which file it is if it is none."""
    from paceline.core.journal import Journal

    try:
        return Journal.load(path, told)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a journal ({error}); give a file that Trainer(journal=…) wrote"
        ) from None


def measured(
    journal: Journal, told: Callable[[float], None] = lambda done: None
) -> tuple[Meter, str]:
    """Return the figures of a journal, and why its run ended."""
    from paceline.core.protocol import Stop
    from paceline.report.metrics import Meter

    meter, reason = Meter.begin(journal.header), UNFINISHED
    for place, entry in enumerate(journal):
        told(place)
        meter.observe(entry)
        for command in entry.commands:
            if isinstance(command, Stop):
                reason = command.reason
    return meter, reason
