"""The search behind a plan: a first look at everything, and full simulations of the best.

A first look times a few steps of a policy, and repeats them with many learning rates at once
until the target. The best candidates are simulated in full, and the best of these with more seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, nan, sqrt
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from paceline.core.errors import StalledError
from paceline.core.policy import Policy
from paceline.planner.forecast.encoded import shrinkage
from paceline.planner.forecast.forecast import (
    Case,
    Forecast,
    Outcome,
    is_measured,
    relative_steps,
    stale_steps,
    summed,
)
from paceline.planner.forecast.predict import fewest_steps
from paceline.planner.forecast.quadratic import descend, modes_of
from paceline.planner.forecast.timeline import Timeline
from paceline.planner.grid import LOCAL, Candidate
from paceline.planner.measure.profile import Profile, Surface

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec

Goal: TypeAlias = Literal["time", "dollars", "bytes"]

TIE = 0.03
"""Relative difference from the best that counts as a tie; the simplest candidate wins it."""
RISKY = 0.2
"""Candidates of a higher risk rank behind all others, and unstable ones behind these."""

SLACK = 1.05
"""The smallest learning rate that needs at most this many times the fewest steps is taken."""

_EVENTS = 4000  # events of a first look, and so fewer steps with more workers
_LEAST = 30  # minimum of steps of a first look, to detect divergence
_DIRECTIONS = 640  # directions of a first look: enough for a loss close to its expectation
_TASKS = 8000  # simulated tasks of the best candidate, divided among its seeds
_LOOKS = 0.6  # approximate share of first looks in a search: 10.6 of 16.7 s with 32 workers
_TAMED = 4  # learning rates to try in full, the last three lower than that of the first look
_RATES = 16  # lower learning rates to try, each 1/sqrt(2) of the one before
_LOWER = 6  # limit of rounds that add four lower rates if none can reach the target
_FIRST = 2 * sqrt(2)  # the first rate times the largest curvature: above 2 SGD is unstable


@dataclass(frozen=True)
class Entry:
    """One row of a plan.

    origin: why theory proposed the policy; "" for one of the fixed grid.
    """

    text: str
    policy: Policy
    codec: Codec | None
    learning_rate: float
    forecast: Forecast
    origin: str = ""

    def about(self) -> dict[str, Any]:
        """Return the row as plain data."""
        origin = {"proposed_by_theory": self.origin} if self.origin else {}
        return {"policy": self.text, **origin, **self.forecast.about()}


@dataclass(frozen=True)
class Look:
    """A first look at a candidate: its best learning rate, and the cost to minimize there."""

    candidate: Candidate
    place: int  # in the grid
    learning_rate: float
    steps: int  # 0 if they are unknown
    figure: float
    unstable: bool = False  # at the sharpest curvature measured, with the learner's own rate


class Search:
    """Compares candidates; later ones are dropped early if they cost more than the best so far."""

    def __init__(
        self,
        profile: Profile,
        surface: Surface,
        target: float,
        goal: Goal,
        learning_rate: float | None,
        max_steps: int,
        patience: float,
        seed: int,
        on_progress: Callable[[float], None] | None = None,
        local_steps: int | None = None,
    ) -> None:
        self._profile, self._surface, self._target, self._goal = profile, surface, target, goal
        self._modes = modes_of(surface, target, _DIRECTIONS)
        self._max_steps, self._patience, self._seed = max_steps, patience, seed
        self._local_steps = local_steps or (LOCAL if profile.local_steps else 1)
        if learning_rate is None:
            self._rates = [_FIRST / surface.top / sqrt(2) ** i for i in range(_RATES + 1)]
        else:
            self._rates = [learning_rate]
            self._modes = replace(self._modes, sharpest=0.0)  # reported as a risk instead
        self._steps = min(max(_EVENTS // profile.size, 10), 80)
        if learning_rate is None:  # if noise keeps the loss too high, add lower rates
            for _ in range(_LOWER):
                if not self.hopeless():
                    break
                self._rates += [self._rates[-1] / sqrt(2) ** i for i in (1, 2, 3, 4)]
        self._on_progress = on_progress or (lambda share: None)
        self._best = inf
        self._lowest = inf  # loss seen
        self.tried = 0

    def hopeless(self) -> bool:
        """Return whether by theory no learning rate reaches the target, even with local steps."""
        modes, batch = modes_of(self._surface, self._target), self._profile.batch_size
        steps = [fewest_steps(modes, batch, rate, self._target) for rate in self._rates]
        return min(steps) > self._max_steps * self._local_steps

    def look(self, candidates: Sequence[Candidate]) -> list[Look]:
        """Time some steps of each candidate, and repeat them until the target."""
        found = []
        for place, candidate in enumerate(candidates):
            self._on_progress(_LOOKS * place / len(candidates))
            self.tried += 1
            try:
                look = self._look(candidate)
            except StalledError:  # it waits for more results than can arrive
                continue
            if look is not None:
                if not look.unstable:
                    self._best = min(self._best, look.figure)
                found.append(look)
        return found

    def _look(self, candidate: Candidate) -> Look | None:
        shrunk, kept = shrinkage(candidate.codec, self._profile)
        timeline = Timeline(candidate.policy, self._profile, self._seed, shrunk)
        timeline.reach(self._steps)
        reads = timeline.repeated(self._max_steps)
        hits: dict[int, int] = {}  # by the place of the rate
        for step, losses in enumerate(descend(self._modes, self._rates, reads, self._seed, kept)):
            self._lowest = min(self._lowest, float(losses.min()))
            for place in (losses <= self._target).nonzero()[0].tolist():
                hits.setdefault(place, step)
            # Twice the rate acts like twice the curvature, and must not diverge either.
            sound = {p: at for p, at in hits.items() if losses[max(p - 2, 0)] < self._surface.loss}
            fewest = min(sound.values(), default=0)
            if sound and step >= min(max(SLACK * fewest, _LEAST), self._max_steps - 1):
                place = max(p for p, at in sound.items() if at <= SLACK * fewest)
                rate = self._rates[place]
                steps = self._measured(timeline, rate, sound[place] + 1, kept)
                if not steps:
                    return None
                figure = self._cost(timeline, steps - 1)
                look = Look(candidate, self.tried, rate, steps, figure)
                # A rate that is free to choose is lowered later, until it is stable.
                fixed = len(self._rates) == 1
                unstable = fixed and bool(self._case(look).instability(timeline))
                return replace(look, unstable=unstable)
            if not sound and self._cost(timeline, step) > self._patience * self._best:
                return None
            if not isfinite(losses[-1]):
                return None
        return None

    def _measured(self, timeline: Timeline, rate: float, steps: int, kept: float) -> int:
        """Return the steps to the target, as measured if gradients are stale; 0: not reached."""
        if not is_measured(self._profile, timeline):
            return steps
        given = timeline, self._target, rate
        relative = relative_steps(self._profile, *given)
        more = self._max_steps, self._seed, kept
        found = stale_steps(relative, self._modes, *given, *more)
        return int(found) if found < inf else 0

    def _cost(self, timeline: Timeline, step: int) -> float:
        seconds, dollars, size = timeline.at(step)
        return {"time": seconds, "dollars": dollars, "bytes": size}[self._goal]

    def halve(self, looks: Sequence[Look], seeds: int | None) -> list[Entry]:
        """Simulate all with few seeds, then the better half with twice as many, and so on."""
        if seeds is None:
            seeds = min(max(_TASKS // (looks[0].steps * self._profile.size), 4), 32)
        count = max(seeds // 4, 1)
        runs: dict[int, list[Outcome]] = {}
        left, behind = list[Look](), list[Look]()
        for place, look in enumerate(looks):
            self._on_progress(_LOOKS + (1 - _LOOKS) * place / len(looks))
            tame, runs[look.place] = self._tamed(look, count)
            left.append(tame)
        while True:
            for look in left:
                for each in range(len(runs[look.place]), count):
                    runs[look.place].append(self._case(look).simulate(self._seed + each))
            left.sort(key=self._order(runs))
            if count >= seeds:
                break
            kept = max(len(left) // 2, 2)
            left, behind, count = left[:kept], left[kept:] + behind, min(2 * count, seeds)
        ranked = self._settled(left, runs) + behind
        first, *others = ranked
        theory = self._case(first).theory(self._seed)
        return [
            self._entry(first, runs[first.place], theory),
            *(self._entry(look, runs[look.place]) for look in others),
        ]

    def _tamed(self, look: Look, seeds: int) -> tuple[Look, list[Outcome]]:
        """Lower the learning rate up to three times until the risk is low; return the runs too."""
        for left in reversed(range(_TAMED)):
            runs = [self._case(look).simulate(self._seed + each) for each in range(seeds)]
            risk = summed(runs, nan, self._target, look.learning_rate).risk
            if risk <= RISKY or len(self._rates) == 1 or not left:
                break
            look = replace(look, learning_rate=look.learning_rate / sqrt(2))
        return look, runs

    def _case(self, look: Look) -> Case:
        each, figures = look.candidate, (look.learning_rate, self._target)
        return Case(each.policy, self._profile, *figures, each.codec, self._max_steps)

    def _order(self, runs: dict[int, list[Outcome]]) -> Callable[[Look], tuple[int, float, int]]:
        def order(look: Look) -> tuple[int, float, int]:
            found = summed(runs[look.place], nan, self._target, look.learning_rate)
            trouble = 2 if found.unstable else int(found.risk > RISKY)
            trouble = trouble if isfinite(found.seconds) else 3
            return trouble, _mean(runs[look.place], self._goal), look.place

        return order

    def _settled(
        self, ranked: Sequence[Look], runs: dict[int, list[Outcome]]
    ) -> list[Look]:  # fmt: skip
        """Put the fastest of the candidates that tie with the best first; break ties by order."""
        order = self._order(runs)
        trouble, best, _ = order(ranked[0])
        close = [
            look for look in ranked
            if order(look)[0] == trouble and order(look)[1] <= best * (1 + TIE)
        ]  # fmt: skip
        if self._goal != "time":
            seconds = {look.place: _mean(runs[look.place], "time") for look in close}
            quickest = min(seconds.values())
            close = [look for look in close if seconds[look.place] <= quickest * (1 + TIE)]
        first = min(close, key=lambda look: look.place)
        return [first, *(look for look in ranked if look is not first)]

    def _entry(self, look: Look, runs: Sequence[Outcome], theory: float = nan) -> Entry:
        each = look.candidate
        found = summed(runs, theory, self._target, look.learning_rate)
        return Entry(str(each), each.policy, each.codec, look.learning_rate, found, each.origin)

    def unreachable(self) -> str:
        """Return the text of the error that no policy reaches the target."""
        text = f"no policy reaches a loss of {self._target:g} within {self._max_steps} steps"
        if isfinite(self._lowest):
            text += f"; the lowest loss seen is {self._lowest:.4g}"
        floor = self._surface.noise / self._profile.batch_size
        text += (
            f". With batches of {self._profile.batch_size} samples noise holds the loss up by "
            f"about {floor / 4:.3g} times the learning rate: use a higher target, a larger "
            "batch, more steps (max_steps=), or another learning rate"
        )
        return text


def figure_of(found: Forecast | Outcome, goal: Goal) -> float:
    """Return the cost to minimize: until the target, or of a step if the steps are unknown.

    The step is then one with fresh gradients, or as many stale ones as it takes.
    """
    if isinstance(found, Forecast) and found.unknown:
        step = found.per_step["seconds" if goal == "time" else goal]
        return step * found.relative_steps
    return {"time": found.seconds, "dollars": found.dollars, "bytes": found.bytes}[goal]


def _mean(runs: Sequence[Outcome], goal: Goal) -> float:
    return sum(figure_of(run, goal) for run in runs) / len(runs)
