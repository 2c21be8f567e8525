"""A policy that follows a plan, and plans again when workers or training differ from it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, isclose, isfinite, nan
from typing import Any

import numpy as np

from paceline.core.logs import logger_of
from paceline.core.policy import Findings, Policy
from paceline.core.protocol import (
    Cancel,
    Command,
    Discard,
    Event,
    Finished,
    Joined,
    Stepped,
    Task,
    View,
    Want,
    WorkerId,
    some_names,
)
from paceline.core.schema import converted
from paceline.core.state import describe
from paceline.delays.empirical import log_rank
from paceline.delays.fit import fit
from paceline.delays.links import Link
from paceline.delays.models import Fixed
from paceline.planner.choose import Plan, plan
from paceline.planner.forecast.forecast import shrinkage
from paceline.planner.grid import candidates
from paceline.planner.measure.profile import Profile, WorkerProfile
from paceline.planner.measure.stale_training import StaleTraining, steps_to
from paceline.policies.gather import Gather, mean

logger = logger_of(__name__)

NEWEST = 20
"""Newest tasks of a worker to compare with its profile, and newest losses to average."""
ENOUGH = 8
"""Tasks of a worker needed for a comparison."""
SURE = 1e-4
"""The p-value below which a worker's speed has changed."""
CHANGED = 1.3
"""Factor of slowdown or speedup that is worth planning again."""
EVERY = 20
"""Steps between two comparisons with the profile."""
BETTER = 0.05
"""Relative gain that another policy must have over the current one."""

_TOLD = 100  # newest changes of plan that are kept
_DRAWN = 400  # samples of a worker's law, to compare its times with


@dataclass
class Seen:
    """Times of a worker's newest tasks.

    seconds: of computing a sample; a lower bound for cancelled and running tasks.
    whole: whether each task finished.
    ways: seconds of a task's messages.
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
        """The likeliest mean of exponential times; the largest lower bound if no task has ended."""
        ended = sum(self.whole)
        return sum(self.seconds) / ended if ended else max(self.seconds)


class Auto(Policy):
    """Runs the first policy of a plan, and plans again when workers or training differ from it.

    It compares each worker's newest tasks with its profile. If they differ significantly, and by
    a factor of 1.3 or more, it updates the profile and plans the rest of the run. It does the same
    if stale gradients take at least 1.3 times the steps that the profile's training suggests, and
    20 more. If another policy is then better by 5 %, it cancels all tasks, discards held results
    and switches to that policy. Batch size, learning rate and codec do not change. Planning takes
    some seconds, in which the run makes no other decision.

    profile: the profile that the plan was made from.
    """

    schema = converted(
        *("auto", 1, "profile", "policy", "changes", "seen", "behind", "since", "losses"),
        current="current",
    )

    def __init__(self, profile: Profile, plan: Plan, *, seed: int = 0) -> None:
        self.profile, self._plan = profile, plan
        self.current = copy.deepcopy(plan.policy)  # the plan's own policy stays unused
        self.changes: list[str] = []  # the newest changes of plan, with reasons
        self._seed = seed
        self._seen: dict[WorkerId, Seen] = {}
        self._behind: set[WorkerId] = set()  # workers whose last task was cancelled
        self._since = 0  # the version of the last comparison
        self._losses: list[tuple[float, float]] = []  # of the newest results, with their staleness

    def __repr__(self) -> str:
        return f"Auto(target={self.plan.target:g}, goal={self.plan.goal!r})"

    @property
    def wants(self) -> frozenset[Want]:
        return self.current.wants | {"loss"}

    @property
    def plan(self) -> Plan:
        """The initial plan."""
        return self._plan

    def findings(self) -> Findings:
        return Findings(changes=self.changes)

    def check(self, workers: Sequence[WorkerId], batch: int) -> None:
        """Refuse an engine or a learner that does not match the profile."""
        if (len(workers), batch) != (self.profile.size, self.profile.batch_size):
            raise ValueError(
                f"the profile is of {self.profile.size} workers and "
                f"batch_size={self.profile.batch_size}, but this run has {len(workers)} workers "
                f"and batch_size={batch}; profile this run"
            )
        if unknown := [name for name in workers if name not in self.profile.workers]:
            raise ValueError(
                f"the profile does not name {some_names(unknown)}, which this run has; profile "
                "this run"
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

    # --- the times of workers --------------------------------------------------------------------

    def _finished(self, view: View, event: Finished) -> None:
        result = view.held[event.task]
        worker = result.task.worker
        if "loss" in result.stats:
            newest = result.stats["loss"], float(view.version - result.task.version)
            self._losses = [*self._losses, newest][-NEWEST:]
        if result.samples:
            way = max(result.at - result.task.since - result.seconds, 0.0)
            # After a cancelled task, it may have waited for that task to end.
            clear = worker not in self._behind
            self._of(worker).add(result.seconds / result.samples, True, way if clear else None)
        self._behind.discard(worker)

    def _cancelled(self, view: View, command: Cancel) -> None:
        task = view.running[command.task]
        if (seconds := self._at_least(view, task)) > 0:
            self._of(task.worker).add(seconds, False, None)
        self._behind.add(task.worker)

    def _at_least(self, view: View, task: Task) -> float:
        """Return a lower bound of a running task's seconds per sample; 0 if it is unknown."""
        if task.worker in self._behind and not self.profile.interruptible:
            return 0.0
        way = self._way(self.profile.workers[task.worker])
        return max(view.now - task.since - way, 0.0) / task.computed

    def _until_now(self, view: View, worker: WorkerId) -> Seen:
        """Return the times of a worker, including its running task."""
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

    # --- whether workers have changed ------------------------------------------------------------

    def _anew(self, view: View) -> Policy | None:
        """Return another policy if something has changed and it is better now, else None."""
        workers = dict(self.profile.workers)
        told = []
        for name, known in self.profile.workers.items():
            changed, text = self._changed(known, self._until_now(view, name))
            if changed is not None:
                workers[name] = changed
                told.append(f"{name} {text}")
        surface = self.profile.surface
        loss, staleness = np.mean(self._losses or [(nan, 0.0)], axis=0).tolist()
        cost, text = self._cost(view.version - NEWEST / 2 - staleness, loss, staleness)
        if cost is not None:
            told.append(text)
        if not told or not self.plan.target < loss < inf:
            return None
        cost = cost or self.profile.stale_training
        self.profile = replace(self.profile, workers=workers, stale_training=cost)
        self._seen, self._behind = {}, set()
        left = replace(self.profile, surface=surface and surface.lowered(loss))
        chosen, text = self._better(left)
        self.changes.append(f"at step {view.version}: {', '.join(told)}: {text}")
        del self.changes[:-_TOLD]
        logger.info("replanned %s", self.changes[-1])
        return chosen

    def _changed(self, known: WorkerProfile, seen: Seen) -> tuple[WorkerProfile | None, str]:
        """Return a worker's new profile and a text, or None if it has not changed."""
        if len(seen.seconds) < ENOUGH:
            return None, ""
        usual = known.compute.mean
        times = seen.pace / usual if usual else inf if seen.pace else 1.0
        if not any(seen.whole):  # the true pace is slower still
            times = max(times, 1.0)
        new, link, told = known, known.link, []
        if not 1 / CHANGED < times < CHANGED and self._differ(known, seen):
            given_up = [not whole for whole in seen.whole]
            # A worker that never ends a task is assumed to need the sum of all its times.
            if all(given_up):
                new = WorkerProfile(Fixed(sum(seen.seconds)))
            else:
                law = fit(seen.seconds, given_up)
                new = WorkerProfile(law.bounded, link, law.observations, law.autocorrelation)
            told.append(f"takes {times:.2g} times as long")
        way, before = float(np.median(seen.ways or [0.0])), self._way(known)
        of_all = usual * self.profile.batch_size / self.profile.size + before
        if len(seen.ways) >= ENOUGH and abs(way - before) > (CHANGED - 1) * of_all:
            link = Link(way / 2)
            if before > 0 and way > 0:
                slower = way / before
                old = known.link
                link = Link(old.latency * slower, old.down / slower, old.up / slower)
            told.append(f"needs {way:.2g} s for its messages instead of {before:.2g} s")
        return (replace(new, link=link) if told else None), " and ".join(told)

    def _differ(self, known: WorkerProfile, seen: Seen) -> bool:
        """Return whether a worker's times contradict its law; a fixed law allows no other times.

        The test is that of `drifted`, for tasks of which perhaps none has ended. The law stands for
        as many tasks as it was fitted to, at equally likely values.
        """
        if isinstance(known.compute, Fixed):
            return True
        rng, memory = np.random.Generator(np.random.PCG64([self._seed, 3])), dict[str, float]()
        drawn, now = np.empty(_DRAWN), 0.0
        for place in range(_DRAWN):
            drawn[place] = known.compute.sample(rng, now, memory)
            now += float(drawn[place])
        size = min(known.observations or _DRAWN, _DRAWN)
        usual = np.sort(drawn)[((np.arange(size) + 0.5) / size * _DRAWN).astype(int)]
        newer = np.array(seen.seconds), np.array(seen.whole)
        return log_rank((usual, np.ones(size, dtype=bool)), newer, known.autocorrelation) < SURE

    def _cost(
        self, steps: float, loss: float, staleness: float
    ) -> tuple[StaleTraining | None, str]:  # fmt: skip
        """Return the cost of stale gradients as it is, and a text; None if it is as expected.

        steps: after which the loss was reached. Losses that fresh gradients did not reach in the
            profile are not compared.
        """
        known = self.profile.stale_training
        if known is None or not staleness or not isfinite(loss) or not self._is_as_profiled(known):
            return None, ""
        first, lowest = known.fresh[0], min(each for _, each in known.fresh)
        if loss > first[1] + (first[1] - lowest) / 2:  # far more than noise
            stale, text = (first,), "the loss rises with stale gradients"
            return replace(known, staleness=staleness, stale=stale), text
        above = [place for place, (_, each) in enumerate(known.fresh) if each > loss]
        if not above:
            return None, ""
        usual = steps_to(known.fresh[above[-1] :], loss)  # the last time, since losses are noisy
        expected = usual * known.ratio(staleness, loss)
        if not steps > max(CHANGED * expected, expected + EVERY):
            return None, ""
        points = first, (round(steps), loss)
        text = f"stale gradients take {steps / usual:.2g} times the steps of fresh ones"
        return replace(known, staleness=staleness, stale=points), text

    def _is_as_profiled(self, known: StaleTraining) -> bool:
        """Return whether steps differ from the profile's training by their staleness alone."""
        inner = self.current.innermost
        return (
            describe(self.current) == describe(self.plan.policy)  # from the first step on
            and isinstance(inner, Gather)
            and inner.combine is mean
            and shrinkage(self.plan.codec, self.profile)[1] == 1
            and (bool(self.plan.unknown) or isclose(self.plan.learning_rate, known.lr, rel_tol=0.1))
        )

    def _better(self, left: Profile) -> tuple[Policy | None, str]:
        """Plan the rest of the run; return a better policy or None, and a text for the log."""
        rate, codec = None if self.plan.unknown else self.plan.learning_rate, self.plan.codec
        try:
            found = plan(
                left, target=self.plan.target, minimize=self.plan.goal, learning_rate=rate,
                codecs=[codec], seeds=4, patience=1.5, seed=self._seed,
            )  # fmt: skip
        except ValueError as error:  # the target seems unreachable
            return None, f"the policy stays the same ({error})"
        looks = {describe(look.candidate.policy): look for look in found.looks}
        own, best = describe(self.current), describe(found.policy)
        stays = own in looks and looks[best].unstable >= looks[own].unstable
        if stays and looks[best].figure > (1 - BETTER) * looks[own].figure:
            return None, f"the policy stays {looks[own].candidate.text}"
        return found.policy, f"the policy becomes {looks[best].candidate.text}"

    # --- checkpoints -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state without that of the current policy, which it holds by name."""
        return {
            "profile": self.profile.to_json(),
            "policy": describe(self.current),
            "changes": self.changes,
            "seen": {w: [s.seconds, s.whole, s.ways] for w, s in self._seen.items()},
            "behind": self._behind,
            "since": self._since,
            "losses": [list(each) for each in self._losses],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Invert `state_dict`."""
        self.profile = Profile.from_json(state["profile"])
        grid = candidates(self.profile, self.plan.goal == "dollars", self._seed)
        known = {describe(each.policy): each.policy for each in grid}
        known[describe(self.plan.policy)] = self.plan.policy
        if state["policy"] not in known:
            raise ValueError(
                f"a plan for this profile has no policy {state['policy']}, which the checkpoint "
                "names; resume with the plan of the saved run"
            )
        self.current = copy.deepcopy(known[state["policy"]])
        self.changes = list(state["changes"])
        self._seen = {worker: Seen(*lists) for worker, lists in state["seen"].items()}
        self._behind, self._since = set(state["behind"]), state["since"]
        losses = state["losses"]  # of version 0.1 without their staleness
        self._losses = [(x, 0.0) if isinstance(x, float) else (x[0], x[1]) for x in losses]
