"""Eight nodes in a ring on a real Ray: one is killed, one is throttled, and the others go on."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch

import paceline as pl
from paceline.core.errors import NodesLost
from paceline.core.protocol import Left, Received, Send
from paceline.testing import Throttle
from tests.conftest import flat, make_learner

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


class Trouble(pl.Callback):
    """Kills a node and throttles another in mid-run."""

    def __init__(self, engine: pl.Ray, at: int) -> None:
        self._engine, self._at, self.when = engine, at, 0.0
        self.throttle: Throttle | None = None

    def stepped(self, progress: pl.Progress) -> None:
        if progress.step >= self._at and self.throttle is None:
            pids = self._engine.pids()
            os.kill(pids["w2"], signal.SIGKILL)
            self.throttle = Throttle(pids["w5"], 0.1)
            self.throttle.__enter__()
            self.when = progress.seconds

    def ended(self, reason: str) -> None:
        if self.throttle is not None:
            self.throttle.__exit__(None, None, None)


def paces(run: pl.Run, begin: float, end: float) -> dict[str, float]:
    """Return the steps a second of each node between two times."""
    return {
        node: float(np.mean((begin < (t := np.array(meter.columns["seconds"]))) & (t <= end)))
        * len(t) / (end - begin)
        for node, meter in run.meters.items()
    }  # fmt: skip


@pytest.mark.timing
def test_a_killed_and_a_throttled_node_slow_nobody() -> None:
    learner = make_learner(hidden=512, batch_size=512)
    engine = pl.Ray(workers=8, respawns=0)
    trouble = Trouble(engine, at=60)
    policy = pl.gossip.Gossip(
        pl.gossip.ring(8), pl.gossip.Difference(0.5), pl.gossip.OnChange(0.1, every=20)
    )
    run = pl.Trainer(
        learner, policy, engine, callbacks=[trouble], codec=pl.codecs.TopK(0.2), progress=False
    ).fit(steps=400)
    assert run.steps >= 400 and trouble.when > 0
    assert set(run.models) >= {f"w{i}" for i in range(8)} - {"w2", "w5"} and "w2" not in run.models
    before = paces(run, 0.0, trouble.when)
    after = paces(run, trouble.when + 0.2 * (run.seconds - trouble.when), run.seconds)
    others = [f"w{i}" for i in range(8) if i not in (2, 5)]
    assert after["w2"] == 0.0 and after["w5"] < 0.5 * before["w5"]
    assert np.median([after[w] / before[w] for w in others]) > 0.7  # with two idle cores above 1
    # The neighbors of the dead are now each other's.
    for node, other in (("w1", "w3"), ("w3", "w1")):
        entries = list(run.journals[node])
        heard = next(at for at, e in enumerate(entries) if e.event == Left("w2"))
        assert entries[heard].commands == (Send((other,), whole=True),)
        news = [e.event for e in entries[heard:] if isinstance(e.event, Received)]
        assert any(event.sender == other for event in news)
        assert not any(event.sender == "w2" for event in news[5:])
    assert run.metrics["loss"][-100:].mean() < 0.25 * run.metrics["loss"][:8].mean()
    for journal in run.journals.values():
        assert pl.protocol.replay(run.driven_policy, journal) == journal
    models = [flat(run.models[w]) for w in others]
    mean = torch.stack(models).mean(dim=0)
    assert max(float(torch.dist(m, mean)) for m in models) < 0.5 * float(mean.norm())


@pytest.mark.long
def test_a_node_that_hangs_is_left_out_in_the_end() -> None:
    engine, stopped = pl.Ray(workers=3), list[int]()

    class Pause(pl.Callback):
        def stepped(self, progress: pl.Progress) -> None:
            if progress.step >= 20 and not stopped:
                stopped.append(engine.pids()["w1"])
                os.kill(stopped[0], signal.SIGSTOP)

    learner = make_learner(hidden=256, batch_size=192)
    run = pl.Trainer(
        learner, pl.gossip.Gossip(pl.gossip.ring(3)), engine, callbacks=[Pause()], progress=False
    ).fit(steps=120)  # fmt: skip
    assert stopped and set(run.models) == {"w0", "w2"} and run.steps >= 120


def broken(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    raise ZeroDivisionError("in the user's loss")


def test_an_error_in_the_users_code_reaches_the_user() -> None:
    learner = make_learner()
    wrong = pl.TorchLearner(learner.model, broken, learner.optimizer, learner.dataset, 64)
    with pytest.raises(ZeroDivisionError, match="in the user's loss"):
        pl.Trainer(wrong, pl.gossip.Gossip(pl.gossip.ring(2)), pl.Ray(2), progress=False).fit(
            steps=5
        )


@pytest.mark.timing
def test_messages_that_come_late_do_not_drag_the_models_back() -> None:
    """A step takes a millisecond here, and a message several: copies are always old."""
    learner = make_learner(batch_size=256)
    policy = pl.gossip.Gossip(pl.gossip.complete(4), pl.gossip.Difference(0.5))
    simulated, real = (
        pl.Trainer(learner, policy, engine, progress=False).fit(steps=150).metrics["loss"]
        for engine in (pl.Simulator(4), pl.Ray(4))
    )
    assert real[-80:].mean() < max(2 * simulated[-80:].mean(), 0.04 * real[:4].mean())


def test_nodes_that_are_all_silent_are_not_waited_for() -> None:
    class Pause(pl.Callback):
        def __init__(self, engine: pl.Ray) -> None:
            self.engine, self.paused = engine, list[int]()

        def stepped(self, progress: pl.Progress) -> None:
            if not self.paused:
                self.paused = list(self.engine.pids().values())
                for pid in self.paused:
                    os.kill(pid, signal.SIGSTOP)

    engine = pl.Ray(workers=3, timeout=4.0)
    pause = Pause(engine)
    trainer = pl.Trainer(
        make_learner(),
        pl.gossip.Gossip(pl.gossip.ring(3)),
        engine,
        callbacks=[pause],
        progress=False,
    )
    with pytest.raises(NodesLost, match="none of 3 nodes answered within the timeout of 4 s"):
        trainer.fit(steps=10**6)
    assert len(pause.paused) == 3
