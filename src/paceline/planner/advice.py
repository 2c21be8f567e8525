"""What a run would have taken under other policies, on the delays that its journal measured.

Only policies are compared that need equally many steps: every step averages the gradient of one
whole batch at the newest model. A run whose steps do anything else gets no advice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from math import fsum

from paceline.core.errors import StalledError
from paceline.core.journal import Journal
from paceline.core.protocol import Start, Step
from paceline.planner.forecast.forecast import step_costs, timed
from paceline.planner.grid import Candidate
from paceline.planner.measure.probe import profile_of
from paceline.planner.measure.profile import Profile
from paceline.planner.steps import averages_whole_batches
from paceline.policies.named import k_sync, sync
from paceline.policies.placement.base import BySpeed
from paceline.policies.wrappers import OnlyWorkers
from paceline.report.words import in_time

EVENTS = 20_000  # of a journal that are read, so that advice on a long run takes seconds
BETTER = 0.9  # of the time that the run took; what is not faster than that is not recommended
_STEPS = 5  # at least, of a run to judge
_RUNS = 48  # simulated runs of a policy times workers, at most; always one run


@dataclass(frozen=True)
class Advice:
    """The seconds that a run took, and those of other policies, the fastest first."""

    seconds: float
    others: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        """Return one or two sentences for the reader of a report."""
        (text, best), *more = self.others
        if best > BETTER * self.seconds:
            names = ", ".join(f"“{name}”" for name, _ in self.others)
            return f"None of {names} would have been clearly faster on these machines."
        told = f"“{text}” would have taken about {in_time(best)} instead of {in_time(self.seconds)}"
        rest = ", ".join(f"“{name}” {in_time(seconds)}" for name, seconds in more)
        return f"{told}; {rest}." if rest else f"{told}."


def advice(journal: Journal, seconds: float, steps: int) -> Advice | None:
    """Replay the delays of a journal under other policies; None if they cannot be compared.

    seconds: of the run, in which it took `steps` steps.
    """
    header = journal.header
    if steps < _STEPS or header.peer is not None or header.tiles:
        return None
    seen = Journal(header)
    for entry in islice(journal, EVENTS):
        seen.append(entry)
    if not _whole_batches(seen):
        return None
    try:
        profile = profile_of(seen)
    except (ValueError, ArithmeticError):  # a worker never had a task, or none finished one
        return None
    if profile.size < 2:
        return None
    costs = {each.text: cost for each in _candidates(profile) if (cost := _cost(each, profile))}
    own = header.written
    # The same error of the simulation is in both times, if the run's own policy is simulated too.
    scale = seconds / (steps * costs[own]) if own in costs else 1.0
    others = [(name, scale * steps * cost) for name, cost in costs.items() if name != own]
    others.sort(key=lambda item: item[1])
    return Advice(seconds, tuple(others)) if others else None


def _whole_batches(journal: Journal) -> bool:
    """Return whether each step used fresh results of one step each, as far as the journal tells."""
    fresh = True
    version, tasks = journal.header.version, {}
    for entry in journal:
        for command in entry.commands:
            if isinstance(command, Start):
                task = command.task
                work = task.work
                fresh = fresh and work.steps == 1 and work.parts is None and not work.overlap
                tasks[task.id] = task.version
            elif isinstance(command, Step):
                fresh = fresh and all(tasks.get(id, version) == version for id in command.weights)
                version += 1
    return fresh


def _candidates(profile: Profile) -> list[Candidate]:
    """Return the usual answers to a slow worker, the simplest first."""
    n, batch = profile.size, profile.batch_size
    needed = {name: w.seconds(batch / n, 0, 0) for name, w in profile.workers.items()}
    slowest = max(needed, key=lambda name: needed[name])
    others = [name for name in profile.workers if name != slowest]
    shares = replace(sync(), placement=BySpeed())
    found = [Candidate.of(sync()), Candidate.of(shares), Candidate.of(k_sync(n - 1))]
    without = Candidate(f"sync() without {slowest}", OnlyWorkers(others, sync()))
    return [*found, without]


def _cost(candidate: Candidate, profile: Profile) -> float | None:
    """Return the seconds of a step, None if the policy cannot be compared on this profile."""
    seconds = []
    for seed in range(min(max(_RUNS // profile.size, 1), 3)):
        try:
            timeline = timed(candidate.policy, profile, None, seed)
        except (StalledError, ValueError, ArithmeticError):
            return None
        if timeline.staleness or not averages_whole_batches(timeline, profile.batch_size):
            return None
        seconds.append(step_costs(timeline)[0])
    return fsum(seconds) / len(seconds)
