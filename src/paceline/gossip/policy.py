"""The policy of decentralized training: nodes step at their own pace and update neighbors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

from paceline.codecs.triggers import Always, Trigger
from paceline.core.policy import Policy
from paceline.core.protocol import (
    Assign,
    Command,
    Discard,
    Event,
    Finished,
    Joined,
    Left,
    Received,
    Send,
    Step,
    Stepped,
    View,
    Want,
    Work,
    WorkerId,
    some_names,
)
from paceline.core.schema import Schema
from paceline.gossip.graphs import Graph
from paceline.gossip.mixing import Difference, Mix, Mixing

WINDOW, SILENCE = 20, 150
"""The least steps over which paces are compared, and the steps of a long silence."""


@dataclass
class Gossip(Policy):
    """One node of a graph. After each gradient the node mixes its model and takes a step:

    x_i <- mix(x_i, x̂) - rate * w_i * g(x_i)

    where w_i is the weight of its steps. x̂ are public copies: those of the neighbors and its own.
    Then the node publishes the tensors for which the trigger fires. No node waits for a neighbor.
    When a node dies, all others repair the graph in the same way (`Graph.without`), and new
    neighbors exchange whole copies.

    | method | expression |
    |---|---|
    | D-PSGD | `Gossip(graph, Averaging())` |
    | EventGraD | `Gossip(ring(n), Averaging(), EventGrad(horizon))` |
    | EventGraD with Top-K | the same with `Trainer(codec=TopK(fraction, sizes))` |
    | CHOCO-SGD | `Gossip(graph, Difference(gamma))` with `Trainer(codec=TopK(…))` |
    | SPARQ-SGD | the same with `OnChange(scale, growth=…)` and `local_steps=H` |
    | ours | `Gossip(graph, Difference(gamma), OnChange(scale, every=…))` |

    graph: the neighbors of each node; its nodes are the engine's workers.
    mixing: `Difference(gamma)`, or `Averaging()` for comparison.
    trigger: decides which tensors to publish.
    local_steps: the steps between two exchanges; the other steps neither mix nor send.
    tiled: whether every node has a data shard of its own, by its place in the graph.
    step_weights: the factor w_i of each node's steps. By default it is n_i * nodes / N, for a shard
        of n_i of all N samples. So the nodes minimize the mean loss of all samples. That assumes
        about as many steps of each node. If a node with twice the samples also takes twice the
        steps, give 1 for all nodes.

    Each node computes an equal share of the global batch, so that all steps together use as many
    samples as with a central coordinator. A slow node takes fewer steps: its data count for less.
    """

    graph: Graph
    mixing: Mixing = Difference(0.5)
    trigger: Trigger = field(default_factory=Always)
    local_steps: int = 1
    tiled: bool = True
    step_weights: Mapping[WorkerId, float] | None = None
    _gone: set[WorkerId] = field(default_factory=set, init=False, repr=False)
    # Neighbors that have a copy of this node's model, and neighbors whose copy this node has.
    _told: set[WorkerId] = field(default_factory=set, init=False, repr=False)
    _known: set[WorkerId] = field(default_factory=set, init=False, repr=False)
    _weights: dict[WorkerId, float] = field(default_factory=dict, init=False, repr=False)
    _place: int = field(default=-1, init=False, repr=False)  # in the graph
    # For each neighbor: its version and mine at an earlier message, a later one, and the last.
    _paces: dict[WorkerId, list[tuple[int, int]]] = field(
        default_factory=dict, init=False, repr=False
    )
    schema = Schema(
        "gossip",
        1,
        {
            **{"gone": "_gone", "told": "_told", "known": "_known", "weights": "_weights"},
            **{"place": "_place", "paces": "_paces"},
        },
        {"trigger": "trigger"},
    )

    def __post_init__(self) -> None:
        if self.local_steps < 1:
            raise ValueError(f"local_steps={self.local_steps}: use 1 or more")
        for name, given, method, example in (
            ("mixing", self.mixing, "mix", "Difference(0.5)"),
            ("trigger", self.trigger, "fires", "OnChange(0.3)"),
        ):
            if isinstance(given, type) or not hasattr(given, method):
                raise ValueError(f"{name}={given!r}: give an object, such as {example}")
        if (weights := self.step_weights) is not None and not (
            set(weights) == set(self.graph.nodes)
            and all(isfinite(weight) and weight > 0 for weight in weights.values())
        ):
            raise ValueError(
                f"step_weights={weights!r}: give a finite number above 0 for each node, "
                f"{self.graph.nodes[0]} to {self.graph.nodes[-1]}"
            )

    decentralized = True

    @property
    def wants(self) -> frozenset[Want]:
        return frozenset({"rate", *(("each", figure) for figure in self.trigger.wants)})

    def check(self, workers: Sequence[WorkerId], batch: int) -> None:
        """Refuse a graph of other nodes than the workers, and a batch too small to share."""
        n = len(workers)
        if set(self.graph.nodes) != set(workers):
            raise ValueError(
                f"the graph has {len(self.graph.nodes)} nodes and the engine {n} workers, "
                f"{some_names(workers)}; use equal numbers, or name the nodes by graph.named(…)"
            )
        if batch < n:
            raise ValueError(
                f"batch_size={batch} cannot be shared among {n} nodes; use batch_size >= {n}"
            )

    def react(self, view: View, event: Event) -> Iterator[Command]:
        me = view.node
        if self._place < 0:
            self._place, self._weights = self.graph.nodes.index(me), self.graph.weights(me)
            self._told, self._known = (
                set(self._weights),
                set(self._weights),
            )  # all nodes start from the same model
            self._paces = {peer: [(0, 0)] * 3 for peer in self._weights}
        match event:
            case Joined(worker) if worker == me:
                yield from self._introduce(view)
                yield self._assign(view)
            case Left(worker) if worker == me:
                self._told = set()  # the others drop its copy,
                self._known = set()  # and its copies of theirs are lost, or old when it returns
            case Joined(worker) | Left(worker):
                yield from self._repair(view, worker, isinstance(event, Left))
            case Received(sender, version):
                self._known.add(sender)
                self._note(sender, version, view.version)
            case Finished(task):
                if view.held[task].samples:
                    weights = self.step_weights or {}
                    yield Step({task: weights.get(me, 1.0)}, self._mix(view))
                else:
                    yield Discard(task)
                if me in view.workers:
                    yield self._assign(view)
            case Stepped(version):
                if version % self.local_steps == 0:
                    yield from self._publish(view, event)

    def _assign(self, view: View) -> Assign:
        for lost in view.lost:
            return Assign(view.node, redo=lost)
        place, nodes = self._place, len(self.graph.neighbors)
        share = view.batch * (place + 1) // nodes - view.batch * place // nodes
        return Assign(view.node, Work(samples=share, tiles={place: share} if self.tiled else None))

    def _mix(self, view: View) -> Mix:
        at_hand = {
            peer: weight
            for peer, weight in self._weights.items()
            if peer in view.copies and peer in self._known
        }
        if not at_hand or view.version % self.local_steps:
            return {}
        paces = {peer: self._pace(peer, view.version) for peer in at_hand}
        return self.mixing.mix(view.node, at_hand, paces)

    def _note(self, peer: WorkerId, version: int, mine: int) -> None:
        """Record the versions of a peer and of this node."""
        first, later, _ = self._paces.get(peer, [(version, mine)] * 3)
        if mine - later[1] >= WINDOW:
            first, later = later, (version, mine)
        self._paces[peer] = [first, later, (version, mine)]

    def _pace(self, peer: WorkerId, mine: int) -> float:
        """Return the steps that a peer takes per step of this node, known from its messages.

        A silent peer is not a slow one: its trigger may not fire. A long silence lowers the pace.
        """
        if peer not in self._paces:
            return 1.0
        (version, step), _, (newest, at) = self._paces[peer]
        pace = (newest - version) / (at - step) if at - step >= WINDOW else 1.0
        return pace * min(1.0, SILENCE / max(mine - at, 1))

    def _publish(self, view: View, stepped: Stepped) -> Iterator[Command]:
        number = stepped.version // self.local_steps
        fired = self.trigger.fires(number, stepped.figures, view.tensors, stepped.stats["rate"])
        if self._weights and any(fired):
            tensors = tuple(place for place, fires in enumerate(fired) if fires)
            yield Send(tuple(self._weights), None if all(fired) else tensors)

    def _repair(self, view: View, worker: WorkerId, left: bool) -> Iterator[Command]:
        """Repair the graph without the nodes that left; send a copy along new links."""
        self._gone = self._gone | {worker} if left else self._gone - {worker}
        self._paces.pop(worker, None)
        self._weights = self.graph.without(*self._gone - {view.node}).weights(view.node)
        # A former neighbor gets no more messages, so the copies at both ends become stale.
        self._told &= set(self._weights) - {worker}
        self._known &= set(self._weights) - {worker}
        if view.node in view.workers:
            yield from self._introduce(view)

    def _introduce(self, view: View) -> Iterator[Command]:
        """Send the whole copy to neighbors that do not have it."""
        new = tuple(peer for peer in self._weights if peer not in self._told)
        if new:
            self._told |= set(new)
            yield Send(new, whole=True)
