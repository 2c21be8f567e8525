"""A node of a decentralized run on a real Ray is killed, starts again, and takes part as before."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

import paceline as pl
from paceline.core.protocol import Finished, Joined, Left, Received, Start
from tests.conftest import make_learner

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


class Kill(pl.Callback):
    """Kills a node once, and ends the run some steps after it has come back."""

    def __init__(self, engine: pl.Ray) -> None:
        self._engine, self.killed, self.back = engine, 0, 0

    def stepped(self, progress: pl.Progress) -> None:
        pid = self._engine.pids().get("w2", 0)
        if progress.step >= 30 and not self.killed:
            self.killed = pid
            os.kill(pid, signal.SIGKILL)
        elif self.killed and pid not in (0, self.killed) and not self.back:
            self.back = progress.step
        if self.back and progress.step >= self.back + 100:
            progress.stop("long enough after its return")


@pytest.mark.long
def test_a_killed_node_joins_again() -> None:
    learner, engine = make_learner(hidden=256, batch_size=256), pl.Ray(4)
    kill = Kill(engine)
    policy = pl.gossip.Gossip(pl.gossip.ring(4), pl.gossip.Difference(0.5))
    run = pl.Trainer(learner, policy, engine, callbacks=[kill], progress=False).fit(
        steps=20_000, seconds=120
    )
    assert kill.back and run.reason == "long enough after its return"
    assert set(run.models) == {"w0", "w1", "w2", "w3"}
    entries = list(run.journals["w2"])
    left, joined = (
        next(at for at, e in enumerate(entries) if at and e.event == kind("w2"))
        for kind in (Left, Joined)
    )
    assert 0 < left < joined
    lost = entries[left - 1]
    assert sum(isinstance(e.event, Finished) for e in entries[joined:]) > 20
    # It goes on in its own shard where its journal ended: no offset is missing or used twice.
    offsets: list[int] = []
    tasks = {c.task.id: c.task for e in entries for c in e.commands if isinstance(c, Start)}
    for entry in entries:
        if isinstance(entry.event, Finished):
            offsets += [offset for _, offset, _ in tasks[entry.event.task].stretches()]
    assert offsets == list(range(0, 64 * len(offsets), 64)), lost
    for node in ("w1", "w3"):
        mine = list(run.journals[node])
        back = next(at for at, e in enumerate(mine) if e.event == Joined("w2"))
        heard = [e.event for e in mine[back:] if isinstance(e.event, Received)]
        assert sum(event.sender == "w2" for event in heard) > 10
    for journal in run.journals.values():
        assert pl.protocol.replay(run.driven_policy, journal) == journal
    alone = pl.Trainer(learner, policy, pl.Simulator(4), progress=False).fit(steps=run.steps // 4)
    assert run.metrics["loss"][-40:].mean() < 0.1 * run.metrics["loss"][:4].mean()
    assert run.metrics["loss"][-40:].mean() < 3 * alone.metrics["loss"][-40:].mean() + 0.01
    assert np.isfinite(run.metrics["loss"]).all()
