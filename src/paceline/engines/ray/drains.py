"""Workers that will be taken away: how a job learns of it, and how they leave."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable
from functools import partial

from paceline.core.logs import logger_of
from paceline.core.protocol import Draining, Event, Interrupted, Left, WorkerId
from paceline.engines.ray.calls import Calls
from paceline.engines.ray.pool import Member, Pool
from paceline.engines.ray.reclaimed import Notice
from paceline.engines.ray.reducer import Reducer

logger = logger_of(__name__)

_HANDING_OVER = 20.0  # seconds that a drained worker keeps results which servers need
_LOOK = 0.1  # seconds between two looks whether servers still need them
_ENDING = 2.0  # seconds that a process has to end by itself


class Drains:
    """The workers of a job that finish their task and leave.

    events: of the job, to which this adds.
    reducer: returns the reducer of the job, None until there is one.
    drop: gives up the tasks of a worker.
    start_again: starts a worker that was removed from the pool.
    leaving: nodes that will be taken away.
    """

    def __init__(
        self,
        pool: Pool,
        calls: Calls,
        events: deque[Event],
        reducer: Callable[[], Reducer | None],
        drop: Callable[[Member], None],
        start_again: Callable[[WorkerId], None],
    ) -> None:
        self._pool, self._calls, self._events = pool, calls, events
        self._reducer, self._drop, self._start_again = reducer, drop, start_again
        self.leaving: set[str] = set()

    def drain(self, names: Iterable[WorkerId]) -> None:
        """Have workers finish their tasks and leave; each is started again where there is room."""
        for name in names:
            member = self._pool.members.get(name)
            if member is not None and member.joined and not member.draining:
                member.draining = True
                logger.info("worker %s will be taken away: it finishes its task and leaves", name)
                self._events.append(Draining(name))

    def drain_nodes(self, nodes: Collection[str]) -> None:
        """Drain the workers on nodes that will be taken away, and move the model from there.

        nodes: all of them; those of an earlier call that are missing stay, or are gone.
        """
        self.leaving = {*nodes}
        if (reducer := self._reducer()) is not None:
            reducer.leave(nodes)
        places = {name: member.place for name, member in self._pool.members.items()}
        self.drain(n for n, place in places.items() if place is not None and place.node in nodes)

    # --- notices ---------------------------------------------------------------------------------

    def listen(self, member: Member) -> None:
        """Be told if a worker learns that it will be taken away; it may be known already."""
        if member.place is not None and member.place.node in self.leaving:
            self.drain([member.name])
        calls, found = self._calls, weakref.ref(self)  # the call may outlive the job

        def tell(notice: Notice | None) -> None:
            if (drains := found()) is not None:
                calls.post(partial(drains._noticed, member, notice))

        self._pool.cluster.listen(member.actor, tell)

    def _noticed(self, member: Member, notice: Notice | None) -> None:
        """Drain a worker that has a notice, with all others on its machine if that goes."""
        if not self._pool.is_current(member) or member.place is None:
            return
        node = member.place.node
        if notice is None:
            self.listen(member)
        elif not notice.machine or node in self.leaving:
            self.drain([member.name])
        elif node == self._pool.cluster.node():
            reason = f"the machine of this process will be taken away: {notice.why}"
            self._events.append(Interrupted(reason))
        else:
            logger.warning("the machine of worker %s leaves: %s", member.name, notice.why)
            self._pool.cluster.drain(node, notice.why)
            self.drain_nodes({*self.leaving, node})

    # --- leaving ---------------------------------------------------------------------------------

    def let_go(self, name: WorkerId) -> None:
        """Report a drained worker, which has no task, as left; its process may end later."""
        member = self._pool.members.get(name)
        if member is None or not member.joined:
            return  # its node was faster
        member.joined = False
        if member.call is not None:  # of a task that was cancelled, or that it computes for others
            self._calls.drop(member.call)
            self._drop(member)
        self._events.append(Left(name))
        self._replace(member, self._pool.cluster.clock() + _HANDING_OVER)

    def _replace(self, member: Member, until: float) -> None:
        """End a drained worker once no server needs a result in it, and start another instead."""
        if not self._pool.is_current(member):
            return  # its node was faster
        reducer = self._reducer()
        holds = reducer is not None and reducer.has_results_in(member)
        if holds and self._pool.cluster.clock() < until:
            self._calls.later(_LOOK, partial(self._replace, member, until))
            return
        self._calls.later(_ENDING, self._pool.release(member))
        self._start_again(member.name)
