"""Whole decentralized runs in bad weather, with what must hold checked at every event.

`play(seed)` draws a graph, a mixing rule, a trigger, a codec and a weather, trains under it, lets
the weather calm down, and has the run end. Whatever breaks a promise raises `Violation`, with the
one command that shows it again.

What is promised, under the numbers of docs/faults.md:

I1   No message counts twice: whatever comes how often and in whatever order, the copy that a node
     has of a peer is, bit for bit, one that this peer has made public. Nor does a result.
I2   Nothing of who is gone: its copy is let go of, and what still comes from it is left out.
I3   Every sample that a node draws of its tile is used once, or is still to be done.
I4   Copies, versions and time do not go back, and the driver's journals have no gap.
I5   A step is x <- mix(x, copies) - rate * g, g at the very model; journals replay.
I7   In the calm the run ends, news comes along every link, and all have mended the graph alike.
I8   Outboxes hold no more than a copy of the model, one call to each peer is under way, and a node
     has no more copies than there are nodes.
I9   No number that is not finite enters a model or a copy, nor one out of all proportion.
I10  A gradient is of the model that it moves: its delay is 0. Copies may be of any age.
I11  Nothing is left behind: processes end with the run.
I12  The same seed gives the same storm.

Not I6: there are no checkpoints of such runs.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.coordinator import replay
from paceline.core.errors import NodesLost
from paceline.core.journal import Entry
from paceline.core.protocol import Finished, Joined, Left, Received, Start, Step, Task, WorkerId
from paceline.gossip.graphs import (
    Graph,
    complete,
    exponential,
    hierarchical,
    random_regular,
    ring,
    torus,
)
from paceline.gossip.mixing import Averaging, Difference, Mixing
from paceline.gossip.node import consensus
from paceline.gossip.policy import Gossip
from paceline.gossip.ray.driver import GRACE
from paceline.gossip.triggers import Always, EventGrad, EventGradStatic, Lag, OnChange
from paceline.learners.arrays import ArrayServer, LeastSquares, Quadratic
from paceline.learners.base import Layout
from paceline.report.callbacks import Callback, Progress
from paceline.training.run import Run
from paceline.training.trainer import Trainer
from tests.storms.cases import Case
from tests.storms.gossip_weather import Gale, PeersOnRay, Process, SimulatedPeer, Waters
from tests.storms.storm import Outcome, require, weather_out

TIMEOUT = 20.0
"""Seconds of virtual time; a pause is up to three times as long."""
_STEPS = 14  # in bad weather, times the number of nodes
_CALM = 16  # and after it
_MOST = 60_000  # things that happen in one run; more of them are a loop without progress
_SETTLED = 30.0  # seconds of calm until all have to stop: a call takes 14 at most, stopping 10
_HEARD = 5.0  # seconds until the driver has heard of the end of a node
_TENSORS = (1, 2, 3)
_APART = 1.0  # how far apart models may be at any time, of optima that are all about 1


class _Server(ArrayServer):
    """One with several tensors, so that messages may be about some."""

    @property
    def layout(self) -> Layout:
        return Layout(self.vector.size, _TENSORS)


class _Tiled(LeastSquares):
    def server(self) -> ArrayServer:
        return _Server(np.zeros(sum(_TENSORS)), self.lr)


class _Noisy(Quadratic):
    def server(self) -> ArrayServer:
        return _Server(np.full(sum(_TENSORS), self.start), self.lr)


def case_of(rng: random.Random) -> Case:
    """Draw what is trained."""
    graph = _graph(rng)
    nodes = len(graph.nodes)
    rules: list[Mixing] = [Averaging(), Difference(0.2), Difference(0.4)]
    rule = rng.choice(rules)
    make: Callable[[], Any] = rng.choice(
        [
            Always,
            lambda: OnChange(rng.choice((0.0, 0.3)), every=rng.choice((None, 3))),
            lambda: OnChange(0.3, every=4, growth=0.2),
            lambda: EventGrad(rng.choice((0.9, 1.0)), warm=rng.randint(3, 8)),
            lambda: EventGradStatic(rng.choice((0.0, 0.01)), warm=rng.randint(0, 4)),
            lambda: Lag(nodes),
        ]
    )
    trigger = make()
    codec = _codec(rng, whole=isinstance(trigger, Always | Lag))
    policy = Gossip(graph, rule, trigger, local_steps=rng.choice((1, 1, 2)))
    name = f"gossip {type(rule).__name__} {type(trigger).__name__} {codec or 'dense'}"
    return Case(name, policy, nodes, 1, codec=codec)


def _graph(rng: random.Random) -> Graph:
    n = rng.randint(2, 7)
    star = {"w0": tuple(f"w{i}" for i in range(1, n))} | {f"w{i}": ("w0",) for i in range(1, n)}
    graphs: list[Callable[[], Graph]] = [
        lambda: ring(n),
        lambda: torus(2, rng.randint(2, 3)),
        lambda: exponential(n),
        lambda: complete(rng.randint(2, 5)),
        lambda: random_regular(6, 3, seed=rng.randrange(100)),
        lambda: hierarchical((2, 3)),
        lambda: Graph(star),
    ]
    return rng.choice(graphs)()


def _codec(rng: random.Random, whole: bool) -> Any:
    from paceline.codecs.chain import Chain
    from paceline.codecs.lowrank import LowRank
    from paceline.codecs.quantize import BFloat16, Half, Int8, Sign
    from paceline.codecs.sparse import RandomK, TopK

    codecs: list[Any] = [None, None, TopK(0.5), RandomK(0.5), Int8(), Half(), BFloat16(), Sign(),
              Chain(TopK(0.5), Int8())]  # fmt: skip
    if whole:  # which is for vectors of one size
        codecs.append(LowRank(1, ((2, 3),)))
    return rng.choice(codecs)


def play(seed: int, folder: Path, only: Case | None = None, respawns: int = 0) -> Outcome:
    """Train through a storm; raise `Violation` if a promise is broken.

    folder: an empty one, for journals.
    only: a case of your own; by default any.
    respawns: how often in a row a dead process is started again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    case = only or case_of(rng)
    weather = Gale.of(rng, case.workers - 1 if rng.random() < 0.95 else case.workers)
    world = Waters(seed, weather, case.workers, TIMEOUT)
    storm = GossipStorm(seed, case, world, folder, rng, respawns)
    weather_out(storm)
    return Outcome(case, weather, world.faults, 0, world.happened, world.now, 0, storm.returned)


@dataclass
class _Seen:
    """What was seen of a node so far."""

    public: dict[int, bytes] = field(default_factory=dict)  # by the number of messages
    heard: dict[WorkerId, tuple[int, int]] = field(default_factory=dict)
    tasks: dict[int, Task] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)
    entries: int = 0
    versions: dict[WorkerId, int] = field(default_factory=dict)


class GossipStorm:
    """One run, from its start to its end."""

    def __init__(
        self, seed: int, case: Case, world: Waters, folder: Path, rng: random.Random, respawns: int
    ) -> None:
        self.respawns, self.returned = respawns, 0
        self.processes: dict[WorkerId, Process] = {}  # the last one seen of each name
        self.seed, self.case, self.world, self.folder = seed, case, world, folder
        self.weather = world.weather
        self.seen: dict[WorkerId, _Seen] = {}
        self.calm: dict[WorkerId, int] = {}  # the messages that each had made public by then
        self.calm_at = self.stop_by = 0.0
        self.learner = _learner(rng, case.workers)
        world.most = _MOST
        world.observe = self._observe

    def told(self) -> str:
        """Say what the storm was, and how to see it again."""
        return (
            f"seed {self.seed}: {self.case.name} on {self.case.workers} nodes, {self.weather}; "
            + (
                f"again: play({self.seed}, folder, respawns={self.respawns})"
                if self.respawns
                else f"again: python benchmarks/chaos.py --part gossip --seed {self.seed}"
            )
        )

    def run(self) -> None:
        engine = PeersOnRay(self.case.workers, self.world, self.respawns)
        trainer = Trainer(
            self.learner,
            self.case.policy,
            engine,
            seed=self.seed,
            callbacks=[_Calm(self)],
            journal=self.folder / "run.jsonl",
            progress=False,
            codec=self.case.codec,
        )
        run = None
        try:
            run = trainer.fit(steps=_STEPS + _CALM)
        except NodesLost as error:
            lost = not any(process.peer._sender for process in self.world.peers.values())
            gone = not any(process.alive for process in self.world.peers.values())
            require(lost or gone, "I7", f"it ended with {error!r}")
        alive = [name for name, process in self.world.peers.items() if process.alive]
        pools = engine._lent_pool, engine._pool
        require(not alive and pools == (None, None), "I11", f"still there after the end: {alive}")
        if run is not None:
            self.stop_by = self.world.stopped + GRACE
            self._check_end(run)

    # --- at every event --------------------------------------------------------------------------

    def _observe(self, process: Process) -> None:
        peer = process.peer
        if peer._sender is None:
            return
        peer.stepping = self._step
        node, name, most = peer.node, process.name, self.case.workers
        if self.processes.get(name, process) is not process:  # it has joined again
            self.returned += 1
            self.seen[name] = _Seen(self.seen[name].public)
        self.processes[name] = process
        seen = self.seen.setdefault(name, _Seen({0: node._start.tobytes()}))
        mine = seen.public.setdefault(node._number, node._copies[name].tobytes())
        same = mine == node._copies[name].tobytes()
        require(same, "I1", f"the public copy of {name} moved without a message")
        require(bool(np.isfinite(node.server.vector).all()), "I9", f"the model of {name}")
        for other in node._copies.keys() - {name}:
            copy = node._copies[other]
            heard = node._heard.get(other, (-1, -1))
            before = seen.heard.get(other, (0, 0))
            same_life = heard[0] >> 32 == before[0] >> 32
            ahead = heard[0] >= before[0] and (heard[1] >= before[1] or not same_life)
            require(ahead, "I4", f"at {name} message {heard} of {other} follows {before}")
            known = self._public(other).get(heard[0]) == copy.tobytes()
            require(known, "I1", f"{name} has a copy of {other} that never was")
            seen.heard[other] = heard
        self._check_books(peer, name)
        sizes = {
            "copies": len(node._copies),
            "news": len(peer._updated),
            "events": len(peer._told) + len(peer._own),
            "results": len(node._results),
            "messages on the way": len(peer.sender._on_the_way),
            "peers due": len(peer.sender._due),
        }
        most += 2 * self.returned  # deaths and returns that it has not been told
        for what, size in sizes.items():
            require(size <= most + 2, "I8", f"{size} {what} at {name} with {most} nodes")
        for outbox in peer.sender._outboxes.values():
            messages = outbox._messages
            waiting = sum(message.nbytes for message in messages)
            short = len(messages) <= 1 or waiting <= node.server.vector.nbytes
            require(short, "I8", f"{waiting} bytes wait at {name}")
        for entry in peer.journal[seen.entries :]:
            self._check_entry(name, entry, seen)
        seen.entries = len(peer.journal)

    def _public(self, name: WorkerId) -> dict[int, bytes]:
        if name not in self.seen:
            start = next(iter(self.world.peers.values())).peer.node._start
            return {0: start.tobytes()}
        return self.seen[name].public

    def _check_books(self, peer: SimulatedPeer, name: WorkerId) -> None:
        assert peer._coordinator is not None
        policy, books = peer._coordinator.policy, peer._coordinator.ledger
        assert isinstance(policy, Gossip)
        missing = set(books.copies) - set(peer.node._copies)
        require(not missing, "I2", f"{name} believes to have copies of {sorted(missing)}")
        kept = policy._gone & {*books.copies, *peer.node._copies}
        require(not kept, "I2", f"{name} keeps copies of {sorted(kept)}, who are gone")
        strange = set(peer.node._copies) - set(self.world.peers)
        require(not strange, "I2", f"{name} has copies of {sorted(strange)}, who are nobody")

    def _check_entry(self, name: WorkerId, entry: Entry, seen: _Seen) -> None:
        event = entry.event
        if isinstance(event, Received):
            before = seen.versions.get(event.sender, 0)
            told = f"{name} hears of version {event.version} of {event.sender} after {before}"
            require(event.version >= before, "I4", told)
            seen.versions[event.sender] = event.version
        if isinstance(event, Joined):
            seen.versions.pop(event.worker, None)
        for command in entry.commands:
            if isinstance(command, Start):
                seen.tasks[command.task.id] = command.task

    def _step(self, peer: SimulatedPeer, step: Step) -> Callable[[], None]:
        """Note all that a step is made of; return what checks it once it is done."""
        node, name = peer.node, peer.process.name
        seen = self.seen[name]
        (task,) = step.weights
        require(task not in seen.used, "I1", f"{name} uses task {task} twice")
        seen.used.add(task)
        assert peer._coordinator is not None
        books, policy = peer._coordinator.ledger, peer._coordinator.policy
        assert isinstance(policy, Gossip)
        since = seen.tasks[task].version if task in seen.tasks else books.version - 1
        late = books.version - 1 - since
        require(late == 0, "I10", f"{name} uses a gradient that is {late} steps old")
        total = sum(step.mix.values())
        if isinstance(policy.mixing, Difference):
            require(total == 0.0, "I5", f"differences of {name} add up to {total}")
        require(-1e-9 <= total < 1, "I5", f"copies count for {total} at {name}")
        links = policy.graph.without(*policy._gone).neighbors[name]
        strange = set(step.mix) - {*links, name}
        require(not strange, "I2", f"{name} mixes with {sorted(strange)}, no neighbors of it")
        x = node.server.vector.copy()
        gradient = node._results[task].vector
        require(gradient is not None and bool(np.isfinite(gradient).all()), "I9", "a gradient")
        copies = sum(weight * node._copies[peer] for peer, weight in step.mix.items())
        expected = (1 - total) * x + copies - self.learner.lr * gradient

        def done() -> None:
            close = np.allclose(node.server.vector, expected, rtol=1e-9, atol=1e-12)
            require(bool(close), "I5", f"a step of {name} is not what was computed and mixed")

        return done

    # --- the calm, and the end -------------------------------------------------------------------

    def calm_down(self) -> None:
        self.world.weather = self.world.weather.calm()
        self.world.cuts.clear()
        self.calm_at = self.world.now
        self.calm = {n: p.peer.node._number for n, p in self.world.peers.items() if p.peer._node}

    def _check_end(self, run: Run) -> None:
        nodes = self.case.workers
        steps = (_STEPS + _CALM) * nodes
        taken = run.meter.version
        require(taken >= steps, "I7", f"ended after {taken} of {steps} steps: {run.reason}")
        for name, process in self.world.peers.items():
            entries, own = list(run.journals[name]), process.peer.journal
            same = next((i for i, (a, b) in enumerate(zip(entries, own, strict=False)) if a != b),
                        min(len(entries), len(own)))  # fmt: skip
            rest = [entry.event for entry in entries[same:]]  # by the driver, of one that is dead
            ends = not rest or (process.died and all(isinstance(e, Joined | Left) for e in rest))
            require(bool(ends) or self.respawns > 0, "I4", f"the journal of {name} has a gap")
            entries = entries[:same]
            over = process.over_at + _HEARD < self.stop_by and self._is_long()
            over = over and not self.respawns
            require(not over or len(entries) == len(own), "I4", f"the end of {name} is missing")
            again = replay(run.driven_policy, run.journals[name])
            require(again == run.journals[name], "I5", f"the journal of {name} does not replay")
            check_samples(name, run.journals[name] if self.respawns else own)
        here = {n: p for n, p in self.world.peers.items() if n in run.models}
        require(bool(here), "I7", "no model is left")
        vectors = {name: process.peer.node.vector() for name, process in here.items()}
        require(bool(np.isfinite(run.model).all()), "I9", f"the model is {run.model}")
        if self._is_told_often():
            apart = consensus(vectors)
            require(apart < _APART, "I7", f"models are {apart:.3g} apart in the end")
        if self._is_long():
            self._check_links(here)

    def _is_told_often(self) -> bool:
        """Tell whether news is regular: where it is not, old differences are added for long."""
        assert isinstance(self.case.policy, Gossip)
        trigger = self.case.policy.trigger
        return isinstance(trigger, Always) or getattr(trigger, "every", None) is not None

    def _is_long(self) -> bool:
        """Tell whether all that was under way when it became calm has arrived long ago."""
        return self.stop_by > self.calm_at + _SETTLED

    def _check_links(self, here: dict[WorkerId, Process]) -> None:
        """I7: all who were awake know who is gone, and hear of each other."""
        awake = {n: p for n, p in here.items() if p.asleep < self.calm_at}
        dead = {n for n, p in self.world.peers.items() if n not in here and p.died < self.calm_at}
        for name, process in awake.items():
            assert process.peer._coordinator is not None
            policy = process.peer._coordinator.policy
            assert isinstance(policy, Gossip)
            require(policy._gone >= dead, "I7", f"{name} has not heard of all of {sorted(dead)}")
            if policy._gone != dead:
                continue  # who died in the calm may still be unknown at the other end
            for other in policy.graph.without(*dead).neighbors[name]:
                if other not in awake:
                    continue
                made = awake[other].peer.node._number
                heard = process.peer.node._heard.get(other, (-1, 0))[0]
                calm = self.calm.get(other, made)  # it may join again after that
                news = made - calm < 6 or heard > calm
                require(news, "I7", f"{name} has heard nothing of {other} since it is calm")
                kept = heard == made or awake[other].peer.has_more_for(name)
                require(kept, "I7", f"{name} is never told of message {made} of {other}")


class _Calm(Callback):
    """Ends the storm after so many steps: then the run has to end too."""

    def __init__(self, storm: GossipStorm) -> None:
        self._storm = storm

    def stepped(self, progress: Progress) -> None:
        require(isfinite(progress.loss), "I9", f"the loss is {progress.loss}")
        if progress.step == _STEPS:
            self._storm.calm_down()


def _learner(rng: random.Random, nodes: int) -> Any:
    batch = 4 * nodes
    if rng.random() < 0.3:
        return _Noisy((1.0, 0.5, 0.5, 0.3, 0.3, 0.2), 1.0, 0.0, 0.1, lr=0.1, batch_size=batch)
    random_ = np.random.default_rng(rng.randrange(1000))
    features = random_.standard_normal((30 * nodes, sum(_TENSORS)))
    targets = features.sum(axis=1) + 0.1 * random_.standard_normal(len(features))
    return _Tiled(features, targets, lr=0.05, batch_size=batch)


def check_samples(name: WorkerId, entries: Iterable[Entry]) -> None:
    """I3: what a node drew of its tile is used once, one stretch after the other, without a gap."""
    tasks: dict[int, Task] = {}
    done: dict[int, int] = {}
    used: Counter[int] = Counter()
    for entry in entries:
        if isinstance(entry.event, Finished):
            done[entry.event.task] = entry.event.samples
        for command in entry.commands:
            if isinstance(command, Start):
                tasks[command.task.id] = command.task
            if isinstance(command, Step):
                for id in command.weights:
                    for _, draw, samples in tasks[id].stretches():
                        require(done[id] == samples, "I3", f"{name} used a part of task {id}")
                        used.update(range(draw, draw + samples))
    twice = [place for place, count in used.items() if count > 1]
    require(not twice, "I3", f"{name} used samples {sorted(twice)[:5]} twice")
    missing = set(range(max(used, default=-1) + 1)) - set(used)
    require(not missing, "I3", f"{name} lost samples {sorted(missing)[:5]}")
