"""Servers that keep all others waiting: with a step, or with the copy of another one's state."""

from __future__ import annotations

from paceline.engines.ray.servers.events import Watch
from paceline.engines.ray.servers.fleet import Fleet
from paceline.engines.ray.servers.slices import Slot, Step
from paceline.engines.ray.servers.steps import Do, Steps

# A server is late if a step takes it three times as long as all others, and two seconds longer.
# It then costs about as much to have another server take the step.
_FACTOR, _SECONDS = 3.0, 2.0
_NODES = 3  # with servers, at least: of two, either may be the unusual one


class Late:
    """Has the last server of a step watched, and says whether it is late when that time is over."""

    def __init__(self, steps: Steps, fleet: Fleet, do: Do) -> None:
        self._steps, self._fleet, self._do = steps, fleet, do

    def watch_step(self) -> None:
        """Have the server watched that alone has not taken the newest step."""
        log = self._steps.history.log
        if log and not log[-1].model.taken and len(left := self._steps.left(log[-1])) == 1:
            self._watch(left[0].server, left[0], log[-1])

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
        if len({self._steps.node(each) for each in self._steps.slots}) >= _NODES:
            after = self._fleet.now - step.began
            seconds = max((_FACTOR - 1) * after, _SECONDS)
            self._do(Watch(server, step.version, slot.index, slot.starts, seconds))

    def slot(self, call: Watch) -> Slot | None:
        """Return the slice that a watch is about, if it is still the same and the same step."""
        steps = self._steps
        log = steps.history.log
        if not log or log[-1].version != call.version or call.index >= len(steps.slots):
            return None
        slot = steps.slots[call.index]
        return slot if slot.starts == call.starts else None

    def has_step(self, call: Watch, slot: Slot) -> bool:
        """Return whether a watched server is still at work on a step that all others have taken."""
        steps = self._steps
        return (
            steps.slots_of(call.server) == [slot]
            and slot.sent == call.version
            and slot.index not in {*steps.history.log[-1].stalled, *steps.starting}
            and steps.left(steps.history.log[-1]) == [slot]
        )

    def has_copy(self, call: Watch, slot: Slot) -> bool:
        """Return whether the copy of a state still holds up the next step."""
        steps = self._steps
        waits = bool(steps.waiting) and steps.history.last.whole
        return waits and slot.keeper == call.server and slot.copied < steps.needed_copy()
