"""The connection of a user's process to a run: it dials in, carries out calls, dials in again."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ray

from paceline.core.logs import logger_of
from paceline.core.state import describe
from paceline.engines.ray.place import Place
from paceline.engines.ray.worker import Given, Worker
from paceline.learners.optimize import shapes_of
from paceline.sessions.cluster import note_of
from paceline.sessions.hub import POLL, SILENCE, Ended, Welcome, hub_actor
from paceline.sessions.learner import Recipe
from paceline.sessions.options import Hello, Options
from paceline.sessions.seats import Call
from paceline.sessions.turns import RunEnded, Turns

logger = logger_of(__name__)

RECONNECT = 120.0
"""Seconds in which a lost hub must be back."""
_ANSWER = 60.0  # seconds that a hub may take for a short call


class LoopWorker(Worker):
    """The worker of a session: all of `Worker` but the computing, which the user's loop does."""

    def __init__(self, turns: Turns, rate: Callable[[int], float]) -> None:
        super().__init__(place=_place)
        self._turns, self._rate_here = turns, rate

    @property
    def rate(self) -> Callable[[int], float]:
        return self._rate_here

    def replica(self, seed: int, tiles: Any) -> Turns:
        return self._turns.replica(seed, tiles)

    def set_up(self, given: Given, seed: int, secret: bytes | None) -> Place:
        _, *rest = given
        return super().set_up((self, *rest), seed, None)  # type: ignore[arg-type]

    def abandon(self, token: bytes) -> None:
        super().abandon(token)
        self._turns.wake()


def _place() -> Place:
    # Without its start time: a run never kills a user's process.
    return Place(ray.get_runtime_context().get_node_id(), os.getpid(), "")


def join(
    run: str, recipe: Recipe, options: Options, examples: int, rate: Callable[[int], float]
) -> tuple[Connection, Options]:
    """Connect this process to a run; return the settings that the run has.

    examples: the samples of one epoch.
    rate: returns the learning rate at a step.
    """
    rules = {
        "optimizer": repr(recipe.optimizer),
        "outer": describe(recipe.outer),
        "scheduler": repr(recipe.scheduler),
        "clip_norm": repr(recipe.transform),
    }
    hello = Hello(shapes_of(recipe.model), rules, examples, options=options)
    turns = Turns()
    connection = Connection(run, hello, lambda: recipe, turns, LoopWorker(turns, rate))
    return connection, connection.open().options


class Connection:
    """Keeps a session in its run, in two threads: one asks for calls, one carries them out."""

    def __init__(
        self, run: str, hello: Hello, recipe: Callable[[], Recipe], turns: Turns, worker: LoopWorker
    ) -> None:
        self._run, self._recipe = run, recipe
        self._hello = replace(hello, note=note_of(os.getpid()))
        self.turns, self._worker = turns, worker
        self._hub: Any = None
        self._client = ""
        self._closing = threading.Event()
        self._calls: queue.SimpleQueue[tuple[str, Call] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"paceline-{name}", daemon=True)
            for name, target in (("asks", self._ask), ("works", self._work))
        ]

    def open(self) -> Welcome:
        """Dial in; raise ValueError if the run refuses this process."""
        welcome = self._dial(time.monotonic() + RECONNECT)
        for thread in self._threads:
            thread.start()
        return welcome

    def close(self) -> None:
        """Leave the run."""
        if self._closing.is_set():
            return
        self._closing.set()
        self.turns.end(RunEnded("the session is closed", False, None))
        self._calls.put(None)
        if not ray.is_initialized():
            return  # the cluster is gone
        try:
            ray.get(self._hub.leave.remote(self._client), timeout=_ANSWER / 6)
        except Exception as error:  # the run notices by itself
            logger.debug("the run was not told that %s left: %s", self._client, error)
        for thread in self._threads:
            thread.join(timeout=_ANSWER / 6)

    @property
    def name(self) -> str | None:
        """The name of this process's worker."""
        found: str | None = ray.get(self._hub.name.remote(self._client), timeout=_ANSWER)
        return found

    def _dial(self, deadline: float) -> Welcome:
        """Find the hub, or make it, and dial in; try again until the deadline."""
        while True:
            try:
                self._hub = hub_actor(self._run, self._hello.options)
                welcome: Welcome = ray.get(self._hub.dial.remote(self._hello), timeout=_ANSWER)
                if welcome.needs_recipe:
                    offered = self._hub.offer.remote(self._hello, self._recipe())
                    ray.get(offered, timeout=_ANSWER)
                self._client = welcome.client
                return welcome
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None  # it says what does not fit
            except (ray.exceptions.RayError, TimeoutError) as error:
                if time.monotonic() > deadline:
                    raise ConnectionError(
                        f"run {self._run!r} has not answered for {RECONNECT:g} s: {error}"
                    ) from error
                self._closing.wait(timeout=0.5)

    def _ask(self) -> None:
        """Ask for calls until the run ends; this is also the sign of life."""
        while not self._closing.is_set():
            try:
                asked = self._hub.poll.remote(self._client)
                found: Sequence[Call] | Ended | None = ray.get(asked, timeout=POLL + SILENCE)
                if isinstance(found, Ended):
                    return self.turns.end(_end_of(found))
            except Exception as error:
                if self._closing.is_set():
                    return
                logger.warning("the connection to run %s is lost (%s)", self._run, _line(error))
                found = None
            if found is None and not self._again():
                return
            for call in found or ():
                if call.method == "abandon":
                    self._worker.abandon(*call.arguments)
                else:
                    self._calls.put((self._client, call))

    def _again(self) -> bool:
        """Dial in again; return whether that worked."""
        if self._closing.is_set():
            return False
        self.turns.drop()
        try:
            self._dial(time.monotonic() + RECONNECT)
        except Exception as error:
            self.turns.end(RunEnded(_line(error), True, None))
            return False
        return True

    def _work(self) -> None:
        """Carry out calls, one after the other."""
        while (item := self._calls.get()) is not None:
            client, call = item
            if client != self._client:
                continue  # of an earlier seat
            reply = error = None
            try:
                arguments = [_here(each) for each in call.arguments]
                reply = getattr(self._worker, call.method)(*arguments)
            except Exception as raised:
                error = raised
                if call.method == "set_up":  # it would raise again and again
                    self.turns.end(
                        RunEnded(f"this process cannot join: {_line(raised)}", True, None)
                    )
            if client == self._client and not self._closing.is_set():
                self._answer(client, call.number, reply, error)

    def _answer(self, client: str, number: int, reply: Any, error: Exception | None) -> None:
        try:
            self._hub.answer.remote(client, number, reply, error)
        except Exception as raised:  # it cannot be pickled, or the hub is gone
            logger.warning("an answer could not be sent: %s", _line(raised))
            with contextlib.suppress(Exception):
                self._hub.answer.remote(client, number, None, RuntimeError(_line(raised)))


def _here(argument: Any) -> Any:
    """Return an argument, fetched if it is in a store."""
    if isinstance(argument, ray.ObjectRef):
        return ray.get(argument, timeout=_ANSWER * 5)
    return argument


def _end_of(ended: Ended) -> RunEnded:
    model = None
    if ended.model is not None:
        model = ray.get(ended.model, timeout=_ANSWER)
    return RunEnded(ended.reason, ended.failed, model, ended.step)


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
