"""`paceline env`: environment variables to set before `ray start`."""

from __future__ import annotations

import shlex

import click

from paceline.cli.show import json_option, print_json


@click.command("env")
@json_option
def environment(as_json: bool) -> None:
    """Print settings of Ray for training on machines that fail: eval "$(paceline env)".

    Use it on every machine before `ray start`. Running code there then needs a token, and workers
    do not yield to all other processes. A machine that is silent counts as lost after five
    seconds, not after a minute.
    """
    from paceline.engines.ray.cluster.settings import SETTINGS

    if as_json:
        print_json(dict(SETTINGS))
        return
    for name, value in SETTINGS.items():
        click.echo(f"export {name}={shlex.quote(value)}")
