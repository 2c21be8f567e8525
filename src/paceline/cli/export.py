"""`paceline export`: a run for the viewers of other tools."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from paceline.cli.journals import JOURNAL
from paceline.cli.show import json_option, patience, print_json, spare_journal

VIEWER = "https://ui.perfetto.dev"


@click.command()
@click.argument("journals", type=JOURNAL, nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Such as trace.json, or trace.json.gz to compress it.",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["perfetto"]),
    default="perfetto",
    show_default=True,
    help="Trace Event JSON, for ui.perfetto.dev and chrome://tracing.",
)
@json_option
def export(journals: Sequence[Path], output: Path, kind: str, as_json: bool) -> None:
    """Write the runs of JOURNALS as a timeline: each task with its worker, its time and its fate.

    Several journals, such as those of a decentralized run, appear one below the other.
    """
    from paceline.gossip.metrics import meter_of
    from paceline.report.perfetto import write

    names = [str(journal) for journal in journals]
    spare_journal(output)
    try:
        with patience(f"writing {output}"):
            count = write(journals, output, meter_of)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"not a journal: {', '.join(names)} ({error}); give files that Trainer(journal=…) wrote"
        ) from None
    if as_json:
        print_json({"journals": names, "output": str(output), "events": count})
    else:
        click.echo(f"wrote {output}: {count} events; open it at {VIEWER}")
