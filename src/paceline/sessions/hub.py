"""The hub: a named actor that runs the trainer of a run, and to which clients dial in.

Clients ask for calls again and again; this is also their sign of life. The trainer has a thread of
its own. Ray carries every byte, starts the actor again if its process dies, and checks who may
call.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

import ray

from paceline.core.logs import logger_of
from paceline.policies.named import sync
from paceline.report.callbacks import Callback
from paceline.sessions.cluster import NAMESPACE
from paceline.sessions.engine import Sessions
from paceline.sessions.learner import Recipe, learner_of
from paceline.sessions.options import DEFAULT_MOST, Hello, Options
from paceline.sessions.seats import Call, Seats
from paceline.training.run import Run
from paceline.training.trainer import Trainer

logger = logger_of(__name__)

SILENCE = 10.0
"""Seconds without a sign of life after which a client counts as lost."""
POLL = 2.0
"""Seconds after which a client asks again, if there is nothing for it."""
_LINGER = 30.0  # seconds in which clients may still ask how the run ended


class Welcome(NamedTuple):
    """The answer to a client that dials in."""

    client: str
    needs_recipe: bool
    options: Options


class Ended(NamedTuple):
    """The last answer to a client: why the run ended, whether by an error, the model, its step."""

    reason: str
    failed: bool
    model: Any = None
    step: int = 0


class Status(NamedTuple):
    """How a run is doing, for people."""

    step: int
    loss: float | None
    workers: int
    ended: str
    failed: bool
    summary: str
    pid: int


class _Watch(Callback):
    """Keeps the last progress."""

    def __init__(self) -> None:
        self.step, self.loss = 0, None

    def stepped(self, progress: Any) -> None:
        self.step, self.loss = progress.step, progress.loss


class Hub:
    """One run. `hub_actor` makes it an actor of Ray; clients call its methods."""

    def __init__(self, run: str, options: Options, resumed: bool = False) -> None:
        """resumed: begin with the newest checkpoint, as after a restart by Ray."""
        self._run, self._options = run, options
        self._resumed = resumed or ray.get_runtime_context().was_current_actor_reconstructed
        self._loop: asyncio.AbstractEventLoop | None = None  # that of the first call
        self._seats = Seats(wake=self._wake)
        self._events: dict[str, asyncio.Event] = {}
        self._first: Hello | None = None
        self._engine: Sessions | None = None
        self._watch = _Watch()
        self._ended: Ended | None = None
        self._summary = ""
        self._numbers = 0
        self._missing = 0  # clients that were lost without having left, and may come back
        self._looking: asyncio.Task[None] | None = None

    # --- what clients call -----------------------------------------------------------------------

    async def dial(self, hello: Hello) -> Welcome:
        """Take a client in; raise ValueError if it does not fit the run."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._looking = self._loop.create_task(self._look_after())
        if self._first is not None:
            hello.check(self._first)
        merged = self._options.merged(hello.options)
        if self._first is not None:
            self._options.check_unchanged(merged)
        self._options = merged
        self._numbers += 1
        self._missing = max(self._missing - 1, 0)
        client = f"{hello.note}#{self._numbers}.{os.getpid()}"
        self._events[client] = asyncio.Event()
        self._seats.dial(client, time.monotonic(), hello.note)
        if self._ended is None:
            logger.info("%s has joined run %s", hello.note, self._run)
        return Welcome(client, self._first is None and self._ended is None, self._options)

    async def offer(self, hello: Hello, recipe: Recipe) -> None:
        """Begin the run with the model of the first client."""
        if self._first is not None:
            hello.check(self._first)  # several may dial in before the first offer
        else:
            self._first = hello
            threading.Thread(
                target=self._train, args=(hello, recipe), name="train", daemon=True
            ).start()

    async def poll(self, client: str) -> list[Call] | Ended | None:
        """Return calls for a client, after some seconds none; None: it must dial in again."""
        if self._ended is not None:
            self._seats.leave(client, "the run has ended")
            return self._ended
        calls = self._fetch(client)
        if calls or calls is None:
            return calls
        event = self._events.setdefault(client, asyncio.Event())
        event.clear()
        calls = self._fetch(client)  # none may come between
        if calls or calls is None:
            return calls
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), timeout=POLL)
        if self._ended is not None:
            return await self.poll(client)
        return self._fetch(client)

    def _fetch(self, client: str) -> list[Call] | None:
        calls = self._seats.fetch(client, time.monotonic())
        if calls is None:
            self._events.pop(client, None)
        return calls

    async def answer(self, client: str, number: int, reply: Any, error: Any = None) -> None:
        """Take the answer of a client to a call."""
        self._seats.answer(client, number, reply, error)

    async def name(self, client: str) -> str | None:
        """Return the name of the client's worker."""
        return self._seats.name(client)

    async def leave(self, client: str) -> None:
        """Let a client go that has ended its loop."""
        self._seats.leave(client, "it has left")
        if (event := self._events.pop(client, None)) is not None:
            event.set()  # the call that waits returns

    async def gone(self, note: str) -> None:
        """Count a client as lost whose process has ended, as its launcher has seen."""
        for client in self._seats.clients:
            if client.startswith(f"{note}#"):
                self._missing += 1
                self._seats.leave(client, "its process has ended")

    # --- what people call ------------------------------------------------------------------------

    async def status(self) -> Status:
        ended = self._ended
        return Status(
            self._watch.step,
            self._watch.loss,
            len(self._seats.clients),
            "" if ended is None else ended.reason,
            ended is not None and ended.failed,
            self._summary,
            os.getpid(),
        )

    async def end(self, reason: str) -> None:
        """End the run; its model and journal are kept as at any other end."""
        if self._engine is not None:
            self._engine.interrupt(reason)
        elif self._ended is None:
            self._ended = Ended(reason, False)

    async def retire(self) -> None:
        """End this process; Ray lets only a call to an actor do so."""
        ray.actor.exit_actor()

    # --- the run ---------------------------------------------------------------------------------

    def _train(self, hello: Hello, recipe: Recipe) -> None:
        """Train to the end, in a thread of its own."""
        try:
            run = self._fit(hello, recipe)
            model = ray.put(_vector(run, recipe))
            self._summary = run.summary()
            ended = Ended(run.reason, False, model, run.steps)
        except BaseException as error:
            ended = Ended(f"{type(error).__name__}: {error}", True)
            logger.warning("run %s has failed: %s", self._run, ended.reason)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._finish, ended)

    def _fit(self, hello: Hello, recipe: Recipe) -> Run:
        given = self._options
        if given.batch_size is None:
            raise ValueError("no session has named the global batch; give batch_size=")
        shares = DEFAULT_MOST if recipe.outer is not None else given.batch_size
        least, most = given.workers or (1, min(DEFAULT_MOST, shares))
        self._engine = Sessions(most, self._seats, timeout=self._timeout, last=given.steps)
        trainer = Trainer(
            learner_of(recipe, given.batch_size, hello.examples),
            given.policy or sync(),
            self._engine,
            seed=given.seed or 0,
            callbacks=[self._watch],
            min_workers=least,
            checkpoints=given.checkpoints,
            journal=given.journal,
            progress=False,
            prices=given.prices,
            placement=given.placement,
            codec=given.codec,
            model_codec=given.model_codec,
            backups=False,  # a loop that evaluates for minutes is not overdue
        )
        if (self._resumed or given.resume) and given.checkpoints is not None:
            trainer.resume(given.checkpoints, missing_ok=True)
        never: Callable[[Any], bool] = lambda progress: False  # noqa: E731
        return trainer.fit(steps=given.steps, epochs=given.epochs, until=never)

    @property
    def _timeout(self) -> float:
        """The seconds for a task; also those in which lost clients may come back."""
        return 600.0 if self._options.timeout is None else self._options.timeout

    def _finish(self, ended: Ended) -> None:
        self._ended = ended
        for event in self._events.values():
            event.set()

    async def _look_after(self) -> None:
        """Count silent clients as lost; end a run that all have left, and then this process."""
        joined, since = False, inf
        while True:
            await asyncio.sleep(1.0)
            now = time.monotonic()
            for client in self._seats.silent(now, SILENCE):
                self._missing += 1
                self._seats.leave(client, f"it gave no sign of life for {SILENCE:g} s")
                self._events.pop(client, None)
            joined |= bool(self._seats.clients)
            if self._ended is None:
                if joined and not self._seats.clients:
                    since = min(since, now)
                    if now - since > (self._timeout if self._missing else SILENCE):
                        await self.end("all workers have left")
                        joined = False  # once
                else:
                    since = inf
                continue
            since = min(since, now)
            if now - since > _LINGER:
                ray.get_runtime_context().current_actor.retire.remote()
                return

    def _wake(self, client: str) -> None:
        def set_it() -> None:
            if (event := self._events.get(client)) is not None:
                event.set()

        assert self._loop is not None
        self._loop.call_soon_threadsafe(set_it)


def _vector(run: Run, recipe: Recipe) -> Any:
    """Return the model of a run as it is sent."""
    from paceline.learners.flat import FlatModule

    flat = FlatModule(run.model.train(), with_grads=False, changing=recipe.buffers)
    return flat.values.numpy()


def hub_actor(run: str, options: Options, detached: bool = True, resumed: bool = False) -> Any:
    """Return the actor of a run; make it if there is none.

    detached: whether it outlives the process that makes it.
    resumed: whether a new one begins with the newest checkpoint.
    """
    kind = ray.remote(max_restarts=3, max_task_retries=0, num_cpus=0, enable_task_events=False)(Hub)
    lifetime = "detached" if detached else None
    return kind.options(
        name=run, namespace=NAMESPACE, get_if_exists=True, lifetime=lifetime
    ).remote(run, options, resumed)
