"""Plans: the number of workers, the staleness, the learning rate, and the cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

from paceline.core.policy import Policy
from paceline.planner import grid, proposals, steps
from paceline.planner.forecast.encoded import unknown_of
from paceline.planner.forecast.forecast import MOST, Forecast, check_target
from paceline.planner.measure.profile import Profile
from paceline.planner.search import Entry, Goal, Look, Search, figure_of

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec

_FINALISTS = 8  # candidates that are simulated in full
_WITH_CODECS = 4  # best candidates that are tried with codecs
_MESSAGES = 0.05  # share of a step's time above which codecs are tried


@dataclass(frozen=True)
class Plan:
    """Policies with their learning rates and forecasts, the best first.

    `Trainer(learner, policy=plan, engine=…)` runs the first policy, with the learning rate of the
    learner: a plan does not change that one.
    """

    entries: tuple[Entry, ...]
    goal: Goal
    target: float
    reason: str
    notes: tuple[str, ...] = ()
    looks: tuple[Look, ...] = ()  # all first looks, sorted by cost
    batch_size: int = 0
    local_steps: int | None = None  # of every task, if their number was given

    @property
    def policy(self) -> Policy:
        return self.entries[0].policy

    @property
    def codec(self) -> Codec | None:
        """The codec of results; None: results are sent unencoded."""
        return self.entries[0].codec

    @property
    def learning_rate(self) -> float:
        return self.entries[0].learning_rate

    @property
    def forecast(self) -> Forecast:
        return self.entries[0].forecast

    @property
    def unknown(self) -> str:
        """Why the steps to the target are unknown; the cost of a step then ranks the policies."""
        return self.forecast.unknown

    def about(self) -> dict[str, Any]:
        """Return the first row as plain data, for a journal's header."""
        return self.entries[0].about()

    def __str__(self) -> str:
        names = [entry.text for entry in self.entries]
        width = max(map(len, names))
        if self.unknown:
            return self._by_step(names, width)
        lines = [
            f"to a loss of {self.target:g}, with the least "
            f"{'time' if self.goal == 'time' else self.goal}:",
            f"{'':2} {'policy':{width}} {'lr':>8} {'seconds':>8} {'':17} {'dollars':>8} "
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
        lines += [
            f"{name} {entry.forecast.unstable}."
            for name, entry in zip(names, self.entries, strict=True)
            if entry.forecast.unstable
        ]
        return "\n".join([*lines, *self._origins(), self.reason, *self.notes])

    def _origins(self) -> list[str]:
        """Return a sentence for each row that theory proposed."""
        return [
            f"{entry.text} was proposed by theory: {entry.origin}."
            for entry in self.entries
            if entry.origin
        ]

    def _by_step(self, names: Sequence[str], width: int) -> str:
        lines = [
            f"with the least {self.goal} per step; the steps to a loss of {self.target:g} are "
            f"unknown: {self.unknown}",
            f"{'':2} {'policy':{width}} {'s/step':>8} {'':17} {'samples/s':>9} {'$/step':>8} "
            f"{'MB/step':>8} {'rel. steps':>10}",
        ]
        for rank, (name, entry) in enumerate(zip(names, self.entries, strict=True), 1):
            step = entry.forecast.per_step
            low, high = entry.forecast.intervals["seconds_per_step"]
            samples = self.batch_size * (self.local_steps or 1)
            rate = samples / step["seconds"] if step["seconds"] else inf
            lines.append(
                f"{rank:2} {name:{width}} {step['seconds']:8.4g} {f'[{low:.4g}-{high:.4g}]':17} "
                f"{rate:9.4g} {step['dollars']:8.3g} {step['bytes'] / 1e6:8.3g} "
                f"{entry.forecast.relative_steps:10.2f}"
            )
        return "\n".join([*lines, *self._origins(), self.reason, *self.notes])


def plan(
    profile: Profile,
    *,
    target: float,
    minimize: Goal = "time",
    workers: int | None = None,
    learning_rate: float | None = None,
    max_steps: int = MOST,
    seeds: int | None = None,
    patience: float = 2.0,
    codecs: Sequence[Codec | None] | None = None,
    local_steps: int | None = None,
    seed: int = 0,
    on_progress: Callable[[float], None] | None = None,
) -> Plan:
    """Choose the policy, workers, codec and learning rate that reach a loss at the least cost.

    If the optimizer is not SGD, or the profile has no curvature, the steps to a loss are unknown.
    They are also unknown for a codec whose effect on accuracy is unknown, such as Lazy.
    Policies are then ranked by the cost of a step, and the plan's `unknown` says so. Those with
    stale gradients need more steps, as measured by `pl.profile`; see `paceline.planner.steps`.

    target: the loss.
    minimize: the time until then, the money, or the bytes sent.
    workers: plan for the first so many only; by default for all of the profile.
    learning_rate: of the learner, to keep it; by default the best of 17 or more candidates that
        are stable at twice the curvature.
    max_steps: limit of the steps of a run.
    seeds: of the best policies' forecasts; by default 4 to 32, fewer for longer runs.
    codecs: to choose from; by default None, and a few more if messages take long.
    local_steps: the number in every task, as with an inner optimizer like AdamW. By default it is
        the best for SGD. There are no local steps if the steps to a loss are unknown.
    patience: a candidate is dropped once it costs this many times the best so far.
    on_progress: called now and then with the approximate share that is done.
    """
    if minimize not in ("time", "dollars", "bytes"):
        raise ValueError(f'minimize={minimize!r}: use "time", "dollars" or "bytes"')
    if learning_rate is not None and not 0 < learning_rate < inf:
        raise ValueError(f"learning_rate={learning_rate}: use a finite one > 0, or None")
    if codecs is not None and not codecs:
        raise ValueError("codecs=[] leaves nothing to choose from; use [None] for none")
    target = float(target)
    profile = _only(profile, workers)
    _check_goal(profile, minimize)
    _check_local_steps(profile, local_steps)
    about = minimize == "dollars", target, learning_rate, local_steps, seed
    unknown = [why for each in codecs or (None,) if (why := unknown_of(profile, each))]
    if unknown:
        plain = proposals.candidates(replace(profile, local_steps=False), *about)
        given = _encoded(plain, steps.one_codec(codecs, unknown[0]))
        more = target, learning_rate, seeds, seed, on_progress or (lambda share: None)
        entries, looks = steps.rank(profile, given, minimize, *more)
        notes = *profile.notes, *steps.notes_of(profile, local_steps, given[0].codec, seed)
        return Plan(
            tuple(entries), minimize, target, _reason(entries, looks, minimize, str(given[0])),
            notes, tuple(looks), profile.batch_size, local_steps,
        )  # fmt: skip
    surface = check_target(profile, target)
    search = Search(
        *(profile, surface, target, minimize, learning_rate, max_steps, patience, seed),
        *(on_progress, local_steps),
    )
    if search.hopeless():
        raise ValueError(search.unreachable())
    plain = proposals.candidates(profile, *about)
    if codecs is not None:
        plain = [each for codec in codecs for each in _encoded(plain, codec)]
        looks = search.look(plain)
    else:
        looks = search.look(plain)
        if minimize == "bytes" or grid.messages_share(profile) > _MESSAGES:
            best = [look.candidate for look in sorted(looks, key=_stable_first)]
            for codec in grid.codecs():
                looks += search.look(_encoded(best[:_WITH_CODECS], codec))
    if not looks:
        raise ValueError(search.unreachable())
    looks.sort(key=_stable_first)
    entries = search.halve(looks[:_FINALISTS], seeds)
    if not isfinite(figure_of(entries[0].forecast, minimize)):
        raise ValueError(search.unreachable())
    reason = _reason(entries, looks, minimize, str(plain[0]))
    return Plan(
        tuple(entries), minimize, target, reason, profile.notes, tuple(looks), profile.batch_size,
        local_steps,
    )  # fmt: skip


def _stable_first(look: Look) -> tuple[bool, float]:
    return look.unstable, look.figure


def _encoded(
    candidates: Sequence[grid.Candidate], codec: Codec | None
) -> list[grid.Candidate]:  # fmt: skip
    """Give the candidates a codec; omit codes, which can only decode unencoded results."""
    return [
        replace(each, codec=codec)
        for each in candidates
        if codec is None or not each.policy.needs_exact_results
    ]


def _only(profile: Profile, workers: int | None) -> Profile:
    if workers is None:
        return profile
    if not 1 <= workers <= profile.size:
        raise ValueError(
            f"workers={workers}: this profile has {profile.size}; use 1 to {profile.size}"
        )
    return replace(profile, workers=dict(list(profile.workers.items())[:workers]))


def _check_local_steps(profile: Profile, local_steps: int | None) -> None:
    if local_steps is None:
        return
    if local_steps < 2:
        raise ValueError(f"local_steps={local_steps}: use 2 or more, or None")
    if not profile.local_steps:
        raise ValueError(
            f"local_steps={local_steps}: this learner cannot take local steps; give it an outer "
            "optimizer, as in TorchLearner(…, outer=…), and profile again"
        )


def _check_goal(profile: Profile, goal: Goal) -> None:
    prices = profile.prices
    if goal == "dollars" and not (prices.charges_hours or prices.charges_bytes):
        raise ValueError(
            'minimize="dollars" needs prices, and this profile has none; give prices=Prices(…) to '
            "pl.profile, or use replace(profile, prices=…)"
        )
    if goal == "bytes" and not profile.message_bytes:
        raise ValueError('minimize="bytes": the messages of this profile have no size')


def _reason(entries: Sequence[Entry], looks: Sequence[Look], goal: Goal, simplest: str) -> str:
    """Return one sentence on why the first entry is the best, compared with the simplest."""
    first = entries[0]
    figures = {str(look.candidate): look.figure for look in looks}
    figures |= {entry.text: figure_of(entry.forecast, goal) for entry in entries}
    plain = figures.get(simplest)
    unit = {"time": "s", "dollars": "dollars", "bytes": "MB"}[goal]
    unit += " a step" if first.forecast.unknown else ""
    if first.forecast.relative_steps != 1 and first.forecast.unknown:
        unit += " with fresh gradients"
    scale = 1e6 if goal == "bytes" else 1.0
    figure = figure_of(first.forecast, goal)
    text = f"{first.text} takes {figure / scale:.3g} {unit}"
    if first.text == simplest:
        second = entries[1] if len(entries) > 1 else None
        if second is None:
            return f"{text}, and nothing else was better."
        other = figure_of(second.forecast, goal)
        return f"{text}; {second.text} with {other / scale:.3g} {unit} is not better by 3 %."
    if plain is None:
        return f"{text}; {simplest} does not reach the target, or the batch is too small for it."
    times = f", {plain / figure:.2f} times as much" if figure else ""
    return f"{text}, and {simplest} {plain / scale:.3g} {unit}{times}."
