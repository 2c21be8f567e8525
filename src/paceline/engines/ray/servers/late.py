"""Servers that keep all others waiting: with a step, or with the copy of another one's state."""

from __future__ import annotations

from paceline.engines.ray.servers.events import Watch
from paceline.engines.ray.servers.fleet import Fleet
from paceline.engines.ray.servers.slices import Step
from paceline.engines.ray.servers.steps import Do, Steps

# A server is late if a step takes it three times as long as all others, and two seconds longer.
# It then costs about as much to have another server take the step.
_FACTOR, _SECONDS = 3.0, 2.0
_FIRST_SECONDS = 20.0  # in the first step of a slice: the process may still load its modules
_NODES = 3  # with servers, at least: of two, either may be the unusual one


class Late:
    """Has the last server of a step watched, and says whether it is late when that time is over."""

    def __init__(self, steps: Steps, fleet: Fleet, do: Do, chunks: int) -> None:
        self._steps, self._fleet, self._do, self._chunks = steps, fleet, do, chunks

    def watch_step(self) -> None:
        """Have the server watched that alone has not taken the newest step."""
        log = self._steps.history.log
        if log and not log[-1].model.taken and not log[-1].overtaken:
            servers = {slot.server for slot in self._steps.left(log[-1])}
            if len(servers) == 1:
                self._watch(servers.pop(), log[-1], False, self._fleet.now - log[-1].began)

    def watch_copy(self) -> None:
        """Have the server watched whose copy of a state alone holds up the next step."""
        history = self._steps.history
        if self._steps.waiting and history.log and history.last.whole:
            needed, step = self._steps.needed_copy(), history.log[-1]
            left = [slot for slot in self._steps.slots if slot.copied < needed]
            keepers = {slot.keeper for slot in left}
            keeper = keepers.pop() if len(keepers) == 1 else None
            if keeper is not None and any(slot.watched < step.version for slot in left):
                for slot in left:
                    slot.watched = step.version
                self._watch(keeper, step, True, step.took)

    def _watch(self, server: str, step: Step, copy: bool, usual: float) -> None:
        if len(self._steps.slots.nodes) >= _NODES:
            first = any(slot.since + 1 >= step.version for slot in self._steps.slots.of(server))
            seconds = max((_FACTOR - 1) * usual, _FIRST_SECONDS if first else _SECONDS)
            self._do(Watch(server, step.version, copy, self._starts(), seconds))

    def _starts(self) -> int:
        return sum(slot.starts for slot in self._steps.slots)

    def _is_same(self, call: Watch) -> bool:
        """Return whether it is the same step, and no slice has started again since."""
        log = self._steps.history.log
        return bool(log) and log[-1].version == call.version and self._starts() == call.starts

    def has_step(self, call: Watch) -> bool:
        """Return whether a watched server is still at work on a step that all others have taken."""
        steps = self._steps
        if call.copy or not self._is_same(call):
            return False
        step, mine = steps.history.log[-1], steps.slots.of(call.server)
        left = steps.left(step)
        return (
            bool(left)
            and all(slot.server == call.server and slot.sent == call.version for slot in left)
            and len(mine) == self._chunks  # with those of another server it is slower
            and not {slot.index for slot in mine} & {*step.stalled, *steps.slots.starting}
        )

    def has_copy(self, call: Watch) -> bool:
        """Return whether the copy of a state still holds up the next step."""
        steps = self._steps
        if not (call.copy and self._is_same(call)):
            return False
        if not (steps.waiting and steps.history.last.whole):
            return False
        needed = steps.needed_copy()
        return any(s.keeper == call.server and s.copied < needed for s in steps.slots)
