"""The driver of decentralized training on Ray.

The driver starts the nodes, collects their journals, and reports the death of a node to all others.
It replays the journals, so it knows the state in which a dead node has to join again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import ray

from paceline.core.coordinator import Coordinator
from paceline.core.errors import NodesLost
from paceline.core.journal import Entry
from paceline.core.logs import logger_of
from paceline.core.protocol import Event, Finished, Interrupted, Joined, Left, WorkerId
from paceline.engines.ray.failures import reason_of
from paceline.engines.ray.pickled import check_pickled
from paceline.engines.ray.pool import Member, Pool, RayWorkers
from paceline.gossip.job import GossipJob, NodeState, Return
from paceline.gossip.policy import Gossip
from paceline.gossip.ray.process import NodeProcess
from paceline.learners.base import Array

logger = logger_of(__name__)

_SLOW = 30.0  # seconds for a call that collects journal entries
_SLOWEST = 2e6  # bytes per second of the slowest link that a model may come over
GRACE = 10.0  # seconds for nodes to stop, and to return their model


class RayGossip:
    """Runs a node in an actor in the place of each worker.

    A process that dies is started again, as often as the pool allows. It takes the model and the
    optimizer's state of a neighbor and goes on where its journal ends. All nodes count as lost when
    none has answered for the timeout of the workers.
    """

    def __init__(self, workers: RayWorkers) -> None:
        self._workers = workers
        self._start_timeout, self._timeout = workers.start_timeout, workers.timeout
        self._cluster, self._clock = workers.cluster, workers.cluster.clock
        self._pool: Pool | None = None
        self._calls = self._cluster.calls()
        self._training: set[WorkerId] = set()  # nodes whose call has not returned
        self._reporting: set[WorkerId] = set()  # nodes whose last entries have not arrived
        self._coordinators: dict[WorkerId, Coordinator] = {}  # of all nodes, by their journals
        self._deaths: dict[WorkerId, int] = {}
        self._starts: dict[WorkerId, int] = {}  # of nodes that died
        self._job: Any = None  # as given to the processes
        # For each process: the events that it has yet to be told, and the number told so far.
        self._events: dict[Member, deque[tuple[Event, Any]]] = {}
        self._numbers: dict[Member, int] = {}
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
        self._coordinators = {name: job.coordinator(name) for name in job.headers}
        self._set_up(job)
        began = job.began
        self._origin = self._clock() - began
        for member in self._members().values():
            state = job.resumed.get(member.name)
            self._train(member, None if state is None else Return(state.coordinator, began, {}))
        while (self._training or self._reporting) and self._clock() < self._stop_by:
            yield from self._drained()
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
        yield from self._drained()
        for name in sorted(self._training):
            logger.warning(
                "node %s did not stop within %g s; its model may be of a later step", name, GRACE
            )

    def stop(self, reason: str) -> None:
        self._calls.post(partial(self._stop, reason))

    def now(self) -> float:
        return self._clock() - self._origin

    def vectors(self) -> dict[WorkerId, Array]:
        found: dict[WorkerId, Array] = self._ask("vector", GRACE)
        return found

    def states(self) -> dict[WorkerId, NodeState]:
        found: dict[WorkerId, NodeState] = self._ask("state", self._timeout)
        for name, coordinator in self._coordinators.items():
            if name not in found:
                near = self._neighbors(name, found)[0]
                found[name] = NodeState(found[near].server, coordinator.state())
        return found

    def _ask(self, method: str, seconds: float) -> dict[WorkerId, Any]:
        """Call a method of all nodes; return the answers that come in time."""
        asked = {n: m for n, m in self._members().items() if n not in self._silent}
        found: dict[WorkerId, Any] = {}
        waiting, limit = set(asked), seconds + self._bytes / _SLOWEST
        deadline = inf

        def answered(name: WorkerId, future: Future[Any]) -> None:
            nonlocal deadline
            waiting.discard(name)
            deadline = self._clock() + limit  # every answer gives the others time again
            if future.exception(timeout=0) is None:
                found[name] = future.result(timeout=0)

        deadline = self._clock() + limit
        for name, member in asked.items():
            call = getattr(member.actor, method).remote()
            self._calls.add(call, inf, partial(answered, name), _no_deadline)
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
        self._job = self._cluster.put(replace(job, resumed={}))
        for name, member in self._pool_members().items():
            saved = [job.resumed[name].server] if name in job.resumed else []
            self._calls.add(
                member.actor.set_up.remote(self._job, name, *saved),
                self._start_timeout,
                partial(self._is_up, member),
                partial(self._failed, f"did not start in {self._start_timeout:g} s", member),
            )
        while not all(member.joined for member in self._pool_members().values()):
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

    def _train(self, member: Member, returned: Return | None) -> None:
        """Have a node train, and report."""
        name = member.name
        self._training.add(name)
        self._reporting.add(name)
        self._seen[name] = 0
        others = {peer: other.actor for peer, other in self._members().items() if peer != name}
        self._calls.add(
            member.actor.train.remote(others, returned),
            inf,
            partial(self._ended, member),
            _no_deadline,
        )
        self._collect(member)

    def _drained(self) -> Iterator[tuple[WorkerId, Entry]]:
        while self._entries:
            yield self._entries.popleft()

    def _record(self, name: WorkerId, event: Event) -> None:
        """Write an event into the journal of a node that is away."""
        coordinator = self._coordinators[name]
        now = max(self.now(), coordinator.ledger.now)
        self._entries.append((name, coordinator.handle(now, event)))

    def _reconcile(self, name: WorkerId) -> None:
        """Write into the journal of a dead node what it was told, but did not report."""
        policy, here = self._coordinators[name].policy, self._members()
        assert isinstance(policy, Gossip)
        for peer in self._coordinators:
            if peer != name and (peer in here) == (peer in policy._gone):
                self._record(name, Joined(peer) if peer in here else Left(peer))

    def _collect(self, member: Member) -> None:
        """Ask for new journal entries; the node answers after a while."""
        collected = partial(self._collected, member)
        seen = self._seen.get(member.name, 0)
        self._calls.add(member.actor.entries.remote(seen), _SLOW, collected, lambda: True)

    def _collected(self, member: Member, future: Future[Any]) -> None:
        error = future.exception(timeout=0)
        if isinstance(error, ray.exceptions.ActorDiedError) or not self._is_current(member):
            return  # the call that trains fails too
        if error is not None:
            self._collect(member)
            return
        self._silent.discard(member.name)
        self._silence = 0.0
        first, entries, ended = future.result(timeout=0)
        new = entries[self._seen.get(member.name, 0) - first :]
        for entry in new:
            self._coordinators[member.name].handle(entry.now, entry.event)
            self._entries.append((member.name, entry))
        self._seen[member.name] = first + len(entries)
        if self._pool is not None and any(isinstance(entry.event, Finished) for entry in new):
            self._pool.trust(member.name)
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
        self._lose(member, reason_of(error))
        if member.name not in self._coordinators[member.name].ledger.workers:
            self._record(member.name, Joined(member.name))  # it died before its first report
        self._record(member.name, Left(member.name))
        self._reconcile(member.name)
        self._tell_all(Left(member.name))

    # --- nodes that join again -------------------------------------------------------------------

    def _lose(self, member: Member, why: str) -> None:
        """Kill a process that counts as lost, and start it again after a while."""
        assert self._pool is not None
        name, joined = member.name, member.joined
        pause = self._pool.remove_lost(member)  # a node that counts as lost must not go on
        self._reporting.discard(name)
        again = "it is not started again" if pause is None else f"it starts again in {pause:g} s"
        logger.warning("node %s is lost: %s; %s", name, why, again)
        if not self._members():
            raise NodesLost("all nodes are lost")
        if joined:
            self._deaths[name] = self._deaths.get(name, 0) + 1
        if pause is not None:
            self._calls.later(pause, partial(self._start_again, name))

    def _start_again(self, name: WorkerId) -> None:
        """Start the process of a dead node, with the state of a neighbor."""
        if self.reason is not None or self._pool is None:
            return
        self._pool.start(name)
        member, source = self._pool.members[name], self._source(name)
        self._calls.add(
            member.actor.set_up.remote(self._job, name, source.actor.saved.remote()),
            self._start_timeout,
            partial(self._is_up_again, member),
            partial(self._lose, member, f"it did not start in {self._start_timeout:g} s"),
        )

    def _source(self, name: WorkerId) -> Member:
        """Return a neighbor that has a model; at each start the next one."""
        here, tries = self._members(), self._starts.get(name, 0)
        self._starts[name] = tries + 1
        near = self._neighbors(name, here)
        awake = [peer for peer in near if peer not in self._silent] or near
        return here[awake[tries % len(awake)]]

    def _neighbors(self, name: WorkerId, here: Collection[WorkerId]) -> list[WorkerId]:
        """Return the neighbors of a node in the graph without those that are not here."""
        policy = self._coordinators[name].policy
        assert isinstance(policy, Gossip)
        away = set(policy.graph.nodes) - set(here) - {name}
        return list(policy.graph.without(*away).neighbors[name])

    def _is_up_again(self, member: Member, future: Future[Any]) -> None:
        if not self._is_current(member):
            return
        if (error := future.exception(timeout=0)) is not None:
            self._lose(member, reason_of(error))
            return
        if self.reason is not None:
            return
        name = member.name
        ledger = self._coordinators[name].ledger
        state = self._coordinators[name].state()
        returned = Return(state, max(self.now(), ledger.now), dict(self._deaths))
        member.place = future.result(timeout=0)
        self._train(member, returned)
        self._tell_all(Joined(name), member.actor)
        member.joined = True
        logger.warning("node %s joined again at its step %d", name, ledger.version)

    def _stop(self, reason: str) -> None:
        self.reason = self.reason or reason
        self._stop_by = min(self._stop_by, self._clock() + GRACE)
        self._tell_all(Interrupted(reason))

    def _tell_all(self, event: Event, handle: Any = None) -> None:
        """Tell all nodes of an event; those that are away find it in their journals."""
        here = self._members()
        for member in here.values():
            self._tell(member, event, handle)
        if isinstance(event, Left | Joined):
            for name in self._coordinators:
                if name not in here and name != event.worker:
                    self._record(name, event)

    def _tell(self, member: Member, event: Event, handle: Any = None) -> None:
        """Tell a node of an event, after all earlier ones."""
        waiting = self._events.setdefault(member, deque())
        waiting.append((event, handle))
        if len(waiting) == 1:
            self._tell_next(member)

    def _tell_next(self, member: Member) -> None:
        """Repeat a call until the node answers: all nodes must repair the graph alike."""
        number, (event, handle) = self._numbers.get(member, 0), self._events[member][0]

        def answered(future: Future[Any]) -> None:
            error = future.exception(timeout=0)
            if isinstance(error, ray.exceptions.ActorDiedError):
                return
            if error is None:
                self._numbers[member] = number + 1
                self._events[member].popleft()
            if self._events[member]:
                self._tell_next(member)

        self._calls.add(
            member.actor.tell.remote(number, event, handle), inf, answered, _no_deadline
        )

    def _is_current(self, member: Member) -> bool:
        return self._pool is not None and self._pool.is_current(member)

    def _pool_members(self) -> dict[WorkerId, Member]:
        return {} if self._pool is None else self._pool.members

    def _members(self) -> dict[WorkerId, Member]:
        """Return the nodes that have joined."""
        return {name: member for name, member in self._pool_members().items() if member.joined}


def _no_deadline() -> None:
    """Do nothing: this call has no deadline."""
