"""`paceline profile`: measure the workers and the loss of a script's own trainer."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.scripts import SCRIPT, at_first_fit
from paceline.cli.show import json_option, patience, print_json, spare_journal, table

if TYPE_CHECKING:
    from paceline.core.protocol import Prices
    from paceline.planner.measure.profile import Profile
    from paceline.training.observers import Setup


def hourly(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> float | dict[str, float] | None:
    """Read dollars an hour: a number for all, or w0=1.2,w1=0.3."""
    try:
        if value is None or "=" not in value:
            return None if value is None else float(value)
        pairs = (pair.split("=") for pair in value.split(","))
        return {worker.strip(): float(price) for worker, price in pairs}
    except ValueError:
        raise click.BadParameter(f"{value!r} is no price; use 1.2, or w0=1.2,w1=0.3") from None


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("script", type=SCRIPT)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("fleet.json"),
    show_default=True,
    help="The file to write.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    help="How long to measure workers, on the engine's clock.",
)
@click.option(
    "--loss-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default=True,
    help="Limit for measuring the loss and its curvature.",
)
@click.option(
    "--floor", type=float, default=0.0, show_default=True, help="The loss of the best model."
)
@click.option(
    "--prices-per-hour",
    callback=hourly,
    metavar="DOLLARS",
    help="1.2 for all, or w0=1.2,w1=0.3 for each.",
)
@json_option
def profile(
    script: Path,
    args: tuple[str, ...],
    output: Path,
    seconds: float,
    loss_seconds: float,
    floor: float,
    prices_per_hour: float | dict[str, float] | None,
    as_json: bool,
) -> None:
    """Measure the learner and the workers of SCRIPT, for `paceline plan`.

    The script runs until its first fit(). There this command measures the trainer's learner and
    engine instead of training, and ends the script. Output of the script goes to stderr. Options
    that this command does not know, and all after --, go to the script.
    """
    if not output.resolve().parent.is_dir():
        raise ValueError(
            f"the folder {output.parent} does not exist; create it, or give another -o"
        )
    spare_journal(output)

    def measure(made: Setup) -> Profile:
        from paceline.planner.measure.probe import profile as measured

        with patience("measuring") as part:
            return measured(
                made.learner,
                made.engine,
                seconds=seconds,
                prices=_prices(made.prices, prices_per_hour),
                floor=floor,
                seed=made.seed,
                loss_seconds=loss_seconds,
                on_progress=part.at,
            )

    with contextlib.redirect_stdout(sys.stderr):
        found = at_first_fit(script, args, measure)
    found.save(output)
    if as_json:
        print_json(_data(found, output))
        return
    click.echo(_workers(found))
    if (surface := found.surface) is not None:
        click.echo(
            f"loss {surface.loss:.4g}, gradient {surface.gradient_norm:.3g}, largest curvature "
            f"{surface.top:.3g}, of {surface.parameters} parameters"
        )
    if (stale := found.stale_training) is not None:
        ratio = stale.ratio(stale.staleness)
        told = f"takes {ratio:.3g} times the steps" if isfinite(ratio) else "hardly lowers the loss"
        click.echo(f"training with a staleness of {stale.staleness:.3g} {told}")
    if found.optimizer is not None:
        click.echo(f"optimizer {_optimizer(found.optimizer)}")
    for note in found.notes:
        click.echo(f"note: {note}")
    if found.unknown:
        click.echo(f"note: a plan will compare the time per step: {found.unknown}")
    click.echo(f"saved {output}; next: paceline plan {output} --target LOSS")


def _prices(known: Prices | None, per_hour: float | dict[str, float] | None) -> Prices | None:
    """Return the trainer's prices, with the given price per hour instead of its own."""
    from dataclasses import replace

    from paceline.core.protocol import Prices

    return known if per_hour is None else replace(known or Prices(), per_hour=per_hour)


def _workers(found: Profile) -> str:
    rows = [
        [
            name,
            f"{worker.compute.mean:.3g}",
            f"{1e3 * worker.link.latency:.3g}",
            _speed(worker.link.down),
            _speed(worker.link.up),
            type(worker.compute).__name__,
        ]
        for name, worker in found.workers.items()
    ]
    return table(["worker", "s/sample", "latency ms", "down MB/s", "up MB/s", "law"], rows)


def _optimizer(given: Mapping[str, Any]) -> str:
    """Return an optimizer as its user would write it.

    >>> _optimizer({"name": "SGD", "lr": 0.1, "momentum": 0.9, "outer": {"name": "SGD", "lr": 1.0}})
    'SGD(lr=0.1, momentum=0.9), outer SGD(lr=1.0)'
    """
    settings = {key: value for key, value in given.items() if key not in ("name", "outer")}
    text = f"{given['name']}({', '.join(f'{key}={value}' for key, value in settings.items())})"
    return f"{text}, outer {_optimizer(given['outer'])}" if "outer" in given else text


def _speed(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e6:.3g}" if isfinite(bytes_per_second) else "–"


def _data(found: Profile, output: Path) -> dict[str, Any]:
    workers = {
        name: {
            "seconds_per_sample": worker.compute.mean,
            "latency": worker.link.latency,
            "bytes_per_second_down": worker.link.down,
            "bytes_per_second_up": worker.link.up,
            "law": type(worker.compute).__name__,
        }
        for name, worker in found.workers.items()
    }
    surface, stale = found.surface, found.stale_training
    return {
        "file": str(output),
        "workers": workers,
        "batch_size": found.batch_size,
        "message_bytes": found.message_bytes,
        "loss": None if surface is None else surface.loss,
        "curvature": None if surface is None else surface.top,
        "staleness": None if stale is None else stale.staleness,
        "relative_steps": None if stale is None else stale.ratio(stale.staleness),
        "optimizer": found.optimizer,
        "unknown": found.unknown,
        "notes": found.notes,
    }
