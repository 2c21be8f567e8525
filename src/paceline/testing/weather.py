"""Ray in virtual time and bad weather: the real engine and worker code, simulated processes.

What stands in for Ray are actors that answer late, twice, wrongly or never, that die, hang and
pause. Everything derives from one seed, so that what went wrong once goes wrong again.
"""

from __future__ import annotations

import heapq
import queue
import random
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import ray

from paceline.engines.ray.calls import Calls
from paceline.engines.ray.engine import Ray
from paceline.engines.ray.pool import Cluster
from paceline.engines.ray.worker import Place, Reply, Worker, unpack

_LATENCY = 0.002  # seconds from one process to another
_START = 0.5  # seconds that a process needs to come up


def died() -> Exception:
    """Return what Ray says of a call to a process that is dead."""
    error: Exception = ray.exceptions.ActorDiedError()
    return error


def unavailable() -> Exception:
    """Return what Ray says where it cannot tell whether a call was carried out."""
    error: Exception = ray.exceptions.ActorUnavailableError("lost contact", None)
    return error


class DriverKilled(BaseException):
    """The process that decides is killed at this very moment."""


@dataclass(frozen=True)
class Weather:
    """How likely each fault is, for each task unless said otherwise."""

    lost: float = 0.0  # the answer never comes
    twice: float = 0.0  # the answer comes again
    late: float = 0.0  # the answer takes up to ten times as long
    crash: float = 0.0  # the process dies in the middle of it
    unknown: float = 0.0  # Ray cannot tell whether the call was carried out
    pause: float = 0.0  # the process stops for up to three times the deadline
    wrong: float = 0.0  # the result is not finite, of another shape or type, or out of all bounds
    stray: float = 0.0  # the answer is under another task's name
    no_start: float = 0.0  # a new process hangs, or dies, before it is up; for each start
    kill: float = 0.0  # the driver is killed; for each thing that happens
    torn: float = 0.0  # and while it writes a checkpoint; for each write
    gone: int = 0  # workers that are lost for good

    @staticmethod
    def of(rng: random.Random, gone: int = 0) -> Weather:
        """Draw a weather: each kind of fault is absent now and then, so that all mix."""
        most = {
            "lost": 0.1, "twice": 0.4, "late": 0.4, "crash": 0.1, "unknown": 0.08, "pause": 0.06,
            "wrong": 0.1, "stray": 0.04, "no_start": 0.2, "kill": 0.002, "torn": 0.3,
        }  # fmt: skip
        drawn = {
            name: rng.uniform(0, top) if rng.random() < 0.6 else 0.0 for name, top in most.items()
        }
        return Weather(**drawn, gone=rng.randint(0, gone))

    def calm(self) -> Weather:
        """Return the same without faults; who is gone for good stays so."""
        return replace(Weather(), gone=self.gone)

    def __str__(self) -> str:
        told = [f"{f.name}={v:.3g}" for f in fields(self) if (v := getattr(self, f.name))]
        return f"Weather({', '.join(told)})"


class World:
    """Virtual time, the processes in it, and the faults that befall them."""

    def __init__(self, seed: int, weather: Weather, size: int, timeout: float) -> None:
        self.rng = random.Random(seed)
        self.weather, self.timeout = weather, timeout
        self.now = 0.0
        self.happened = 0
        self.usual_is_known = False  # how large results are, to the driver
        self.most = 10**9  # things that may happen; more of them are a loop without progress
        self.faults: Counter[str] = Counter()
        self.inbox = _Inbox(self)
        self.actors: list[_Actor] = []
        names = [f"w{i}" for i in range(size)]
        self.gone = set(self.rng.sample(names, weather.gone))
        self.pace = {name: self.rng.choice((0.5, 1.0, 1.0, 1.0, 4.0)) for name in names}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0

    def strikes(self, fault: str) -> bool:
        """Draw whether a fault happens now; it is counted."""
        likely: float = getattr(self.weather, fault)
        struck = likely > 0 and self.rng.random() < likely
        if struck:
            self.faults[fault] += 1
        return struck

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (self.now + seconds, self._order, action))

    def advance(self, until: float) -> bool:
        """Have the next thing happen, if there is one before; the driver may be killed by it."""
        if not self._queue or self._queue[0][0] > until:
            return False
        if self.strikes("kill"):
            raise DriverKilled
        self.now, _, action = heapq.heappop(self._queue)
        self.count()
        action()
        return True

    def count(self) -> None:
        """Count what happens, be it that nothing does; there must be an end to it."""
        self.happened += 1
        if self.happened > self.most:
            raise RuntimeError(f"I7: no end after {self.happened} events, {self.now:.0f} s")

    def restart(self) -> None:
        """End all processes, as the death of their driver does."""
        for actor in self.actors:
            actor.alive = False
        self.actors.clear()
        self._queue.clear()
        self.inbox.clear()
        self.usual_is_known = False


class _Inbox:
    """A queue on which waiting lets virtual time pass."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._items: deque[Callable[[], None]] = deque()

    def put(self, item: Callable[[], None]) -> None:
        self._items.append(item)

    def get(self, *, timeout: float) -> Callable[[], None]:
        until = self._world.now + timeout
        while not self._items:
            if not self._world.advance(until):
                self._world.now = until
                self._world.count()
                raise queue.Empty
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items

    def clear(self) -> None:
        self._items.clear()


class _Reference:
    """What a call returns: answered once, if ever, though whoever listens may hear it twice."""

    def __init__(self) -> None:
        self._future: Future[Any] = Future()
        self._listeners: list[Callable[[Future[Any]], None]] = []

    def future(self) -> _Reference:
        return self

    def add_done_callback(self, listener: Callable[[Future[Any]], None]) -> None:
        self._listeners.append(listener)

    def answer(self, value: Any = None, error: Exception | None = None) -> None:
        if not self._future.done():
            if error is None:
                self._future.set_result(value)
            else:
                self._future.set_exception(error)
        for listener in self._listeners:
            listener(self._future)


class _Actor:
    """A process with a real worker in it."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.alive, self.ending = True, False
        self._clock = 0.0
        self._worker = Worker(lambda: self._clock, lambda: Place("simulated", 0, ""))
        self._waiting: list[_Reference] = []
        self.set_up = _Method(self._set_up)
        self.compute = _Method(self._compute)
        self.abandon = _Method(self._abandon)
        world.actors.append(self)

    def die(self) -> None:
        """End, if it has not yet, and have Ray tell so of every call that is not answered."""
        self.alive = False
        for reference in self._waiting:
            error = ray.exceptions.ActorDiedError()
            self.world.after(0.01, lambda r=reference, e=error: r.answer(error=e))  # type: ignore[misc]
        self._waiting.clear()

    def _set_up(self, reference: _Reference, *given: Any) -> None:
        world = self.world
        self._waiting.append(reference)
        if self.name in world.gone:
            world.after(_START, self.die)
        elif world.strikes("no_start"):
            if world.rng.random() < 0.5:
                world.after(_START, self.die)
        else:
            world.after(world.rng.uniform(0.5, 1.5) * _START, lambda: self._is_up(reference, given))

    def _is_up(self, reference: _Reference, given: tuple[Any, ...]) -> None:
        if self.alive:
            self._answer(reference, self._worker.set_up(*given))

    def _compute(self, reference: _Reference, *given: Any) -> None:
        world, rng = self.world, self.world.rng
        self._waiting.append(reference)
        seconds = world.pace[self.name] * rng.uniform(0.8, 1.2)
        if rng.random() < 0.1:
            seconds *= 4
        if world.strikes("late"):
            seconds *= rng.uniform(2, 10)
        if world.strikes("pause"):
            seconds += rng.uniform(0.2, 3) * world.timeout
        if world.strikes("crash"):
            world.after(rng.random() * seconds, self.die)
            return
        begin = world.now
        world.after(seconds, lambda: self._done(reference, given, begin))

    def _done(self, reference: _Reference, given: tuple[Any, ...], begin: float) -> None:
        world = self.world
        if not self.alive:
            return
        self._clock = begin
        budget = unpack(given[0])[1].work.budget
        reply = self._run(given, begin, min(world.now, begin + 0.99 * budget))
        if world.strikes("lost"):
            return
        if world.strikes("unknown"):
            self._waiting.remove(reference)
            failed = ray.exceptions.ActorUnavailableError("lost contact", None)
            world.after(_LATENCY, lambda: reference.answer(error=failed))
            return
        if world.strikes("stray"):
            name, *rest = reply
            reply = ((*name[:3], name[3] + world.rng.choice((-1, 1, 7))), *rest)
        elif world.strikes("wrong"):
            reply = self._spoiled(reply, unpack(given[0])[1].attempt)
        self._answer(reference, reply)
        if world.strikes("twice"):
            world.after(world.rng.uniform(0, 8), lambda: reference.answer(reply))

    def _run(self, given: tuple[Any, ...], begin: float, end: float) -> Reply:
        times = iter((begin,))
        self._worker._clock = lambda: next(times, end)
        return self._worker.compute(*given)

    def _spoiled(self, reply: Reply, attempt: int) -> Reply:
        """Make a result that must not get in."""
        name, vector, samples, *rest = reply
        if vector is None or not samples:
            return reply
        bad = np.array(vector)
        kinds = ["shape", "type", "samples"]
        if attempt == 1:  # else it would look like the model's doing
            kinds += ["nan", "inf"]
            if self.world.usual_is_known:
                kinds.append("large")
        kind = self.world.rng.choice(kinds)
        if kind in ("nan", "inf") and bad.dtype.kind == "f":
            bad[self.world.rng.randrange(bad.size)] = float(kind)
        elif kind == "type":
            bad = bad.astype(np.complex64)
        elif kind == "large" and bad.dtype.kind == "f":
            bad = bad * 1e30
        elif kind == "samples":
            samples = samples + 1000
        else:
            bad = bad[:-1]
        return name, bad, samples, *rest

    def _answer(self, reference: _Reference, value: Any) -> None:
        self._waiting.remove(reference)
        self.world.after(_LATENCY, lambda: reference.answer(value))

    def _abandon(self, reference: _Reference, token: tuple[Any, ...]) -> None:
        self.world.after(_LATENCY, lambda: self._worker.abandon(token))


@dataclass(frozen=True)
class _Method:
    """Called as Ray's methods are."""

    run: Callable[..., None]

    def remote(self, *given: Any) -> _Reference:
        reference = _Reference()
        self.run(reference, *given)
        return reference


class _SimulatedCluster(Cluster):
    def __init__(self, world: World) -> None:
        self._world = world

    def connect(self, address: str | None, workers: int, message_bytes: int) -> bool:
        return True

    def make_workers(
        self, cpus: float | None, gpus: float, size: int, fixed: bool, kind: type = Worker
    ) -> Callable[[str], Any]:
        return lambda name: _Actor(self._world, name)

    def calls(self) -> Calls:
        return Calls(self._world.inbox, lambda: self._world.now)

    def clock(self) -> float:
        return self._world.now

    def put(self, thing: Any) -> Any:
        return thing

    def kill(self, actor: _Actor) -> None:
        # One that is paused does not obey at once, and may answer in its last moments.
        actor.ending = True
        if self._world.rng.random() < 0.2:
            self._world.after(self._world.rng.uniform(0, 30), actor.die)
        else:
            actor.die()

    def node(self) -> str:
        return "driver"

    def nodes(self) -> set[str]:
        return {"simulated"}

    def free_cpus(self) -> float:
        return 0.0

    def shutdown(self) -> None:
        pass


class SimulatedRay(Ray):
    """`Ray` on a simulated cluster. The model is in the driver."""

    def __init__(self, workers: int, world: World, **options: Any) -> None:
        self.world = world
        super().__init__(workers, servers="driver", timeout=world.timeout, **options)

    def _make_cluster(self) -> Cluster:
        return _SimulatedCluster(self.world)
