"""The driver of decentralized training on Ray.

The driver starts the nodes, collects their journals, and reports the death of a node to all others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from math import inf
from typing import Any

import ray

from paceline.core.errors import NodesLost
from paceline.core.journal import Entry
from paceline.core.logs import logger_of
from paceline.core.protocol import Event, Interrupted, Left, WorkerId
from paceline.engines.ray.pickled import check_pickled
from paceline.engines.ray.pool import Member, Pool, RayWorkers
from paceline.gossip.job import GossipJob
from paceline.gossip.ray.process import NodeProcess
from paceline.learners.base import Array

logger = logger_of(__name__)

_SLOW = 30.0  # seconds for a call that collects journal entries
_SLOWEST = 2e6  # bytes per second of the slowest link that a model may come over
GRACE = 10.0  # seconds for nodes to stop, and to return their model


class RayGossip:
    """Runs a node in an actor in the place of each worker.

    All nodes count as lost when none has answered for the timeout of the workers.
    """

    def __init__(self, workers: RayWorkers) -> None:
        self._workers = workers
        self._start_timeout, self._timeout = workers.start_timeout, workers.timeout
        self._cluster, self._clock = workers.cluster, workers.cluster.clock
        self._pool: Pool | None = None
        self._calls = self._cluster.calls()
        self._training: set[WorkerId] = set()  # nodes whose call has not returned
        self._reporting: set[WorkerId] = set()  # nodes whose last entries have not arrived
        self._entries: deque[tuple[WorkerId, Entry]] = deque()
        self._seen: dict[WorkerId, int] = {}
        self._stop_by = inf
        self._origin = self._clock()
        self._silence = 0.0  # seconds of waiting without an answer of any node
        self._bytes = 0
        self._silent: set[WorkerId] = set()  # nodes that did not answer, and have not since
        self.reason: str | None = None

    def entries(self, job: GossipJob) -> Iterator[tuple[WorkerId, Entry]]:
        check_pickled(job.learner)
        self._pool = self._workers.start(NodeProcess, job.learner)
        self._bytes = job.learner.message_bytes
        self._set_up(job)
        handles = {name: member.actor for name, member in self._members().items()}
        self._origin = self._clock()
        for name, member in self._members().items():
            self._training.add(name)
            self._reporting.add(name)
            others = {peer: handle for peer, handle in handles.items() if peer != name}
            self._calls.add(
                member.actor.train.remote(others), inf, partial(self._ended, member), _no_deadline
            )
            self._collect(member)
        while (self._training or self._reporting) and self._clock() < self._stop_by:
            while self._entries:
                yield self._entries.popleft()
            until = min(self._clock() + 1.0, self._stop_by, self._origin + job.seconds)
            listening = self._clock()
            self._calls.wait(until)
            self._silence += self._clock() - listening
            if self._silence > self._timeout:
                raise NodesLost(
                    f"none of {len(self._members())} nodes answered within the timeout of "
                    f"{self._timeout:g} s: they are paused or cut off. Check their hosts, or use "
                    "Ray(timeout=…) if a task takes longer"
                )
            if self.reason is None and self.now() >= job.seconds:
                self._stop(f"{job.seconds:g} seconds passed")
        yield from self._entries
        self._entries.clear()
        for name in sorted(self._training):
            logger.warning(
                "node %s did not stop within %g s; its model may be of a later step", name, GRACE
            )

    def stop(self, reason: str) -> None:
        self._calls.post(partial(self._stop, reason))

    def now(self) -> float:
        return self._clock() - self._origin

    def vectors(self) -> dict[WorkerId, Array]:
        asked = {n: m for n, m in self._members().items() if n not in self._silent}
        found: dict[WorkerId, Array] = {}
        waiting, limit = set(asked), GRACE + self._bytes / _SLOWEST
        deadline = inf

        def answered(name: WorkerId, future: Future[Any]) -> None:
            nonlocal deadline
            waiting.discard(name)
            deadline = self._clock() + limit  # every answer gives the others time again
            if future.exception(timeout=0) is None:
                found[name] = future.result(timeout=0)

        deadline = self._clock() + limit
        for name, member in asked.items():
            self._calls.add(
                member.actor.vector.remote(), inf, partial(answered, name), _no_deadline
            )  # fmt: skip
        while waiting and self._clock() < deadline:
            self._calls.wait(deadline)
        for name in [name for name in asked if name not in found]:
            self._silent.add(name)
            logger.warning("node %s does not answer; its model is left out", name)
        if not found:
            raise NodesLost(f"none of {len(self._members())} nodes answers; their models are lost")
        return {name: found[name] for name in self._members() if name in found}

    def close(self) -> None:
        if self._pool is not None:
            self._pool.end()
            self._pool = None
        self._calls = self._cluster.calls()
        self._workers.end()

    # --- the nodes -------------------------------------------------------------------------------

    def _set_up(self, job: GossipJob) -> None:
        given = self._cluster.put(job)
        for name, member in self._members().items():
            self._calls.add(
                member.actor.set_up.remote(given, name),
                self._start_timeout,
                partial(self._is_up, member),
                partial(self._failed, f"did not start in {self._start_timeout:g} s", member),
            )
        while not all(member.joined for member in self._members().values()):
            if not self._calls.wait(inf):
                raise NodesLost(
                    "some nodes did not start; a decentralized run needs all nodes at its start"
                )

    def _is_up(self, member: Member, future: Future[Any]) -> None:
        if isinstance(error := future.exception(timeout=0), ray.exceptions.RayTaskError):
            raise error  # the user's own code failed: with its own traceback
        if error is not None:
            self._failed(type(error).__name__, member)
        member.place, member.joined = future.result(timeout=0), True

    def _failed(self, why: str, member: Member) -> None:
        raise NodesLost(
            f"node {member.name} {why}; a decentralized run needs all nodes at its start"
        )

    def _collect(self, member: Member) -> None:
        """Ask for new journal entries; the node answers after a while."""
        collected = partial(self._collected, member)
        seen = self._seen.get(member.name, 0)
        self._calls.add(member.actor.entries.remote(seen), _SLOW, collected, lambda: True)

    def _collected(self, member: Member, future: Future[Any]) -> None:
        error = future.exception(timeout=0)
        if isinstance(error, ray.exceptions.ActorDiedError):
            return  # the call that trains fails too
        if error is not None:
            self._collect(member)
            return
        self._silent.discard(member.name)
        self._silence = 0.0
        first, entries, ended = future.result(timeout=0)
        new = entries[self._seen.get(member.name, 0) - first :]
        self._entries.extend((member.name, entry) for entry in new)
        self._seen[member.name] = first + len(entries)
        if ended:
            self._reporting.discard(member.name)
        else:
            self._collect(member)

    def _ended(self, member: Member, future: Future[Any]) -> None:
        error = future.exception(timeout=0)
        if isinstance(error, ray.exceptions.RayTaskError):
            raise error  # the user's own code failed: with its own traceback
        self._training.discard(member.name)
        if error is None:
            return  # its last entries follow
        logger.warning("node %s is lost: %s", member.name, type(error).__name__)
        assert self._pool is not None
        self._cluster.kill(member.actor)  # a node that counts as lost must not go on
        self._pool.members.pop(member.name, None)
        self._reporting.discard(member.name)
        if not self._members():
            raise NodesLost("all nodes are lost")
        self._tell_all(Left(member.name))

    def _stop(self, reason: str) -> None:
        self.reason = self.reason or reason
        self._stop_by = min(self._stop_by, self._clock() + GRACE)
        self._tell_all(Interrupted(reason))

    def _tell_all(self, event: Event) -> None:
        for member in self._members().values():
            self._tell(member, event)

    def _tell(self, member: Member, event: Event) -> None:
        """Repeat a call until the node answers: all nodes must repair the graph alike."""

        def answered(future: Future[Any]) -> None:
            error = future.exception(timeout=0)
            if error is not None and not isinstance(error, ray.exceptions.ActorDiedError):
                self._tell(member, event)

        self._calls.add(member.actor.tell.remote(event), inf, answered, _no_deadline)

    def _members(self) -> dict[WorkerId, Member]:
        return {} if self._pool is None else self._pool.members


def _no_deadline() -> None:
    """Do nothing: this call has no deadline."""
