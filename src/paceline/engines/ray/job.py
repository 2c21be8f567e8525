"""One job on Ray: commands become actor calls; their answers and failures become events."""

from __future__ import annotations

import heapq
import uuid
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, NamedTuple

import ray

from paceline.core.errors import WorkersLost
from paceline.core.logs import logger_of
from paceline.core.protocol import (
    MAIN,
    Assign,
    Cancel,
    Command,
    Discard,
    Event,
    Finished,
    Interrupted,
    Joined,
    Left,
    Release,
    Send,
    SetTimer,
    Start,
    Stat,
    Step,
    Stepped,
    Stop,
    Task,
    TaskId,
    TimerFired,
    WorkerId,
)
from paceline.engines.base import Job
from paceline.engines.checks import NOT_FINITE, ResultCheck, Skipping
from paceline.engines.kinds import Fleet
from paceline.engines.ray.calls import Calls
from paceline.engines.ray.drains import Drains
from paceline.engines.ray.failures import Raised, reason_of
from paceline.engines.ray.patience import Patience
from paceline.engines.ray.pool import Member, Pool
from paceline.engines.ray.reducer import Model, Reducer
from paceline.engines.ray.worker import Answer, Token, read
from paceline.engines.results import Refused
from paceline.learners.base import for_workers

logger = logger_of(__name__)

_MODEL_ATTEMPTS = 3  # how often a worker may fail to get a model before it counts as lost


@dataclass
class _Order:
    """A task for a worker, sent or waiting, and the model to compute it on."""

    task: Task
    model: Model
    attempts: int = 0  # failed ones to get the model
    moved: bool = False  # whether the next one fails because a slice has moved
    again: bool = False  # whether its result takes the place of one that was lost
    avoid: str = ""  # a node whose workers do not get it if there are others

    def is_ready(self) -> bool:
        """Return whether the model's references exist; for a second attempt, the whole model.

        If that is gone by now, the second attempt fails, and the policy assigns the task anew.
        """
        return self.model.known and (not self.attempts or self.model.whole or self.model.gone)


class Timeouts(NamedTuple):
    """Seconds that a task may take, and that a worker may take to come up.

    learned: whether a task may take less, once the usual response times are known.
    """

    task: float
    start: float
    learned: bool = True


class RayJob:
    """A job on the workers of a pool: sends tasks, reads results, replaces lost workers.

    fleet: the kind of machine of each worker.
    calls: the inbox of the job's answers.
    events: those that the trainer has not seen yet; `Ray.interrupt` adds to them too.
    secret: of the processes that may connect to each other directly, None for none.
    """

    reducer: Reducer  # set before the first command

    def __init__(
        self,
        job: Job,
        pool: Pool,
        fleet: Fleet,
        calls: Calls,
        events: deque[Event],
        timeouts: Timeouts,
        secret: bytes | None,
    ) -> None:
        self._job, self._pool, self._calls, self._events = job, pool, calls, events
        self._fleet, self._timeouts, self._secret = fleet, timeouts, secret
        self._patience = Patience(timeouts.task, timeouts.learned)
        self._run = uuid.uuid4().hex
        self._version = job.steps
        self._opened, self._has_joined = pool.cluster.clock(), False  # whether any worker has
        self.origin, self.started = self._opened, False  # the clock at the run's second 0
        self._last_loss = ""  # which worker was lost last, and why
        self._timers: list[tuple[float, str]] = []
        self._orders: dict[TaskId, _Order] = {}
        self._homeless: list[TaskId] = []  # tasks that the next idle worker computes again
        self._senders: dict[TaskId, Member] = {}  # the workers of held encoded results
        self.drains = Drains(
            *(pool, calls, events, lambda: vars(self).get("reducer")),
            *(self._drop_tasks, self._start_again),
        )
        self._raised = Raised()
        self._check = ResultCheck(job.server.layout.size, job.server.vector.dtype)
        self._skipping = Skipping(job.skip_limit)
        self._learner = pool.cluster.put(
            (for_workers(job.learner), job.tiles, job.codec, job.model_codec, job.server.layout)
        )

    def begin(self) -> None:
        """Set up all workers, and wait for as many, of each kind, as the job needs to begin.

        A job that begins with fewer workers than the fleet's least does not wait for each kind.
        """
        for name in list(self._pool.members):
            self._set_up(name)
        needed = self._job.min_workers
        by_kind = needed >= self._fleet.least
        while True:
            up = [name for name, member in self._pool.members.items() if member.joined]
            missing = self._fleet.missing(up) if by_kind else {}
            if len(up) >= needed and not missing:
                return
            if any(isinstance(event, Interrupted) for event in self._events):
                return  # it ends before it has begun
            if not self._calls.wait(inf):
                lacking = {} if len(up) < needed else missing
                kinds = "".join(f", with {n} more of {kind}" for kind, n in lacking.items())
                raise WorkersLost(
                    f"{len(up)} workers came up and {needed} are needed to begin{kinds} "
                    f"(the last one to fail: {self._last_loss}); Trainer(min_workers=…) begins "
                    "with fewer"
                )

    def start_clock(self) -> None:
        """Begin the run's time now: starting up is not training."""
        self.origin, self.started = self._pool.cluster.clock() - self._job.began, True

    def now(self) -> float:
        # Rounding must not turn time back.
        return max(self._pool.cluster.clock() - self.origin, self._job.began)

    def end(self) -> None:
        """Abandon all tasks; the next job has other models."""
        for member in self._pool.members.values():
            if member.busy is not None:
                member.actor.abandon.remote(member.busy.pack())
            member.reset()
        vars(self).pop("reducer", None)  # it calls back: the model is freed with it, at once

    # --- commands --------------------------------------------------------------------------------

    def execute(self, command: Command) -> None:
        match command:
            case Start(task):
                self._start(task)
            case Cancel(id):
                self._cancel(id)
            case Discard(id):
                self.reducer.drop(id)
                self._refund(id)
            case Release(worker):
                self.drains.let_go(worker)
            case Step(weights, _, keep, lr_scale):
                self.reducer.step(weights, keep, lr_scale)
                for id in () if keep else weights:
                    self._senders.pop(id, None)
            case SetTimer(name, at):
                if at < inf:
                    heapq.heappush(self._timers, (at, name))
            case Stop() | Assign():
                pass
            case Send():
                raise NotImplementedError("only nodes of a decentralized run send: see `lend`")

    def _start(self, task: Task) -> None:
        member = self._member(task.worker)
        if member is None:
            return  # it was lost a moment ago: its `Left` event follows
        self._orders[task.id] = _Order(task, self.reducer.publish())
        member.waiting.append(task.id)
        self._ship(member)

    def redo(self, task: Task, model: Model, avoid: str = "") -> None:
        """Recompute a task whose result was lost after it was reported.

        Any worker gives a result that is as good, so the policy need not know. The next idle worker
        gets the task: a busy worker may itself wait for the step that needs the result.

        avoid: a node whose workers do not get it, unless there are no others.
        """
        self._orders[task.id] = _Order(task, model, again=True, avoid=avoid)
        self._homeless.append(task.id)
        self.ship_all()

    def ask_anew(self, model: Model) -> None:
        """Have workers that wait for a model ask for it again; the others go on."""
        for member in self._pool.members.values():
            busy = member.busy
            order = None if busy is None else self._orders.get(busy.task)
            if busy is not None and order is not None and order.model is model:
                order.moved = True
                member.actor.ask_anew.remote(busy.pack())

    def ship_all(self) -> None:
        for member in sorted(self._pool.members.values(), key=lambda member: member.draining):
            self._ship(member)

    def _ship(self, member: Member) -> None:
        """Send an idle worker its next task, only one, so that a straggler gathers no queue."""
        if member.busy is not None or not member.joined:
            return
        own = member.waiting
        homeless = [id for id in self._homeless if self._may_have(member, self._orders[id])]
        # A draining worker takes such a task only while its own one waits, maybe for that result.
        tasks = [*own, *(homeless if own else ())] if member.draining else [*homeless, *own]
        if (id := next((id for id in tasks if self._orders[id].is_ready()), None)) is None:
            return
        (self._homeless if id in self._homeless else member.waiting).remove(id)
        order, task = self._orders[id], self._orders[id].task
        token = Token(self._run, member.name, member.incarnation, task.id)
        member.busy = token
        again = order.attempts > 0
        reply = self.reducer.dispatch(member, token, task, order.model, again)
        patience, member.sent_at = self._patience.of(member.proven), self._pool.cluster.clock()
        member.call = self._calls.add(
            reply,
            patience,
            partial(self._finished, member),
            partial(self._overdue, member, order, patience),
        )

    def _may_have(self, member: Member, order: _Order) -> bool:
        """Return whether a worker may get a task that is not its own."""
        stay = [each for each in self._pool.members.values() if each.joined and not each.draining]
        nodes = {each.place.node for each in stay if each.place is not None} - {order.avoid}
        return not nodes or member.place is None or member.place.node != order.avoid

    def _overdue(self, member: Member, order: _Order, patience: float) -> bool:
        if not (order.model.whole or order.model.gone or self._homeless):
            return True  # it waits for a server, whose call has its own deadline
        self._lose(member, f"it did not finish task {order.task.id} in {patience:g} s")
        return False

    def _cancel(self, id: int) -> None:
        order = self._orders.pop(id, None)
        self.reducer.drop(id)
        member = None if order is None else self._member(order.task.worker)
        if member is None:
            return  # the task was lost with its worker
        if member.busy is not None and member.busy.task == id:
            member.actor.abandon.remote(member.busy.pack())  # before its next piece of work, if any
        else:
            member.waiting.remove(id)

    def _set_up(self, name: WorkerId) -> None:
        member = self._pool.members[name]
        member.call = self._calls.add(
            member.actor.set_up.remote(self._learner, self._job.seed, self._secret),
            self._timeouts.start,
            partial(self._is_up, member),
            partial(self._is_not_up, member),
        )

    def _is_not_up(self, member: Member) -> bool:
        """Count a worker as lost if it does not come up; return whether to wait longer.

        The timeout begins when its process exists: a node may join after many minutes.
        """
        if not self._pool.cluster.has_process(member.actor):
            self._pool.cluster.tell_waiting(member.name)
            self._pool.trust(member.name)  # an absent machine is no failure of the worker
            return True
        if not member.placed:
            member.placed = True
            return True
        self._lose(member, f"it did not come up in {self._timeouts.start:g} s")
        return False

    # --- events ----------------------------------------------------------------------------------

    def next_event(self) -> tuple[float, WorkerId, Event] | None:
        while True:
            now = self.now()
            if self._timers and self._timers[0][0] <= now:
                self._calls.take_arrived()  # earlier results are reported first
                self._events.append(TimerFired(heapq.heappop(self._timers)[1]))
            if self._events:
                return now, MAIN, self._events.popleft()
            if not self._calls.wait(self.origin + self._timers[0][0] if self._timers else inf):
                return None

    def stepped(
        self, stats: dict[Stat, float], sending: Mapping[WorkerId, float] | None = None
    ) -> None:
        self._version += 1
        self._events.append(Stepped(self._version, stats, sending=sending or {}))

    def _is_up(self, member: Member, future: Future[Any]) -> None:
        if self._failed(member, future):
            return
        member.place, member.joined, self._has_joined = future.result(timeout=0), True, True
        self._events.append(Joined(member.name))
        self.drains.listen(member)
        self._ship(member)

    def _finished(self, member: Member, future: Future[Any]) -> None:
        if self._failed(member, future):
            return
        answer = read(future.result(timeout=0))
        id = answer.token.task
        if answer.token != member.busy:
            return self._refuse(member, None, f"it is under the name of task {id}")
        if answer.samples is None:
            member.busy = None
            return self._without_model(member, id)
        order = self._orders.get(id)
        try:
            accepted = self.reducer.accept(answer)
        except Refused as error:
            return self._refuse(member, None, str(error))
        if accepted and order is not None:
            given = self.reducer.vector(id), answer.samples, answer.stats, answer.norm
            fault = self._check.fault(order.task, *given)
            if fault == NOT_FINITE and self._skipping.may_skip(member.name):
                answer = self._skipped(answer, answer.samples, order.task)
            elif fault is not None:
                return self._refuse(member, order.task, fault)
            else:
                self._skipping.finite(member.name)
        member.busy, member.proven = None, True
        self._patience.learn(self._pool.cluster.clock() - member.sent_at)
        self._orders.pop(id, None)
        self._pool.trust(member.name)
        if answer.sent is not None:
            self._senders[id] = member
        if accepted:
            news = answer.seconds, answer.stats, self._calls.waited, answer.sent, member.model_bytes
            self._events.append(Finished(id, answer.samples or 0, *news, answer.skipped))
        elif order is not None and order.again:
            self._senders.pop(id, None)  # a step uses it
        else:
            self._refund(id)
        self._ship(member)

    def _refuse(self, member: Member, task: Task | None, why: str) -> None:
        """Reject a result and kill its worker; if the model is to blame, end the run too."""
        stops = not self._job.skip_limit
        if stops and task is not None and why == NOT_FINITE and self._check.is_again(task):
            self._events.append(
                Interrupted(
                    f"results at version {task.version} are not finite, and not because of a "
                    "worker: look at the learning rate, the model and the samples"
                )
            )
        self._lose(member, f"its result was refused: {why}", distrust=True)

    def _skipped(self, answer: Answer, samples: int, task: Task) -> Answer:
        """Skip a result that is not finite, with its samples."""
        self.reducer.drop(task.id)
        logger.warning(
            "%d samples are skipped: their result is not finite (task %d, version %d)",
            samples, task.id, task.version,
        )  # fmt: skip
        if (reason := self._skipping.reason(task)) is not None:
            self._events.append(Interrupted(reason))
        return answer._replace(samples=0, stats={}, skipped=samples)

    def refuse_later(self, token: Token, task: Task, why: str) -> None:
        """Reject a result that was accepted, if the process that computed it is still current."""
        member = self._pool.members.get(token.worker)
        if member is not None and member.incarnation == token.incarnation:
            self._refuse(member, task, why)

    def disconnected(self, actor: Any, why: str) -> None:
        """Report a worker as lost whose process is known to be gone, even while it is idle."""
        for member in list(self._pool.members.values()):
            if member.actor is actor:
                self._pool.trust(member.name)  # no failure: it may have left, and another may come
                self._lose(member, why)

    def _refund(self, id: TaskId) -> None:
        """Report an unused result to its worker, with the worker's next task."""
        member = self._senders.pop(id, None)
        if member is not None:
            member.refunds.append(id)

    def _failed(self, member: Member, future: Future[Any]) -> bool:
        """Return whether a call failed or its worker was replaced; replace a failed worker."""
        if not self._pool.is_current(member):
            return True
        member.call = None
        error = future.exception(timeout=0)
        if error is None:
            return False
        has_raised = isinstance(error, ray.exceptions.RayTaskError)
        if has_raised and self._is_users_fault(member):
            raise error  # with the traceback of the user's code
        self._lose(member, reason_of(error), distrust=has_raised)
        return True

    def _is_users_fault(self, member: Member) -> bool:
        """Return whether the exception would occur on any worker."""
        pool = self._pool
        if member.busy is None:
            late = pool.cluster.clock() > self._opened + self._timeouts.start
            others = pool.with_process() if late else pool.members
            return not self._has_joined and self._raised.in_set_up(member.name, others)
        order = self._orders.get(member.busy.task)
        if order is None or member.place is None:
            return False  # cancelled meanwhile
        where = member.name, member.place.node, len(pool.nodes())
        return self._raised.in_task(order.task, *where, alone=pool.size == 1)

    def _without_model(self, member: Member, id: TaskId) -> None:
        """Send a task again whose model was lost in transit, once the model is recovered."""
        order = self._orders.get(id)
        if order is None or not order.moved:
            self.reducer.recover_model()
        if order is None:  # cancelled meanwhile
            self._ship(member)
            return
        order.attempts, order.moved = order.attempts + 1, False
        member.waiting.appendleft(id)
        if order.model.gone or order.attempts > _MODEL_ATTEMPTS:
            # The policy must assign it on another model, which it does when a worker is lost.
            self._lose(member, f"it could not get the model for task {id}")
        else:
            self._ship(member)

    def _lose(self, member: Member, why: str, distrust: bool = False) -> None:
        """Report a worker as lost, kill its process, and start another in its place."""
        logger.warning("worker %s is lost: %s", member.name, why)
        self._last_loss = f"{member.name}: {why}"
        was_joined, member.joined = member.joined, False
        if member.call is not None:
            self._calls.drop(member.call)
        if was_joined:
            self._events.append(Left(member.name))
        self._drop_tasks(member)
        pause = self._pool.remove_lost(member, distrust)
        if pause is not None and pause > 0:
            self._calls.later(pause, partial(self._start_again, member.name))
        elif pause is not None:
            self._start_again(member.name)
        elif not self._pool.expecting:
            pool, free = self._pool, self._pool.cluster.free_cpus()
            raise WorkersLost(
                f"all {pool.size} workers are lost and respawns={pool.respawns} is used up; the "
                f"last one was {self._last_loss}. Ray reports {free:g} free CPUs"
            )

    def _drop_tasks(self, member: Member) -> None:
        """Give up the tasks of a worker that is lost, or that leaves."""
        for id in [*([member.busy.task] if member.busy else []), *member.waiting]:
            self._orders.pop(id, None)
            self.reducer.drop(id, lost=True)

    def _start_again(self, name: WorkerId) -> None:
        self._pool.start(name)
        self._set_up(name)
        self.ship_all()  # what waits for a worker of another node may go to any now

    def _member(self, name: WorkerId) -> Member | None:
        """Return the current process of a worker, None if it is not connected."""
        member = self._pool.members.get(name)
        return member if member is not None and member.joined else None
