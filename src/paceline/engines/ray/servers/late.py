"""Servers that keep all others waiting: with a step, or with the copy of another one's state."""

from __future__ import annotations

from paceline.engines.ray.servers.events import Watch
from paceline.engines.ray.servers.fleet import Fleet
from paceline.engines.ray.servers.slices import Slot, Step
from paceline.engines.ray.servers.steps import Do, Steps

# A server is late if a step takes it three times as long as all others, and two seconds longer.
# It then costs about as much to have another server take the step.
_FACTOR, _SECONDS = 3.0, 2.0
_TO_COMPARE = 3  # servers, at least: of two, either may be the unusual one


class Late:
    """Has the last server of a step watched, and says whether it is late when that time is over."""

    def __init__(self, steps: Steps, fleet: Fleet, do: Do) -> None:
        self._steps, self._fleet, self._do = steps, fleet, do

    def watch_step(self, step: Step) -> None:
        """Have the server watched that alone has not taken a step."""
        if len(left := self._steps.left(step)) == 1:
            self._watch(left[0].server, left[0], step)

    def watch_copy(self) -> None:
        """Have the server watched whose copy of a state alone holds up the next step."""
        history = self._steps.history
        if self._steps.waiting and history.log and history.last.whole:
            needed, step = self._steps.needed_copy(), history.log[-1]
            left = [slot for slot in self._steps.slots if slot.copied < needed]
            if len(left) == 1 and left[0].keeper and left[0].watched < step.version:
                left[0].watched = step.version
                self._watch(left[0].keeper, left[0], step)

    def _watch(self, server: str, slot: Slot, step: Step) -> None:
        if len(self._steps.slots) >= _TO_COMPARE and self._steps.several:
            after = self._fleet.now - step.began
            seconds = max((_FACTOR - 1) * after, _SECONDS)
            self._do(Watch(server, step.version, seconds, slot, step))

    def has_step(self, call: Watch) -> bool:
        """Return whether a watched server is still at work on a step that all others have taken."""
        steps, step, slot = self._steps, call.step, call.slot
        return (
            steps.slots_of(call.server) == [slot]
            and step.model is steps.history.last
            and slot.sent == step.version
            and slot.index not in {*step.stalled, *steps.starting}
            and steps.left(step) == [slot]
        )

    def has_copy(self, call: Watch) -> bool:
        """Return whether the copy of a state still holds up the next step."""
        steps, step, slot = self._steps, call.step, call.slot
        waits = bool(steps.waiting) and step.model is steps.history.last and step.model.whole
        return waits and slot.keeper == call.server and slot.copied < steps.needed_copy()
