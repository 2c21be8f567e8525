"""Virtual time, the machines and processes in it, and the faults that befall them.

Everything derives from one seed, so that what went wrong once goes wrong again.
"""

from __future__ import annotations

import heapq
import queue
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Protocol

_MOMENT = 1e-6  # seconds that pass at least when somebody waits, as they do on a real clock


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
    node: float = 0.0  # a machine is lost, with all that is on it
    slow: int = 0  # machines whose links are slow

    @staticmethod
    def of(rng: random.Random, gone: int = 0, nodes: int = 1) -> Weather:
        """Draw a weather: each kind of fault is absent now and then, so that all mix."""
        most = {
            "lost": 0.1, "twice": 0.4, "late": 0.4, "crash": 0.1, "unknown": 0.08, "pause": 0.06,
            "wrong": 0.1, "stray": 0.04, "no_start": 0.2, "kill": 0.002, "torn": 0.3,
        }  # fmt: skip
        if nodes > 1:
            most["node"] = 0.008
        drawn = {
            name: rng.uniform(0, top) if rng.random() < 0.6 else 0.0 for name, top in most.items()
        }
        slow = int(nodes > 2 and rng.random() < 0.3)
        return Weather(**drawn, gone=rng.randint(0, gone), slow=slow)

    def calm(self) -> Weather:
        """Return the same without faults; who is gone for good stays so."""
        return replace(Weather(), gone=self.gone)

    def __str__(self) -> str:
        told = [f"{f.name}={v:.3g}" for f in fields(self) if (v := getattr(self, f.name))]
        return f"Weather({', '.join(told)})"


class Process(Protocol):
    """What the world knows of a process."""

    name: str
    node: str
    alive: bool
    ending: bool

    def die(self) -> None:
        """End, and have Ray tell so."""


class World:
    """Virtual time, the processes in it, and the faults that befall them."""

    def __init__(
        self, seed: int, weather: Weather, size: int, timeout: float, nodes: int = 1
    ) -> None:
        self.rng = random.Random(seed)
        self.weather, self.timeout = weather, timeout
        self.now = 0.0
        self.happened = 0
        self.usual_is_known = False  # how large results are, to the driver
        self.spoiled: set[tuple[object, ...]] = set()  # samples; twice, it would be the model
        self.most = 10**9  # things that may happen; more of them are a loop without progress
        self.faults: Counter[str] = Counter()
        self.inbox = _Inbox(self)
        self.actors: list[Process] = []
        names = [f"w{i}" for i in range(size)]
        self.gone = set(self.rng.sample(names, weather.gone))
        self.pace = {name: self.rng.choice((0.5, 1.0, 1.0, 1.0, 4.0)) for name in names}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._size, self._made = nodes, 0
        self.nodes: list[str] = []  # that are up
        self.silent: dict[str, list[Callable[[], None]]] = {}  # lost, and Ray has not noticed yet
        self.dead: set[str] = set()
        self._add_nodes(nodes)
        self.slow = set(self.rng.sample(self.nodes, weather.slow))

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

    def _add_nodes(self, count: int) -> None:
        for _ in range(count):
            self.nodes.append(f"n{self._made}")
            self._made += 1

    def may_lose_a_node(self) -> None:
        """Have a machine lost now and then, if there is another."""
        if len(self.nodes) < 2 or not self.strikes("node"):
            return
        self.lose_node(self.rng.choice(self.nodes))

    def lose_node(self, lost: str) -> None:
        """Have a machine lost with all that is on it. Ray notices later."""
        self.nodes.remove(lost)
        self.silent[lost] = []
        for actor in self._on(lost):
            actor.alive = False
        self.after(self.rng.uniform(0.1, 10), lambda: self._notice(lost))
        self.after(self.rng.uniform(5, 60), lambda: self._add_nodes(1))

    def _notice(self, lost: str) -> None:
        self.dead.add(lost)
        waiting = self.silent.pop(lost)
        for actor in self._on(lost):
            actor.die()
        for action in waiting:
            action()

    def _on(self, node: str) -> Iterable[Process]:
        return [actor for actor in self.actors if actor.node == node]

    def restart(self) -> None:
        """End all processes, as the death of their driver does."""
        for actor in self.actors:
            actor.alive = False
        self.dead |= set(self.silent)
        self.silent.clear()
        self._add_nodes(self._size - len(self.nodes))
        self.actors.clear()
        self._queue.clear()
        self.inbox.clear()
        self.spoiled.clear()
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
                self._world.now = max(until, self._world.now + _MOMENT)
                self._world.count()
                raise queue.Empty
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items

    def clear(self) -> None:
        self._items.clear()
