"""The reducer whose model is on servers.

Each server owns a slice of the model, pulls that slice of the results from the workers, and
publishes it. The driver handles references alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING, Any

import ray

from paceline.core.protocol import Coefficients, Task, TaskId, Want
from paceline.engines.ray.pool import Member
from paceline.engines.ray.servers.events import ModelMissed
from paceline.engines.ray.servers.recovery import ATTEMPTS
from paceline.engines.ray.servers.shell import Callbacks, Processes, Shell
from paceline.engines.ray.servers.slices import Copy, Object, Result, Version
from paceline.engines.ray.worker import Answer, Token, pack
from paceline.learners.base import Saved, Server, Span

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec

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
        codec: Codec | None = None,
    ) -> None:
        self._server, self._processes = server, processes
        self._workers, self._cluster = processes.workers, processes.servers.cluster
        self._calls, self._timeout = processes.calls, processes.timeout
        self._settled = version  # the version that the job's own server has
        shell = Shell(server, wants, processes, callbacks, codec)
        self._transfers = shell.transfers
        self.machine = shell.machine(self._cut(version), wants)
        self.machine.start()

    def _cut(self, version: int) -> dict[str, Copy]:
        """Cut the state into a slice for each server, and put the slices into the store."""
        layout, saved, cluster = self._server.layout, self._server.save(), self._cluster
        copies = {}
        spans = layout.spans(len(self._processes.servers.members))
        for name, span in zip(self._processes.servers.members, spans, strict=True):
            part = layout.cut([((0, layout.size), saved)], span)
            arrays = {key: array for key, array in part.arrays.items() if key != "values"}
            refs = cluster.put(part.arrays["values"]), cluster.put((arrays, dict(part.data)))
            copies[name] = Copy(version, [span], [Object(ref) for ref in refs])
        return copies

    def wait(self) -> None:
        """Return when all servers are up on nodes that reach all workers."""
        if len(self._workers.nodes()) <= _FEW_NODES:
            self.machine.routes.check()
        while self.machine.steps.starting or self._transfers.running:
            self._calls.wait(self._cluster.clock() + self._processes.start_timeout)

    # --- requests of the engine ------------------------------------------------------------------

    def dispatch(self, member: Member, token: Token, task: Task, model: Version) -> Any:
        assert member.place is not None
        steps = self.machine.steps
        spans = steps.spans
        cuts = model.nodes, model.spans, spans
        others = member.refunds, *cuts, steps.several, self._timeout / 2
        reply, *slices = member.actor.compute_slices.options(num_returns=1 + len(spans)).remote(
            pack(token, task, *others), [each.ref for each in model.slices if each is not None]
        )
        member.refunds = []
        node, m = member.place.node, task.work.messages
        self.machine.expect(Result(token, task, model, spans, slices, node, m))
        return reply

    def accept(self, answer: Answer) -> bool:
        return self.machine.accept(answer.token, answer.samples or 0, answer.stats.get("loss"))

    def vector(self, task: TaskId) -> None:
        return None  # its slices are on the servers; the worker reports its norm

    def drop(self, task: TaskId, lost: bool = False) -> None:
        self.machine.drop(task, lost)

    def step(self, weights: Mapping[TaskId, Coefficients], keep: bool) -> None:
        self.machine.step(weights, keep)

    def publish(self) -> Version:
        return self.machine.steps.model

    def recover_model(self) -> None:
        self.machine.handle(ModelMissed())

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
                        f"complete version is {steps.history.last_whole}. Resume from a checkpoint"
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
                "attempts; resume from a checkpoint"
            )

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
                    f"{self._cluster.address(steps.node(slot))} at the driver within "
                    f"{self._timeout:g} s; check the link between them, or use a longer "
                    "Ray(timeout=…)"
                ) from error
            for span, values, (arrays, data) in zip(
                copy.spans, found[0::2], found[1::2], strict=True
            ):
                vector[span[0] : span[1]] = values  # in place: the whole may be large
                if not any(span == known for known, _ in parts):
                    parts.append((span, Saved({"values": values[:0], **arrays}, data)))
        state = layout.cut(sorted(parts, key=_start), (0, layout.size))
        self._server.load(Saved({**state.arrays, "values": vector}, state.data))
        self._settled = steps.model.number


def _start(part: tuple[Span, Saved]) -> int:
    return part[0][0]
