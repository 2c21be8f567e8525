"""Simulated processes with a real worker or server in them, and the objects that they exchange.

They stand in for Ray's actors: they answer late, twice, wrongly or never, die, hang and pause. What
a call returns lies on the machine of the process that made it, and is lost with it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, repeat
from typing import Any

import numpy as np
import ray

from paceline.core.copies import samples_of
from paceline.core.protocol import Task
from paceline.engines.ray.place import Place
from paceline.engines.ray.servers.server import Server
from paceline.engines.ray.worker import Reply, Token, Worker, unpack
from tests.storms.weather import World

_LATENCY = 0.002  # seconds from one process to another
_START = 0.5  # seconds that a process needs to come up
_SLOW = 1.0  # seconds that a slice takes over a slow link
JOINS_IN = 10.0
"""Seconds in which a worker must have joined, once there is a machine for it."""
POISON = "this sample cannot be read"
RAISED: type[Exception] = ray.exceptions.RayTaskError
"""As what the user sees an exception of a worker."""


def died() -> Exception:
    """Return what Ray says of a call to a process that is dead."""
    error: Exception = ray.exceptions.ActorDiedError()
    return error


def unavailable() -> Exception:
    """Return what Ray says where it cannot tell whether a call was carried out."""
    error: Exception = ray.exceptions.ActorUnavailableError("lost contact", None)
    return error


def raised(why: str) -> Exception:
    """Return what Ray says of a call whose code raised."""
    return wrapped("simulated", why, OSError(why))


def wrapped(name: str, told: str, cause: Exception) -> Exception:
    """Return an exception as Ray hands it on: of its own kind, and a RayTaskError."""
    error = ray.exceptions.RayTaskError(name, told, cause, "", 0, "")
    found: Exception = error.as_instanceof_cause()
    return found


class Reference:
    """What a call returns: answered once, if ever, though whoever listens may hear it twice.

    node: whose store it is in; None: it is small, and with whoever made the call.
    holder: the process that it is in, if it is in no store.
    """

    def __init__(self, world: World, node: str | None = None) -> None:
        self._world, self.node = world, node
        self.holder: Process | None = None  # with which it is lost
        self._future: Future[Any] = Future()
        self._listeners: list[Callable[[Any], None]] = []
        self._waiting: list[Callable[[], None]] = []

    def future(self) -> Reference:
        return self

    def done(self) -> bool:
        """Return whether it is answered."""
        return self._future.done()

    def add_done_callback(self, listener: Callable[[Any], None]) -> None:
        if self._future.done():
            listener(self._future)
        else:
            self._listeners.append(listener)

    def when_here(self, action: Callable[[], None], node: str | None = None) -> bool:
        """Tell whether it can be read on a node, or is known to be lost; if not, act when it is."""
        if not self._future.done():
            self._waiting.append(action)
        elif self._world.is_cut(self.node, node) and self.node not in self._world.dead:
            self._world.after(1.0, action)  # looks again: the machine may be lost by then
        elif self.node in self._world.silent:
            self._world.silent[self.node].append(action)
        else:
            return True
        return False

    def fetched(self, node: str) -> Reference:
        """Return a copy on a node, which stays when the machine is lost that it came from."""
        copy = Reference(self._world)
        late = not self._future.done() or self.node in self._world.silent
        try:
            cut = self._world.is_cut(self.node, node) and self.node not in self._world.dead
            if late or cut:
                raise ray.exceptions.GetTimeoutError("not here in time")
            copy.answer(self.result(timeout=0))
        except ray.exceptions.RayError as error:
            copy.answer(error=error)
        return copy

    def failed(self) -> bool:
        """Return whether the call that was to return it has failed."""
        return self._future.done() and self._future.exception(timeout=0) is not None

    def is_lost(self) -> bool:
        """Return whether it is lost with its machine or its process."""
        if self.node in self._world.dead:
            return True
        return self.holder is not None and self.node is not None and not self.holder.alive

    def result(self, timeout: float) -> Any:
        if self.node in self._world.dead:
            raise ray.exceptions.ObjectLostError("simulated", None, "")
        if self.is_lost():
            raise died()
        return self._future.result(timeout)

    def answer(self, value: Any = None, error: Exception | None = None) -> None:
        if not self._future.done():
            if error is None:
                self._future.set_result(value)
            else:
                self.node = None
                self._future.set_exception(error)
        for listener in self._listeners:
            listener(self._future)
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            action()


def when_here(
    references: Sequence[Reference], action: Callable[[], None], node: str | None = None
) -> None:
    """Act as soon as all objects can be read on a node or are known to be lost."""
    again = partial(when_here, references, action, node)
    if all(reference.when_here(again, node) for reference in references):
        action()


@dataclass(eq=False)
class Call:
    """A call on its way through a process."""

    name: str
    given: tuple[Any, ...]
    returns: list[Reference]
    begun: bool = False
    nodes: list[str | None] = field(default_factory=list)  # where its objects were


@dataclass(frozen=True)
class Method:
    """Called as Ray's methods are."""

    process: Process
    name: str
    returns: int = 1

    def options(self, num_returns: int) -> Method:
        return replace(self, returns=num_returns)

    def remote(self, *given: Any) -> Any:
        world = self.process.world
        returns = [Reference(world) for _ in range(self.returns)]
        sent = tuple(list(each) if isinstance(each, list) else each for each in given)
        self.process.receive(Call(self.name, sent, returns))
        return returns[0] if self.returns == 1 else returns


class Process:
    """One life of an actor on some machine."""

    calls: frozenset[str] = frozenset()  # what the engine may ask of it

    def __init__(self, world: World, name: str, node: str) -> None:
        self.world, self.name, self.node = world, name, node
        self.alive, self.ending = node not in world.silent, False
        self.placed = bool(node)
        self.due: float | None = None  # by when it must have joined
        self.times: Iterator[float] = repeat(0.0)
        self.place = Place(node, 0, "")
        self.inside: Any = None
        self._open: list[Call] = []
        world.actors.append(self)

    def clock(self) -> float:
        return next(self.times)

    def __getattr__(self, name: str) -> Method:
        if name not in type(self).calls:
            raise AttributeError(f"{type(self).__name__} has no method {name!r}")
        return Method(self, name)

    def die(self) -> None:
        """End, if it has not yet, and have Ray tell so of every call that is not answered."""
        self.alive = False
        for call in self._open:
            self._later(call, error=died(), seconds=0.01)
        self._open.clear()

    # --- a call, from its arrival to its answer --------------------------------------------------

    def receive(self, call: Call) -> None:
        if not self.alive and self.node not in self.world.silent:
            return self._later(call, error=died(), seconds=0.01)
        self._open.append(call)
        if self.placed:
            self._wait_for(call)

    def be_placed(self, node: str) -> None:
        if self.alive:
            self.node, self.placed, self.place = node, True, Place(node, 0, "")
            for call in list(self._open):
                self._wait_for(call)

    def _wait_for(self, call: Call) -> None:
        """Begin a call when its objects are here, or its timeout for them has passed."""
        when_here(self.needs(call), partial(self.begin, call), self.node)
        if not call.begun and (timeout := self.timeout(call)) is not None:
            self.world.after(timeout, partial(self.begin, call))

    def timeout(self, call: Call) -> float | None:
        """Return the seconds after which a call goes on without the objects that are not here."""
        return None

    def needs(self, call: Call) -> list[Reference]:
        """Return the objects that have to be here before it begins."""
        return [given for given in call.given if isinstance(given, Reference)]

    def begin(self, call: Call) -> None:
        if call.begun or not self.alive:
            return
        call.begun = True
        call.nodes = [reference.node for reference in self.needs(call)]
        call.given = _fetched(call.given, self.node)
        if call.name == "set_up":
            self._start(call)
        else:
            self.carry_out(call)

    def carry_out(self, call: Call) -> None:
        """Do it after a moment."""
        self.world.after(_LATENCY, partial(self.finish, call))

    def _start(self, call: Call) -> None:
        world = self.world
        if self.name in world.gone:
            world.after(_START, self.die)
        elif world.strikes("no_start"):
            fate = world.rng.choice(("dies", "hangs", "raises"))
            # On all workers, or twice on one server, it would be the user's code.
            raised_before = self.name in world.raised_once or (self.name,) in world.spoiled
            once = world.has_joined if self.name in world.pace else not raised_before
            if fate == "raises" and once:
                world.raised_once.add(self.name)
                world.after(_START, partial(self.answer, call, None, raised("no such mount")))
            elif fate != "hangs":
                world.after(_START, self.die)
        else:
            if self.due is None and world.now > 0:
                self.due = world.now + JOINS_IN
            world.after(world.rng.uniform(0.5, 1.5) * _START, partial(self.finish, call))

    def finish(self, call: Call) -> None:
        """Run the real code, and answer."""
        if self.alive:
            answer, error = self.run(call)
            self.answer(call, answer, error)

    def run(self, call: Call) -> tuple[Any, Exception | None]:
        """Return what the real code returns or raises, the latter as Ray wraps it."""
        try:
            given = [g.result(timeout=0) if isinstance(g, Reference) else g for g in call.given]
            return stored(getattr(self.inside, call.name)(*given)), None
        except ray.exceptions.RayTaskError as error:
            return None, error
        except Exception as error:
            told = traceback.format_exc()
            return None, wrapped(call.name, told, error)

    def answer(self, call: Call, answer: Any, error: Exception | None) -> None:
        if call in self._open:
            self._open.remove(call)
            self._later(call, answer, error)

    def take(self, call: Call, seconds: float) -> None:
        """Take so long for it, and longer in bad weather, or die of it."""
        world, rng = self.world, self.world.rng
        world.may_lose_a_node()
        if world.strikes("late"):
            seconds *= rng.uniform(2, 10)
        if world.strikes("pause"):
            seconds += rng.uniform(0.2, 3) * world.timeout
        if world.strikes("crash"):
            world.after(rng.random() * seconds, self.die)
        else:
            world.after(seconds, partial(self.finish, call))

    def deliver(self, call: Call, answer: Any, error: Exception | None) -> None:
        """Answer, if the answer is not lost; it may come twice."""
        world = self.world
        if world.strikes("lost"):
            return
        if world.strikes("unknown"):
            failed = unavailable()
            Process.answer(self, call, None, failed)
            return
        Process.answer(self, call, answer, error)
        if error is None and world.strikes("twice"):
            self._later(call, answer, seconds=world.rng.uniform(0, 8))

    def _later(
        self,
        call: Call,
        answer: Any = None,
        error: Exception | None = None,
        seconds: float = _LATENCY,
    ) -> None:
        self.world.after(seconds, partial(self._returned, call, answer, error))

    def way(self, node: str | None) -> float:
        """Return the seconds that an object takes from a machine."""
        ends = {node, self.node}
        return _SLOW if len(ends) == 2 and ends & self.world.slow else _LATENCY

    def arrivals(self, call: Call) -> Iterator[float]:
        """Yield the times at which a call looks at its clock: when it asks for objects, at each
        arrival, and from then on."""
        return chain((0.0,), [self.way(node) for node in call.nodes], repeat(0.0))

    def _returned(self, call: Call, answer: Any, error: Exception | None) -> None:
        if error is not None or len(call.returns) == 1:
            call.returns[0].answer(answer, error)
            for reference in call.returns[1:]:
                reference.answer(error=error)
            return
        for reference, each in zip(call.returns, answer, strict=True):
            if is_large(each):
                reference.node = self.node
        for reference, each in zip(call.returns[1:], answer[1:], strict=True):
            reference.answer(each)
        call.returns[0].answer(answer[0])


class WorkerProcess(Process):
    """Has a worker in it."""

    calls = frozenset(
        {"set_up", "compute", "compute_slices", "abandon", "ask_anew"}
        | {"holds", "held", "sample", "fetch"}
    )

    def __init__(self, world: World, name: str, node: str) -> None:
        super().__init__(world, name, node)
        self.inside = Worker(self.clock, lambda: self.place)

    def needs(self, call: Call) -> list[Reference]:
        if call.name == "compute_slices":
            return list(call.given[1])
        return list(call.given[0]) if call.name == "fetch" else super().needs(call)

    def timeout(self, call: Call) -> float | None:
        if call.name == "compute_slices":
            return float(unpack(call.given[0])[2][4])
        return float(call.given[1]) if call.name == "fetch" else None

    def _exception(self, task: Task) -> Exception | None:
        """Return what a task raises, if it does."""
        world, samples = self.world, samples_of(task)
        places = range(task.offset, task.offset + task.computed) if task.work.tiles is None else ()
        if any(place in world.poison for place in places):
            return raised(POISON)
        # The fault is the machine's: started again on another one, the worker is sound.
        broken = self.name in world.broken and self.node == world.broken_on.setdefault(
            self.name, self.node
        )
        if broken and world.raised.get(samples, self.name) == self.name:
            world.faults["broken"] += 1
            world.raised[samples] = self.name
            if world.rng.random() < 0.1:
                world.broken.discard(self.name)  # it is repaired
            return raised("CUDA error: an illegal memory access was encountered")
        if samples not in world.raised and world.strikes("raises"):
            world.raised[samples] = self.name
            return raised("input/output error")
        return None

    def carry_out(self, call: Call) -> None:
        if call.name == "fetch":
            longest = max(self.way(node) for node in call.nodes)
            self.world.after(longest, partial(self.finish, call))
            return
        if not call.name.startswith("compute"):
            return super().carry_out(call)
        token, task, _ = unpack(call.given[0])
        if token in (self.inside._abandoned, self.inside._asks_anew):  # before it had its model
            return self.finish(call)
        rng = self.world.rng
        seconds = self.world.pace[self.name] * rng.uniform(0.8, 1.2)
        if rng.random() < 0.1:
            seconds *= 4
        # Every look at the clock between pieces of work takes a share of the time.
        pieces = max(task.computed, 1) + 8
        begin = self.world.now
        # What it looks at until its model is here has happened by now.
        looks = 1 if call.name == "compute" else 4 + len(self.needs(call))
        self.times = chain(repeat(begin, looks), _ticking(begin, seconds / pieces))
        self.take(call, min(seconds, task.work.budget))

    def answer(self, call: Call, answer: Any, error: Exception | None) -> None:
        if call.name in ("abandon", "ask_anew"):
            token = Token.unpack(call.given[0])
            for each in [c for c in self._open if c.name == "compute_slices" and not c.begun]:
                if unpack(each.given[0])[0] == token:
                    self.begin(each)
        if not call.name.startswith("compute") or error is not None:
            return super().answer(call, answer, error)
        reply = answer if call.name == "compute" else answer[0]
        rest = () if call.name == "compute" else answer[1:]
        if self.world.strikes("stray"):
            name, *others = reply
            reply = ((*name[:3], name[3] + self.world.rng.choice((-1, 1, 7))), *others)
        elif self.world.strikes("wrong"):
            spoil = self._spoiled_norm if rest else self._spoiled
            reply = spoil(reply, samples_of(unpack(call.given[0])[1]))
        elif rest and self.world.strikes("slices"):
            rest = self._spoiled_slices(rest, samples_of(unpack(call.given[0])[1]))
        self.deliver(call, (reply, *rest) if rest else reply, None)

    def run(self, call: Call) -> tuple[Any, Exception | None]:
        if call.name == "set_up":
            self.world.has_joined = True
        elif call.name.startswith("compute"):
            error = self._exception(unpack(call.given[0])[1])
            if error is not None:
                return None, error
        times = self.times
        if call.name == "fetch":  # beside a task, which looks at the clock as well
            self.times = self.arrivals(call)
        answer = super().run(call)
        self.times = times
        return answer

    def _spoiled_slices(self, slices: tuple[Any, ...], of: tuple[object, ...]) -> tuple[Any, ...]:
        """Spoil one slice, and leave the norm as it is."""
        at = self.world.rng.randrange(len(slices))
        if slices[at] is None or not slices[at].size:
            return slices
        bad = np.array(slices[at])
        if bad.dtype.kind == "f" and of not in self.world.spoiled and self.world.rng.random() < 0.7:
            bad[self.world.rng.randrange(bad.size)] = self.world.rng.choice((np.nan, np.inf))
            self.world.spoiled.add(of)
        else:
            bad = bad[:-1]
        return *slices[:at], bad, *slices[at + 1 :]

    def _spoiled(self, reply: Reply, of: tuple[object, ...]) -> Reply:
        """Make a result that must not get in."""
        name, vector, samples, *rest = reply
        if vector is None or not samples:
            return reply
        bad = np.array(vector)
        kind = self._kind(of, "shape", "type")
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

    def _spoiled_norm(self, reply: Reply, of: tuple[object, ...]) -> Reply:
        """Make such a result of which only the norm is seen; its slices are not used."""
        *rest, samples, seconds, stats, sent, norm = reply
        if norm is None or not samples:
            return reply
        kind = self._kind(of)
        if kind == "samples":
            samples = samples + 1000
        else:
            norm = norm * 1e30 if kind == "large" else float(kind)
        return *rest, samples, seconds, stats, sent, norm

    def _kind(self, of: tuple[object, ...], *others: str) -> str:
        """Draw how a result is spoiled."""
        kinds = [*others, "samples"]
        if of not in self.world.spoiled:
            kinds += ["nan", "inf"]
            if self.world.usual_is_known:
                kinds.append("large")
        kind = self.world.rng.choice(kinds)
        if kind in ("nan", "inf", "large"):
            self.world.spoiled.add(of)
        return kind


class ServerProcess(Process):
    """Has a server in it."""

    calls = frozenset(
        {"set_up", "step", "reduce", "apply", "sum_up", "keep", "give", "show", "write", "up"}
    )

    def __init__(self, world: World, name: str, node: str) -> None:
        super().__init__(world, name, node)
        self.inside = Server(self.clock, lambda: self.place)

    def needs(self, call: Call) -> list[Reference]:
        if call.name == "write":
            return list(call.given[2])
        if call.name == "sum_up":
            return list(call.given[1])
        return list(call.given[1][3]) if call.name in ("step", "reduce") else super().needs(call)

    def carry_out(self, call: Call) -> None:
        if call.name == "give":
            return super().carry_out(call)
        longest = max((self.way(node) for node in call.nodes), default=0.0)
        self.take(call, self.world.rng.uniform(0.02, 0.2) + longest)

    def timeout(self, call: Call) -> float | None:
        if call.name == "sum_up":
            return float(call.given[2])
        return float(call.given[1][4]) if call.name in ("step", "reduce") else None

    def run(self, call: Call) -> tuple[Any, Exception | None]:
        # Twice at one version, it would be the optimizer; set-up may have raised at this one.
        steps = call.name in ("step", "reduce", "apply")
        of = "raised", self.name, call.given[0] if steps else None
        fresh = of not in self.world.spoiled and self.name not in self.world.raised_once
        if steps and fresh and self.world.strikes("server_raises"):
            self.world.spoiled |= {of, (self.name,)}
            error = RuntimeError("CUDA error: an illegal memory access was encountered")
            return None, ray.exceptions.RayTaskError(call.name, "", error, "", 0, "")
        self.times = self.arrivals(call)
        return super().run(call)

    def answer(self, call: Call, answer: Any, error: Exception | None) -> None:
        if call.name in ("set_up", "give"):
            super().answer(call, answer, error)
        else:
            self.deliver(call, answer, error)


def _fetched(thing: Any, node: str) -> Any:
    if isinstance(thing, Reference):
        return thing.fetched(node)
    if isinstance(thing, tuple | list):
        has = _has_references(thing)
        return type(thing)(_fetched(each, node) for each in thing) if has else thing
    return thing


def _has_references(things: Sequence[Any]) -> bool:
    return any(
        isinstance(each, Reference) or (isinstance(each, tuple | list) and _has_references(each))
        for each in things
    )


def _ticking(begin: float, tick: float) -> Iterator[float]:
    now = begin
    while True:
        yield now
        now += tick


def stored(thing: Any) -> Any:
    """Return a thing as it comes out of a store: apart from the one that was put in, unchanging."""
    if isinstance(thing, np.ndarray):
        copy = thing.copy()
        copy.flags.writeable = False
        return copy
    if isinstance(thing, tuple):
        return tuple(map(stored, thing))
    if isinstance(thing, dict):
        return {name: stored(each) for name, each in thing.items()}
    return thing


def is_large(thing: Any) -> bool:
    """Tell whether a thing goes to its machine's store; for the simulation, all arrays do."""
    if isinstance(thing, tuple | list):
        return any(map(is_large, thing))
    if isinstance(thing, dict):
        return any(map(is_large, thing.values()))
    return isinstance(thing, np.ndarray)
