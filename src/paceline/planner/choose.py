"""How many workers, how stale, which learning rate, and what will it cost: a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

from paceline.core.protocol import Policy
from paceline.planner import grid
from paceline.planner.forecast import MOST, Forecast, check_target
from paceline.planner.profile import Profile
from paceline.planner.search import Entry, Goal, Look, Search, figure_of

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec

_FINALISTS = 8  # that are simulated in full
_WITH_CODECS = 4  # the best, to which codecs are tried
_MESSAGES = 0.05  # of a step's time, above which codecs are tried


@dataclass(frozen=True)
class Plan:
    """Ways to train, the best first. Nothing is changed by it: take its learning rate, or do not.

    `Trainer(learner, policy=plan, engine=…)` runs the first, with the learner's learning rate.
    """

    entries: tuple[Entry, ...]
    goal: Goal
    target: float
    reason: str
    notes: tuple[str, ...] = ()
    looks: tuple[Look, ...] = ()  # all that was looked at, by its figure

    @property
    def policy(self) -> Policy:
        return self.entries[0].policy

    @property
    def codec(self) -> Codec | None:
        """What results should be encoded with; None: sent as they are."""
        return self.entries[0].codec

    @property
    def learning_rate(self) -> float:
        return self.entries[0].learning_rate

    @property
    def forecast(self) -> Forecast:
        return self.entries[0].forecast

    def about(self) -> dict[str, Any]:
        """Return the first row as plain data, for a journal's header."""
        return {"policy": self.entries[0].text, **self.forecast.about()}

    def __str__(self) -> str:
        names = [entry.text for entry in self.entries]
        width = max(map(len, names))
        lines = [
            f"to a loss of {self.target:g}, with the least "
            f"{'time' if self.goal == 'time' else self.goal}:",
            f"{'':2} {'policy':{width}} {'rate':>8} {'seconds':>8} {'':17} {'dollars':>8} "
            f"{'MB':>8} {'risk':>5}",
        ]
        for rank, (name, entry) in enumerate(zip(names, self.entries, strict=True), 1):
            found = entry.forecast
            low, high = found.intervals["seconds"]
            lines.append(
                f"{rank:2} {name:{width}} {entry.learning_rate:8.3g} {found.seconds:8.4g} "
                f"{f'[{low:.4g}-{high:.4g}]':17} {found.dollars:8.3g} {found.bytes / 1e6:8.3g} "
                f"{found.risk:5.0%}"
            )
        return "\n".join([*lines, self.reason, *self.notes])


def plan(
    profile: Profile,
    *,
    target: float,
    minimize: Goal = "time",
    workers: int | None = None,
    learning_rate: float | None = None,
    most: int = MOST,
    seeds: int | None = None,
    patience: float = 2.0,
    codecs: Sequence[Codec | None] | None = None,
    seed: int = 0,
    told: Callable[[float], None] | None = None,
) -> Plan:
    """Choose a policy, who takes part, and a learning rate, by which a loss is reached best.

    target: the loss.
    minimize: the time until then, the money, or the bytes sent.
    workers: plan for the first so many only; by default for all of the profile.
    learning_rate: of the learner, if it shall stay as it is; by default the best of 16 that bear
        twice the curvature.
    most: steps that a run may take.
    seeds: of the best policies' forecasts; by default 4 to 32, fewer for longer runs.
    codecs: of results, to choose from; by default None, and where messages take long a few more.
    patience: what takes so many times as much as the best so far is not looked at further.
    told: about which share is done, now and then.
    """
    if minimize not in ("time", "dollars", "bytes"):
        raise ValueError(f'minimize={minimize!r}: use "time", "dollars" or "bytes"')
    if learning_rate is not None and not 0 < learning_rate < inf:
        raise ValueError(f"learning_rate={learning_rate}: use a finite one > 0, or None")
    if codecs is not None and not codecs:
        raise ValueError("codecs=[] leaves nothing to choose from; use [None] for none")
    target = float(target)
    surface = check_target(profile, target)
    profile = _only(profile, workers)
    _check_goal(profile, minimize)
    search = Search(profile, surface, target, minimize, learning_rate, most, patience, seed, told)
    if search.hopeless():
        raise ValueError(search.unreachable())
    plain = grid.candidates(profile, minimize == "dollars", seed)
    if codecs is not None:
        looks = search.look([each for codec in codecs for each in _encoded(plain, codec)])
    else:
        looks = search.look(plain)
        if minimize == "bytes" or grid.messages_share(profile) > _MESSAGES:
            best = [look.candidate for look in sorted(looks, key=lambda look: look.figure)]
            for codec in grid.codecs():
                looks += search.look(_encoded(best[:_WITH_CODECS], codec))
    if not looks:
        raise ValueError(search.unreachable())
    looks.sort(key=lambda look: look.figure)
    entries = search.halve(looks[:_FINALISTS], seeds)
    if not isfinite(figure_of(entries[0].forecast, minimize)):
        raise ValueError(search.unreachable())
    reason = _reason(entries, looks, minimize)
    return Plan(tuple(entries), minimize, target, reason, profile.notes, tuple(looks))


def _encoded(
    candidates: Sequence[grid.Candidate], codec: Codec | None
) -> list[grid.Candidate]:  # fmt: skip
    """Give all of them a codec, but for codes, which decode from results as they are."""
    return [
        replace(each, codec=codec)
        for each in candidates
        if codec is None or not hasattr(each.policy, "code")
    ]


def _only(profile: Profile, workers: int | None) -> Profile:
    if workers is None:
        return profile
    if not 1 <= workers <= profile.size:
        raise ValueError(
            f"workers={workers}: this profile has {profile.size}; use 1 to {profile.size}"
        )
    return replace(profile, workers=dict(list(profile.workers.items())[:workers]))


def _check_goal(profile: Profile, goal: Goal) -> None:
    prices = profile.prices
    if goal == "dollars" and not (prices.charges_hours or prices.charges_bytes):
        raise ValueError(
            'minimize="dollars" needs prices, and this profile has none; give prices=Prices(…) to '
            "pl.profile, or use replace(profile, prices=…)"
        )
    if goal == "bytes" and not profile.message_bytes:
        raise ValueError('minimize="bytes": the messages of this profile have no size')


def _reason(entries: Sequence[Entry], looks: Sequence[Look], goal: Goal) -> str:
    """Say in one sentence why the first is the first."""
    first = entries[0]
    figures = {str(look.candidate): look.figure for look in looks}
    figures |= {entry.text: figure_of(entry.forecast, goal) for entry in entries}
    plain = figures.get("sync()")
    unit = {"time": "s", "dollars": "dollars", "bytes": "MB"}[goal]
    scale = 1e6 if goal == "bytes" else 1.0
    figure = figure_of(first.forecast, goal)
    text = f"{first.text} takes {figure / scale:.3g} {unit}"
    if first.text == "sync()":
        second = entries[1] if len(entries) > 1 else None
        if second is None:
            return f"{text}, and nothing else was better."
        other = figure_of(second.forecast, goal)
        return f"{text}; {second.text} with {other / scale:.3g} {unit} does not do better by 3 %."
    if plain is None:
        return f"{text}; sync() does not get there, or the batch is too small for it."
    times = f", {plain / figure:.2f} times as much" if figure else ""
    return f"{text}, and sync() {plain / scale:.3g} {unit}{times}."
