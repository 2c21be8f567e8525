"""A policy that does what was planned, and plans again when workers are not what they were."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any

import numpy as np

from paceline.core.logs import logger_of
from paceline.core.protocol import (
    Cancel,
    Command,
    Discard,
    Event,
    Finished,
    Joined,
    Policy,
    Stepped,
    Task,
    View,
    Want,
    WorkerId,
)
from paceline.core.state import describe, load_state, save_state
from paceline.delays.empirical import log_rank
from paceline.delays.fit import fit
from paceline.delays.models import Fixed
from paceline.engines.simulator import Link
from paceline.planner.choose import Plan, plan
from paceline.planner.forecast import shrinkage
from paceline.planner.grid import candidates
from paceline.planner.profile import Profile, WorkerProfile

logger = logger_of(__name__)

NEWEST = 20
"""Tasks of a worker that are compared with its profile, and losses of which the mean is taken."""
ENOUGH = 8
"""Tasks that say something."""
SURE = 1e-4
"""The p-value below which a worker's pace is another."""
CHANGED = 1.3
"""Times as slow, or as quick: less is not worth planning again."""
EVERY = 20
"""Steps between two looks."""
BETTER = 0.05
"""Relative, by which another policy must be better than the one in use."""

_TOLD = 100  # changes of plan that are remembered
_DRAWN = 400  # of a worker's law, with which its times are compared


@dataclass
class Seen:
    """What a worker's newest tasks took: seconds of computing a sample, and those of the way.

    Of tasks that were given up, or go on, it is what a sample takes at least.
    """

    seconds: list[float]
    whole: list[bool]
    ways: list[float]

    def add(self, seconds: float, whole: bool, way: float | None) -> None:
        self.seconds = [*self.seconds, seconds][-NEWEST:]
        self.whole = [*self.whole, whole][-NEWEST:]
        if way is not None:
            self.ways = [*self.ways, way][-NEWEST:]

    @property
    def pace(self) -> float:
        """The likeliest mean, if times are exponential; the least possible if none has ended."""
        ended = sum(self.whole)
        return sum(self.seconds) / ended if ended else max(self.seconds)


class Auto:
    """Does what a plan says first, and plans anew when workers change.

    Each worker's newest tasks are compared with its profile. Where they differ for sure, and by
    more than a third, the rest of the run is planned again with what they took. If another policy
    is then better by 5 %, all work under way is given up and that one takes over. Batch size,
    learning rate and codec stay as they are. While it plans, for some seconds, nothing else is
    decided.

    profile: that the plan was made from.
    """

    def __init__(self, profile: Profile, plan: Plan, *, seed: int = 0) -> None:
        self.profile, self.plan = profile, plan
        self.current = copy.deepcopy(plan.policy)  # the plan's own is a recipe
        self.changes: list[str] = []  # what was planned anew of late, and why
        self._seed = seed
        self._seen: dict[WorkerId, Seen] = {}
        self._behind: set[WorkerId] = set()  # whose task before was given up
        self._since = 0  # the version at which it last looked
        self._losses: list[float] = []

    def __repr__(self) -> str:
        return f"Auto(target={self.plan.target:g}, goal={self.plan.goal!r})"

    @property
    def wants(self) -> frozenset[Want]:
        return self.current.wants | {"loss"}

    def check(self, workers: int, batch: int) -> None:
        """Refuse an engine or a learner that the profile is not of."""
        if (workers, batch) != (self.profile.size, self.profile.batch_size):
            raise ValueError(
                f"the profile is of {self.profile.size} workers and a batch of "
                f"{self.profile.batch_size}, and this run has {workers} and {batch}: profile it"
            )

    def react(self, view: View, event: Event) -> Iterator[Command]:
        if isinstance(event, Finished):
            self._finished(view, event)
        elif isinstance(event, Stepped) and view.version >= self._since + EVERY:
            self._since = view.version
            if (found := self._anew(view)) is not None:
                yield from self._give_up(view)
                self.current = found
                if workers := list(view.workers):
                    yield from self._watched(view, Joined(workers[0]))
                return
        yield from self._watched(view, event)

    def _watched(self, view: View, event: Event) -> Iterator[Command]:
        for command in self.current.react(view, event):
            if isinstance(command, Cancel):
                self._cancelled(view, command)
            yield command

    def _give_up(self, view: View) -> Iterator[Command]:
        for id in list(view.running):
            yield Cancel(id)
        for id in list(view.held):
            yield Discard(id)

    # --- what workers do -------------------------------------------------------------------------

    def _finished(self, view: View, event: Finished) -> None:
        result = view.held[event.task]
        worker = result.task.worker
        if "loss" in result.stats:
            self._losses = [*self._losses, result.stats["loss"]][-NEWEST:]
        if result.samples:
            way = max(result.at - result.task.since - result.seconds, 0.0)
            # Behind what was given up, it may have waited for that to end.
            clear = worker not in self._behind
            self._of(worker).add(result.seconds / result.samples, True, way if clear else None)
        self._behind.discard(worker)

    def _cancelled(self, view: View, command: Cancel) -> None:
        task = view.running[command.task]
        if (seconds := self._at_least(view, task)) > 0:
            self._of(task.worker).add(seconds, False, None)
        self._behind.add(task.worker)

    def _at_least(self, view: View, task: Task) -> float:
        """Return how long a task under way has taken at least, for a sample; 0 if nobody knows."""
        if task.worker in self._behind and not self.profile.interruptible:
            return 0.0
        way = self._way(self.profile.workers[task.worker])
        return max(view.now - task.since - way, 0.0) / task.computed

    def _until_now(self, view: View, worker: WorkerId) -> Seen:
        """Return what was seen of a worker, with the task that it is at."""
        seen = copy.copy(self._of(worker))
        task = next((task for task in view.running.values() if task.worker == worker), None)
        if task is not None and (seconds := self._at_least(view, task)) > 0:
            seen.add(seconds, False, None)
        return seen

    def _of(self, worker: WorkerId) -> Seen:
        return self._seen.setdefault(worker, Seen([], [], []))

    def _way(self, worker: WorkerProfile) -> float:
        size = self.profile.message_bytes
        return worker.seconds(0, size, size * self._shrunk)

    @cached_property
    def _shrunk(self) -> float:
        return shrinkage(self.plan.codec, self.profile)[0]

    # --- whether that is new ---------------------------------------------------------------------

    def _anew(self, view: View) -> Policy | None:
        """Return another policy, if workers have changed and it is better now."""
        workers = dict(self.profile.workers)
        told = []
        for name, known in self.profile.workers.items():
            changed, text = self._changed(known, self._until_now(view, name))
            if changed is not None:
                workers[name] = changed
                told.append(f"{name} {text}")
        surface = self.profile.known()
        loss = sum(self._losses) / max(len(self._losses), 1)
        if not told or not self.plan.target < loss < inf:
            return None
        self.profile = replace(self.profile, workers=workers)
        self._seen, self._behind = {}, set()
        left = replace(self.profile, surface=surface.lowered(loss))
        chosen, text = self._better(left)
        self.changes.append(f"at step {view.version}: {', '.join(told)}: {text}")
        del self.changes[:-_TOLD]
        logger.info("planned anew %s", self.changes[-1])
        return chosen

    def _changed(self, known: WorkerProfile, seen: Seen) -> tuple[WorkerProfile | None, str]:
        """Return what a worker is now, if that differs, and by how much."""
        if len(seen.seconds) < ENOUGH:
            return None, ""
        usual = known.compute.mean
        times = seen.pace / usual if usual else inf if seen.pace else 1.0
        if not any(seen.whole):  # it takes longer than that
            times = max(times, 1.0)
        compute, link, told = known.compute, known.link, []
        if not 1 / CHANGED < times < CHANGED and self._differ(known, seen):
            given_up = [not whole for whole in seen.whole]
            # Who never ends a task is taken to need as long as all of them together.
            compute = (
                Fixed(sum(seen.seconds)) if all(given_up) else fit(seen.seconds, given_up).bounded
            )
            told.append(f"takes {times:.2g} times as long")
        way, before = float(np.median(seen.ways or [0.0])), self._way(known)
        of_all = usual * self.profile.batch_size / self.profile.size + before
        if len(seen.ways) >= ENOUGH and abs(way - before) > (CHANGED - 1) * of_all:
            link = Link(way / 2)
            if before > 0 and way > 0:
                slower = way / before
                old = known.link
                link = Link(old.latency * slower, old.down / slower, old.up / slower)
            told.append(f"its messages take {way:.2g} s and not {before:.2g} s")
        return (WorkerProfile(compute, link) if told else None), " and ".join(told)

    def _differ(self, known: WorkerProfile, seen: Seen) -> bool:
        """Tell whether a worker's times are not of its law; of a fixed one all that differ are."""
        if isinstance(known.compute, Fixed):
            return True
        rng, memory = np.random.Generator(np.random.PCG64([self._seed, 3])), dict[str, float]()
        drawn = np.array([known.compute.sample(rng, 0.0, memory) for _ in range(_DRAWN)])
        newer = np.array(seen.seconds), np.array(seen.whole)
        return log_rank((drawn, np.ones(_DRAWN, dtype=bool)), newer, 0.0) < SURE

    def _better(self, left: Profile) -> tuple[Policy | None, str]:
        """Plan the rest."""
        rate, codec = self.plan.learning_rate, self.plan.codec
        try:
            found = plan(
                left, target=self.plan.target, minimize=self.plan.goal, learning_rate=rate,
                codecs=[codec], seeds=4, patience=1.5, seed=self._seed,
            )  # fmt: skip
        except ValueError as error:  # it cannot be reached, as far as is known
            return None, f"goes on as it was ({error})"
        looks = {describe(look.candidate.policy): look for look in found.looks}
        own, best = describe(self.current), describe(found.policy)
        if own in looks and looks[best].figure > (1 - BETTER) * looks[own].figure:
            return None, f"goes on with {looks[own].candidate.text}"
        return found.policy, f"goes on with {looks[best].candidate.text}"

    # --- what is saved ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all as plain data; the policy is in it by name."""
        return {
            "profile": self.profile.to_json(),
            "policy": describe(self.current),
            "current": save_state(self.current),
            "changes": self.changes,
            "seen": {w: [s.seconds, s.whole, s.ways] for w, s in self._seen.items()},
            "behind": self._behind,
            "since": self._since,
            "losses": self._losses,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Invert it."""
        self.profile = Profile.from_json(state["profile"])
        grid = candidates(self.profile, self.plan.goal == "dollars", self._seed)
        known = {describe(each.policy): each.policy for each in grid}
        known[describe(self.plan.policy)] = self.plan.policy
        if state["policy"] not in known:
            raise ValueError(f"the saved policy {state['policy']} is none that a plan has")
        self.current = copy.deepcopy(known[state["policy"]])
        load_state(self.current, state["current"])
        self.changes = list(state["changes"])
        self._seen = {worker: Seen(*lists) for worker, lists in state["seen"].items()}
        self._behind, self._since = set(state["behind"]), state["since"]
        self._losses = list(state["losses"])
