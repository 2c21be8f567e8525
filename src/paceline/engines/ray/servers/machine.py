"""The recovery machine: it receives events about servers, and answers with calls.

It reads no clock and makes no call of its own, so that a transcript of events and calls is a test.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from math import inf
from typing import TYPE_CHECKING

from paceline.core.logs import logger_of
from paceline.core.protocol import Coefficients, Stats, TaskId
from paceline.engines.ray.servers.events import (
    Add,
    CameUp,
    CopyLost,
    Event,
    HeldTold,
    MayBeLate,
    ModelMissed,
    NotUp,
    Probed,
    Reduced,
    Remove,
    ResultsUnusable,
    ServerLost,
    ServerRaised,
    Ship,
    SliceNotWritten,
    SliceWritten,
    SlotEvent,
    Started,
    StateKept,
    StepTaken,
    Watch,
)
from paceline.engines.ray.servers.files import Files
from paceline.engines.ray.servers.fleet import Fleet, Settings
from paceline.engines.ray.servers.late import Late
from paceline.engines.ray.servers.links import Links
from paceline.engines.ray.servers.lost_results import LostResults
from paceline.engines.ray.servers.moves import Moves
from paceline.engines.ray.servers.placement import Placement
from paceline.engines.ray.servers.recovery import Recovery
from paceline.engines.ray.servers.routes import Routes
from paceline.engines.ray.servers.slices import Result, Results, Slot
from paceline.engines.ray.servers.slots import Copies
from paceline.engines.ray.servers.steps import Do, Steps

if TYPE_CHECKING:  # which needs ray
    from paceline.engines.ray.worker import Token

logger = logger_of(__name__)


class Machine:
    """Decides what servers do, one event after the other.

    copies: of the slices at the start, each with its server.
    do: makes a call at once. An event that the call itself brings about may come before it ends.
    """

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        placement: Placement,
        copies: Copies,
        do: Do,
    ) -> None:
        self._settings, self._fleet, self._placement, self._do = settings, fleet, placement, do
        self.results, self.links = Results(), Links(settings.adapts)
        self.steps = Steps(settings, fleet, do, copies)
        self.late = Late(self.steps, fleet, do, settings.chunks)
        self.routes = Routes(placement, fleet, do, settings.timeout / 2)
        around = self.routes, placement, fleet, do
        self.recovery = Recovery(settings, self.steps, self.results, *around)
        on = self.steps, self.results, fleet, do
        self.lost_results = LostResults(settings, *on, self.recovery.fail)
        self.files = Files(settings.layout, self.steps, do)
        self.moves = Moves(placement, fleet)
        self._begun = False  # whether a step was sent to the servers

    def start(self) -> None:
        """Set all servers up."""
        for slot in self.steps.slots:
            self.recovery.set_up(slot)

    def leaves_slow_link(self) -> bool:
        """Leave a server out whose link was slow in a probe before the first step, if there is one.

        Return whether there was. The next one can follow when all servers are up.
        """
        slots = self.steps.slots
        if (slow := self.links.slow_before(slots, slots.node)) is None:
            return False
        self._leave_out(slow, -1)
        return True

    # --- results and steps -----------------------------------------------------------------------

    def expect(self, result: Result) -> None:
        """Expect the answer to a task that was sent."""
        self.results.expected[result.task.id] = result

    def accept(self, token: Token, samples: int, stats: Stats, seconds: float = 0.0) -> bool:
        """Hold a result that was computed in some seconds; return False if no step can use it."""
        result = self.results.expected.get(token.task)
        if result is None or result.token != token:
            return False
        del self.results.expected[token.task]
        for slot in self.steps.slots:  # until its next task, this worker holds that model
            if self.steps.slots.node(slot) != result.node:
                slot.held = max(slot.held, result.model.number)
        if token.task in self.results.again:
            self.lost_results.computed_again(self.results.again.pop(token.task), result)
            self.late.watch_step()
            return False
        result.loss, result.count = stats.get("loss"), stats.get("count")
        result.samples, result.seconds = samples, seconds
        result.answered = self._fleet.now
        self.results.held[token.task] = result
        return True

    def drop(self, task: TaskId, lost: bool) -> None:
        """Forget a task and its result; lost: with the worker that was to compute it."""
        self.results.expected.pop(task, None)
        self.results.held.pop(task, None)
        if lost and task in self.results.again:
            self.lost_results.compute_again(self.results.again[task])

    def results_in_use(self) -> Iterator[Result]:
        """Yield the results that a server may still ask for."""
        yield from self.results.held.values()
        for step in self.steps.waiting:
            yield from step.results
        if self.steps.history.log and not self.steps.history.last.whole:
            yield from self.steps.history.log[-1].results

    def step(
        self, weights: Mapping[TaskId, Coefficients], keep: bool, lr_scale: float = 1.0
    ) -> None:
        """Take a step along held results."""
        held = self.results.held
        results = [held[task] if keep else held.pop(task) for task in weights]
        self.steps.add(list(weights.values()), results, lr_scale)
        self._advance()

    # --- events ----------------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Make the calls that an event leads to."""
        match event:
            case ServerLost(server, why):
                if self.recovery.lose_with_node(server, why):
                    self._left(server)
                else:
                    self.recovery.lose(server, why)
            case ServerRaised(slot=slot):
                if slot in self.steps.slots:
                    self.recovery.raised(event)
            case CameUp(server):
                self.moves.ready.append(server)
            case NotUp(server, why):
                self._give_up(server, why)
            case MayBeLate(call):
                self._replace_late(call)
            case Probed():
                self._probed(event)
            case ModelMissed():
                self.recovery.recover_idle()
                self.routes.check()
            case SliceWritten():
                self.files.written(event)
            case SliceNotWritten():
                self.files.not_written(event)
            case _:
                if event.call.slot in self.steps.slots:  # an answer may be of the cut before
                    self._handle_for_slot(event)

    def _handle_for_slot(self, event: SlotEvent) -> None:
        match event:
            case Started():
                self.recovery.started(event)
                self._report()
                self.late.watch_step()
                self._advance()
                self._do(Ship())
            case Reduced():
                self.steps.reduced(event)
                self.late.watch_step()
            case StepTaken():
                self._step_taken(event)
            case StateKept():
                self.steps.state_kept(event)
                self._advance()
            case HeldTold():
                self.recovery.rescued(event)
            case CopyLost():
                self.recovery.copy_lost(event)
            case ResultsUnusable():
                if event.late:
                    self.routes.check()
                self.lost_results.unusable(event)

    def _step_taken(self, event: StepTaken) -> None:
        self.steps.taken(event)
        server, slots = event.call.server, self.steps.slots
        if not any(slot.index in slots.starting for slot in slots.of(server)):
            self._placement.works(server)
        self._report()
        if event.call.step.model.whole:
            self.steps.forget()
            self._advance()
            self._do(Ship())
        else:
            self.late.watch_step()
        if event.call.slot in self.steps.slots:  # the model may have been cut anew
            self.steps.feed(event.call.slot)

    def _report(self) -> None:
        """Report the newest step if all servers have taken it.

        Before, a server gives its slices away if its link is slow by seconds: they are about to be
        sent to all workers.
        """
        if (step := self.steps.to_report()) is None:
            return
        if not step.overtaken:  # what servers fetched again took longer
            slots, nodes = self.steps.slots, self._fleet.worker_nodes()
            slow = self.links.watch(step, slots, slots.node, nodes)
            if slow is not None:
                sending = self.links.sending(self._fleet.node(slow))
                if self._take_over(slow, "its link is slow", sending):
                    return
        self.steps.report(step)

    def _take_over(self, server: str, why: str, sending: float = inf) -> bool:
        """Have other servers take the newest step in place of one, and leave that one out.

        sending: seconds of a result from its node.
        """
        node = self._fleet.node(server)
        if not self.recovery.overtake(server, why):
            return False
        for slot in self.steps.slots:  # they were compared with the one that is left out
            slot.slow = 0
        if node in self._placement.leaving:
            self._left(server)
        else:
            since = self.steps.history.last.number
            self.links.leave_out(server, node, self._fleet.now, since, sending)
        return True

    def _replace_late(self, call: Watch) -> None:
        """Leave a server out that keeps all others waiting, or have another one keep a state."""
        if self.late.has_step(call):
            self._take_over(call.server, "all others have taken it")
        elif self.late.has_copy(call):
            logger.warning("server %s is late with a copy: another one keeps it", call.server)
            self.steps.keep_elsewhere(call.server, lost=False)
            self._advance()

    def _probed(self, event: Probed) -> None:
        match event.call.purpose:
            case "routes":
                self.routes.confirm(event.seconds)
                if not self._begun:
                    size = self._settings.layout.size * self._settings.itemsize
                    if (probe := self.links.suspect(event.seconds, size)) is not None:
                        self._do(probe)
            case "suspects":
                self.links.examined(event.call, event.seconds)
            case "failed routes":
                self.recovery.lose_cut_off(event.seconds)
            case "left out":
                self.links.probed(event.call, event.seconds)

    # --- between two steps -----------------------------------------------------------------------

    def _advance(self) -> None:
        """Send the next step to the servers, if they are done with the one before."""
        self.files.advance()  # the next step replaces what it refers to
        self.steps.copy_needed()
        if not self.steps.is_due():
            self.late.watch_copy()
            return
        if leaving := self.moves.leaving(self.steps.slots):
            self._move(leaving)
        elif (slow := self.links.slow(self.steps.slots)) is not None:
            self._leave_out(slow, self.steps.history.last.number)
        elif self.moves.ready:
            self._cut([*self.steps.slots.servers, self.moves.ready.pop(0)])
        elif not self.steps.slots.is_even:
            self._cut(self.steps.slots.servers)
        self._begin()
        size = self._settings.layout.size * self._settings.itemsize // len(self.steps.slots)
        if (probe := self.links.probe(self._fleet, size)) is not None:
            self._do(probe)
        self._bring_up()
        self._do(Ship())

    def _begin(self) -> None:
        """Send the next step to the servers, once results are recomputed that a slow link holds up.

        Another worker needs less time for that.
        """
        step, again = self.steps.waiting[0], self.results.again
        sooner = self.links.is_computed_sooner
        slow = [each for each in step.results if sooner(each) and not each.model.gone]
        if not self._settings.direct:  # they may be under way as a sum of their node
            slow = []
        if slow:
            step.stalled.update(slot.index for slot in self.steps.slots)
        self.steps.begin()
        self._begun = True
        for result in slow:
            if result.task.id not in again:
                again[result.task.id] = result
                self.lost_results.compute_again(result, avoid=result.node)

    def leave(self, nodes: Collection[str]) -> None:
        """Move the slices away from nodes that will be taken away, once no step is under way."""
        self.moves.leave(nodes)
        for server in self.links.forget(nodes, self._fleet):
            self.moves.left(server)
        if self.steps.history.last.whole and not self.steps.slots.starting:
            self.files.advance()  # before the slots change
            if leaving := self.moves.leaving(self.steps.slots):
                self._move(leaving)

    def _move(self, leaving: list[Slot]) -> None:
        """Cut the model anew among the servers that stay, or start the servers elsewhere."""
        servers = list(dict.fromkeys(slot.server for slot in leaving))
        stay = [server for server in self.steps.slots.servers if server not in servers]
        if not stay:
            for server in servers:
                self.recovery.lose(server, "its node will be taken away")
            return
        self._cut(stay)
        for server in servers:
            logger.info("the node of server %s will be taken away: its slice moves", server)
            self._do(Remove(server))
            self._placement.release(server)
            self._left(server)

    def _left(self, server: str) -> None:
        """Note that a server is gone with its node. It returns on another one, whatever the link
        of an earlier node was like."""
        self.moves.left(server)
        self.links.left_out.pop(server, None)

    def _bring_up(self) -> None:
        """Start a server that gets a slice when its process is up: until then, steps go on."""
        if self.links.left_out:
            dead = {out.node for out in self.links.left_out.values()} - {*self._fleet.alive()}
            for server in self.links.forget(dead, self._fleet):
                self.moves.left(server)
        if (back := self.links.take_back(self._fleet)) is not None:
            why = "the link to server %s is good again, or holds up no step: it gets a slice"
            logger.warning(why, back)
        else:
            slow = self.links.without_server(self._fleet)
            back = self.moves.returning(self.steps.slots, slow)
        if back is not None:
            self._do(Add(back))

    def _give_up(self, server: str, why: str) -> None:
        """End a server whose process did not come up; it is started again later."""
        logger.warning("server %s did not start (%s): the others keep its slice", server, why)
        self._do(Remove(server))
        self._placement.release(server)
        if server not in self.links.left_out:  # or it returns after good probes
            self.moves.not_up(server)

    def _leave_out(self, slow: Slot, since: int) -> None:
        """Cut the model anew among the other servers.

        since: the newest version, -1 before the first step.
        """
        when = "before the first step" if since < 0 else f"at step {since}"
        why = "the link to server %s was slow %s: its slice moves to the other servers"
        logger.warning(why, slow.server, when)
        node = self.steps.slots.node(slow)
        self.links.leave_out(slow.server, node, self._fleet.now, since, self.links.sending(node))
        self._cut([server for server in self.steps.slots.servers if server != slow.server])
        self._do(Remove(slow.server))
        self._placement.release(slow.server)

    def _cut(self, servers: list[str]) -> None:
        self.steps.cut(servers)
        self.start()
