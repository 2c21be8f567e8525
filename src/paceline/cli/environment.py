"""`paceline env`: what to set before `ray start`."""

from __future__ import annotations

import shlex

import click

from paceline.cli.show import json_option, print_json


@click.command("env")
@json_option
def environment(as_json: bool) -> None:
    """Print settings of Ray for training on machines that fail: eval "$(paceline env)".

    On every machine, before `ray start`: a token is needed to run code there, workers do not yield
    to everything else, and a machine that is silent for five seconds is lost, not after a minute.
    """
    from paceline.engines.ray.settings import SETTINGS

    if as_json:
        print_json(dict(SETTINGS))
        return
    for name, value in SETTINGS.items():
        click.echo(f"export {name}={shlex.quote(value)}")
