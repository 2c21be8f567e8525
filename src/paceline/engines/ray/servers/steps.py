"""Feeding steps to servers, and publishing the versions of the model that they make.

A step goes to all servers with the weights and the slices of its results, one step at a time for
each server. A version of the model is whole, and reported, when every server has it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from paceline.core.averages import by_count, mean_loss
from paceline.core.protocol import Coefficients, Stat
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
    SumUp,
    TakeStep,
    Trust,
)
from paceline.engines.ray.servers.fleet import Fleet, Settings
from paceline.engines.ray.servers.history import History
from paceline.engines.ray.servers.pieces import pieces_of
from paceline.engines.ray.servers.slices import (
    Copy,
    Kept,
    NodeSum,
    Object,
    Result,
    Slot,
    Step,
    Version,
)
from paceline.engines.ray.servers.slots import Copies, Slots
from paceline.engines.ray.servers.sums import by_node
from paceline.learners.base import Sums, add_up, statistics

LAG = 3
"""Versions by which the copy of a slice may be behind, if the exact values are a part of it. A step
of 4 hosts then sends at most a twelfth of the exact model more; without a lag it is a quarter."""

Do: TypeAlias = Callable[[Call], None]
"""Makes a call at once; the fleet shows its changes from then on."""


class Steps:
    """The slices and the steps on their way.

    copies: of the slices, each with its server.
    """

    def __init__(self, settings: Settings, fleet: Fleet, do: Do, copies: Copies) -> None:
        self._settings, self._fleet, self._do = settings, fleet, do
        self.slots = Slots(settings, fleet, copies)
        self.waiting: deque[Step] = deque()  # steps not yet sent to servers
        self._cut_anew: dict[int, Object] = {}  # slices of the version at the last cut
        version = self.slots[0].newest.version
        unknown: list[Object | None] = [None] * len(copies)  # until the servers are up
        self.model = Version(version, self.slots.spans, unknown, taken=True)
        self.history = History(self.model)

    # --- the order of steps ----------------------------------------------------------------------

    def add(
        self, weights: Sequence[Coefficients], results: list[Result], lr_scale: float = 1.0
    ) -> None:
        """Add a step along results, to be sent after those before it."""
        counts = [result.count for result in results]
        loss = mean_loss(weights, [result.loss for result in results], counts)
        stats: dict[Stat, float] = {} if loss is None else {"loss": loss}
        self.model = Version(self.model.number + 1, [], [None])  # unknown until it is sent
        factors = list(by_count(weights, counts))
        step = Step(self.model.number, factors, results, stats, self.model, lr_scale)
        self.waiting.append(step)

    def is_due(self) -> bool:
        """Return whether servers are done with the step before, and enough is copied."""
        if not self.waiting or not self.history.last.whole:
            return False
        return all(slot.copied >= self._wanted for slot in self.slots)

    def copy_needed(self) -> None:
        """Have the states copied that the next step waits for, and that are not on their way."""
        for slot in self.slots:
            if slot.copied < self._wanted and slot.index not in self.slots.starting:
                self.copy_state(slot, True)

    @property
    def _wanted(self) -> int:
        waits = self.waiting and self.history.last.whole
        return self.needed_copy() if waits else -1

    def needed_copy(self) -> int:
        """Return the version that must be on a second node before the next step.

        An older one will do if a server that starts from it can repeat all steps since. Results
        that are lost with its node are computed again, so their models must not be older.
        """
        last, base = self.history.last.number, self.history.base.number
        if not self._settings.rounded or not self.waiting[0].is_fresh:
            return last
        stale = [step.version for step in self.history.log if not step.is_fresh]
        return max([base, last - LAG, *stale])

    def begin(self) -> None:
        """Send the next step to the servers."""
        step = self.waiting.popleft()
        count = len(self.slots)
        step.model.spans, step.states = self.slots.spans, [None] * count
        step.model.slices = [None] * count
        step.began = self._fleet.now
        self.history.log.append(step)
        if self._settings.sum_on_nodes and not any(
            isinstance(each, tuple) for each in step.weights
        ):
            self._sum_on_nodes(step)
        for slot in self.slots.last_chunk_first():
            self.feed(slot)

    def _sum_on_nodes(self, step: Step) -> None:
        """Have servers add up the results of their nodes for the servers on other nodes."""
        step.nodes = by_node(step.results)
        servers = {self.slots.node(slot): slot.server for slot in self.slots}
        for node in step.nodes:
            alike = all(step.results[index].spans == self.slots.spans for index in node.members)
            others = [slot.index for slot in self.slots if self.slots.node(slot) != node.node]
            worth = len(node.members) > 1 and not self._settings.direct  # or slices are pushed
            if worth and alike and others and node.node in servers:
                node.sums = {index: Object() for index in others}
                self._do(SumUp(servers[node.node], step.version, step, node))

    def send_singly(self, step: Step, slot: Slot, nodes: Iterable[NodeSum]) -> None:
        """Send a server the results of nodes in place of their sums."""
        for node in nodes:
            node.sums.pop(slot.index, None)
        slot.sent = step.version - 1
        self.feed(slot)

    def feed(self, slot: Slot) -> None:
        """Send a server the step that it has to take next, one at a time."""
        version = slot.newest.version + 1
        if slot.index in self.slots.starting or slot.sent >= version:
            return
        for step in self.history.log:
            if step.version == version and slot.index not in step.stalled:
                slot.sent = version
                self._send(step, slot)

    def _send(self, step: Step, slot: Slot) -> None:
        pieces = pieces_of(step, slot)
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
            for each in self.slots.last_chunk_first():
                self._apply(step, each, step.totals)
            self._do(Ship())

    def _apply(self, step: Step, slot: Slot, totals: Sums) -> None:
        made = self._publish(step, slot)
        self._do(Apply(slot.server, step.version, totals, slot, step, *made))

    def _publish(self, step: Step, slot: Slot) -> tuple[Object, Object]:
        """Name the values and the state that a server is about to make."""
        values, state = Object(), Object()
        step.model.slices[slot.index], step.states[slot.index] = values, state
        step.model.nodes[slot.index] = self.slots.node(slot)
        return values, state

    def taken(self, event: StepTaken) -> None:
        """Note that a server has taken a step."""
        step, slot = event.call.step, event.call.slot
        step.sums[slot.index] = event.sums
        step.done[slot.index] = step.arrivals(slot.index, event.seconds)
        values, state = step.model.slices[slot.index], step.states[slot.index]
        assert values is not None and state is not None
        slot.newest = self.copy_of(slot, step.version, values, state)
        step.states[slot.index] = None  # the newest one is enough
        slot.attempts, slot.raised = 0, -1
        self._do(Trust(slot.server))
        step.model.missing.discard(slot.index)
        step.former.pop(slot.index, None)
        self.copy_state(slot, event.has_arrays)

    def taken_before(self, step: Step, slot: Slot) -> None:
        """Note that a slice has a step which it need not take again."""
        sums, step.done[slot.index] = step.former.pop(slot.index)
        if sums is not None:
            step.sums[slot.index] = sums

    def to_report(self) -> Step | None:
        """Return the newest step if all servers have taken it, and it is not reported.

        A server that starts from a copy that has the step is still about to publish its slice.
        """
        step = self.history.log[-1] if self.history.log else None
        if step is None or step.model.taken or not step.model.known:
            return None
        return step if len(step.done) == len(self.slots) else None

    def report(self, step: Step) -> None:
        """Report a step that all servers have taken."""
        step.model.taken, step.took = True, self._fleet.now - step.began
        for node in step.nodes or ():
            node.sums.clear()  # a server that repeats this step uses the results
        totals = step.totals or self._totals(step)
        stats = step.stats | statistics(totals, self._settings.wants)
        self._do(Report(stats, step.sending()))

    def left(self, step: Step) -> list[Slot]:
        """Return the slices whose servers are not done with a step, or with its first phase."""
        first = self._settings.needs_totals and step.totals is None
        done = step.sums if first else step.done
        return [slot for slot in self.slots if slot.index not in done]

    def _totals(self, step: Step) -> Sums:
        return add_up(step.sums[index] for index in range(len(self.slots)))

    # --- copies on other nodes -------------------------------------------------------------------

    def copy_of(self, slot: Slot, version: int, values: Object, state: Object) -> Copy:
        """Return the copy from which a server can start a slice again."""
        parts = [state] if self._settings.rounded else [values, state]
        return Copy(version, [slot.span], parts, self.slots.node(slot))

    def copy_state(self, slot: Slot, has_arrays: bool, late: str | None = None) -> None:
        """Have a server on another node keep the state as of the newest step.

        If the state before is still on its way, this one follows when that has arrived. If the
        exact values are a part of it, one of `LAG` versions is copied, or what a step waits for.
        late: a server that keeps none.
        """
        version, state = slot.newest.version, slot.newest.parts[-1]
        keeper = self._keeper(slot, late)
        if not has_arrays:  # it is small, and in this process
            slot.states[version] = state
        if not has_arrays or keeper is None:
            slot.copied = version
            return
        # Of all slices at the same versions: those lost together start again from the same one.
        due = (max(self.slots.elsewhere(slot), default=-LAG) // LAG + 1) * LAG
        enough = self._settings.rounded and version < due
        if slot.keeper is None and (not enough or late is not None or slot.copied < self._wanted):
            slot.keeper = keeper
            oldest, cut = self.history.base.number, self.slots.number
            self._do(KeepState(keeper, slot.index, version, oldest, cut, slot, state))

    def keep_elsewhere(self, server: str, lost: bool = True) -> None:
        """Copy the states elsewhere that a server is about to keep.

        lost: whether those are lost that it keeps.
        """
        for slot in self.slots:
            kept = {v: s for v, s in slot.states.items() if not (lost and is_with(s, server))}
            if len(kept) < len(slot.states) or slot.keeper == server:
                slot.states, slot.keeper = kept, None
                self.copy_state(slot, True, server)

    def state_kept(self, event: StateKept) -> None:
        slot, version = event.call.slot, event.call.version
        if event.keeper is not None:
            slot.states[version] = event.keeper
        elif slot.keeper != event.call.keeper:
            return  # it is copied to another server instead
        slot.copied = max(slot.copied, version)  # if it failed, the next one may not
        self.forget()
        slot.keeper = None
        if slot.newest.version > version:
            self.copy_state(slot, True)

    def _keeper(self, slot: Slot, late: str | None) -> str | None:
        """Return a server on another node, without one that is late: of each chunk another one, so
        that copies leave a host over several connections."""
        servers = self.slots.servers
        at, others = servers.index(slot.server), len(servers) - 1
        chunk = slot.index * self._settings.chunks // len(self.slots)
        for i in range(others):
            server = servers[(at + 1 + (chunk + i) % others) % len(servers)]
            starting = all(each.index in self.slots.starting for each in self.slots.of(server))
            away = self._fleet.node(server) != self.slots.node(slot)
            if away and not starting and server != late:
                return server
        return None

    def forget(self) -> None:
        """Drop the steps that no server has to take again."""
        limit = self._fleet.workers + LAG + 2
        self.history.forget(self.slots, len(self.slots.nodes) > 1, self._is_safe, limit)

    def _is_safe(self, slot: Slot, number: int) -> bool:
        """Return whether a slice of a version is on a second node."""
        if self._settings.rounded:
            return number in self.slots.elsewhere(slot)
        return slot.held >= number and number in slot.states

    # --- cuts  -----------------------------------------------------------------------------------

    def published_again(self, version: Version, slot: Slot, values: Object) -> None:
        """Note where a slice of a version is now; a version of another cut needs all of them."""
        if version.spans == self.slots.spans:
            version.slices[slot.index] = values
            version.nodes[slot.index] = self.slots.node(slot)
            version.missing.discard(slot.index)
            return
        self._cut_anew[slot.index] = values
        if len(self._cut_anew) == len(self.slots):
            version.slices = [self._cut_anew[each.index] for each in self.slots]
            version.nodes = {each.index: self.slots.node(each) for each in self.slots}
            version.missing &= self.slots.starting
            version.spans, version.gone = self.slots.spans, False

    def makes_again(self, version: Version, index: int) -> bool:
        """Return whether the server of a slice has this version, or will take the step to it."""
        others = [slot for slot in self.slots if slot.index not in self._cut_anew]
        if version is self.history.base and version.spans != self.slots.spans and others:
            return all(slot.newest.version <= version.number for slot in others)
        same = version in self.history.versions() and version.spans == self.slots.spans
        return same and version.number >= self.slots[index].newest.version

    def cut(self, servers: Sequence[str]) -> None:
        """Cut the model anew among servers. Only between two steps."""
        self.slots.cut(servers)
        self.history.clear()
        self._cut_anew.clear()


def is_with(state: Object | Kept, server: str) -> bool:
    return isinstance(state, Kept) and state.server == server
