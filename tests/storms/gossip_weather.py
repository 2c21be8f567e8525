"""Decentralized nodes in virtual time and bad weather: their real code, simulated processes.

What stands in for Ray are calls between processes that are lost, doubled, late, spoiled or under
another's name, links that are cut for a while, and processes that die, hang and pause.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import numpy as np

from paceline.core.journal import Entry
from paceline.core.protocol import Command, Event, Interrupted, Send, Step, Task, WorkerId
from paceline.engines.checks import KNOWN
from paceline.engines.kinds import Fleet
from paceline.engines.ray.engine import Ray
from paceline.engines.ray.place import Place
from paceline.engines.ray.pool import Cluster
from paceline.engines.ray.worker import Worker
from paceline.gossip.job import GossipJob, Return
from paceline.gossip.node import Node
from paceline.gossip.ray.process import NodeProcess
from paceline.gossip.ray.sender import MessageSender
from paceline.learners.base import Array, Outcome, Proceed, Saved
from tests.storms.processes import died, unavailable
from tests.storms.simulated import SimulatedCluster
from tests.storms.weather import Weather, World

_LATENCY = 0.002  # seconds from one process to another
_START = 0.5  # seconds that a process needs to come up


@dataclass(frozen=True)
class Gale(Weather):
    """How likely each fault is: of messages for each call, of processes for each task.

    A process that has died stays dead: `gone` is how many may die.
    """

    cut: float = 0.0  # a link is cut for up to eight seconds; for each call
    bad: float = 0.0  # a result is not finite, or out of all bounds

    @staticmethod
    def of(rng: random.Random, gone: int = 0, nodes: int = 1) -> Gale:
        most = {
            "lost": 0.1, "twice": 0.3, "late": 0.3, "crash": 0.04, "unknown": 0.1, "pause": 0.04,
            "wrong": 0.15, "stray": 0.08, "cut": 0.03, "bad": 0.1,
        }  # fmt: skip
        drawn: dict[str, Any] = {
            name: rng.uniform(0, top) if rng.random() < 0.6 else 0.0 for name, top in most.items()
        }
        no_start = 0.2 if rng.random() < 0.02 else 0.0
        return Gale(**drawn, no_start=no_start, gone=rng.randint(0, gone))

    def calm(self) -> Gale:
        return replace(Gale(), gone=self.gone)


class Waters(World):
    """A world of peers: who looks on is told after everything that happens to one of them."""

    def __init__(self, seed: int, weather: Gale, size: int, timeout: float) -> None:
        super().__init__(seed, replace(weather, gone=0), size, timeout)
        self.weather, self.left = weather, weather.gone
        self.peers: dict[WorkerId, Process] = {}
        self.cuts: dict[frozenset[WorkerId], float] = {}  # -> when a link is whole again
        self.observe: Callable[[Process], None] = lambda process: None
        self.stopped = inf  # when the driver first told a node to stop

    def dies(self) -> bool:
        """Draw whether a process dies now, of those that may."""
        if self.left and self.strikes("crash"):
            self.left -= 1
            return True
        return False

    def delay(self, one: WorkerId, other: WorkerId) -> float:
        """Draw the seconds that a call takes from one process to another."""
        seconds = _LATENCY * self.rng.uniform(0.5, 2)
        link = frozenset((one, other))
        if self.strikes("cut"):
            self.cuts[link] = max(self.cuts.get(link, 0.0), self.now + self.rng.uniform(0, 8))
        if self.strikes("late"):
            seconds += self.rng.uniform(0, 4)
        return seconds + max(self.cuts.get(link, 0.0) - self.now, 0.0)


class Answer:
    """What a call returns: answered once, if ever."""

    def __init__(self) -> None:
        self._future: Future[Any] = Future()

    def future(self) -> Future[Any]:
        return self._future

    def give(self, value: Any) -> None:
        if not self._future.done():
            self._future.set_result(value)

    def fail(self, error: Exception) -> None:
        if not self._future.done():
            self._future.set_exception(error)


@dataclass(frozen=True)
class _Method:
    """Called as Ray's methods are."""

    run: Callable[..., None]

    def remote(self, *given: Any) -> Answer:
        answer = Answer()
        self.run(answer, *given)
        return answer


class Process:
    """A process with a real peer in it, as its driver sees it."""

    def __init__(self, world: Waters, name: WorkerId) -> None:
        self.world, self.name = world, name
        self.alive, self.died, self.over_at = True, 0.0, inf
        self.asleep = 0.0  # until when
        self.peer = SimulatedPeer(self)
        self._open: list[Answer] = []  # of calls that a death is told to
        self._training: Answer | None = None
        self.set_up = _Method(self._set_up)
        self.train = _Method(self._train)
        self.tell = _Method(self._tell)
        self.entries = _Method(self._entries)
        self.vector = _Method(self._vector)
        self.saved = _Method(self._saved)
        world.peers[name] = self

    def die(self) -> None:
        if self.alive:
            self.alive, self.died = False, self.world.now
            for answer in self._open:
                seconds = self.world.rng.uniform(0.01, 1.0)
                self.world.after(seconds, partial(answer.fail, died()))
            self._open.clear()

    def expect(self, answer: Answer) -> None:
        """Have an answer fail when this process dies."""
        if not self.alive:
            self.world.after(0.01, partial(answer.fail, died()))
            return
        self._open = [each for each in self._open if not each.future().done()]
        self._open.append(answer)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Have this process do something, if it is alive then, and once it is awake."""

        def act() -> None:
            if not self.alive:
                return
            if self.asleep > self.world.now:
                self.world.after(self.asleep - self.world.now, act)
                return
            action()
            self.world.observe(self)

        self.world.after(seconds, act)

    # --- what the driver calls -------------------------------------------------------------------

    def _set_up(
        self, answer: Answer, job: GossipJob, name: WorkerId, source: Answer | None = None
    ) -> None:
        self.expect(answer)
        if self.world.strikes("no_start"):
            if self.world.rng.random() < 0.5:
                self.world.after(_START, self.die)
            return
        if source is None:
            self.after(_START, lambda: answer.give(self.peer.set_up(job, name)))
        else:
            source.future().add_done_callback(partial(self._set_up_with, answer, job, name))

    def _set_up_with(
        self, answer: Answer, job: GossipJob, name: WorkerId, source: Future[Any]
    ) -> None:
        if (error := source.exception()) is not None:
            self.world.after(_START, partial(answer.fail, error))  # type: ignore[arg-type]
            return
        saved = source.result()
        self.after(_START, lambda: answer.give(self.peer.set_up(job, name, saved)))

    def _train(
        self, answer: Answer, others: Mapping[WorkerId, Process], returned: Return | None = None
    ) -> None:
        self.expect(answer)
        self._training = answer
        links = {name: Link(self, other) for name, other in others.items()}
        self.after(self.world.rng.uniform(0, 0.1), lambda: self.peer.begin(links, returned))

    def ended(self) -> None:
        assert self._training is not None
        self.over_at = self.world.now
        self.world.after(_LATENCY, partial(self._training.give, None))

    def _tell(
        self, answer: Answer, number: int, event: Event, other: Process | None = None
    ) -> None:
        if isinstance(event, Interrupted):
            self.world.stopped = min(self.world.stopped, self.world.now)

        def told() -> None:
            self.peer.tell(number, event, None if other is None else Link(self, other))
            self.peer.look_around()
            answer.give(None)

        self._call(answer, 0.0, told)

    def _entries(self, answer: Answer, seen: int) -> None:
        waits = self.world.rng.uniform(0.5, 2.0)
        self._call(answer, waits, lambda: answer.give(self.peer.since(seen)))

    def _vector(self, answer: Answer) -> None:
        self._call(answer, 0.0, lambda: answer.give(self.peer.vector()))

    def _saved(self, answer: Answer) -> None:
        self._call(answer, 0.0, lambda: answer.give(self.peer.saved()))

    def _call(self, answer: Answer, waits: float, action: Callable[[], None]) -> None:
        """Carry out a call of the driver; it may hear too late, or nothing, of it."""
        world = self.world
        self.expect(answer)
        delay = waits + world.delay("driver", self.name)
        if world.strikes("lost"):
            world.after(delay, partial(answer.fail, unavailable()))
            return
        if world.strikes("unknown"):
            world.after(world.rng.uniform(0, delay), partial(answer.fail, unavailable()))
        self.after(delay, action)
        if world.strikes("twice"):
            self.after(delay + world.rng.uniform(0, 8), action)


class Link:
    """What a peer has of another: its messages go this way, and the answers come back."""

    def __init__(self, sender: Process, to: Process) -> None:
        self._sender, self._to, self._world = sender, to, sender.world
        self.receive = _Method(self._receive)

    def _receive(self, answer: Answer, name: WorkerId, messages: Sequence[Any]) -> None:
        world, to = self._world, self._to
        answer.future().add_done_callback(lambda future: self._sender.peer.send_soon())
        to.expect(answer)
        delay = world.delay(name, to.name)
        if world.strikes("lost"):
            world.after(delay, partial(answer.fail, unavailable()))
            return
        if world.strikes("unknown"):
            world.after(world.rng.uniform(0, delay), partial(answer.fail, unavailable()))
        to.after(delay, partial(self._deliver, answer, name, messages))
        if world.strikes("twice"):
            to.after(delay + world.rng.uniform(0, 15), partial(self._deliver, None, name, messages))

    def _deliver(self, answer: Answer | None, name: WorkerId, messages: Sequence[Any]) -> None:
        world, to = self._world, self._to
        if world.strikes("wrong"):
            place = world.rng.randrange(len(messages))
            spoiled = _spoiled(messages[place], world.rng, to.peer.known_of(name))
            messages = [*messages[:place], spoiled, *messages[place + 1 :]]
        elif world.strikes("stray"):
            others = [each for each in world.peers if each not in (name, to.name)]
            name = world.rng.choice([*others, "w99"])
        taken = to.peer.receive(name, messages)
        to.peer.look_around()
        if answer is not None:
            world.after(_LATENCY, partial(answer.give, taken))


class _Idle(Exception):
    """There is nothing to do now."""


class SimulatedPeer(NodeProcess):
    """A peer whose thread is the world's: it acts when there is something to do."""

    def __init__(self, process: Process) -> None:
        super().__init__(lambda: self._time(), lambda: Place("simulated", 0, ""))
        self.process, self._world = process, process.world
        self._time: Callable[[], float] = lambda: self._world.now
        self._busy = self._is_over = False
        self._result: Event | None = None
        self.journal: list[Entry] = []  # all of it, whatever the driver has heard
        self.stepping: Callable[[SimulatedPeer, Step], Callable[[], None]] | None = None

    @property
    def node(self) -> Node:
        assert self._node is not None
        return self._node

    @property
    def sender(self) -> MessageSender:
        assert self._sender is not None
        return self._sender

    def set_up(self, job: GossipJob, name: WorkerId, saved: Saved | None = None) -> Place:
        place = super().set_up(job, name, saved)
        self.node._replica = _Spoiling(self, self.node._replica)
        return place

    def begin(self, links: Mapping[WorkerId, Link], returned: Return | None = None) -> None:
        self._begin(links, returned)
        self.look_around()

    def look_around(self) -> None:
        """Do all that there is to do."""
        if self._busy or self._is_over or self._sender is None or not self.process.alive:
            return
        try:
            while self._act():
                self._world.count()
                self.journal.append(self._entries[-1])
                self._world.observe(self.process)
            self._is_over = True
            self._end()
            self.process.ended()
        except _Idle:
            self.send_soon()

    def send_soon(self) -> None:
        """Have the thread that sends messages look, soon."""
        self.process.after(self._world.rng.uniform(0, 0.02), self._turn)

    def _turn(self) -> None:
        if self._sender is not None:
            self._sender.turn()

    def since(self, seen: int) -> tuple[int, list[Entry], bool]:
        return self._since(seen)

    def known_of(self, sender: WorkerId) -> bool:
        """Tell whether a message of this sender that is too large would be refused."""
        slot = self.node._message_check
        return slot.usual > 0 and sender not in slot._rejected

    def has_more_for(self, other: WorkerId) -> bool:
        """Tell whether a message to another is under way, or waits."""
        sender, outbox = self.sender, self.sender._outboxes[other]
        waits = {*sender._on_the_way, *sender._due, *sender._later}
        return other in waits or outbox._whole or bool(outbox._messages)

    def execute(self, node: WorkerId, command: Command) -> None:
        if isinstance(command, Step) and self.stepping is not None:
            check = self.stepping(self, command)
            super().execute(node, command)
            check()
            return
        if isinstance(command, Send) and not command.whole and self._world.rng.random() < 0.05:
            message = self.node.publish(command.tensors)  # as `execute` does, but that
            self._turn()  # the other thread is quicker
            self.sender.post(command.to, message)
            return
        super().execute(node, command)

    def _wait(self) -> None:
        raise _Idle

    def _next(self) -> Event | None:
        if self._result is not None:
            event, self._result = self._result, None
            return event
        return super()._next()

    def _compute(self, task: Task) -> Event:
        world, process = self._world, self.process
        seconds = world.pace[process.name] * world.rng.uniform(0.8, 1.2)
        if world.rng.random() < 0.1:
            seconds *= 4
        if world.strikes("pause"):
            process.asleep = world.now + world.rng.uniform(0.2, 3) * world.timeout
        if world.dies():
            world.after(world.rng.random() * seconds, process.die)
        self._busy = True
        process.after(seconds, partial(self._done, task, world.now))
        raise _Idle

    def _done(self, task: Task, begin: float) -> None:
        times = iter((begin,))
        self._time = lambda: next(times, self._world.now)
        self._result = super()._compute(task)
        self._time = lambda: self._world.now
        self._busy = False
        self.look_around()


class _Spoiling:
    """A replica whose results are nonsense now and then, never twice in a row."""

    def __init__(self, peer: SimulatedPeer, replica: Any) -> None:
        self._peer, self._replica = peer, replica
        self._again = False

    def compute(self, model: Iterable[Array], task: Task, proceed: Proceed) -> Outcome:
        outcome: Outcome = self._replica.compute(model, task, proceed)
        world = self._peer._world
        if self._again or outcome.vector is None or not world.strikes("bad"):
            self._again = False
            return outcome
        self._again = True
        vector = np.array(outcome.vector)
        kinds = ["nan", "inf", "shape", "type"]
        norms = self._peer.node._result_check._norms
        if len(norms) >= KNOWN and min(norms) > 0:
            kinds.append("large")
        kind = world.rng.choice(kinds)
        if kind in ("nan", "inf"):
            vector[world.rng.randrange(vector.size)] = float(kind)
        elif kind == "large":
            vector = vector * 1e30
        else:
            vector = vector[:-1] if kind == "shape" else vector.astype(np.complex128)
        return Outcome(vector, outcome.samples, outcome.stats)


def _spoiled(packed: Any, rng: random.Random, large: bool) -> Any:
    """Make a message that must not get in."""
    from paceline.codecs.base import Message, pack, unpack

    kind = rng.choice(["nan", "inf", "cut", "garbage", "short", "long", *["large"] * large])
    if kind == "cut":
        return packed[: rng.randrange(packed.size)].copy()
    if kind == "garbage":
        return np.array([rng.randrange(256) for _ in range(packed.size)], np.uint8)
    parts = [part.clone() for part in unpack(packed).parts]
    floats = [i for i, part in enumerate(parts) if part.is_floating_point() and part.numel()]
    if not floats or kind in ("short", "long"):
        place = floats[0] if floats else 0
        short = parts[place]
        parts[place] = short[:-1] if kind == "short" else short.repeat(2)[: short.numel() + 1]
    else:
        place = floats[0]
        if kind == "large":
            parts[place] = (parts[place].double() * 1e30).to(parts[place].dtype)
        else:
            parts[place][rng.randrange(parts[place].numel())] = float(kind)
    return pack(Message(tuple(parts)))


class _PeerCluster(SimulatedCluster):
    def __init__(self, world: Waters) -> None:
        super().__init__(world)
        self._waters = world

    def make_workers(
        self, fleet: Fleet, gpus: Mapping[str, float], fixed: bool, actor: type = Worker
    ) -> Callable[[str], Any]:
        return lambda name: Process(self._waters, name)

    def put(self, thing: Any) -> Any:
        return thing

    def has_lost(self, node: str) -> bool:
        return False

    def kill(self, actor: Any) -> None:
        actor.die()


class PeersOnRay(Ray):
    """`Ray` with simulated processes, for decentralized runs."""

    def __init__(self, workers: int, world: Waters, respawns: int = 0) -> None:
        self.world = world
        super().__init__(workers, start_timeout=5.0, respawns=respawns)

    def _make_cluster(self) -> Cluster:
        return _PeerCluster(self.world)
