"""Feeding steps to servers, and publishing the versions of the model that they make.

A step goes to all servers with the weights and the slices of its results, one step at a time for
each server. A version of the model is whole, and reported, when every server has it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from paceline.core.protocol import Coefficients
from paceline.engines.ray.servers.events import (
    Apply,
    Call,
    KeepState,
    Reduce,
    Reduced,
    Report,
    Ship,
    StateKept,
    StepTaken,
    TakeStep,
    Trust,
)
from paceline.engines.ray.servers.fleet import Fleet, Settings
from paceline.engines.ray.servers.history import History
from paceline.engines.ray.servers.links import Links
from paceline.engines.ray.servers.pieces import carrier_of, pieces_of
from paceline.engines.ray.servers.slices import Copy, Object, Result, Slot, Step, Version
from paceline.learners.base import Sums, add_up, mean_loss, statistics

Do: TypeAlias = Callable[[Call], None]
"""Makes a call at once; the fleet shows its changes from then on."""


class Steps:
    """The slices and the steps on their way.

    copies: of the slices, by server.
    """

    def __init__(
        self, settings: Settings, fleet: Fleet, do: Do, links: Links, copies: dict[str, Copy]
    ) -> None:
        self._settings, self._fleet, self._do, self._links = settings, fleet, do, links
        self.spans = [copy.spans[0] for copy in copies.values()]
        self.slots = [
            Slot(index, copy.spans[0], server, copy)
            for index, (server, copy) in enumerate(copies.items())
        ]
        self.starting: set[int] = set()  # slots whose server is not up
        self.waiting: deque[Step] = deque()  # steps not yet sent to servers
        values: list[Object | None] = [copy.parts[0] for copy in copies.values()]
        version = self.slots[0].newest.version
        self.model = Version(version, self.spans, values, [None] * len(values), taken=True)
        self.history = History(self.model)

    # --- the order of steps ----------------------------------------------------------------------

    def add(self, weights: Sequence[Coefficients], results: list[Result]) -> None:
        """Add a step along results, to be sent after those before it."""
        stats = mean_loss(weights, [result.loss for result in results])
        self.model = Version(self.model.number + 1, [], [None], [])  # unknown until it is sent
        step = Step(self.model.number, list(weights), results, stats, self.model)
        self.waiting.append(step)

    def is_due(self) -> bool:
        """Return whether servers are done with the step before, and its state is elsewhere."""
        last = self.history.last
        return (
            bool(self.waiting)
            and last.whole
            and all(slot.copied >= last.number for slot in self.slots)
        )

    def begin(self) -> None:
        """Send the next step to the servers."""
        step = self.waiting.popleft()
        count = len(self.slots)
        step.model.spans, step.states = self.spans, [None] * count
        step.model.slices, step.model.nodes = [None] * count, [None] * count
        self.history.log.append(step)
        for slot in self.slots:
            self.feed(slot)

    def feed(self, slot: Slot) -> None:
        """Send a server the step that it has to take next, one at a time."""
        version = slot.newest.version + 1
        if slot.index in self.starting or slot.sent >= version:
            return
        for step in self.history.log:
            if step.version == version and slot.index not in step.stalled:
                slot.sent = version
                self._send(step, slot)

    def _send(self, step: Step, slot: Slot) -> None:
        pieces = pieces_of(step, slot.span, self._settings)
        if self._settings.needs_totals:
            self._do(Reduce(slot.server, step.version, slot, step, pieces))
        else:
            made = self._publish(step, slot)
            self._do(TakeStep(slot.server, step.version, slot, step, pieces, *made))

    def reduced(self, event: Reduced) -> None:
        step, slot = event.call.step, event.call.slot
        step.sums[slot.index] = event.sums
        if step.totals is not None:  # this server repeats the step: the others are done
            self._apply(step, slot, step.totals)
        elif len(step.sums) == len(self.slots):
            step.totals = self._totals(step)
            for each in self.slots:
                self._apply(step, each, step.totals)
            self._do(Ship())

    def _apply(self, step: Step, slot: Slot, totals: Sums) -> None:
        made = self._publish(step, slot)
        self._do(Apply(slot.server, step.version, totals, slot, step, *made))

    def _publish(self, step: Step, slot: Slot) -> tuple[Object, Object]:
        """Name the values and the state that a server is about to make."""
        values, state = Object(), Object()
        step.model.slices[slot.index], step.states[slot.index] = values, state
        node = self.node(slot)
        step.model.nodes[slot.index] = carrier_of(slot.span, node, self._settings)
        return values, state

    def taken(self, event: StepTaken) -> None:
        """Note that a server has taken a step; report the step if it is the last one."""
        step, slot = event.call.step, event.call.slot
        step.sums[slot.index], step.done[slot.index] = event.sums, event.seconds
        values, state = step.model.slices[slot.index], step.states[slot.index]
        assert values is not None and state is not None
        slot.newest = Copy(step.version, [slot.span], [values, state], self.node(slot))
        slot.attempts, slot.raised = 0, -1
        self._do(Trust(slot.server))
        step.model.missing.discard(slot.index)
        self.copy_state(slot, event.has_arrays)
        if len(step.done) == len(self.slots) and not step.model.taken:
            step.model.taken = True
            self._links.watch(step, self.slots, self.node)
            totals = step.totals or self._totals(step)
            self._do(Report(step.stats | statistics(totals, self._settings.wants)))

    def _totals(self, step: Step) -> Sums:
        return add_up(step.sums[index] for index in range(len(self.slots)))

    # --- copies on other nodes -------------------------------------------------------------------

    def copy_state(self, slot: Slot, has_arrays: bool) -> None:
        """Have a server on another node keep the optimizer's state as of the newest step."""
        version, state = slot.newest.version, slot.newest.parts[1]
        keeper = self._keeper(slot)
        if not has_arrays:  # it is small, and in this process
            slot.states[version] = state
        if not has_arrays or keeper is None:
            slot.copied = version
            return
        oldest = self.history.base.number
        self._do(KeepState(keeper, slot.index, version, oldest, slot, state))

    def state_kept(self, event: StateKept) -> None:
        slot, version = event.call.slot, event.call.version
        if event.keeper is not None:
            slot.states[version] = event.keeper
        slot.copied = max(slot.copied, version)  # if it failed, the next one may not
        self.forget()

    def _keeper(self, slot: Slot) -> str | None:
        """Return the next server on another node."""
        for shift in range(1, len(self.slots)):
            other = self.slots[(slot.index + shift) % len(self.slots)]
            if other.index not in self.starting and self.node(other) != self.node(slot):
                return other.server
        return None

    def forget(self) -> None:
        """Drop the steps that no server has to take again."""
        self.history.forget(self.slots, self.several, self._fleet.workers + 2)

    # --- slots -----------------------------------------------------------------------------------

    @property
    def several(self) -> bool:
        """Whether servers are on several nodes, of which one can be lost."""
        return len({self.node(slot) for slot in self.slots}) > 1

    def node(self, slot: Slot) -> str:
        return self._fleet.node(slot.server)

    def slot_of(self, server: str) -> Slot:
        return next(slot for slot in self.slots if slot.server == server)

    def has(self, slot: Slot) -> bool:
        """Return whether a slot is one of the present cut."""
        return slot.index < len(self.slots) and self.slots[slot.index] is slot

    def cut(self, servers: Sequence[str]) -> None:
        """Cut the model anew among servers. Only between two steps."""
        olds = self.slots
        self.spans = self._settings.layout.spans(len(servers))
        self.slots = []
        for index, (server, span) in enumerate(zip(servers, self.spans, strict=True)):
            meet = [s for s in olds if s.span[0] < span[1] and span[0] < s.span[1]]
            parts = [part for slot in meet for part in slot.newest.parts]
            copy = Copy(olds[0].newest.version, [slot.span for slot in meet], parts)
            self.slots.append(Slot(index, span, server, copy))
        self.history.clear()
        self.starting.clear()
