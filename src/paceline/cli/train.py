"""`paceline train`: run a script, and print its result."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import click

from paceline.cli.scripts import SCRIPT, run_script, watched
from paceline.cli.show import json_option, print_json, say
from paceline.training.observers import observing


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--live", is_flag=True, help="Show all workers while it trains.")
@click.option("--supervised", type=click.Path(path_type=Path), hidden=True)
@json_option
@click.argument("script", type=SCRIPT)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def train(
    script: Path, args: tuple[str, ...], live: bool, supervised: Path | None, as_json: bool
) -> None:
    """Run SCRIPT with ARGS, as `python SCRIPT ARGS` would.

    The summary of the last run is printed, unless the script asks for one itself. Options go before
    SCRIPT; everything after SCRIPT belongs to the script.
    """
    code: object = 0
    with watched(live) as seen, contextlib.ExitStack() as stack:
        if supervised is not None:  # by `paceline submit`
            from paceline.cli.supervise import Supervised, end_with_parent

            end_with_parent()
            stack.enter_context(observing(Supervised(supervised)))
        if as_json:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        try:
            run_script(script, args)
        except SystemExit as end:
            code = end.code
    if as_json:
        print_json({"runs": seen.runs})
    elif seen.last is None:
        say(f"{script} ended without a call of Trainer.fit()")
    elif not seen.summarized:
        click.echo(seen.last.summary())
    if code or seen.failed:
        sys.exit(code or 1)  # type: ignore[arg-type]
