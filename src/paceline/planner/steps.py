"""A plan by the cost per step, if the steps to a loss are unknown.

The planner can forecast the number of steps only for SGD on a measured curvature. Without it,
policies can still be compared if they need equally many steps. They do if every step averages the
gradient of one whole batch at the newest model. Stale gradients need more steps. `pl.profile`
measures how many more, by training with them. Local steps and smaller batches change the number of
steps too, so policies that use them are left out. If all tasks are equally many local steps,
policies are compared by the time of an outer step. The changes of a step then use as many whole
batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf, nan
from typing import TYPE_CHECKING

from paceline.core.errors import StalledError
from paceline.planner.forecast.encoded import unknown_of
from paceline.planner.forecast.forecast import (
    COSTS,
    relative_steps,
    step_costs,
    summed_steps,
    timed,
)
from paceline.planner.forecast.overlap import overlap_note
from paceline.planner.forecast.timeline import Timeline
from paceline.planner.grid import Candidate
from paceline.planner.measure.profile import Profile
from paceline.planner.search import TIE, Entry, Goal, Look, figure_of

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec

_NOTE = (
    "the plan compares policies whose every step averages the gradient of a whole batch at the "
    "newest model: they need equally many steps. {stale}. "
    "k_sync, bandit, rennala and ata use the results of fast workers: if workers hold their own "
    "data, the data of slow workers count less"
)
_LOCAL_NOTE = (
    "the plan compares policies whose every step averages changes of {steps} local steps, which "
    "together use {steps} whole batches: they are assumed to need equally many steps. With fewer "
    "workers each has larger batches"
)
_LEFT_OUT = "Stale gradients and local steps are left out"
_COMPARED = "Stale gradients need more steps, as training showed; local steps are left out"
_FINALISTS, _SEEDS = 8, 4
_LOOKS = 0.7  # approximate share of the time for first looks
_EXACT = 1e-6  # relative, for rounding


def rank(
    profile: Profile,
    candidates: Sequence[Candidate],
    goal: Goal,
    target: float,
    learning_rate: float | None,
    seeds: int | None,
    seed: int,
    on_progress: Callable[[float], None],
) -> tuple[list[Entry], list[Look]]:
    """Return the best candidates, and all first looks, both sorted by the cost of a step."""
    own = (profile.optimizer or {}).get("lr", nan)
    rate = float(own) if learning_rate is None else learning_rate
    looks, first_costs, relative = [], {}, {}
    local = _local_steps(candidates)
    for place, candidate in enumerate(candidates):
        on_progress(_LOOKS * place / len(candidates))
        try:
            timeline = timed(candidate.policy, profile, candidate.codec, seed)
        except StalledError:  # it waits for more results than can arrive
            continue
        unmeasured = timeline.staleness > 0 and profile.stale_training is None
        if unmeasured or not averages_whole_batches(timeline, profile.batch_size, local):
            continue
        relative[place] = relative_steps(profile, timeline, target)
        if relative[place] < inf:
            first_costs[place] = costs = step_costs(timeline)
            figure = costs[COSTS.index("seconds" if goal == "time" else goal)] * relative[place]
            looks.append(Look(candidate, place, rate, 0, figure))
    looks.sort(key=lambda look: look.figure)
    entries = {}
    for place, look in enumerate(looks[:_FINALISTS]):
        on_progress(_LOOKS + (1 - _LOOKS) * place / _FINALISTS)
        each = look.candidate
        more = (
            step_costs(timed(each.policy, profile, each.codec, seed + number))
            for number in range(1, seeds or _SEEDS)
        )
        of_seeds = first_costs[look.place], *more
        unknown = unknown_of(profile, each.codec)
        found = summed_steps(of_seeds, unknown, target, rate, relative[look.place])
        entries[look.place] = Entry(str(each), each.policy, each.codec, rate, found, each.origin)
    ranked = sorted(entries, key=lambda place: figure_of(entries[place].forecast, goal))
    best = figure_of(entries[ranked[0]].forecast, goal)
    close = [p for p in ranked if figure_of(entries[p].forecast, goal) <= best * (1 + TIE)]
    first = min(close)  # the simplest of those within TIE
    return [entries[p] for p in (first, *(p for p in ranked if p != first))], looks


def _local_steps(candidates: Sequence[Candidate]) -> int:
    """Return the local steps of the first candidate's tasks, which is the simplest."""
    return max((work.steps for work in candidates[0].policy.works()), default=1)


def averages_whole_batches(timeline: Timeline, batch: int, local_steps: int = 1) -> bool:
    """Return whether each step is the mean gradient of a whole batch, at one or more models.

    local_steps: of each result; all first steps of the results together use a whole batch.
    """
    return all(
        all(read.steps == local_steps for read in reads)
        and abs(sum(read.weight for read in reads) - 1) < _EXACT
        and sum(read.weight**2 * read.variance for read in reads) * batch < 1 + _EXACT
        for reads in timeline.reads
    )


def notes_of(
    profile: Profile, local_steps: int | None, codec: Codec | None, seed: int
) -> Iterator[str]:
    """Yield what a plan by the cost of a step compares."""
    if local_steps is not None:
        yield _LOCAL_NOTE.format(steps=local_steps)
        yield overlap_note(profile, local_steps, codec, seed)
        return
    yield _NOTE.format(stale=_LEFT_OUT if profile.stale_training is None else _COMPARED)


def one_codec(codecs: Sequence[Codec | None] | None, unknown: str) -> Codec | None:
    """Return the only codec; refuse several, since the steps that each needs are unknown."""
    if codecs is not None and len(codecs) > 1:
        raise ValueError(
            f"{len(codecs)} codecs are given, and the steps that each of them needs are unknown: "
            f"{unknown}; give one, or None"
        )
    return codecs[0] if codecs else None
