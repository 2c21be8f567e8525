"""One call of `fit` under a decentralized policy: the limits count over all nodes together."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.core.errors import Terminated
from paceline.core.logs import tell_left_out
from paceline.core.protocol import WorkerId
from paceline.gossip.engine import gossip_engine
from paceline.gossip.job import NodeState
from paceline.gossip.policy import Gossip
from paceline.gossip.training import Ends, GossipTraining, Record
from paceline.report.callbacks import Callback, Live
from paceline.training.checkpoint.nodes import NodeSaving
from paceline.training.fit import Condition, Ending
from paceline.training.run import Run
from paceline.training.settings import Settings, unused
from paceline.training.signals import signals


def fit_decentralized(
    settings: Settings,
    policy: Gossip,
    ends: dict[str, float],
    until: Condition | None,
    callbacks: Sequence[Callback],
    resumed: Mapping[WorkerId, NodeState] | None = None,
) -> Run:
    """Train a model on each node; return the run with their mean.

    resumed: the states of all nodes in a checkpoint.
    """
    on = settings.given

    def journal(node: WorkerId) -> Path | None:
        path = None if on.journal is None else Path(on.journal)
        return None if path is None else unused(path.with_stem(f"{path.stem}-{node}"), None)

    training = GossipTraining(
        on.learner,
        policy,
        settings.tiles,
        settings.codec,
        on.seed,
        Record(settings.about_run(), on.prices, journal),
        resumed,
    )
    saves = on.checkpoints
    saving = None if saves is None else NodeSaving(saves, on.learner, settings.about())
    engine, ended, caught = gossip_engine(on.engine), Ending(), list[int]()
    with contextlib.ExitStack() as finally_:
        finally_.callback(ended.tell, callbacks)
        finally_.callback(tell_left_out)
        live = Live(training.header, training.meter.nodes, training.meter.total, engine.now)
        for callback in callbacks:
            callback.started(live)
        caught_signals = signals(engine.stop, caught)
        steps = ends["steps"] * on.engine.size
        limits = Ends(steps, ends["samples"], ends["seconds"], until)
        ended.text = training.train(
            engine, limits, callbacks, lambda: finally_.enter_context(caught_signals), saving
        )
    total, driven = training.meter.total, training.policy
    run = Run(
        training.mean(),
        total.arrays(),
        total,
        training.journals,
        driven,
        ended.text,
        driven,
        meters=training.meter.nodes,
        make_models=training.models,
        more=training.summary,
    )
    if signal.SIGTERM in caught:
        raise Terminated(run)
    return run
