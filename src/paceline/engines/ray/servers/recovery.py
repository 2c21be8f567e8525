"""Recovery after the loss of servers and nodes: of slices and their copies.

When a server is lost, another process takes over its slice, and repeats the missing steps. Until
then the version is not whole, so that no step is ever half taken. Two cases differ. If only the
process is lost, the next one starts from the newest slice and state. Both are in its node's store
and belong to the driver. If the node is lost, a worker elsewhere holds the slice from its last
task, and a server elsewhere keeps the optimizer's state. Workers that get rounded values only hold
nothing: the exact values are then a part of the state. Another server that is up then takes the
slice at once, and the lost one returns on a node without one.

A server that is late with a step, which all others have taken, gives its slice to a server on
another node. That one starts it from the same copies as after the loss of a node.

A server that raises an exception is lost as well. If the next process raises at the same step, the
optimizer itself is at fault, and the exception reaches the user.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import inf

from paceline.core.errors import ServersLost, SlicesLost
from paceline.core.logs import logger_of
from paceline.engines.ray.servers.events import (
    AskAnew,
    AskHeld,
    CopyLost,
    GiveState,
    HeldTold,
    ReadHeld,
    Remove,
    Replace,
    ServerRaised,
    SetUp,
    Started,
    Way,
)
from paceline.engines.ray.servers.fleet import Fleet, Settings
from paceline.engines.ray.servers.lost_results import ATTEMPTS
from paceline.engines.ray.servers.placement import Placement
from paceline.engines.ray.servers.routes import Routes
from paceline.engines.ray.servers.slices import (
    Copy,
    Kept,
    Object,
    Results,
    Slot,
    Step,
    Version,
)
from paceline.engines.ray.servers.steps import Do, Steps, is_with

logger = logger_of(__name__)


class NoRoute(ServersLost):
    """No node can fetch objects from all nodes that have workers."""


class Recovery:
    """Decides how each loss is recovered from; see the top of this file.

    failure: the error after which no version becomes whole again.
    """

    def __init__(
        self,
        settings: Settings,
        steps: Steps,
        results: Results,
        routes: Routes,
        placement: Placement,
        fleet: Fleet,
        do: Do,
    ) -> None:
        self._rounded = settings.rounded
        self._steps, self._results, self._routes = steps, results, routes
        self._placement, self._fleet, self._do = placement, fleet, do
        self.failure: Exception | None = None

    def fail(self, why: str, kind: type[ServersLost] = SlicesLost) -> ServersLost:
        """Return the error for what cannot be recovered."""
        self.failure = kind(why)
        return self.failure

    # --- servers ---------------------------------------------------------------------------------

    def set_up(self, slot: Slot) -> None:
        """Have a slot's server start from its copy, and then take all steps since."""
        copy = slot.newest
        self._steps.slots.starting.add(slot.index)
        slot.sent, slot.since, slot.starts = copy.version, copy.version, slot.starts + 1
        for step in self._steps.history.log:
            if step.version > copy.version:
                step.stalled.discard(slot.index)
                sums = None
                if step.totals is None:
                    sums = step.sums.pop(slot.index, None)  # of the former process
                if not step.model.taken and slot.index in step.done:
                    step.former[slot.index] = sums, step.done.pop(slot.index)
        cut, made = self._steps.slots.number, (Object(), Object())
        self._do(SetUp(slot.server, copy.version, slot.span, slot, copy, *made, cut))

    def started(self, event: Started) -> None:
        """Note that a server has its slice, and send it the next step."""
        call, slot, steps = event.call, event.call.slot, self._steps
        steps.slots.starting.discard(slot.index)
        copy = steps.copy_of(slot, call.version, call.values, call.state)
        slot.newest = replace(copy, other=call.copy.other)
        if self._rounded:  # its server may be on the node that kept the state
            slot.copied = max(steps.slots.elsewhere(slot), default=-1)
        steps.copy_state(slot, event.has_arrays)
        if not steps.slots.is_first and not steps.slots.starting:
            for each in steps.slots:  # no other server may have been up for its state
                if each.newest.version not in each.states:
                    steps.copy_state(each, True)
        for version in steps.history.versions():
            if version.number == call.version:
                # The former server's objects may be on another node, and be lost with it.
                steps.published_again(version, slot, call.values)
        for step in steps.history.log:
            if step.version <= call.version and slot.index in step.former:
                steps.taken_before(step, slot)  # it starts from a copy that has the step
        steps.feed(slot)

    def lose_with_node(self, server: str, why: str) -> bool:
        """Have servers that are up take the slices of one that is lost with its node.

        Return whether there are any. A new process would have to fetch the same copies.
        """
        slots = self._steps.slots.of(server)
        if others := self._others(server, slots):
            logger.warning("server %s is lost: %s; others take its slices", server, why)
            self._let_go(server, slots)
            self._hand_over(slots, others)
            self._do(Remove(server))
            self._placement.release(server)
            for slot in slots:
                self.recover(slot)
        return bool(others)

    def lose(self, server: str, why: str, raised: bool = False) -> None:
        """Replace a lost server, and recover its slices; raised: it starts on another node."""
        logger.warning("server %s is lost: %s", server, why)
        steps, slots = self._steps, self._steps.slots.of(server)
        is_up = self._fleet.joined(server) and not {s.index for s in slots} & steps.slots.starting
        if raised or not is_up:
            self._placement.avoid(server)
        self._let_go(server, slots)
        self._do(Replace(server))
        if not self._fleet.has(server):
            cut = self._placement.cut
            raise self.fail(
                f"server {server} was lost too often "
                f"({why}{f'; {self._routes.named(cut)}' if cut else ''}); the last complete "
                f"version is {steps.history.last_whole}. Resume from a checkpoint, or allow more "
                "losses with Ray(respawns=…)",
                ServersLost,
            )
        for slot in slots:
            self.recover(slot)

    def _let_go(self, server: str, slots: Sequence[Slot]) -> None:
        """Note that a server has neither its slices nor the states that it kept for others."""
        self._steps.slots.starting.update(slot.index for slot in slots)
        self._steps.keep_elsewhere(server)  # the originals are not gone

    def _others(self, lost: str, slots: Collection[Slot]) -> list[str]:
        """Return the servers that can take the slices of one that is lost with its node."""
        alive, fleet, starting = {*self._fleet.alive()}, self._fleet, self._steps.slots.starting
        copies = {slot.newest.node for slot in slots if slot.newest.node is not None}
        nodes = {fleet.node(lost)} if fleet.node(lost) else copies
        if not nodes or nodes & alive:
            return []
        return [
            each
            for each in self._steps.slots.servers
            if each != lost
            and fleet.joined(each)
            and fleet.node(each) in alive
            and not any(slot.index in starting for slot in self._steps.slots.of(each))
        ]

    def _hand_over(self, slots: Sequence[Slot], others: Sequence[str]) -> None:
        """Give slices to other servers, if possible to those that keep their states."""
        for i, slot in enumerate(slots):
            keeping = [
                server
                for server in others
                if any(is_with(state, server) for state in slot.states.values())
            ]
            slot.server = (keeping or others)[i % len(keeping or others)]
            slot.held, slot.keeper, slot.raised, slot.slow = -1, None, -1, 0

    def overtake(self, late: str, why: str) -> bool:
        """Have servers of other nodes take the newest step in place of one that is late.

        why: it counts as late.
        Return whether other nodes have what that takes: values, with a worker whose result is in
        the step, and the optimizer's state. The late server gives away all its slices.
        """
        steps, step = self._steps, self._steps.history.log[-1]
        slots = steps.slots.of(late)
        holders = {slot.index: self._holders(slot, step, late) for slot in slots}
        others = [
            each for each in steps.slots if steps.slots.node(each) != steps.slots.node(slots[0])
        ]
        if not others or any(self._newest(slot, holders[slot.index]) is None for slot in slots):
            return False
        step.overtaken = True
        self._let_go(late, slots)
        logger.warning(
            "server %s is late with step %d (%s): others take it in its place",
            *(late, step.version, why),
        )
        copies = [self._copy_elsewhere(slot, holders[slot.index]) for slot in slots]
        self._hand_over(slots, list(dict.fromkeys(each.server for each in others)))
        for slot, copy in zip(slots, copies, strict=True):
            assert copy is not None
            self._start_from(slot, replace(copy, other=slot.newest))
        self._do(Remove(late))
        self._placement.release(late)
        for slot in slots:  # until the other server is about to make it
            step.model.slices[slot.index] = None
        self._do(AskAnew(step.model))
        return True

    def _holders(self, slot: Slot, step: Step, late: str) -> dict[int, str]:
        """Return the workers that have the values of a slice by version, apart from its node; ""
        if the state has them. Versions are left out whose state a late server keeps."""
        holders = dict.fromkeys(slot.states, "")
        if not self._rounded:
            away = self._steps.slots.node(slot), ""
            results = [each for each in step.results if each.node not in away]
            there = [each for each in results if self._fleet.has_worker(each.token)]
            holders = {each.model.number: each.token.worker for each in there}
        states = slot.states
        return {v: w for v, w in holders.items() if v not in states or not is_with(states[v], late)}

    def raised(self, event: ServerRaised) -> None:
        """Replace a server that raised an exception, by one on another node if there is one."""
        slot = event.slot
        if slot.raised == slot.newest.version:  # in a second process, at the same step
            self.failure = event.error
            raise event.error  # with its own traceback
        for each in self._steps.slots.of(event.server):
            if each.newest.version == slot.newest.version:  # about to take the same step
                each.raised = slot.newest.version
        self.lose(event.server, event.why, raised=True)

    def lose_cut_off(self, found: Mapping[Way, float]) -> None:
        """Move servers away from nodes that cannot fetch from all worker nodes."""
        cut = {frozenset(way) for way, seconds in found.items() if seconds == inf}
        if not cut:
            return
        placement, routes = self._placement, self._routes
        placement.cut |= cut
        logger.warning("%s", routes.named(cut))
        if not placement.has_reaching(self._fleet.alive()):
            self.failure = NoRoute(
                f"{routes.named(placement.cut)}, so no node can run a server. Open Ray's ports "
                "between these hosts, or use Ray(servers='driver')"
            )
            raise self.failure
        for server in self._steps.slots.servers:
            if away := placement.cut_off(placement.nodes[server]):
                names = ", ".join(map(self._fleet.address, away))
                self.lose(server, f"its node cannot fetch objects from {names}")

    # --- slices ----------------------------------------------------------------------------------

    def recover_idle(self) -> None:
        """Recover slices whose node is lost without a call that failed.

        An idle server has no call that could fail. Without its slice there are no results, and so
        no call is made to it.
        """
        alive = self._fleet.alive()
        for slot in self._steps.slots:
            node = slot.newest.node
            is_up = slot.index not in self._steps.slots.starting
            if is_up and node is not None and node not in alive:
                self.recover(slot)
        for version in self._versions():  # a slice may have stayed where its server has left
            found = [i for i, node in version.nodes.items() if node and node not in alive]
            lost = [index for index in found if index not in version.missing]  # under way
            if not all(self._steps.makes_again(version, index) for index in lost):
                version.gone = True

    def recover(self, slot: Slot) -> None:
        """Have a server start again from the newest copy that is left."""
        copy = slot.newest
        gone = copy.node is not None and copy.node not in self._fleet.alive()
        if copy.other is not None and (copy.rescued or gone):
            slot.newest = copy.other
            self.recover(slot)
        elif copy.rescued or gone:
            self._rescue(slot)
        else:
            self._start_from(slot, copy)

    def _start_from(self, slot: Slot, copy: Copy) -> None:
        slot.newest = copy
        logger.warning("server %s starts from version %d", slot.server, copy.version)
        self.set_up(slot)

    def _rescue(self, slot: Slot) -> None:
        """Search the nodes that are left for the newest version of a slice."""
        self._steps.slots.starting.add(slot.index)
        for version in self._steps.history.versions():
            version.missing.add(slot.index)
        if self._rounded:
            self._start_elsewhere(slot, dict.fromkeys(slot.states, ""))
        else:
            self._do(AskHeld(slot.server, slot))

    def rescued(self, event: HeldTold) -> None:
        """Start from a slice that a worker holds."""
        holders: dict[int, str] = {}
        for worker, versions in event.versions.items():
            for version in versions:
                holders.setdefault(version, worker)
        self._start_elsewhere(event.call.slot, holders)

    def _start_elsewhere(self, slot: Slot, holders: Mapping[int, str]) -> None:
        """Start from the newest version that has both values and a kept state.

        holders: the workers that hold the values, by version; "" if the state has them.
        """
        copy = self._copy_elsewhere(slot, holders)
        if copy is None:
            raise self.fail(
                f"the node of server {slot.server} is lost, and no other node has a version of "
                f"its slice from {self._steps.history.base.number} on"
            )
        for version in self._versions():
            same = len(version.spans) > slot.index and version.spans[slot.index] == slot.span
            if version.number < copy.version or not same:
                version.gone = True
        self._start_from(slot, copy)

    def _newest(self, slot: Slot, holders: Mapping[int, str]) -> int | None:
        """Return the newest version with values and a kept state, the same of all lost slices if
        possible: a result lost with them is computed again on a model with all slices."""
        base, alive = self._steps.history.base.number, self._fleet.alive()
        found = {v for v in holders if v >= base and v in slot.states}
        lost = [s for s in self._steps.slots if s.newest.node and s.newest.node not in alive]
        common = found.intersection(*(s.states for s in lost))
        return max(common or found, default=None)

    def _copy_elsewhere(self, slot: Slot, holders: Mapping[int, str]) -> Copy | None:
        """Return a copy of that version, of values from a worker and a state from a server."""
        newest = self._newest(slot, holders)
        if newest is None:
            return None
        state, values = slot.states[newest], Object()
        if isinstance(state, Kept):
            keeper, state = state.server, Object()
            self._do(GiveState(keeper, slot.index, newest, self._steps.slots.number, state))
        if holders[newest]:
            self._do(ReadHeld(holders[newest], newest, slot.span, values))
        copy = self._steps.copy_of(slot, newest, values, state)
        return replace(copy, node=None, rescued=True)

    def _versions(self) -> list[Version]:
        """Return the versions that a server or a worker may still ask for."""
        steps, results = self._steps, self._results
        taken = [result for step in (*steps.history.log, *steps.waiting) for result in step.results]
        found = [*taken, *results.held.values(), *results.expected.values()]
        return [*steps.history.versions(), *(result.model for result in found)]

    def copy_lost(self, event: CopyLost) -> None:
        slot = event.call.slot
        slot.attempts += 1
        if slot.attempts > ATTEMPTS:
            raise self.fail(
                f"the slice of server {slot.server} cannot be recovered ({event.error}); the last "
                f"complete version is {self._steps.history.last_whole}"
            ) from event.error
        self.recover(slot)
