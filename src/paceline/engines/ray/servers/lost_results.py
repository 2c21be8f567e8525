"""Results that are lost with a node, or that a server refuses.

Any worker computes such a result again: a task gives the same result on every worker. Local steps
with a kept state, or with `overlap`, give another one, which is as good. The worker of a refused
result is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf

from paceline.core.logs import logger_of
from paceline.engines.ray.servers.events import Redo, Refuse, ResultsUnusable
from paceline.engines.ray.servers.fleet import Fleet, Settings
from paceline.engines.ray.servers.slices import Result, Results
from paceline.engines.ray.servers.steps import Do, Steps

logger = logger_of(__name__)

ATTEMPTS = 3
"""How often a server starts from copies, or asks for results, that turn out to be lost."""


class LostResults:
    """Has workers compute results again.

    fail: returns the error for one that cannot be.
    """

    def __init__(
        self,
        settings: Settings,
        steps: Steps,
        results: Results,
        fleet: Fleet,
        do: Do,
        fail: Callable[[str], Exception],
    ) -> None:
        self._direct, self._again = settings.direct, results.again
        self._steps, self._fleet, self._do, self._fail = steps, fleet, do, fail

    def unusable(self, event: ResultsUnusable) -> None:
        """Recompute the results that a server could not use."""
        step, slot, pieces = event.call.step, event.call.slot, event.call.pieces
        of, sent = pieces.results, pieces.slices
        failed = (*event.lost, *event.late, *event.bad)
        if sums := [pieces.sums[i] for i in failed if i in pieces.sums]:
            self._steps.send_singly(step, slot, sums)
            return
        slot.sent = step.version - 1
        alive = self._fleet.alive()
        current = {i for i in range(len(of)) if of[i].slices is sent[i]}
        bad = {of[i].task.id: (of[i], why) for i, why in event.bad.items() if i in current}
        missing = [of[i] for i in (*event.lost, *event.late) if i in current]
        again = [result for result, _ in bad.values()]
        # With direct transport, a result is lost with the process of its worker.
        lost = {of[i].task.id for i in event.lost} if self._direct else set()
        again += [r for r in missing if r.node not in alive or r.task.id in lost]
        if missing and not again:  # its node is there, or not yet known to be lost
            slot.attempts += 1
            if slot.attempts > ATTEMPTS:
                again = missing
        if not again:
            self._steps.feed(slot)
            return
        step.stalled.add(slot.index)
        for result in again:
            if result.task.id not in self._again:
                self._again[result.task.id] = result
                if result.task.id in bad:
                    self._do(Refuse(result.token, result.task, bad[result.task.id][1]))
                logger.warning("the result of task %d is computed again", result.task.id)
                self.compute_again(result)

    def compute_again(self, result: Result, avoid: str = "") -> None:
        """Recompute a result on its version of the model; avoid a node if there are others."""
        if result.model.gone:
            raise self._fail(
                f"the result of task {result.task.id} is lost, and so is version "
                f"{result.model.number} of the model that it was computed on"
            )
        # As many samples as the first time, without the budget, and on that version of the model.
        # Parts are of the whole batch: a task computes all of them or none.
        task, work = result.task, replace(result.task.work, budget=inf, overlap=False)
        samples = result.samples // work.steps if work.parts is None else task.samples
        self._do(Redo(replace(task, work=work, samples=samples), result.model, avoid))

    def computed_again(self, old: Result, new: Result) -> None:
        """Put a new result in the place of a lost one, and send the steps that waited for it."""
        old.spans, old.slices, old.node = new.spans, new.slices, new.node
        old.token, old.pushed, old.answered = new.token, new.pushed, self._fleet.now
        for step in self._steps.history.log:
            if step.stalled and not any(r.task.id in self._again for r in step.results):
                stalled, step.stalled = step.stalled, set()
                for index in sorted(stalled):
                    self._steps.feed(self._steps.slots[index])
