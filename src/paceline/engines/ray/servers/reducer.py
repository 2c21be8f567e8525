"""The reducer whose model is on servers.

Each server owns a slice of the model, pulls that slice of the results from the workers, and
publishes it. The driver handles references alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ray

from paceline.core.protocol import Coefficients, Task, TaskId, Want
from paceline.engines.base import Writer
from paceline.engines.ray.pool import Member
from paceline.engines.ray.servers.events import ModelMissed
from paceline.engines.ray.servers.lost_results import ATTEMPTS
from paceline.engines.ray.servers.processes import Processes
from paceline.engines.ray.servers.server import joined, parted
from paceline.engines.ray.servers.shell import Callbacks, Shell
from paceline.engines.ray.servers.slices import Copy, Object, Result, Version
from paceline.engines.ray.servers.slots import Copies
from paceline.engines.ray.servers.writer import writer_into
from paceline.engines.ray.worker import Answer, Token, pack
from paceline.learners.base import Saved, Server, Span

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec, Elementwise

_FEW_NODES = 16  # up to which all pairs are probed before the start: 120 pairs


class ShardedReducer:
    """Reduces on servers; see the top of this file."""

    def __init__(
        self,
        server: Server,
        version: int,
        wants: frozenset[Want],
        processes: Processes,
        callbacks: Callbacks,
        codecs: tuple[Codec | None, Codec | None] = (None, None),
    ) -> None:
        """codecs: of results, and of models."""
        self._server, self._processes = server, processes
        self._workers, self._cluster = processes.workers, processes.servers.cluster
        self._calls, self._timeout = processes.calls, processes.timeout
        self._settled = version  # the version that the job's own server has
        self._model_codec = cast("Elementwise | None", codecs[1])  # `server_count` refuses others
        self._sizes: dict[int, int] = {}  # bytes of an encoded model, by the number of slices
        shell = Shell(server, wants, processes, callbacks, (codecs[0], self._model_codec))
        self._transfers = shell.transfers
        self.machine = shell.machine(self._cut(version), wants)
        self.machine.start()

    def _cut(self, version: int) -> Copies:
        """Cut the state into the slices of all servers, and put them into the store."""
        layout, saved, cluster = self._server.layout, self._server.save(), self._cluster
        names, chunks = [*self._processes.servers.members], self._processes.chunks
        copies = []
        for name, span in zip(names * chunks, layout.spans(len(names), chunks), strict=True):
            part = layout.cut([((0, layout.size), saved)], span)
            parts = parted(part, self._model_codec is not None)
            refs = [Object(cluster.put(each)) for each in parts]
            copies.append((name, Copy(version, [span], refs)))
        return copies

    def wait(self) -> None:
        """Return when all servers are up on nodes that reach all workers, and links are probed."""
        if len(self._workers.nodes()) <= _FEW_NODES:
            self.machine.routes.check()
        self._wait_for_servers()

    def leave_slow_links(self) -> None:
        """Leave out servers behind slow links, one after the other, before the first step."""
        while self.machine.leaves_slow_link():
            self._wait_for_servers()

    def _wait_for_servers(self) -> None:
        while self.machine.steps.slots.starting or self._transfers.running:
            self._calls.wait(self._cluster.clock() + self._processes.start_timeout)

    def unreachable(self) -> str | None:
        """Return why slices cannot go from process to process, or None if they can."""
        servers, workers = self._processes.servers, self._workers
        members = workers.members.values(), servers.members.values()
        asked = self._processes.transport.unreachable(*members)
        try:
            reasons = self._cluster.get(asked, self._processes.start_timeout)
        except ray.exceptions.RayError as error:
            return str(error)
        return next((reason for reason in reasons if reason is not None), None)

    # --- requests of the engine ------------------------------------------------------------------

    def dispatch(
        self, member: Member, token: Token, task: Task, model: Version, again: bool = False
    ) -> Any:
        assert member.place is not None
        steps = self.machine.steps
        spans = steps.slots.spans
        hold = len(steps.slots.nodes) > 1 and self._model_codec is None
        others = member.refunds, model.spans, spans, hold, self._timeout / 2
        slices = [each for each in model.slices if each is not None]
        refs = [each.ref if again else each.nearest for each in slices]
        servers = [self._processes.servers.members[slot.server] for slot in steps.slots]
        given = pack(token, task, *others), refs
        transport, waits = self._processes.transport, not member.pushes
        reply, pieces = transport.call(
            member, task.version + 1, servers, waits, "compute_slices", len(spans), *given
        )
        member.refunds, member.model_bytes = [], self._model_bytes(model)
        node, m = member.place.node, task.work.messages
        pushed = transport.direct and not waits
        self.machine.expect(Result(token, task, model, spans, pieces, node, pushed, m))
        return reply

    def _model_bytes(self, model: Version) -> int | None:
        """Return the bytes of a model on its way, if it is encoded."""
        if self._model_codec is None:
            return None
        if len(model.spans) not in self._sizes:
            from paceline.codecs.downlink import rounded_bytes

            trained, item = self._server.layout.trained, self._server.vector.itemsize
            sizes = (rounded_bytes(self._model_codec, span, trained, item) for span in model.spans)
            self._sizes[len(model.spans)] = sum(sizes)
        return self._sizes[len(model.spans)]

    def accept(self, answer: Answer) -> bool:
        token = answer.token
        again = token.task in self.machine.results.again
        given = answer.samples or 0, answer.stats, answer.seconds
        accepted = self.machine.accept(token, *given)
        if not accepted and not again and answer.norm is not None:  # its vector came for nothing
            self._use(token, False)
        return accepted

    def _use(self, token: Token, used: bool) -> None:
        """Have a worker push its next result at once only if its last one was used."""
        member = self._workers.members.get(token.worker)
        if member is not None:
            member.pushes = used

    def vector(self, task: TaskId) -> None:
        return None  # its slices are on the servers; the worker reports its norm

    def drop(self, task: TaskId, lost: bool = False) -> None:
        if (unused := self.machine.results.held.get(task)) is not None:
            self._use(unused.token, False)
        self.machine.drop(task, lost)

    def step(
        self, weights: Mapping[TaskId, Coefficients], keep: bool, lr_scale: float = 1.0
    ) -> None:
        for task in weights:
            self._use(self.machine.results.held[task].token, True)
        self.machine.step(weights, keep, lr_scale)

    def publish(self) -> Version:
        return self.machine.steps.model

    def recover_model(self) -> None:
        self.machine.handle(ModelMissed())

    def leave(self, nodes: Collection[str]) -> None:
        self.machine.leave(nodes)

    def has_results_in(self, member: Member) -> bool:
        if not self._processes.transport.direct:
            return False  # they are in the store of its node
        life = member.name, member.incarnation
        found = self.machine.results_in_use()
        return any((r.token.worker, r.token.incarnation) == life for r in found)

    def settle(self) -> None:
        recovery, steps = self.machine.recovery, self.machine.steps
        if recovery.failure is not None:
            raise recovery.failure
        for _ in range(ATTEMPTS):
            # Every call has a deadline, and each lost server has its respawns. One deadline for
            # all would end a run because servers are lost while a checkpoint is taken.
            while steps.waiting or not steps.history.last.whole:
                if not self._calls.wait(inf):
                    raise recovery.fail(
                        f"the servers did not reach version {steps.model.number}; the last "
                        f"complete version is {steps.history.last_whole}"
                    )
            if self._settled == steps.model.number:
                return
            try:
                self._gather()
            except ray.exceptions.ObjectLostError:  # a node is lost, but no call has failed
                self.recover_model()
        if self._settled != steps.model.number:
            raise recovery.fail(
                f"version {steps.model.number} of the model could not be gathered in {ATTEMPTS} "
                "attempts"
            )

    def writer(self, folder: Path) -> Writer | None:
        return writer_into(folder, self.machine, self._processes)

    def _gather(self) -> None:
        """Bring the newest slices and states to the job's own server."""
        steps, layout = self.machine.steps, self._server.layout
        parts: list[tuple[Span, Saved]] = []
        vector = self._server.vector
        until = self._cluster.clock() + self._timeout  # for all of them
        for slot in steps.slots:
            copy = slot.newest
            try:
                left = max(until - self._cluster.clock(), 0.0)
                found = self._cluster.get([part.ref for part in copy.parts], left)
            except ray.exceptions.GetTimeoutError as error:
                raise self.machine.recovery.fail(
                    f"the slice of server {slot.server} did not arrive from "
                    f"{self._cluster.address(steps.slots.node(slot))} at the driver within "
                    f"{self._timeout:g} s; check the link between them, or use a longer "
                    "Ray(timeout=…)"
                ) from error
            for span, saved in zip(copy.spans, joined(found, len(copy.spans)), strict=True):
                values = saved.arrays["values"]
                vector[span[0] : span[1]] = values  # in place: the whole may be large
                if not any(span == known for known, _ in parts):
                    rest = {**saved.arrays, "values": values[:0]}
                    parts.append((span, Saved(rest, saved.data)))
        state = layout.cut(sorted(parts, key=_start), (0, layout.size))
        self._server.load(Saved({**state.arrays, "values": vector}, state.data))
        self._settled = steps.model.number


def _start(part: tuple[Span, Saved]) -> int:
    return part[0][0]
