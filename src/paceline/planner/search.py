"""The search behind a plan: a first look at everything, and full simulations of the best.

For a first look a policy is timed for a few steps, which are then repeated with many learning
rates at once until the target. The best are simulated in full, and those that stay best with more
seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, nan, sqrt
from typing import TYPE_CHECKING, Literal, TypeAlias

from paceline.core.coordinator import StalledError
from paceline.core.protocol import Policy
from paceline.planner.forecast import Case, Forecast, Outcome, shrinkage, summed
from paceline.planner.grid import LOCAL, Candidate
from paceline.planner.predict import fewest_steps
from paceline.planner.profile import Profile, Surface
from paceline.planner.quadratic import descend, modes_of
from paceline.planner.timeline import Timeline

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec

Goal: TypeAlias = Literal["time", "dollars", "bytes"]

TIE = 0.03
"""Relative: what is closer to the best is as good, and the simpler of them is taken."""
RISKY = 0.2
"""A plan of more risk comes behind all others."""

SLACK = 1.05
"""Times the fewest steps: of the learning rates that need no more, the smallest is taken."""

_EVENTS = 4000  # of a first look, and so fewer steps with more workers
_LEAST = 30  # steps of a first look, in which what diverges is seen to
_DIRECTIONS = 640  # of a first look, by which the loss is close to what is expected
_TASKS = 8000  # of the simulations of the first, over which its seeds are spread
_LOOKS = 0.6  # of the time of a search that first looks take, about: 10.6 of 16.7 s of 32 workers
_TAMED = 4  # learning rates, of which the last three are lower than at the first look
_RATES = 16  # learning rates, each 1/sqrt(2) of the one before
_LOWER = 6  # times that four lower ones are added if none may reach the target
_FIRST = 2 * sqrt(2)  # the first, over the largest curvature: beyond 2 nothing is stable


@dataclass(frozen=True)
class Entry:
    """One row of a plan."""

    text: str
    policy: Policy
    codec: Codec | None
    learning_rate: float
    forecast: Forecast


@dataclass(frozen=True)
class Look:
    """A first look at a candidate: its best learning rate, and the figure to be minimized there."""

    candidate: Candidate
    place: int  # in the grid
    learning_rate: float
    steps: int
    figure: float


class Search:
    """Goes through candidates, with what it has found so far."""

    def __init__(
        self,
        profile: Profile,
        surface: Surface,
        target: float,
        goal: Goal,
        learning_rate: float | None,
        most: int,
        patience: float,
        seed: int,
        told: Callable[[float], None] | None = None,
    ) -> None:
        self._profile, self._surface, self._target, self._goal = profile, surface, target, goal
        self._modes = modes_of(surface, target, _DIRECTIONS)
        self._most, self._patience, self._seed = most, patience, seed
        if learning_rate is None:
            self._rates = [_FIRST / surface.top / sqrt(2) ** i for i in range(_RATES + 1)]
        else:
            self._rates = [learning_rate]
            self._modes = replace(self._modes, sharpest=0.0)  # which is a risk to be told
        self._steps = min(max(_EVENTS // profile.size, 10), 80)
        if learning_rate is None:  # where noise holds the loss up, lower ones are needed
            for _ in range(_LOWER):
                if not self.hopeless():
                    break
                self._rates += [self._rates[-1] / sqrt(2) ** i for i in (1, 2, 3, 4)]
        self._told = told or (lambda share: None)
        self._best = inf
        self._lowest = inf  # loss seen
        self.tried = 0

    def hopeless(self) -> bool:
        """Tell whether by theory no learning rate can reach the target, even with local steps."""
        modes, batch = modes_of(self._surface, self._target), self._profile.batch_size
        steps = [fewest_steps(modes, batch, rate, self._target) for rate in self._rates]
        return min(steps) > self._most * (LOCAL if self._profile.local_steps else 1)

    def look(self, candidates: Sequence[Candidate]) -> list[Look]:
        """Time each for some steps, and repeat them until the target."""
        found = []
        for place, candidate in enumerate(candidates):
            self._told(_LOOKS * place / len(candidates))
            self.tried += 1
            try:
                look = self._look(candidate)
            except StalledError:  # it waits for more results than there can be
                continue
            if look is not None:
                self._best = min(self._best, look.figure)
                found.append(look)
        return found

    def _look(self, candidate: Candidate) -> Look | None:
        shrunk, kept = shrinkage(candidate.codec, self._profile)
        timeline = Timeline(candidate.policy, self._profile, self._seed, shrunk)
        timeline.reach(self._steps)
        steps = timeline.repeated(self._most)
        hits: dict[int, int] = {}  # by the place of the rate
        for step, losses in enumerate(descend(self._modes, self._rates, steps, self._seed, kept)):
            self._lowest = min(self._lowest, float(losses.min()))
            for place in (losses <= self._target).nonzero()[0].tolist():
                hits.setdefault(place, step)
            # Twice the rate is as much as twice the curvature, and must not diverge.
            sound = {p: at for p, at in hits.items() if losses[max(p - 2, 0)] < self._surface.loss}
            fewest = min(sound.values(), default=0)
            if sound and step >= min(max(SLACK * fewest, _LEAST), self._most - 1):
                place = max(p for p, at in sound.items() if at <= SLACK * fewest)
                figure = self._cost(timeline, sound[place])
                return Look(candidate, self.tried, self._rates[place], sound[place] + 1, figure)
            if not sound and self._cost(timeline, step) > self._patience * self._best:
                return None
            if not isfinite(losses[-1]):
                return None
        return None

    def _cost(self, timeline: Timeline, step: int) -> float:
        seconds, dollars, size = timeline.at(step)
        return {"time": seconds, "dollars": dollars, "bytes": size}[self._goal]

    def halve(self, looks: Sequence[Look], seeds: int | None) -> list[Entry]:
        """Simulate all with few seeds, the better half of them with twice as many, and so on."""
        if seeds is None:
            seeds = min(max(_TASKS // (looks[0].steps * self._profile.size), 4), 32)
        count = max(seeds // 4, 1)
        runs: dict[int, list[Outcome]] = {}
        left, behind = list[Look](), list[Look]()
        for place, look in enumerate(looks):
            self._told(_LOOKS + (1 - _LOOKS) * place / len(looks))
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
        """Lower the learning rate until there is little risk, a few times; return the runs too."""
        for left in reversed(range(_TAMED)):
            runs = [self._case(look).simulate(self._seed + each) for each in range(seeds)]
            risk = summed(runs, nan, self._target, look.learning_rate).risk
            if risk <= RISKY or len(self._rates) == 1 or not left:
                break
            look = replace(look, learning_rate=look.learning_rate / sqrt(2))
        return look, runs

    def _case(self, look: Look) -> Case:
        each, figures = look.candidate, (look.learning_rate, self._target)
        return Case(each.policy, self._profile, *figures, each.codec, self._most)

    def _order(self, runs: dict[int, list[Outcome]]) -> Callable[[Look], tuple[int, float, int]]:
        def order(look: Look) -> tuple[int, float, int]:
            found = summed(runs[look.place], nan, self._target, look.learning_rate)
            trouble = 2 if not isfinite(found.seconds) else int(found.risk > RISKY)
            return trouble, _mean(runs[look.place], self._goal), look.place

        return order

    def _settled(
        self, ranked: Sequence[Look], runs: dict[int, list[Outcome]]
    ) -> list[Look]:  # fmt: skip
        """Put first, of what is as good as the best, the quickest, and of these the simplest."""
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
        return Entry(str(each), each.policy, each.codec, look.learning_rate, found)

    def unreachable(self) -> str:
        """Say how far it went."""
        text = f"no policy reaches a loss of {self._target:g} within {self._most} steps"
        if isfinite(self._lowest):
            text += f"; the lowest loss seen is {self._lowest:.4g}"
        floor = self._surface.noise / self._profile.batch_size
        text += (
            f". With batches of {self._profile.batch_size} samples noise holds the loss up by "
            f"about {floor / 4:.3g} times the learning rate: use a higher target, a larger "
            "batch, more steps (most=), or another learning rate"
        )
        return text


def figure_of(found: Forecast | Outcome, goal: Goal) -> float:
    return {"time": found.seconds, "dollars": found.dollars, "bytes": found.bytes}[goal]


def _mean(runs: Sequence[Outcome], goal: Goal) -> float:
    return sum(figure_of(run, goal) for run in runs) / len(runs)
