"""Virtual time, the machines and processes in it, and the faults that befall them.

Everything derives from one seed, so that what went wrong once goes wrong again.
"""

from __future__ import annotations

import heapq
import queue
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Protocol

_CHATTER = 0.25  # seconds until the next message of no interest
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
    raises: float = 0.0  # the task raises an exception, once for the same samples
    no_start: float = 0.0  # a new process hangs, dies, or raises before it is up; for each start
    kill: float = 0.0  # the driver is killed; for each thing that happens
    torn: float = 0.0  # and while it writes a checkpoint; for each write
    chatter: int = 0  # whether the driver's inbox is never empty
    term: float = 0.0  # the driver gets SIGTERM; for each thing that happens
    gone: int = 0  # workers that are lost for good
    broken: int = 0  # workers whose every task raises, until they are started again elsewhere
    poisoned: int = 0  # samples on which every task raises; then the run must say so
    unplaced: int = 0  # workers that have to wait until a machine joins, after many minutes
    node: float = 0.0  # a machine is lost, with all that is on it
    slow: int = 0  # machines whose links are slow
    slices: float = 0.0  # a slice of a result is not finite or too short, under a good norm
    server_raises: float = 0.0  # a call to a server raises an exception; for each step
    no_route: int = 0  # pairs of machines that cannot fetch objects from each other

    @staticmethod
    def of(rng: random.Random, gone: int = 0, nodes: int = 1) -> Weather:
        """Draw a weather: each kind of fault is absent now and then, so that all mix."""
        most = {
            "lost": 0.1, "twice": 0.4, "late": 0.4, "crash": 0.1, "unknown": 0.08, "pause": 0.06,
            "wrong": 0.1, "stray": 0.04, "raises": 0.08, "no_start": 0.2, "kill": 0.002,
            "torn": 0.3, "term": 0.002,
        }  # fmt: skip
        if nodes > 1:
            most["node"] = 0.008
        drawn = {
            name: rng.uniform(0, top) if rng.random() < 0.6 else 0.0 for name, top in most.items()
        }
        slow = int(nodes > 2 and rng.random() < 0.3)
        absent = rng.randint(0, gone)
        unplaced = rng.randint(0, absent) if rng.random() < 0.3 else 0
        for name, top in (("slices", 0.05), ("server_raises", 0.03)):
            drawn[name] = rng.uniform(0, top) if rng.random() < 0.4 else 0.0
        return Weather(
            **drawn,
            gone=absent - unplaced,
            unplaced=unplaced,
            broken=int(gone > 0 and rng.random() < 0.2),
            poisoned=int(rng.random() < 0.05),
            chatter=int(rng.random() < 0.1),
            slow=slow,
            no_route=int(nodes > 1 and rng.random() < 0.2),
        )

    def calm(self) -> Weather:
        """Return the same without faults that may end; workers that are gone stay so."""
        return replace(Weather(), gone=self.gone, unplaced=self.unplaced, poisoned=self.poisoned)

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

    def be_placed(self, node: str) -> None:
        """Begin, on a machine that has joined."""


class World:
    """Virtual time, the processes in it, and the faults that befall them."""

    def __init__(
        self,
        seed: int,
        weather: Weather,
        size: int,
        timeout: float,
        nodes: int = 1,
        direct: bool = False,
        chunks: int = 1,
        names: Sequence[str] | None = None,
    ) -> None:
        self.direct = direct  # whether results are lost with their worker's process
        self.chunks = chunks  # of a model that servers keep
        self.rng = random.Random(seed)
        self.weather, self.timeout = weather, timeout
        self.now = 0.0
        self.happened = 0
        self.usual_is_known = False  # how large results are, to the driver
        # Samples that failed; twice, it would be the model, or the user's code.
        self.spoiled: set[tuple[object, ...]] = set()
        self.raised: dict[tuple[object, ...], str] = {}  # and on which worker
        self.most = 10**9  # things that may happen; more of them are a loop without progress
        self.faults: Counter[str] = Counter()
        self.terminate: Callable[[], None] = lambda: None  # what SIGTERM does in the driver
        self.inbox = _Inbox(self)
        self.actors: list[Process] = []
        names = names or [f"w{i}" for i in range(size)]
        absent = self.rng.sample(names, weather.gone + weather.unplaced)
        self.gone, self.unplaced = set(absent[weather.unplaced :]), set(absent[: weather.unplaced])
        present = [name for name in names if name not in absent]
        self.broken = set(self.rng.sample(present, min(weather.broken, len(present) - 1)))
        self.broken_on: dict[str, str | None] = {}  # the machine of each broken worker
        # Somewhere in the first third of what the run draws.
        self.poison = {self.rng.randrange(200) for _ in range(weather.poisoned)}
        self.has_joined = False  # any worker, in this life of the driver
        self.raised_once: set[str] = set()  # processes whose set-up raised
        self.pace = {name: self.rng.choice((0.5, 1.0, 1.0, 1.0, 4.0)) for name in names}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._size, self._made = nodes, 0
        self.nodes: list[str] = []  # that are up
        self.silent: dict[str, list[Callable[[], None]]] = {}  # lost, and Ray has not noticed yet
        self.dead: set[str] = set()
        self.leaving: set[str] = set()  # machines that will be taken away
        self.notices: dict[str, Any] = {}  # what workers learn of their end when they join
        self.tell_leaving: Callable[[frozenset[str]], None] = lambda nodes: None
        self._homeless: list[Process] = []  # which wait for a machine
        self._add_nodes(nodes)
        self.slow = set(self.rng.sample(self.nodes, weather.slow))
        if self.slow and self.rng.random() < 0.5:
            self.after(self.rng.uniform(30, 300), self.slow.clear)
        self.no_routes: set[frozenset[str]] = set()  # pairs of machines without a route
        for _ in range(weather.no_route):
            pair = frozenset(self.rng.sample(self.nodes, 2))
            if self.rng.random() < 0.5:
                self.no_routes.add(pair)
            else:
                self.after(self.rng.uniform(0, 60), partial(self.no_routes.add, pair))

    def is_cut(self, one: str | None, other: str | None) -> bool:
        """Return whether two machines cannot fetch objects from each other."""
        return frozenset((one, other)) in self.no_routes

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
        if self.strikes("term"):
            self.terminate()
        at, _, action = heapq.heappop(self._queue)
        self.now = max(self.now, at)  # waiting may have taken a moment longer
        self.count()
        action()
        return True

    def count(self) -> None:
        """Count what happens, be it that nothing does; there must be an end to it."""
        self.happened += 1
        if self.happened > self.most:
            raise RuntimeError(f"I7: no end after {self.happened} events, {self.now:.0f} s")

    def wait_for_a_node(self, process: Process) -> None:
        """Have a process wait until a machine joins that has room for it."""
        if not self._homeless:
            self.after(self.rng.uniform(30, 2000), self._place_all)
        self._homeless.append(process)

    def _place_all(self) -> None:
        self._add_nodes(1)
        waiting, self._homeless = self._homeless, []
        for process in waiting:
            self.unplaced.discard(process.name)
            process.be_placed(self.nodes[-1])

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

    def drain_node(self, seconds: float) -> None:
        """Give notice of a machine, and take it away after so many seconds."""
        staying = [node for node in self.nodes if node not in self.leaving]
        if len(staying) < 2:
            return
        node = self.rng.choice(staying)
        self.faults["notice"] += 1
        self.leaving.add(node)
        self.tell_leaving(frozenset(self.leaving))
        self.after(seconds, partial(self._take_away, node))

    def _take_away(self, node: str) -> None:
        self.leaving.discard(node)
        if node in self.nodes and len(self.nodes) > 1:  # the world keeps one
            self.lose_node(node)
        self.tell_leaving(frozenset(self.leaving))

    def _notice(self, lost: str) -> None:
        self.dead.add(lost)
        waiting = self.silent.pop(lost)
        for actor in self._on(lost):
            actor.die()
        for action in waiting:
            action()

    def _on(self, node: str) -> Iterable[Process]:
        return [actor for actor in self.actors if actor.node == node]

    def new_inbox(self) -> _Inbox:
        """Return an empty inbox; answers to calls of a run before go to the former one."""
        self.inbox = _Inbox(self)
        return self.inbox

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
        self.leaving.clear()
        self.spoiled.clear()
        self.raised.clear()
        self.raised_once.clear()
        self._homeless.clear()
        self.usual_is_known = self.has_joined = False


class _Inbox:
    """A queue on which waiting lets virtual time pass."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._items: deque[Callable[[], None]] = deque()

    def put(self, item: Callable[[], None]) -> None:
        self._items.append(item)

    def get(self, *, timeout: float) -> Callable[[], None]:
        until = self._world.now + timeout
        if self._chatters and not self._items:
            if not self._world.advance(self._world.now + _CHATTER):
                self._world.now += _CHATTER
                self._world.count()
            return self._items.popleft() if self._items else _nothing
        while not self._items:
            if not self._world.advance(until):
                self._world.now = max(until, self._world.now + _MOMENT)
                self._world.count()
                raise queue.Empty
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items and not self._chatters

    def qsize(self) -> int:
        return len(self._items) + self._chatters

    @property
    def _chatters(self) -> bool:
        return self._world.weather.chatter > 0

    def clear(self) -> None:
        self._items.clear()


def _nothing() -> None:
    """What a message of no interest asks for."""
