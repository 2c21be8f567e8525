"""Server actors in the driver's place: each owns a slice, pulls it from the workers, publishes it.

The driver handles references alone. A step is sent to all servers with the weights and the slices
of the chosen results; a version of the model is whole, and reported, when every server has it.

When a server is lost, another takes its slice over, and takes again the steps that are missing.
Until that is done the version is not there; so no step is ever half taken. What it starts from: if
only the process is gone, the newest slice and state, which are in its node's store and belong to
the driver. If the node is gone, the slice as a worker elsewhere holds it from its last task, and
the optimizer's state, if there is any, as a server elsewhere has kept it. Results that were lost
with a node are computed again: a task gives the same result on every worker.
"""

from __future__ import annotations

import contextlib
import statistics as numbers
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import ray

from paceline.codes.blocks import covering
from paceline.core.logs import logger_of
from paceline.core.protocol import Coefficients, Task, TaskId, Want
from paceline.engines.ray.calls import Calls
from paceline.engines.ray.carrier import CARRIED_BYTES, Carriers
from paceline.engines.ray.pool import Member, Pool
from paceline.engines.ray.reducer import INLINE_BYTES, Stepped
from paceline.engines.ray.server import Done
from paceline.engines.ray.slices import Copy, Result, Slot, Step, Version
from paceline.engines.ray.worker import Answer, Gone, Token, pack
from paceline.learners.base import (
    Saved,
    Server,
    Span,
    Sums,
    add_up,
    mean_loss,
    statistics,
)

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec

logger = logger_of(__name__)

# What a call fails with if something it works on was lost.
_LOST = (ray.exceptions.ObjectLostError, ray.exceptions.RayActorError, Gone)
_SHORT = 10.0  # seconds for a small question to a worker
_ATTEMPTS = 3  # to start a server from copies that turn out to be lost
# A node's link counts as slow if whatever comes from it or goes to it takes thrice as long as
# between other nodes, and a quarter of a second more, in two steps in a row: then a server is
# better off elsewhere.
_SLOW_FACTOR, _SLOW_SECONDS, _SLOW_STEPS = 3.0, 0.25, 2


class ServersLost(RuntimeError):
    """A slice of the model is lost, and so are its copies."""


class ShardedReducer:
    """Reduces on servers; see the top of this file.

    changed: called when tasks that wait for their model may be sent.
    redo: has a task computed again on its model, by whoever can.
    """

    def __init__(
        self,
        server: Server,
        version: int,
        wants: frozenset[Want],
        pool: Pool,
        workers: Pool,
        carriers: Carriers,
        calls: Calls,
        patience: tuple[float, float],
        stepped: Stepped,
        changed: Callable[[], None],
        redo: Callable[[Task, Version], None],
        codec: Codec | None = None,
    ) -> None:
        self._codec = codec
        self._server, self._wants = server, sorted(wants, key=str)
        self._pool, self._workers, self._carriers, self._calls = pool, workers, carriers, calls
        self._cluster = pool.cluster
        self._patience, self._start_patience = patience
        self._stepped, self._changed, self._redo = stepped, changed, redo
        self._layout = server.layout
        self._expected: dict[TaskId, Result] = {}
        self._held: dict[TaskId, Result] = {}
        self._again: dict[TaskId, Result] = {}  # used, lost, and being computed once more
        self._waiting: deque[Step] = deque()  # steps not yet sent to servers
        self._log: deque[Step] = deque()  # steps sent, until every slice is elsewhere as well
        self._version = self._settled = version
        self._starting: set[int] = set()
        self._slots = self._cut()
        values = [slot.newest.parts[0] for slot in self._slots]
        self._model = Version(version, self._spans(), values, [None] * len(values), taken=True)
        self._base = self._model  # the version before those of the log

    def _cut(self) -> list[Slot]:
        """Cut the server's state into a slice for each server process, and send them out."""
        whole, saved = (0, self._layout.size), self._server.save()
        slots = []
        cluster = self._cluster
        names = list(self._pool.members)
        spans = self._layout.spans(len(names))
        for index, (name, span) in enumerate(zip(names, spans, strict=True)):
            part = self._layout.cut([(whole, saved)], span)
            arrays = {key: array for key, array in part.arrays.items() if key != "values"}
            refs = [cluster.put(part.arrays["values"]), cluster.put((arrays, dict(part.data)))]
            copy = Copy(self._version, [span], refs)
            slots.append(Slot(index, span, self._server.recipe(span), name, copy))
        for slot in slots:
            self._set_up(slot)
        return slots

    def wait(self) -> None:
        """Return when all servers are up."""
        while self._starting:
            self._calls.wait(self._cluster.clock() + self._start_patience)

    # --- what the engine asks for ----------------------------------------------------------------

    def dispatch(self, member: Member, token: Token, task: Task, model: Version) -> Any:
        assert member.place is not None
        spans = self._spans()
        reply, *slices = member.actor.compute_slices.options(num_returns=1 + len(spans)).remote(
            *(pack(token, task), model.refs, model.nodes, model.spans, spans, self._several()),
            member.unused,
        )
        member.unused = []
        self._expected[task.id] = Result(token, task, model, spans, slices, member.place.node)
        return reply

    def accept(self, answer: Answer) -> bool:
        result = self._expected.get(answer.token.task)
        if result is None or result.token != answer.token:
            return False
        del self._expected[answer.token.task]
        for slot in self._slots:  # until its next task, this worker holds that model
            if self._node(slot) != result.node:
                slot.held = max(slot.held, result.model.number)
        if answer.token.task in self._again:
            self._computed_again(self._again.pop(answer.token.task), result)
            return False
        result.loss, result.samples = answer.stats.get("loss"), answer.samples or 0
        self._held[answer.token.task] = result
        return True

    def vector(self, task: TaskId) -> None:
        return None  # its slices are with the servers; the worker says its norm

    def drop(self, task: TaskId, lost: bool = False) -> None:
        self._expected.pop(task, None)
        self._held.pop(task, None)
        if lost and task in self._again:
            self._compute_again(self._again[task])

    def step(self, weights: Mapping[TaskId, Coefficients], keep: bool) -> None:
        results = [self._held[task] if keep else self._held.pop(task) for task in weights]
        factors = list(weights.values())
        stats = mean_loss(factors, [result.loss for result in results])
        self._version += 1
        self._model = Version(self._version, [], [None], [])  # unknown until it is sent
        self._waiting.append(Step(self._version, factors, results, stats, self._model, []))
        self._advance()

    def publish(self) -> Version:
        return self._model

    def miss_model(self) -> None:
        """Have slices again whose node is lost. Nobody else may notice: a server that is idle has
        no call that could fail, and without its slice there are no results to call it with."""
        alive = self._cluster.nodes()
        for slot in self._slots:
            node = slot.newest.node
            if slot.index not in self._starting and node is not None and node not in alive:
                self._recover(slot)

    def settle(self) -> None:
        for _ in range(_ATTEMPTS):
            # Every call has a deadline, and who is lost is replaced so many times and no more: one
            # for all of it would end a run because servers are lost while somebody looks at it.
            while self._waiting or not self._last().whole:
                if not self._calls.wait(inf):
                    raise ServersLost(
                        f"the servers did not come to version {self._version}; the last whole one "
                        f"is {self._whole()}. Resume from a checkpoint"
                    )
            if self._settled == self._version:
                return
            try:
                self._gather()
            except ray.exceptions.ObjectLostError:  # the loss of a node that nobody had noticed
                self.miss_model()
        if self._settled != self._version:
            raise ServersLost(
                f"version {self._version} of the model could not be gathered in {_ATTEMPTS} "
                "attempts; resume from a checkpoint"
            )

    def _gather(self) -> None:
        parts: list[tuple[Span, Saved]] = []
        vector = self._server.vector
        for slot in self._slots:
            copy = slot.newest
            found = self._cluster.get(list(copy.parts), self._patience)
            for span, values, (arrays, data) in zip(
                copy.spans, found[0::2], found[1::2], strict=True
            ):
                vector[span[0] : span[1]] = values  # in place: the whole may be large
                if not any(span == known for known, _ in parts):
                    parts.append((span, Saved({"values": values[:0], **arrays}, data)))
        state = self._layout.cut(sorted(parts, key=_start), (0, self._layout.size))
        self._server.load(Saved({**state.arrays, "values": vector}, state.data))
        self._settled = self._version

    # --- steps -----------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Send the next step to the servers, if they are done with the one before."""
        last = self._last()
        if not self._waiting or not last.whole:
            return
        if any(slot.copied < last.number for slot in self._slots):
            return  # until the state is elsewhere as well
        if slow := next((slot for slot in self._slots if slot.slow >= _SLOW_STEPS), None):
            self._leave_out(slow)
        step = self._waiting.popleft()
        count = len(self._slots)
        step.model.spans, step.states = self._spans(), [None] * count
        step.model.refs, step.model.nodes = [None] * count, [None] * count
        self._log.append(step)
        for slot in self._slots:
            self._feed(slot)
        self._changed()

    def _feed(self, slot: Slot) -> None:
        """Send a server the step that it has to take next, one at a time."""
        version = slot.newest.version + 1
        if slot.index in self._starting or slot.sent >= version:
            return
        for step in self._log:
            if step.version == version and slot.index not in step.stalled:
                slot.sent = version
                self._send(step, slot)

    def _last(self) -> Version:
        return self._log[-1].model if self._log else self._base

    def _send(self, step: Step, slot: Slot) -> None:
        member = self._pool.members[slot.server]
        missing = partial(self._miss_results, step, slot, [r.slices for r in step.results])
        order = step.weights, self._wants, *self._pieces(step, slot), self._patience
        if not self._server.needs_totals:
            refs = member.actor.step.options(num_returns=3).remote(step.version, order)
            self._sent(step, slot, member, refs, missing)
            return
        sums = member.actor.reduce.remote(step.version, order)
        self._call(member, sums, partial(self._reduced, step, slot), missing)

    def _reduced(self, step: Step, slot: Slot, sums: Sums) -> None:
        step.sums[slot.index] = sums
        if step.totals is not None:  # it is taken again: the others are long done
            self._apply(step, slot)
        elif len(step.sums) == len(self._slots):
            step.totals = self._totals(step)
            for each in self._slots:
                self._apply(step, each)
            self._changed()

    def _apply(self, step: Step, slot: Slot) -> None:
        member = self._pool.members[slot.server]
        refs = member.actor.apply.options(num_returns=3).remote(step.version, step.totals)
        self._sent(step, slot, member, refs, None)

    def _sent(
        self, step: Step, slot: Slot, member: Member, refs: Sequence[Any], missing: Missing
    ) -> None:
        done, step.model.refs[slot.index], step.states[slot.index] = refs
        step.model.nodes[slot.index] = self._carried(slot.span, self._node(slot))
        self._call(member, done, partial(self._done, step, slot), missing)

    def _done(self, step: Step, slot: Slot, answer: Done) -> None:
        step.sums[slot.index], has_arrays, step.done[slot.index] = answer
        parts = [step.model.refs[slot.index], step.states[slot.index]]
        slot.newest = Copy(step.version, [slot.span], parts, self._node(slot))
        slot.attempts = 0
        step.model.missing.discard(slot.index)
        self._copy_state(slot, has_arrays)
        if len(step.done) == len(self._slots) and not step.model.taken:
            step.model.taken = True
            self._watch_times(step)
            totals = step.totals or self._totals(step)
            self._stepped(step.stats | statistics(totals, frozenset(self._wants)))
        if step.model.whole:
            self._forget()
            self._advance()
            self._changed()
        self._feed(slot)

    def _totals(self, step: Step) -> Sums:
        return add_up(step.sums[index] for index in range(len(self._slots)))

    def _pieces(
        self, step: Step, slot: Slot
    ) -> tuple[list[list[Span]] | None, list[Any], list[str | None]]:
        """Return where pieces of results go in this slot, the pieces, and who carries them."""
        at: list[list[Span]] = []
        pieces: list[Any] = []
        nodes: list[str | None] = []
        fitting = True
        for result in step.results:
            at.append([])
            m = result.task.work.messages
            start, stop = covering(slot.span, m)
            for span, piece in zip(result.spans, result.slices, strict=True):
                if span[0] < slot.span[1] and slot.span[0] < span[1]:
                    low, high = covering(span, m)
                    at[-1].append((low - start, high - start))
                    pieces.append(piece)
                    nodes.append(self._carried((low, high), result.node))
            fitting = fitting and at[-1] == [(0, stop - start)]
        return None if fitting else at, pieces, nodes

    def _carried(self, span: Span, node: str) -> str | None:
        """Return the node if its carrier brings a slice, None if the stores do."""
        size = (span[1] - span[0]) * self._server.vector.itemsize
        return node if node in self._carriers and INLINE_BYTES < size <= CARRIED_BYTES else None

    # --- a server whose link is slow -------------------------------------------------------------

    def _watch_times(self, step: Step) -> None:
        """Count for each server's node the steps in a row in which all ways from and to it were
        slow, against those between other nodes."""
        ways: list[tuple[str, str, float]] = []
        for slot in self._slots:
            if len(step.done[slot.index]) == len(step.results):
                for result, seconds in zip(step.results, step.done[slot.index], strict=True):
                    ways.append((result.node, self._node(slot), seconds))
        ways = [way for way in ways if way[0] != way[1]]
        for slot in self._slots:
            mine = [seconds for *ends, seconds in ways if self._node(slot) in ends]
            others = [seconds for *ends, seconds in ways if self._node(slot) not in ends]
            if mine and others:
                usual = numbers.median(others)
                bound = max(_SLOW_FACTOR * usual, usual + _SLOW_SECONDS)
                slot.slow = slot.slow + 1 if min(mine) > bound else 0

    def _leave_out(self, slow: Slot) -> None:
        """Cut the model anew among the other servers. Only between two steps."""
        logger.warning(
            "the link to server %s was slow for %d steps in a row: its slice goes to the others",
            slow.server,
            slow.slow,
        )
        olds = self._slots
        names = [slot.server for slot in olds if slot is not slow]
        spans = self._layout.spans(len(names))
        self._slots = []
        for index, (name, span) in enumerate(zip(names, spans, strict=True)):
            meet = [s for s in olds if s.span[0] < span[1] and span[0] < s.span[1]]
            parts = [part for slot in meet for part in slot.newest.parts]
            copy = Copy(olds[0].newest.version, [slot.span for slot in meet], parts)
            self._slots.append(Slot(index, span, self._server.recipe(span), name, copy))
        self._base = self._last()
        self._log.clear()
        self._starting.clear()
        for slot in self._slots:
            self._set_up(slot)
        self._pool.remove(slow.server)

    # --- what is elsewhere, in case a node is lost -----------------------------------------------

    def _copy_state(self, slot: Slot, has_arrays: bool) -> None:
        """Have a server on another node keep the optimizer's state as of the newest step."""
        version, state = slot.newest.version, slot.newest.parts[1]
        keeper = self._keeper(slot)
        if not has_arrays:  # it is small, and in this process
            slot.states[version] = state
        if not has_arrays or keeper is None:
            slot.copied = version
            return

        def kept(future: Future[Any] | None = None) -> None:
            done = future is not None and future.exception(timeout=0) is None
            if done and self._pool.is_current(keeper):  # one that is lost may answer at its end
                slot.states[version] = keeper
            slot.copied = max(slot.copied, version)  # if it failed, the next one may not
            self._forget()
            self._advance()

        oldest = self._base.number
        answer = keeper.actor.keep.remote(slot.index, version, oldest, state)
        self._calls.add(answer, self._patience, kept, kept)

    def _keeper(self, slot: Slot) -> Member | None:
        """Return the next server on another node."""
        for shift in range(1, len(self._slots)):
            other = self._slots[(slot.index + shift) % len(self._slots)]
            if other.index not in self._starting and self._node(other) != self._node(slot):
                return self._pool.members[other.server]
        return None

    def _node(self, slot: Slot) -> str:
        place = self._pool.members[slot.server].place
        return place.node if place else ""

    def _several(self) -> bool:
        """Whether there are several nodes, of which one can be lost."""
        return len({self._node(slot) for slot in self._slots}) > 1

    def _forget(self) -> None:
        """Drop the steps that nobody needs to take again, and the oldest ones in any case."""
        several = self._several()
        bound = len(self._workers.members) + 2
        while self._log and self._log[0].model.whole:
            number = self._log[0].version
            safe = all(slot.held >= number and number in slot.states for slot in self._slots)
            if several and not safe and len(self._log) <= bound:
                return
            self._base = self._log.popleft().model
        for slot in self._slots:
            slot.states = {v: s for v, s in slot.states.items() if v >= self._base.number}

    # --- starting again --------------------------------------------------------------------------

    def _set_up(self, slot: Slot) -> None:
        """Let a slot's server start from its copy, and then take all steps since."""
        member = self._pool.members[slot.server]
        copy = slot.newest
        up, *parts = member.actor.set_up.options(num_returns=3).remote(
            *(slot.recipe, self._layout, slot.span, copy.version),
            *(self._carriers, self._codec, copy.spans, *copy.parts),
        )
        self._starting.add(slot.index)

        def is_up(answer: Any) -> None:
            member.place, member.joined = answer[0], True
            self._starting.discard(slot.index)
            slot.newest = Copy(copy.version, [slot.span], parts, answer[0].node)
            self._copy_state(slot, answer[1])
            for version in self._versions():
                same = version.spans[slot.index : slot.index + 1] == [slot.span]
                if version.number == copy.version and same:
                    # What the former server made may be on another node, and be lost with it.
                    version.refs[slot.index], version.nodes[slot.index] = parts[0], None
                    version.missing.discard(slot.index)
            self._feed(slot)
            self._advance()
            self._changed()

        slot.sent = copy.version
        for step in self._log:
            if step.version > copy.version:
                step.stalled.discard(slot.index)
                if step.totals is None:
                    step.sums.pop(slot.index, None)  # of an earlier life
                if not step.model.taken:
                    step.done.pop(slot.index, None)
        self._call(member, up, is_up, partial(self._miss_copy, slot), self._start_patience)

    def _versions(self) -> list[Version]:
        return [self._base, *(step.model for step in self._log)]

    def _lose(self, member: Member, why: str) -> None:
        logger.warning("server %s is lost: %s", member.name, why)
        slot = next(slot for slot in self._slots if slot.server == member.name)
        self._starting.add(slot.index)
        for other in self._slots:  # what it kept for others is gone; the originals are not
            kept = {v: state for v, state in other.states.items() if state is not member}
            if len(kept) < len(other.states):
                other.states = kept
                self._copy_state(other, True)
        if not self._pool.replace(member):
            raise ServersLost(
                f"server {member.name} was lost too often ({why}); the last whole version is "
                f"{self._whole()}. Resume from a checkpoint, or allow more with Ray(respawns=…)"
            )
        self._recover(slot)

    def _recover(self, slot: Slot) -> None:
        """Let a server start again from the newest copy that there still is."""
        copy = slot.newest
        if copy.rescued or (copy.node is not None and copy.node not in self._cluster.nodes()):
            slot.newest = self._rescue(slot)
            for version in self._versions():
                version.missing.add(slot.index)
                same = len(version.spans) > slot.index and version.spans[slot.index] == slot.span
                if version.number < slot.newest.version or not same:
                    version.gone = True
        logger.warning("server %s starts from version %d", slot.server, slot.newest.version)
        self._set_up(slot)

    def _rescue(self, slot: Slot) -> Copy:
        """Find the newest version of a slice on the nodes that are left."""
        alive, found = self._cluster.nodes(), []
        for member in self._workers.members.values():
            if member.joined and member.place and member.place.node in alive:
                with contextlib.suppress(ray.exceptions.RayError):
                    for version in self._cluster.get(member.actor.holds.remote(), _SHORT):
                        if version >= self._base.number and version in slot.states:
                            found.append((version, member))
        if not found:
            raise ServersLost(
                f"the node of server {slot.server} is lost, and no worker has a version of its "
                f"slice from {self._base.number} on; resume from a checkpoint"
            )
        version, member = max(found, key=lambda pair: pair[0])
        state = slot.states[version]
        if isinstance(state, Member):
            state = state.actor.give.remote(slot.index, version)
        values = member.actor.held.remote(version, slot.span)
        return Copy(version, [slot.span], [values, state], rescued=True)

    def _miss_copy(self, slot: Slot, error: Exception) -> None:
        slot.attempts += 1
        if slot.attempts > _ATTEMPTS:
            raise ServersLost(
                f"the slice of server {slot.server} cannot be had ({error}); the last whole "
                f"version is {self._whole()}. Resume from a checkpoint"
            ) from error
        self._recover(slot)

    def _miss_results(self, step: Step, slot: Slot, sent: Sequence[Any], error: Exception) -> None:
        """Have the results computed again that a server could not get: their node is lost."""
        slot.sent = step.version - 1
        if any(r.slices is not slices for r, slices in zip(step.results, sent, strict=True)):
            self._feed(slot)  # they are there again already
            return
        alive = self._cluster.nodes()
        lost = [result for result in step.results if result.node not in alive]
        if not lost:  # or not yet known to be
            slot.attempts += 1
            if slot.attempts > _ATTEMPTS:
                raise error
            self._feed(slot)
            return
        step.stalled.add(slot.index)
        for result in lost:
            if result.task.id not in self._again:
                logger.warning("the result of task %d is computed again", result.task.id)
                self._again[result.task.id] = result
                self._compute_again(result)

    def _compute_again(self, result: Result) -> None:
        if result.model.gone:
            raise ServersLost(
                f"the result of task {result.task.id} is lost, and so is version "
                f"{result.model.number} of the model that it was computed on; resume from a "
                "checkpoint"
            )
        # As many samples as the first time, whatever the time allowed then. Parts are of the whole
        # batch, and all of them are computed or none.
        task, work = result.task, replace(result.task.work, budget=inf)
        samples = result.samples // work.steps if work.parts is None else task.samples
        self._redo(replace(task, work=work, samples=samples), result.model)

    def _computed_again(self, old: Result, new: Result) -> None:
        old.spans, old.slices, old.node = new.spans, new.slices, new.node
        for step in self._log:
            if step.stalled and not any(r.task.id in self._again for r in step.results):
                stalled, step.stalled = step.stalled, set()
                for index in sorted(stalled):
                    self._feed(self._slots[index])

    def _call(
        self,
        member: Member,
        ref: Any,
        then: Callable[[Any], None],
        missing: Missing,
        patience: float | None = None,
    ) -> None:
        """Have `then` called with the answer, unless the server is lost before.

        missing: called if what the call was to work on is lost.
        """
        patience = patience or self._patience

        def answered(future: Future[Any]) -> None:
            if not self._pool.is_current(member):
                return
            error = future.exception(timeout=0)
            if error is None:
                then(future.result(timeout=0))
            elif isinstance(error, ray.exceptions.RayTaskError):
                if missing is None or not isinstance(error.cause, _LOST):
                    raise error  # the user's own code failed: with its own traceback
                missing(error)
            else:
                self._lose(member, type(error).__name__)

        def overdue() -> None:
            if self._pool.is_current(member):
                self._lose(member, f"did not answer in {patience:g} s")

        self._calls.add(ref, patience, answered, overdue)

    def _whole(self) -> int:
        whole = [step.version for step in self._log if step.model.whole]
        return max([*whole, self._base.number])

    def _spans(self) -> list[Span]:
        return [slot.span for slot in self._slots]


Missing = Callable[[Exception], None] | None


def _start(part: tuple[Span, Saved]) -> int:
    return part[0][0]
