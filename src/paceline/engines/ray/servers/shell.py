"""The shell around the recovery machine: it makes the machine's calls on Ray.

It decides nothing. Answers become events; answers of a server's former life are dropped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from paceline.core.protocol import Stat, Task, Want, WorkerId
from paceline.engines.ray.failures import reason_of
from paceline.engines.ray.pool import Member
from paceline.engines.ray.servers.events import (
    Add,
    Apply,
    AskAnew,
    AskHeld,
    Call,
    CameUp,
    CopyLost,
    Event,
    GiveState,
    HeldTold,
    KeepState,
    MayBeLate,
    NotUp,
    Probe,
    Probed,
    ReadHeld,
    Redo,
    Reduce,
    Reduced,
    Refuse,
    Remove,
    Replace,
    Report,
    Request,
    ResultsUnusable,
    ServerCall,
    ServerLost,
    ServerRaised,
    SetUp,
    Ship,
    SliceNotWritten,
    SliceWritten,
    Started,
    StateKept,
    StepTaken,
    SumUp,
    TakeStep,
    Trust,
    Watch,
    WriteSlice,
)
from paceline.engines.ray.servers.fleet import Settings
from paceline.engines.ray.servers.machine import Machine
from paceline.engines.ray.servers.processes import Processes, RayFleet
from paceline.engines.ray.servers.server import Unusable
from paceline.engines.ray.servers.slices import Kept, Pieces, Version
from paceline.engines.ray.servers.slots import Copies
from paceline.engines.ray.servers.steps import LAG
from paceline.engines.ray.servers.transfers import Transfers, ask_all
from paceline.engines.ray.transport.calls import Made
from paceline.engines.ray.worker import Gone, Token
from paceline.learners.base import Server

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec, Elementwise

# The errors of a call that works on a lost object.
_LOST = (ray.exceptions.ObjectLostError, ray.exceptions.RayActorError, Gone, Unusable)
_SHORT = 10.0  # seconds for a small question to a worker


@dataclass(frozen=True)
class Callbacks:
    """The requests that servers make to the engine.

    stepped: reports a step, and the seconds that the result of each worker was on its way.
    changed: sends the tasks that wait for their model.
    asked_anew: has workers ask again for a version of the model that they wait for.
    redo: has any worker compute a task again on its model, on another node than a given one if
        there is a choice.
    refused: rejects a result that a server refused, before it is computed again.
    """

    stepped: Callable[[dict[Stat, float], Mapping[WorkerId, float]], None]
    changed: Callable[[], None]
    asked_anew: Callable[[Version], None]
    redo: Callable[[Task, Version, str], None]
    refused: Callable[[Token, Task, str], None]


class Shell:
    """Makes the machine's calls, and turns their answers into events.

    The machine holds the shell, and not the other way round. So the slices of a model are freed
    with the machine.
    """

    def __init__(
        self,
        server: Server,
        wants: frozenset[Want],
        processes: Processes,
        callbacks: Callbacks,
        codecs: tuple[Codec | None, Elementwise | None],
    ) -> None:
        """codecs: of results, and of models."""
        self._server, self._wants, self._codecs = server, sorted(wants, key=str), codecs
        self._processes, self._callbacks = processes, callbacks
        self._pool, self._calls = processes.servers, processes.calls
        self._workers, self._timeout = processes.workers, processes.timeout
        self._transport = processes.transport
        self._lag = 0 if codecs[1] is None else LAG
        self.transfers = Transfers(processes.workers, processes.calls)
        self._machine: Callable[[], Machine | None] = lambda: None

    def machine(self, copies: Copies, wants: frozenset[Want]) -> Machine:
        """Make the machine that this shell serves.

        copies: of the slices at the start, each with its server.
        """
        server, processes, model_codec = self._server, self._processes, self._codecs[1]
        settings = Settings(
            server.layout,
            (server.vector if model_codec is None else model_codec).dtype.itemsize,
            server.needs_totals,
            wants,
            processes.timeout,
            processes.transport.direct,
            rounded=model_codec is not None,
            sum_on_nodes=processes.sum_on_nodes,
            chunks=processes.chunks,
            adapts=processes.adapts,
        )
        fleet = RayFleet(processes, self.transfers)
        machine = Machine(settings, fleet, processes.placement, copies, self._make)
        self._machine = weakref.ref(machine)
        return machine

    def _handle(self, event: Event) -> None:
        machine = self._machine()
        if machine is not None:  # or the job has ended
            machine.handle(event)

    def _make(self, call: Call) -> None:
        """Make a call of the machine."""
        match call:
            case SetUp() | TakeStep() | Reduce() | Apply():
                self._call_server(call)
            case SumUp():
                self._sum_up(call)
            case KeepState():
                self._keep_state(call)
            case GiveState(keeper, index, version):
                actor = self._pool.members[keeper].actor
                call.state.ref = actor.give.remote((index, call.cut), version)
            case WriteSlice():
                self._write(call)
            case AskHeld():
                self._ask_held(call)
            case ReadHeld(worker, version, span):
                actor = self._workers.members[worker].actor
                call.values.ref = actor.held.remote(version, span)
            case Probe():
                then = partial(self._probed, call)
                self.transfers.start(call.ways, call.size, _SHORT, then)
            case Watch():
                self._calls.later(call.seconds, partial(self._handle, MayBeLate(call)))
            case _:
                self._request(call)

    def _request(self, request: Request) -> None:
        """Start and end processes, or pass a request to the engine."""
        match request:
            case Replace(server):
                self._pool.replace(self._pool.members[server])
            case Remove(server):
                self._pool.remove(server)
            case Add(server):
                self._pool.add(server)
                self._await_up(self._pool.members[server])
            case Trust(server):
                self._pool.trust(server)
            case Report(stats, sending):
                self._callbacks.stepped(dict(stats), sending)
            case Ship():
                self._callbacks.changed()
            case AskAnew(model):
                self._callbacks.asked_anew(model)
            case Redo(task, model, avoid):
                self._callbacks.redo(task, model, avoid)
            case Refuse(token, task, why):
                self._callbacks.refused(token, task, why)

    def _call_server(self, call: ServerCall) -> None:
        member, slot = self._pool.members[call.server], call.slot.index
        timeout, actor = self._timeout, member.actor
        match call:
            case SetUp(_, version, span, copy=copy, cut=cut):
                timeout = self._processes.start_timeout
                done, call.values.ref, call.state.ref = actor.set_up.options(num_returns=3).remote(
                    *(self._server.recipe(span), self._server.layout, span, version),
                    *(self._processes.secret, self._codecs, (slot, cut), copy.spans),
                    *(part.ref for part in copy.parts),
                )
            case TakeStep(_, version, step=step, pieces=pieces):
                made = Made(version, self._lag, call.values, call.state)
                order = self._order(pieces)
                done = self._transport.publish(
                    member, made, "step", version, order, step.lr_scale, slot
                )
            case Reduce(_, version, pieces=pieces):
                done = actor.reduce.remote(version, self._order(pieces), slot)
            case Apply(_, version, totals, step=step):
                made = Made(version, self._lag, call.values, call.state)
                done = self._transport.publish(
                    member, made, "apply", version, totals, step.lr_scale, slot
                )
        self._await(call, member, done, timeout)

    def _order(self, pieces: Pieces) -> tuple[Any, ...]:
        half = self._timeout / 2
        return pieces.weights, self._wants, pieces.at, pieces.refs, half, pieces.groups

    def _sum_up(self, call: SumUp) -> None:
        results, sums = call.step.results, call.results.sums
        weights = [call.step.weights[index] for index in call.results.members]
        slices = [results[i].slices[slot] for slot in sums for i in call.results.members]
        method = self._pool.members[call.server].actor.sum_up.options(num_returns=len(sums))
        made = method.remote(weights, slices, self._timeout / 4)
        for each, ref in zip(sums.values(), made if len(sums) > 1 else [made], strict=True):
            each.ref = ref

    def _await(self, call: ServerCall, member: Member, ref: Any, timeout: float) -> None:
        """Report the answer, unless the server is lost before."""

        def answered(future: Future[Any]) -> None:
            member.queued -= 1
            if not self._pool.is_current(member):
                return
            error = future.exception(timeout=0)
            if error is None:
                self._handle(_answered(call, member, future.result(timeout=0)))
            elif isinstance(error, ray.exceptions.RayTaskError):
                self._handle(_raised(call, error))
            else:
                self._handle(ServerLost(member.name, reason_of(error)))

        def overdue() -> None:
            if self._pool.is_current(member):
                why = f"did not answer in {timeout:g} s"
                self._handle(ServerLost(member.name, why))

        timeout *= 1 + member.queued  # a server answers its calls one after the other
        member.queued += 1
        self._calls.add(ref, timeout, answered, overdue)

    def _await_up(self, member: Member) -> None:
        """Report when the process of a server is there, or that it does not come."""
        seconds = self._processes.start_timeout

        def answered(future: Future[Any]) -> None:
            error = future.exception(timeout=0)
            if self._pool.is_current(member):
                self._handle(CameUp(member.name) if error is None else not_up(reason_of(error)))

        def overdue() -> None:
            if self._pool.is_current(member):
                self._handle(not_up(f"it did not come up in {seconds:g} s"))

        not_up = partial(NotUp, member.name)
        self._calls.add(member.actor.up.remote(), seconds, answered, overdue)

    def _keep_state(self, call: KeepState) -> None:
        member = self._pool.members[call.keeper]

        def kept(future: Future[Any] | None = None) -> None:
            done = future is not None and future.exception(timeout=0) is None
            # A lost keeper may answer at its end.
            has = done and self._pool.is_current(member)
            keeper = Kept(member.name, member.incarnation) if has else None
            self._handle(StateKept(call, keeper))

        what = (call.index, call.cut), call.version, call.oldest, call.state.nearest
        answer = member.actor.keep.remote(*what, self._timeout / 2)
        self._calls.add(answer, self._timeout, kept, kept)

    def _write(self, call: WriteSlice) -> None:
        """Have a slice written. A failure says nothing about the server's steps."""
        actor = self._pool.members[call.server].actor

        def answered(future: Future[Any]) -> None:
            error = future.exception(timeout=0)
            if error is None:
                self._handle(SliceWritten(call, *future.result(timeout=0)))
            else:
                self._handle(SliceNotWritten(call, reason_of(error)))

        def overdue() -> None:
            self._handle(SliceNotWritten(call, f"it took longer than {call.timeout:g} s"))

        path, refs = str(call.writing.folder / call.file), [part.ref for part in call.copy.parts]
        answer = actor.write.remote(path, call.token, refs, call.timeout)
        self._calls.add(answer, call.timeout, answered, overdue)

    def _ask_held(self, call: AskHeld) -> None:
        server, alive = self._pool.members[call.server], self._pool.cluster.nodes()
        asked = {
            member: member.actor.holds.remote()
            for member in self._workers.members.values()
            if member.joined and member.place and member.place.node in alive
        }

        def told(versions: Mapping[Member, Sequence[int]]) -> None:
            if self._pool.is_current(server):  # otherwise all were asked again
                members = self._workers.members.values()
                held = {m.name: versions[m] for m in members if m in versions}
                self._handle(HeldTold(call, held))

        ask_all(self._calls, asked, _SHORT, told)

    def _probed(self, call: Probe, seconds: Mapping[tuple[str, str], float]) -> None:
        self._handle(Probed(call, seconds))


def _answered(call: ServerCall, member: Member, answer: Any) -> Event:
    """Return a server's answer as an event."""
    match call:
        case SetUp():
            member.place, member.joined = answer[0], True
            return Started(call, answer[1])
        case Reduce():
            return Reduced(call, answer)
        case TakeStep() | Apply():
            return StepTaken(call, *answer)


def _raised(call: ServerCall, error: ray.exceptions.RayTaskError) -> Event:
    """Return as an event that a server raised an exception."""
    cause = error.cause
    match call:
        case SetUp() if isinstance(cause, _LOST):
            return CopyLost(call, error)
        case TakeStep() | Reduce() if isinstance(cause, Unusable):
            return ResultsUnusable(call, cause.lost, cause.late, cause.bad)
    return ServerRaised(call.server, call.slot, reason_of(error), error)
