"""`paceline replay`: check that a policy makes the decisions of a journal again."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.expressions import parse, parsed, policy_given
from paceline.cli.journals import JOURNAL, load_journal
from paceline.cli.show import json_option, patience, print_json

if TYPE_CHECKING:
    from paceline.core.journal import Journal
    from paceline.core.policy import Policy

DIFFERENT = 3
"""The exit code if a replay differs from the journal."""
NOTHING = "no command"


@click.command()
@click.argument("journal", type=JOURNAL)
@click.option(
    "--policy",
    callback=policy_given,
    metavar="POLICY",
    help='Such as "k_sync(6)"; by default the one that the journal names.',
)
@json_option
def replay(journal: Path, policy: Any, as_json: bool) -> None:
    """Feed the events of JOURNAL to a policy, and print its first different decision.

    The journal says when to begin and end, unless the policy does by Until(…).
    Exit code 3: not the same.
    """
    with patience(f"reading {journal}", journal.stat().st_size) as part:
        loaded = load_journal(journal, part.to)
    with patience(f"replaying {journal}", len(loaded)) as part:
        found = first_difference(driven(policy, loaded.header.policy), loaded, part.to)
    data: dict[str, Any] = {"journal": str(journal), "entries": len(loaded), "same": found is None}
    if found is None:
        text = f"the same: all {len(loaded)} entries"
    else:
        data |= asdict(found)
        text = (
            f"not the same: at entry {found.entry} of {len(loaded)}, after {found.seconds:.6g} s, "
            f"{found.event}\n  journal  {found.recorded}\n  replay   {found.replayed}"
        )
    if as_json:
        print_json(data)
    else:
        click.echo(text)
    if found is not None:
        raise click.exceptions.Exit(DIFFERENT)


@dataclass(frozen=True)
class Difference:
    """An event at which a replay differs from the journal, and the first different command."""

    entry: int  # counted from 1
    seconds: float
    event: str
    recorded: str
    replayed: str


def first_difference(
    policy: Policy, journal: Journal, on_progress: Callable[[float], None] = lambda done: None
) -> Difference | None:
    """Return the first difference of a replay, None if there is none."""
    from paceline.core.coordinator import replayed
    from paceline.core.errors import PolicyError
    from paceline.core.journal import same
    from paceline.core.state import describe

    decisions = replayed(policy, journal)
    for place, recorded in enumerate(journal, 1):
        on_progress(place)
        at = place, recorded.now, describe(recorded.event)
        mine = [describe(command) for command in recorded.commands]
        try:
            decided = next(decisions)
        except PolicyError as error:
            return Difference(*at, ", ".join(mine) or NOTHING, f"fails: {error}")
        if not same(recorded, decided):
            theirs = [describe(command) for command in decided.commands]
            pairs = zip_longest(mine, theirs, fillvalue=NOTHING)
            first = next((pair for pair in pairs if pair[0] != pair[1]), (str(mine), str(theirs)))
            return Difference(*at, *first)
    return None


def driven(policy: Policy | None, text: str) -> Policy:
    """Return a policy as a trainer drives it, with its wrappers taken from the text.

    policy: None for the policy that the text names.
    """
    from paceline.policies.backups import Backups
    from paceline.policies.wrappers import MinWorkers, Until

    if policy is None:
        try:
            named: Policy = parse(text)
        except ValueError as error:
            raise ValueError(
                f"the journal's policy cannot be made from its name, {text} ({error}); give it as "
                "--policy"
            ) from None
        return named
    if isinstance(policy, Until):
        return policy
    try:
        outer = _arguments(parsed(text), "Until")
        inner = None if outer is None else _arguments(outer.pop("inner"), "MinWorkers")
    except ValueError:  # no trainer drove this policy
        return policy
    if outer is None or inner is None:
        return policy
    ends = {name: ast.literal_eval(value) for name, value in outer.items()}
    given = _arguments(inner["inner"], "Backups")
    if given is not None and not isinstance(policy, Backups):
        del given["inner"]
        options = {name: ast.literal_eval(value) for name, value in given.items()}
        policy = Backups(policy, **options)
    return Until(MinWorkers(ast.literal_eval(inner["n"]), policy), **ends)


def _arguments(node: ast.expr, name: str) -> dict[str, ast.expr] | None:
    """Return the arguments of a call of this name, None if it is another."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
        return {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
    return None
