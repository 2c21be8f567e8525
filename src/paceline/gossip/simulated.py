"""Decentralized training in virtual time, on the simulator's workers, links and schedule.

A node sends its messages one after the other over its own link. The messages for a peer wait in an
`Outbox` until the previous delivery to that peer has arrived.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from paceline.core.coordinator import Coordinator, drive
from paceline.core.journal import Entry
from paceline.core.logs import logger_of
from paceline.core.protocol import (
    Assign,
    Cancel,
    Command,
    Discard,
    Event,
    Finished,
    Interrupted,
    Joined,
    Left,
    Received,
    Send,
    SetTimer,
    Start,
    Step,
    Stepped,
    Stop,
    Task,
    TimerFired,
    WorkerId,
)
from paceline.delays.links import Link
from paceline.delays.models import Delay
from paceline.engines.simulator import SimulatedWorkers
from paceline.gossip.job import GossipJob, NodeState
from paceline.gossip.node import Node, RejectedUpdate
from paceline.gossip.outbox import Outbox
from paceline.learners.base import Array

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Bytes


logger = logger_of(__name__)


@dataclass
class Place:
    """The state of a simulated node: its delay model, its link, its task, its messages."""

    delay: Delay
    link: Link
    memory: dict[str, float] = field(default_factory=dict)
    here: bool = False
    task: Task | None = None
    seconds: float = 0.0
    outboxes: dict[WorkerId, Outbox] = field(default_factory=dict)
    on_the_way: set[WorkerId] = field(default_factory=set)
    free_at: float = 0.0  # when its link has sent all messages
    sent: int = 0  # bytes since the last task
    got: int = 0


@dataclass(frozen=True)
class Delivery:
    """Messages that arrive together."""

    sender: WorkerId
    messages: Sequence[Bytes]
    rejected: list[str] = field(default_factory=list)  # the reason, once they have arrived


@dataclass(frozen=True)
class Delivered:
    """The sender learns whether its messages were accepted."""

    to: WorkerId
    parcel: Delivery


Item: TypeAlias = Event | Task | Delivery | Delivered


class SimulatedGossip:
    """Runs a decentralized job in virtual time."""

    def __init__(self, workers: SimulatedWorkers) -> None:
        self._places = {
            name: Place(delay, workers.links[name]) for name, delay in workers.delays.items()
        }
        self._schedule, self._unit, self._update = workers.schedule, workers.unit, workers.update
        self._nodes: dict[WorkerId, Node] = {}
        self._coordinators: dict[WorkerId, Coordinator] = {}
        self._queue: list[tuple[float, int, WorkerId, Item]] = []
        self._order, self._now = 0, 0.0
        self.reason: str | None = None

    def entries(self, job: GossipJob) -> Iterator[tuple[WorkerId, Entry]]:
        self._per_sample = 1 / (self._unit or job.learner.batch_size / len(self._places))
        self._rng = np.random.Generator(np.random.PCG64(job.seed))
        self._nodes = {name: job.node(name) for name in self._places}
        self._coordinators = {name: job.coordinator(name) for name in self._places}
        self._now = began = job.began
        for name, state in job.resumed.items():
            version = self._coordinators[name].ledger.version
            self._nodes[name].load(state.server, version, {}, ())
        for name in self._places:
            self._push(began, name, Joined(name))
        for at, event in self._schedule:
            for name in self._places if at >= began else ():
                self._push(at, name, event)
        yield from drive(self._coordinators, self)

    def stop(self, reason: str) -> None:
        self.reason = self.reason or reason

    def now(self) -> float:
        return self._now

    def vectors(self) -> dict[WorkerId, Array]:
        return {name: n.vector() for name, n in self._nodes.items() if self._places[name].here}

    def states(self) -> dict[WorkerId, NodeState]:
        return {
            name: NodeState(node.saved(), self._coordinators[name].state())
            for name, node in self._nodes.items()
        }

    def close(self) -> None:
        self._queue.clear()

    # --- the engine ------------------------------------------------------------------------------

    def next_event(self) -> tuple[float, WorkerId, Event] | None:
        if self.reason is not None:
            for name, coordinator in self._coordinators.items():
                if coordinator.ledger.stopped is None:
                    return self._now, name, Interrupted(self.reason)
        while self._queue:
            self._now, _, name, item = heapq.heappop(self._queue)
            event = self._event(name, self._places[name], item)
            if event is not None:
                return self._now, name, event
        return None

    def _event(self, name: WorkerId, place: Place, item: Item) -> Event | None:
        match item:
            case Task():
                return self._finish(name, place, item) if place.task == item else None
            case Delivery():
                return self._deliver(name, place, item)
            case Delivered(to, parcel):
                place.on_the_way.discard(to)
                if not parcel.rejected:
                    self._ship(name, place, to)
                elif to in place.outboxes:  # with the next message, not at once
                    place.outboxes[to].add_whole()
                return None
            case Joined(worker) if worker == name:
                place.here = True
            case Left(worker) if worker == name:
                place.here, place.task = False, None
                place.outboxes.clear()
                self._nodes[name].return_to_life()
            case Left(worker):
                place.outboxes.pop(worker, None)
                self._nodes[name].forget(worker)
            case Joined(worker):
                self._nodes[name].welcome(worker)
            case Stepped() if not place.here:
                return None
        return item

    def execute(self, node: WorkerId, command: Command) -> None:
        place, here = self._places[node], self._nodes[node]
        match command:
            case Start(task):
                place.task = task
                begin = max(self._now, place.memory.get("ready", 0.0))
                sampled = place.delay.sample(self._rng, begin, place.memory)
                place.seconds = sampled * task.computed * self._per_sample
                self._push(begin + place.seconds, node, task)
            case Cancel():
                place.task = None
            case Discard(id):
                here.discard(id)
            case Step():
                stats, figures = here.step(command)
                ready = place.memory["ready"] = self._now + self._update
                self._push(ready, node, Stepped(here.version, stats, figures))
            case Send(to, tensors, whole):
                message = None if whole else here.publish(tensors)
                for peer in to:
                    outbox = place.outboxes.setdefault(peer, Outbox(here))
                    if message is None:
                        outbox.add_whole()
                    else:
                        outbox.add(message)
                    self._ship(node, place, peer)
            case SetTimer(name, at):
                if at < inf:
                    self._push(at, node, TimerFired(name))
            case Stop() | Assign():
                pass

    def _ship(self, sender: WorkerId, place: Place, to: WorkerId) -> None:
        """Send the waiting messages of a peer, unless a delivery to it is in flight."""
        if to in place.on_the_way or to not in place.outboxes:
            return
        messages = place.outboxes[to].take()
        if not messages:
            return
        size, far = sum(message.nbytes for message in messages), self._places[to].link
        place.sent += size
        place.on_the_way.add(to)
        place.free_at = max(self._now, place.free_at) + size / place.link.up
        latency = place.link.latency + far.latency
        arrival = place.free_at + latency + size / far.down
        parcel = Delivery(sender, messages)
        self._push(arrival, to, parcel)
        self._push(arrival + latency, sender, Delivered(to, parcel))

    def _deliver(self, name: WorkerId, place: Place, parcel: Delivery) -> Event | None:
        if not place.here:
            return None
        newest = None
        for message in parcel.messages:
            place.got += message.nbytes
            try:
                version = self._nodes[name].receive(parcel.sender, message)
            except RejectedUpdate as error:
                logger.warning("%s", error)
                parcel.rejected.append(str(error))
                break  # the following messages build on it
            newest = newest if version is None else version
        return None if newest is None else Received(parcel.sender, newest)

    def _finish(self, name: WorkerId, place: Place, task: Task) -> Event:
        place.task = None
        outcome = self._nodes[name].compute(task, lambda done: True)
        sent, place.sent = place.sent, 0
        got, place.got = place.got, 0
        stats = outcome.stats
        return Finished(task.id, outcome.samples, place.seconds, stats, 0.0, sent, got)

    def _push(self, at: float, node: WorkerId, item: Item) -> None:
        self._order += 1  # ties are broken by order, never by chance
        heapq.heappush(self._queue, (at, self._order, node, item))
