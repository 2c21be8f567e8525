"""A policy that follows a plan, and plans again when workers, steps or training differ from it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
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
from paceline.core.schema import Schema
from paceline.core.state import describe
from paceline.planner.changes import CHANGED, NEWEST, WARM, Paced, Seen, changed
from paceline.planner.choose import Plan, plan
from paceline.planner.forecast.encoded import shrinkage
from paceline.planner.grid import Candidate
from paceline.planner.measure.profile import Profile, WorkerProfile
from paceline.planner.measure.stale_training import StaleTraining, steps_to
from paceline.planner.proposals import candidates
from paceline.policies.gather import Gather, mean

logger = logger_of(__name__)

EVERY = 20
"""Steps between two comparisons with the profile."""
BETTER = 0.05
"""Relative gain that another policy must have over the current one."""

_TOLD = 100  # newest changes of plan that are kept


class Auto(Policy):
    """Runs the first policy of a plan, and plans again when the run differs from it.

    It compares each worker's newest tasks with its profile, and the newest steps of a policy
    without stale gradients with their forecast. If they differ significantly, and by a factor of
    1.3 or more, it updates the profile and plans the rest of the run. It does the same
    if stale gradients take at least 1.3 times the steps that the profile's training suggests, and
    20 more. If another policy is then better by 5 %, it cancels all tasks, discards held results
    and switches to that policy. Batch size, learning rate and codec do not change. Planning takes
    some seconds, in which the run makes no other decision.

    profile: the profile that the plan was made from.
    """

    schema = Schema(
        "auto",
        1,
        {
            name: name
            for name in ("profile", "policy", "changes", "seen", "behind", "since", "losses")
        },
        {"current": "current"},
        {name: f"_{name}" for name in ("age", "stepped", "steps", "missed", "planned")},
    )

    def __init__(self, profile: Profile, plan: Plan, *, seed: int = 0) -> None:
        self.profile, self._plan = profile, plan
        self._chosen = plan.policy  # which stays unused
        self.current = copy.deepcopy(self._chosen)
        self.changes: list[str] = []  # the newest changes of plan, with reasons
        self._seed = seed
        self._seen: dict[WorkerId, Seen] = {}
        self._behind: set[WorkerId] = set()  # workers whose last task was cancelled
        self._since = 0  # the version of the last comparison
        self._losses: list[tuple[float, float]] = []  # of the newest results, with their staleness
        self._age = 0  # steps of the current policy
        self._stepped = 0.0  # when the last step was taken; 0: unknown
        self._steps: list[float] = []  # seconds of the newest steps of this policy
        self._missed: set[str] = set()  # policies whose steps did not take the forecast time
        self._planned = ""  # the profile from which the current policy was planned

    def __repr__(self) -> str:
        return f"Auto(target={self.plan.target:g}, goal={self.plan.goal!r})"

    @property
    def wants(self) -> frozenset[Want]:
        return self.current.wants | {"loss"}

    @property
    def acting(self) -> Policy:
        return self.current

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
        elif isinstance(event, Stepped):
            self._step(view)
        if isinstance(event, Stepped) and view.version >= self._since + EVERY:
            self._since = view.version
            if (found := self._anew(view)) is not None:
                yield from self._give_up(view)
                self._chosen, self.current = found, copy.deepcopy(found)
                self._age = 0
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

    # --- the time of steps -----------------------------------------------------------------------

    def _step(self, view: View) -> None:
        """Note the seconds of a step, if all workers take part."""
        self._age += 1
        complete = len(view.workers) == self.profile.size
        if complete and self._stepped and self._age > WARM:
            self._steps = [*self._steps, view.now - self._stepped][-NEWEST:]
        self._stepped = view.now if complete else 0.0

    @cached_property
    def _paced(self) -> Paced:
        """The current policy on the current profile."""
        return Paced(self._chosen, self.profile, self.plan.codec, self._seed)

    def _late(self) -> str:
        """Return in words how the steps differ from their forecast; "" if they do not.

        Each policy is found wrong at most once, so that two policies cannot take turns.
        """
        name = describe(self._chosen)
        if name in self._missed or not (text := self._paced.missed(self._steps, self._age)):
            return ""
        self._missed.add(name)
        return text

    def _begin(self, profile: Profile) -> None:
        """Compare the run with another profile from now on."""
        self.profile = profile
        self._seen, self._behind = {}, set()
        self._steps, self._stepped = [], 0.0
        self.__dict__.pop("_paced", None)

    # --- whether something has changed -----------------------------------------------------------

    def _anew(self, view: View) -> Policy | None:
        """Return another policy if something has changed and it is better now, else None."""
        loss, staleness = np.mean(self._losses or [(nan, 0.0)], axis=0).tolist()
        if not self.plan.target < loss < inf:
            return None
        workers = dict(self.profile.workers)
        told = []
        seen = {name: self._until_now(view, name) for name in workers}
        share = self.profile.batch_size / self.profile.size
        for name, known in self.profile.workers.items():
            new, text = changed(known, seen[name], share, self._way(known), self._seed)
            if new is not None:
                workers[name] = new
                told.append(f"{name} {text}")
        anew = replace(self.profile, workers=workers)
        if not told and (late := self._late()):
            anew = self._paced.corrected(seen)
            told.append(late)
        surface = self.profile.surface
        cost, text = self._cost(view.version - NEWEST / 2 - staleness, loss, staleness)
        if cost is not None:
            told.append(text)
            anew = replace(anew, stale_training=cost)
        if not told:
            return None
        self._begin(anew)
        left = replace(self.profile, surface=surface and surface.lowered(loss))
        chosen, text = self._better(left)
        if chosen is not None:
            self._planned = left.to_json()
        self.changes.append(f"at step {view.version}: {', '.join(told)}: {text}")
        del self.changes[:-_TOLD]
        logger.info("replanned %s", self.changes[-1])
        return chosen

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
        try:
            found = plan(
                left, target=self.plan.target, minimize=self.plan.goal, learning_rate=self._rate,
                codecs=[self.plan.codec], local_steps=self.plan.local_steps, seeds=4, patience=1.5,
                seed=self._seed,
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
        self.profile, self._planned = Profile.from_json(state["profile"]), state.get("planned", "")
        known = {describe(each.policy): each.policy for each in self._candidates()}
        known[describe(self.plan.policy)] = self.plan.policy
        if state["policy"] not in known:
            raise ValueError(
                f"a plan for this profile has no policy {state['policy']}, which the checkpoint "
                "names; resume with the plan of the saved run"
            )
        self._chosen = known[state["policy"]]
        self.current = copy.deepcopy(self._chosen)
        self.changes = list(state["changes"])
        self._seen = {worker: Seen(*lists) for worker, lists in state["seen"].items()}
        self._behind, self._since = set(state["behind"]), state["since"]
        losses = state["losses"]  # of version 0.1 without their staleness
        self._losses = [(x, 0.0) if isinstance(x, float) else (x[0], x[1]) for x in losses]
        # Files of before lack these.
        self._age, self._stepped = state.get("age", 0), state.get("stepped", 0.0)
        self._steps, self._missed = list(state.get("steps", ())), {*state.get("missed", ())}
        self.__dict__.pop("_paced", None)

    def _candidates(self) -> list[Candidate]:
        """Return those of the plan that the current policy is from."""
        profile = Profile.from_json(self._planned) if self._planned else self.profile
        by_price, steps = self.plan.goal == "dollars", self.plan.local_steps
        return candidates(profile, by_price, self.plan.target, self._rate, steps, self._seed)

    @property
    def _rate(self) -> float | None:
        """The learning rate to plan with, which stays the same."""
        return None if self.plan.unknown else self.plan.learning_rate
