"""One decentralized run, which `Trainer.fit` starts under `Gossip`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from paceline.core.journal import Entry, Header, Journal
from paceline.core.logs import logger_of
from paceline.core.protocol import Evaluated, LrScaled, Peer, Prices, WorkerId
from paceline.core.state import describe
from paceline.data.partition import even
from paceline.data.partition.base import Partition
from paceline.gossip.engine import GossipEngine
from paceline.gossip.job import GossipJob, NodeState
from paceline.gossip.metrics import GossipMeters
from paceline.gossip.node import consensus, mean_of, tensors_of
from paceline.gossip.policy import Gossip
from paceline.learners.arrays import TimingOnly
from paceline.learners.base import Array, Learner, Server
from paceline.report.callbacks import Callback, Progress, progress_of

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec

logger = logger_of(__name__)

_FAR_FROM_EQUAL = 1.5  # the samples of one node count this many times as much as those of another


@dataclass(frozen=True)
class Ends:
    """The limits of a run over all nodes: steps of nodes, samples, seconds, or a condition."""

    steps: float = inf
    samples: float = inf
    seconds: float = inf
    until: Callable[[Progress], bool] | None = None

    def reached(self, meter: GossipMeters) -> str | None:
        total = meter.total
        if total.version >= self.steps:
            return f"{total.version} steps taken by {len(meter.nodes)} nodes"
        if total.samples_used >= self.samples:
            return f"{total.samples_used} samples used"
        if total.columns["seconds"][-1] >= self.seconds:
            return f"{total.columns['seconds'][-1]:g} seconds passed"
        return None


@dataclass(frozen=True)
class Record:
    """The contents of the journals' headers, and the file of each journal."""

    about: Mapping[str, Any]
    prices: Prices
    journal: Callable[[WorkerId], Path | None]


class Saving(Protocol):
    """Writes checkpoints of all nodes."""

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after a step."""

    def save(self, step: int, states: Mapping[WorkerId, NodeState], mean: Server) -> None:
        """Save a checkpoint; log a failure."""


class GossipTraining:
    """The journals, metrics and models of one decentralized run."""

    def __init__(
        self,
        learner: Learner,
        policy: Gossip,
        tiles: Partition | None,
        codec: Codec | None,
        seed: int,
        record: Record,
        resumed: Mapping[WorkerId, NodeState] | None = None,
    ) -> None:
        nodes = policy.graph.nodes
        if isinstance(learner, TimingOnly):
            raise ValueError("Timing has no model to send to neighbors; use Quadratic to try times")
        if learner.examples is not None and learner.examples < len(nodes):
            raise ValueError(
                f"{learner.examples} samples for {len(nodes)} nodes: each node needs at least one"
            )
        if tiles is None and learner.examples is not None:
            tiles = even(learner.examples, len(nodes), seed=seed)
        if tiles is not None and tiles.parts != len(nodes):
            raise ValueError(
                f"the data have {tiles.parts} shards (tiles) and the graph has {len(nodes)} "
                f"nodes; use {len(nodes)} shards: node i of the graph gets shard i"
            )
        self._samples = samples_of(tiles, nodes)
        weights = policy.step_weights
        if weights is None and self._samples is not None:
            mean = sum(self._samples.values()) / len(nodes)
            weights = {node: count / mean for node, count in self._samples.items()}
        self.policy = replace(policy, tiled=tiles is not None, step_weights=weights)
        tensors = tensors_of(learner.server().layout)
        self.header = common = Header(
            describe(self.policy),
            learner.batch_size,
            record.about,
            message_bytes=learner.message_bytes,
            prices=record.prices,
            tiles=() if tiles is None else tuple(tiles.sizes.tolist()),
        )
        headers = {
            node: replace(
                common,
                peer=Peer(node, tuple(policy.graph.weights(node)), tensors),
                state=resumed[node].coordinator if resumed else None,
            )
            for node in nodes
        }
        self.journals = {
            node: Journal(head, record.journal(node)) for node, head in headers.items()
        }
        path = next(iter(self.journals.values())).path
        self.meter = GossipMeters(headers, None if path is None else path.parent)
        self._learner = learner
        self._job = GossipJob(
            learner, self.policy, headers, seed, tiles, codec, resumed=resumed or {}
        )
        self._vectors: dict[WorkerId, Array] = {}

    def train(
        self,
        engine: GossipEngine,
        ends: Ends,
        callbacks: Sequence[Callback],
        begun: Callable[[], None],
        saving: Saving | None = None,
    ) -> str:
        """Train until a limit is reached; return the reason.

        begun: a callback for the start of the engine.
        saving: writes checkpoints.
        """
        reason: str | None = None
        progress: Progress | None = None
        nodes = len(self.journals)
        with contextlib.ExitStack() as finally_:
            finally_.callback(self.meter.close)
            finally_.callback(engine.close)
            for journal in self.journals.values():
                finally_.callback(journal.close)
            job = replace(self._job, seconds=ends.seconds)
            for count, (node, entry) in enumerate(engine.entries(job)):
                if count == 0:
                    begun()
                self.journals[node].append(entry)
                if not self.meter.observe(node, entry) or reason is not None:
                    continue
                reasons: list[str] = []
                reason = ends.reached(self.meter)
                total = self.meter.total
                if total.version % nodes == 0:
                    progress = self._progress(engine, reasons)
                    for callback in callbacks:
                        callback.stepped(progress)
                    if ends.until is not None and ends.until(progress):
                        reasons.append("the condition of until holds")
                    if not isfinite(progress.loss):
                        reasons.append(f"the loss is {progress.loss} at step {progress.step}")
                    if saving is not None and saving.is_due(progress.step) and not reasons:
                        self._save(engine, saving)
                reason = reason or (reasons[0] if reasons else None)
                if reason is not None:
                    engine.stop(reason)
            if progress is not None:
                for callback in callbacks:
                    callback.ending(progress)
            self._vectors = engine.vectors()
            if saving is not None and isfinite(self._loss()):
                self._save(engine, saving)
        self._compare_counts()
        return engine.reason or "all nodes have stopped"

    def _progress(self, engine: GossipEngine, reasons: list[str]) -> Progress:
        """Return the progress of all nodes together; a reason to stop is added to `reasons`."""
        nodes, total = len(self.journals), self.meter.total
        mean: Callable[[], Any] = lambda: self._mean(engine.vectors())  # noqa: E731
        examples = self._learner.examples
        found = progress_of(total, examples, nodes, mean, reasons.append, self._record)
        return replace(found, step=total.version // nodes, loss=self._loss())

    def _record(self, event: Evaluated | LrScaled) -> None:
        """Write an evaluation of the mean model into the journal of the first node."""
        if isinstance(event, LrScaled):
            raise ValueError(
                "progress.scale_lr changes the learning rate of servers, and a decentralized run "
                "has none; give the learner a schedule"
            )
        node, journal = next(iter(self.journals.items()))
        entry = Entry(self.meter.nodes[node].now, event, ())
        journal.append(entry)
        self.meter.observe(node, entry)

    def models(self) -> dict[WorkerId, Any]:
        """Return the model of every node that was connected at the end."""
        return {node: self._model(vector) for node, vector in self._vectors.items()}

    def mean(self) -> Any:
        """Return the mean of all models, by the samples of the nodes.

        Where training stands still, sum_i n_i grad f_i(x_i) = 0. With one curvature for all nodes,
        the mean of x_i by n_i then is the very optimum over all samples.
        """
        return self._mean(self._vectors)

    def summary(self) -> str:
        return self.meter.lines(consensus(self._vectors))

    def _mean(self, vectors: Mapping[WorkerId, Array]) -> Any:
        return self._model(mean_of(vectors, self._samples))

    def _save(self, engine: GossipEngine, saving: Saving) -> None:
        """Save the states of all nodes, as they are when they start again."""
        fresh = replace(self._job, resumed={})
        states = {node: fresh.as_left(node, state) for node, state in engine.states().items()}
        mean = mean_of({n: s.server.arrays["values"] for n, s in states.items()}, self._samples)
        server = self._learner.server()
        server.vector[:] = mean
        saving.save(self.meter.total.version // len(self.journals), states, server)

    def _loss(self) -> float:
        """Return the mean of the nodes' last losses, by their samples."""
        rows = self.meter.total.columns["loss"]
        if self._samples is None or not len(rows):
            return float(np.mean(rows[-len(self.journals) :])) if len(rows) else nan
        columns = {node: meter.columns["loss"] for node, meter in self.meter.nodes.items()}
        losses = {node: column[-1] for node, column in columns.items() if len(column)}
        weights = [self._samples[node] for node in losses]
        return float(np.average(list(losses.values()), weights=weights))

    def _compare_counts(self) -> None:
        """Warn if the samples of a node counted much more or less than those of others."""
        weights, counts = self.policy.step_weights, self._samples
        if weights is None or counts is None:
            return
        per_sample = {
            n: weights[n] * self.meter.nodes[n].version / counts[n] for n in self._vectors
        }
        here = sum(counts[node] for node in per_sample)
        mean = sum(each * counts[node] for node, each in per_sample.items()) / here
        counted = {node: each / max(mean, 1e-300) for node, each in per_sample.items()}
        least, most = min(counted, key=counted.__getitem__), max(counted, key=counted.__getitem__)
        if counted[least] * _FAR_FROM_EQUAL < counted[most]:
            logger.warning(
                "the nodes took unequal numbers of steps: a sample of %s counted %.2g times as "
                "much as it should, one of %s %.2g times; give Gossip(step_weights=…) in "
                "proportion to samples over steps",
                least, counted[least], most, counted[most],
            )  # fmt: skip

    def _model(self, vector: Array) -> Any:
        server = self._learner.server()
        server.vector[:] = vector
        return server.model()


def samples_of(tiles: Partition | None, nodes: Sequence[WorkerId]) -> dict[WorkerId, int] | None:
    """Return the samples of each node; None if all have equally many, up to one."""
    if tiles is None:
        return None
    counts = dict(zip(nodes, tiles.sizes.tolist(), strict=True))
    return counts if max(counts.values()) - min(counts.values()) > 1 else None
