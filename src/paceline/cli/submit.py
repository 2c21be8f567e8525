"""`paceline submit`: run a script whose driver process may die."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from paceline.cli.scripts import SCRIPT
from paceline.cli.show import json_option, print_json


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--restarts",
    type=click.IntRange(0),
    default=3,
    show_default=True,
    help="Restarts in a row without progress.",
)
@json_option
@click.argument("script", type=SCRIPT)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def submit(script: Path, args: tuple[str, ...], restarts: int, as_json: bool) -> None:
    """Run SCRIPT with ARGS as `train` does, and start it again if its process dies.

    Each `Trainer` of SCRIPT must have checkpoints, and resumes from its newest one. The exit code
    is that of the last process. Options go before SCRIPT; everything after SCRIPT belongs to the
    script.
    """
    from paceline.cli.supervise import Supervisor

    def command(notes: Path) -> list[str]:
        start = [sys.executable, "-m", "paceline", "train", "--supervised", str(notes)]
        return [*start, str(script), *args]

    supervisor = Supervisor(command, restarts, sys.stderr if as_json else None)
    code = supervisor.run()
    if as_json:
        print_json({"exit_code": code, "restarts": supervisor.restarted})
    if code:
        sys.exit(code)
