"""`paceline serve`: start a run that processes join, and watch it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import click

from paceline.cli.expressions import codec_given, policy_given
from paceline.cli.show import json_option, print_json, say

_LOOK = 1.0  # seconds between two looks at the run
_ANSWER = 60.0  # seconds that the run may take to answer
_RETURN = 120.0  # seconds in which the hub must be back, if it is restarted


@click.command()
@click.option("--run", "name", default="main", show_default=True, help="The name of the run.")
@click.option("--policy", callback=policy_given, help='For instance "k_sync(7)"; default sync().')
@click.option("--batch-size", type=click.IntRange(1), help="The global batch.")
@click.option("--workers", help="How many begin, or LEAST-MOST, such as 2-8.")
@click.option("--steps", type=click.IntRange(1), help="Steps after which the run ends.")
@click.option("--codec", callback=codec_given, help='For instance "Feedback(TopK(0.01))".')
@click.option("--journal", type=click.Path(path_type=Path), help="A file for the journal.")
@click.option("--checkpoints", type=click.Path(path_type=Path), help="A folder for checkpoints.")
@click.option("--every", type=click.IntRange(1), default=100, help="Steps between checkpoints.")
@click.option("--resume", is_flag=True, help="Begin with the newest checkpoint.")
@click.option("--address", help="A Ray cluster to join; by default Ray is started here.")
@json_option
def serve(name: str, as_json: bool, **given: Any) -> None:
    """Start a run, to which scripts with `paceline.session` dial in, and watch it to its end.

    Other terminals set RAY_ADDRESS to the address that is printed, and start the script.
    """
    from paceline.sessions.cluster import gcs_address, start_ray
    from paceline.sessions.hub import hub_actor

    start_ray(given["address"] or os.environ.get("RAY_ADDRESS"), 1)
    hub = hub_actor(name, _options(given), detached=False, resumed=given["resume"])
    say(f"run {name} waits for workers; in other terminals:")
    mode = os.environ.get("RAY_AUTH_MODE")
    token = "" if mode is None else f" RAY_AUTH_MODE={mode}"
    say(f"  export RAY_ADDRESS={gcs_address()} PACELINE_RUN={name}{token}")
    status = Watch(hub, name).until_the_end()
    if as_json:
        shown = {"run": name, "step": status.step, "loss": status.loss, "ended": status.ended}
        print_json(shown)
    else:
        click.echo(status.summary)


def _options(given: dict[str, Any]) -> Any:
    from paceline.sessions.options import Options
    from paceline.training.checkpoint import Checkpoints

    folder, journal = given["checkpoints"], given["journal"]
    return Options(
        policy=given["policy"],
        batch_size=given["batch_size"],
        workers=_workers(given["workers"]),
        steps=given["steps"],
        codec=given["codec"],
        journal=None if journal is None else str(journal.absolute()),
        checkpoints=None if folder is None else Checkpoints(folder, every=given["every"]),
    )


def _workers(text: str | None) -> tuple[int, int] | None:
    from paceline.sessions.options import workers_given

    if text is None:
        return None
    least, _, most = text.partition("-")
    if not least.isdigit() or not (most or least).isdigit():
        raise click.BadParameter(f"--workers {text}: write a number, or LEAST-MOST, such as 2-8")
    return workers_given((int(least), int(most or least)))


class Watch:
    """Prints how a run is doing; the first Ctrl-C or SIGTERM ends the run as it should end."""

    def __init__(self, hub: Any, name: str) -> None:
        self._hub, self._name = hub, name
        self._asked = False

    def until_the_end(self) -> Any:
        """Return the last status of the run; raise RuntimeError if it has failed."""
        from paceline.sessions.cluster import status_of

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._end)
        shown, answered = -1, time.monotonic()
        while True:
            status = status_of(self._hub, _ANSWER)
            if status is None:
                if time.monotonic() - answered > _RETURN:
                    raise RuntimeError(f"run {self._name} has not answered for {_RETURN:g} s")
                time.sleep(_LOOK)
                continue
            answered = time.monotonic()
            if status.step != shown or status.ended:
                loss = "" if status.loss is None else f", loss {status.loss:.4g}"
                say(f"step {status.step}{loss}, {status.workers} workers")
                shown = status.step
            if status.ended:
                if status.failed:
                    raise RuntimeError(f"run {self._name} has failed: {status.ended}")
                return status
            time.sleep(_LOOK)

    def _end(self, number: int, frame: object) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        self._hub.end.remote(f"ended by {signal.Signals(number).name}")
