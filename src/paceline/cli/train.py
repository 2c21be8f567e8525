"""`paceline train`: run a script, and print its result."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import click

from paceline.cli.scripts import SCRIPT, run_script, watched
from paceline.cli.show import json_option, print_json, say


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--live", is_flag=True, help="Show all workers while it trains.")
@json_option
@click.argument("script", type=SCRIPT)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def train(script: Path, args: tuple[str, ...], live: bool, as_json: bool) -> None:
    """Run SCRIPT with ARGS, as `python SCRIPT ARGS` would.

    The summary of the last run is printed, unless the script asks for one itself. Options go before
    SCRIPT; everything after SCRIPT belongs to the script.
    """
    code: object = 0
    with watched(live) as seen, contextlib.ExitStack() as stack:
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
