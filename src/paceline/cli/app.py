"""The `paceline` command: its subcommands and its error handling."""

from __future__ import annotations

from typing import Any

import click

from paceline.cli.doctor import doctor
from paceline.cli.environment import environment
from paceline.cli.export import export
from paceline.cli.journals import compare, report
from paceline.cli.launch import launch
from paceline.cli.new import new
from paceline.cli.plan import plan, simulate
from paceline.cli.profile import profile
from paceline.cli.replay import replay
from paceline.cli.serve import serve
from paceline.cli.submit import submit
from paceline.cli.train import train

_EXPECTED = (ValueError, OSError, ImportError, RuntimeError)  # their messages say what to do


class Commands(click.Group):
    """Prints an error as one sentence on stderr, with exit code 1."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order of their use

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if ctx.params["debug"]:
                raise
            raise click.ClickException(_told(error)) from None


def _told(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, _EXPECTED) and text:
        return text
    return (
        f"{type(error).__name__}: {text}: this is a bug in Paceline; please report it with the "
        "output of `paceline --debug …`"
    )


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="paceline", prog_name="paceline")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def app(debug: bool) -> None:
    """Train one model on unequal, unreliable, far-apart machines.

    Exit codes: 0 fine, 1 the run or check failed, 2 wrong usage, 3 not the same (replay),
    143 ended by SIGTERM (train, submit).
    """


_ORDER = (
    *(new, train, submit, launch, serve, profile, plan, simulate, replay, report, compare),
    *(export, doctor, environment),
)
for command in _ORDER:
    app.add_command(command)


def main() -> None:
    """Run the `paceline` command."""
    app(prog_name="paceline")
