"""`paceline plan` and `paceline simulate`: rank policies, and forecast one policy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from paceline.cli.expressions import codec_given, policy_given
from paceline.cli.show import json_option, patience, print_json

if TYPE_CHECKING:
    from paceline.planner.measure.profile import Profile

FLEET = click.Path(exists=True, dir_okay=False, path_type=Path)
_RATE = click.FloatRange(min=0, min_open=True)

target_option = click.option("--target", type=float, required=True, help="The loss to reach.")


@click.command()
@click.argument("fleet", type=FLEET)
@target_option
@click.option(
    "--minimize",
    type=click.Choice(["time", "dollars", "bytes"]),
    default="time",
    show_default=True,
    help="The quantity to minimize.",
)
@click.option("--workers", type=click.IntRange(min=1), help="Plan for the first N workers only.")
@click.option(
    "--learning-rate",
    type=_RATE,
    help="A fixed learning rate; by default the plan searches for the best.",
)
@click.option(
    "--local-steps",
    type=click.IntRange(min=2),
    help="Plan for tasks of so many local steps only.",
)
@json_option
def plan(
    fleet: Path,
    target: float,
    minimize: Literal["time", "dollars", "bytes"],
    workers: int | None,
    learning_rate: float | None,
    local_steps: int | None,
    as_json: bool,
) -> None:
    """Rank ways to train on FLEET, a file that `paceline profile` wrote."""
    from paceline.planner.choose import plan as choose

    with patience("planning", 1.0) as part:
        found = choose(
            load_fleet(fleet),
            target=target,
            minimize=minimize,
            workers=workers,
            learning_rate=learning_rate,
            local_steps=local_steps,
            on_progress=part.to,
        )
    if not as_json:
        click.echo(str(found))
        return
    rows = [entry.about() for entry in found.entries]
    print_json(
        {
            "target": found.target,
            "minimize": found.goal,
            "entries": rows,
            "unknown": found.unknown,
            "reason": found.reason,
            "notes": found.notes,
        }
    )


@click.command()
@click.argument("fleet", type=FLEET)
@click.option(
    "--policy", callback=policy_given, metavar="POLICY", required=True, help='Such as "k_sync(6)".'
)
@target_option
@click.option("--learning-rate", type=_RATE, required=True, help="Momentum included: lr / (1 - β).")
@click.option(
    "--codec", callback=codec_given, metavar="CODEC", help='Codec of results, such as "Int8()".'
)
@click.option(
    "--seeds", type=click.IntRange(min=1), default=8, show_default=True, help="Simulated runs."
)
@json_option
def simulate(
    fleet: Path,
    policy: Any,
    target: float,
    learning_rate: float,
    codec: Any,
    seeds: int,
    as_json: bool,
) -> None:
    """Forecast a run with one policy on FLEET, a file that `paceline profile` wrote."""
    from paceline.planner.forecast.forecast import forecast
    from paceline.policies.named import written

    profile = load_fleet(fleet)
    with patience("simulating", 1.0) as part:
        found = forecast(
            policy,
            profile,
            learning_rate=learning_rate,
            target=target,
            codec=codec,
            seeds=seeds,
            on_progress=part.to,
        )
    if as_json:
        print_json({"policy": written(policy), **found.about(), "notes": profile.notes})
        return
    until = "" if found.unknown else f" to a loss of {target:g}"
    click.echo(f"{written(policy)}{until}: {found}")
    for note in profile.notes:
        click.echo(f"note: {note}")


def load_fleet(path: Path) -> Profile:
    """Read a profile; refuse a file that is not one, by its name."""
    from paceline.planner.measure.profile import Profile

    try:
        return Profile.load(path)
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise ValueError(
            f"{path} is not a profile ({error}); write one with `paceline profile SCRIPT -o "
            "fleet.json`, and plan for that"
        ) from None
