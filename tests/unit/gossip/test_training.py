"""Decentralized runs on the simulator: what papers promise, and what users see."""

from __future__ import annotations

from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import paceline as pl
from paceline.codecs.base import Codec
from paceline.codecs.triggers import Trigger
from paceline.core.protocol import Received, Send, Start, Step
from paceline.data.sampling import Samples, Stream
from paceline.gossip.metrics import GossipMeter
from paceline.gossip.node import consensus
from paceline.gossip.simulated import Delivery, SimulatedGossip
from paceline.gossip.training import GossipTraining, Record
from tests.conftest import flat, make_learner

TARGET = 3 / sqrt(10)


def least_squares(rows: int = 240, lr: float = 0.05) -> pl.learners.LeastSquares:
    random = np.random.default_rng(1)
    features = random.standard_normal((rows, 6))
    noise = 0.1 * random.standard_normal(rows)
    return pl.learners.LeastSquares(
        features, features @ np.arange(1.0, 7.0) + noise, lr, batch_size=32
    )


def fit(
    policy: pl.gossip.Gossip,
    learner: Any = None,
    delays: Any = pl.delays.Fixed(1.0),
    steps: int = 40,
    *,
    link: pl.delays.Link = pl.delays.Link(),
    schedule: Any = (),
    **more: Any,
) -> pl.Run:
    workers = len(policy.graph.nodes)
    engine = pl.Simulator(workers, delays, link, schedule=schedule)
    learner = learner or least_squares()
    return pl.Trainer(learner, policy, engine, progress=False, **more).fit(steps=steps)


def meter_of(run: pl.Run) -> GossipMeter:
    assert isinstance(run.meter, GossipMeter)
    return run.meter


# --- what papers promise -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trigger", [pl.gossip.Always(), pl.gossip.EventGrad(0.0), pl.gossip.EventGradStatic(0.0)]
)
def test_a_horizon_of_zero_is_d_psgd_bit_for_bit(trigger: Trigger) -> None:
    learner, graph = least_squares(), pl.gossip.ring(8)
    tiles = pl.partition.even(240, 8, seed=3)
    placed = pl.policies.Placed(tiles, move=False)
    run = fit(
        pl.gossip.Gossip(graph, pl.gossip.Averaging(), trigger), learner, placement=placed, seed=3
    )
    # D-PSGD, written down without messages, copies or rules; the samples are those of the tasks.
    samples, third = Samples(Stream(240, 3), 3, tiles), 1 / 3
    x = [np.zeros(6) for _ in range(8)]
    tasks = [
        [c.task for entry in run.journals[node] for c in entry.commands if isinstance(c, Start)]
        for node in graph.nodes
    ]
    for step in range(40):
        slopes = [learner.gradient(x[i], samples.of(tasks[i][step]))[1] for i in range(8)]
        sides = [sorted(((i - 1) % 8, (i + 1) % 8)) for i in range(8)]
        x = [
            (1 - 2 * third) * x[i] + (third * x[a] + third * x[b]) - 0.05 * slopes[i]
            for i, (a, b) in enumerate(sides)
        ]
    assert [run.models[node].tobytes() for node in graph.nodes] == [each.tobytes() for each in x]


@pytest.mark.parametrize(
    ("v", "norm", "events"),
    [(0.05, 0.299, 20), (0.1, 0.629, 13), (0.2, 1.315, 6), (0.5, 2.6087, 0)],
)
def test_stale_averaging_freezes_and_differences_do_not(v: float, norm: float, events: int) -> None:
    learner = pl.learners.Quadratic((1.0,) * 10, TARGET, 0.0, lr=0.1, batch_size=8)
    trigger = pl.gossip.OnChange(v / (0.1 * sqrt(10)))
    frozen = fit(
        pl.gossip.Gossip(pl.gossip.ring(8), pl.gossip.Averaging(), trigger), learner, steps=250
    )
    assert np.linalg.norm(frozen.model - TARGET) == pytest.approx(norm, abs=5e-4)
    assert meter_of(frozen).messages == 2 * 8 * events
    cured = fit(
        pl.gossip.Gossip(pl.gossip.ring(8), pl.gossip.Difference(0.5), trigger), learner, steps=250
    )
    assert np.linalg.norm(cured.model - TARGET) < 1e-9


@pytest.mark.parametrize(
    "codec",
    [
        pl.codecs.TopK(0.34),
        pl.codecs.Int8(),
        pl.codecs.Chain(pl.codecs.TopK(0.5), pl.codecs.Int8()),
    ],
)
def test_compressed_differences_reach_the_same(codec: Codec) -> None:
    """Shards whose best models are far apart, of which only the mean is right."""
    learner = least_squares(lr=0.02)
    order = np.argsort(learner.features[:, 0])
    tiles = pl.partition.Partition(np.argsort(order) // 30)
    best = np.linalg.lstsq(learner.features, learner.targets, rcond=None)[0]
    run = fit(
        pl.gossip.Gossip(pl.gossip.ring(8), pl.gossip.Difference(0.3)), learner, steps=600,
        codec=codec, placement=pl.policies.Placed(tiles, move=False),
    )  # fmt: skip
    assert np.linalg.norm(run.model - best) < 0.05
    assert consensus({n: m for n, m in run.models.items()}) < 0.2


def test_rare_messages_still_reach_everyone() -> None:
    policy = pl.gossip.Gossip(
        pl.gossip.ring(8), pl.gossip.Difference(0.25), pl.gossip.OnChange(1.0, every=40)
    )
    run = fit(policy, steps=600, delays=pl.delays.ShiftedExponential(0.8, 0.2))
    assert meter_of(run).tensors_sent < 0.5 * 2 * run.meter.version
    for model in run.models.values():
        assert np.linalg.norm(model - np.arange(1.0, 7.0)) < 0.3


def test_a_slow_node_holds_nobody_back() -> None:
    """Neither in time nor in what is learned: it hardly matters how slow one of eight is."""

    def excess(slow: float) -> tuple[float, float]:
        learner = pl.learners.Quadratic((1.0, 0.1), 0.0, 10.0, lr=0.05, batch_size=8)
        delays = [pl.delays.Fixed(slow if i == 3 else 1.0) for i in range(8)]
        run = fit(
            pl.gossip.Gossip(pl.gossip.ring(8), pl.gossip.Difference(0.5)),
            learner,
            delays,
            steps=150,
        )
        quick = [run.models[f"w{i}"] for i in range(8) if i != 3]
        return run.seconds, max(learner.loss(model) for model in quick)

    (equal, before), (slowed, after) = excess(1.0), excess(40.0)
    assert slowed < equal * 8 / 7 * 1.02  # seven do the work of eight, and wait for none
    assert after < 1.25 * before


def test_differences_leave_the_mean_alone_however_rare_messages_are() -> None:
    """At equal paces: the mean moves by the gradients alone."""
    learner = pl.learners.Quadratic((0.5, 1.0, 2.0), 0.0, 3.0, noise=1.0, lr=0.05, batch_size=8)
    policy = pl.gossip.Gossip(
        pl.gossip.ring(8), pl.gossip.Difference(0.3), pl.gossip.OnChange(3.0, every=50)
    )
    run = fit(policy, learner, steps=300)
    alone = fit(
        pl.gossip.Gossip(pl.gossip.ring(8), pl.gossip.Difference(0.3), pl.gossip.OnChange(1e9)),
        learner,
        steps=300,
    )
    assert 0 < meter_of(run).messages < 0.2 * 2 * run.meter.version and not meter_of(alone).messages
    # Both see the same noise; on a quadratic the mean of all gradients is that of the mean model.
    np.testing.assert_allclose(run.model, alone.model, atol=1e-12)
    assert consensus(run.models) < 0.9 * consensus(alone.models)


# --- who comes and goes, and slow links ----------------------------------------------------------


def test_training_goes_on_around_the_dead_and_with_the_returned() -> None:
    schedule = [
        (5.0, pl.protocol.Left("w2")),
        (9.0, pl.protocol.Left("w5")),
        (20.5, pl.protocol.Joined("w2")),
    ]
    run = fit(pl.gossip.Gossip(pl.gossip.ring(6), pl.gossip.Difference(0.5)), steps=300,
              schedule=schedule, delays=pl.delays.ShiftedExponential(0.8, 0.2),
              link=pl.delays.Link(0.05), codec=pl.codecs.TopK(0.5))  # fmt: skip
    assert list(run.models) == ["w0", "w1", "w2", "w3", "w4"]
    wholes = [
        (node, command.to)
        for node, journal in run.journals.items()
        for entry in journal
        for command in entry.commands
        if isinstance(command, Send) and command.whole
    ]
    assert ("w1", ("w3",)) in wholes and ("w3", ("w1",)) in wholes  # around w2
    assert ("w1", ("w2",)) in wholes and ("w2", ("w1", "w3")) in wholes  # and back
    for model in run.models.values():
        assert np.linalg.norm(model - np.arange(1.0, 7.0)) < 0.3
    for journal in run.journals.values():
        assert pl.protocol.replay(run.driven_policy, journal) == journal


def test_who_leaves_before_its_first_step_is_known_when_it_comes_back() -> None:
    schedule = [(0.5, pl.protocol.Left("w2")), (2.0, pl.protocol.Joined("w2"))]
    run = fit(pl.gossip.Gossip(pl.gossip.ring(4)), schedule=schedule, codec=pl.codecs.TopK(0.5))
    heard = [e.event for e in run.journals["w1"] if isinstance(e.event, Received)]
    assert sum(event.sender == "w2" for event in heard) > 20


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_both_ends_of_every_link_have_one_copy(data: st.DataObject) -> None:
    """Whoever came and went: once nothing is under way, and nobody has lost a message."""
    nodes = [f"w{i}" for i in range(5)]
    schedule: list[tuple[float, pl.protocol.Left | pl.protocol.Joined]] = []
    away: set[str] = set()
    for at in sorted(data.draw(st.lists(st.floats(0.2, 12.0), max_size=8, unique=True))):
        name = data.draw(st.sampled_from(nodes))
        if name in away:
            away.remove(name)
            schedule.append((at, pl.protocol.Joined(name)))
        elif len(away) < 3:
            away.add(name)
            schedule.append((at, pl.protocol.Left(name)))
    codec = data.draw(st.sampled_from([None, pl.codecs.TopK(0.5), pl.codecs.Int8()]))
    link = data.draw(
        st.sampled_from([pl.delays.Link(), pl.delays.Link(0.3), pl.delays.Link(0.1, up=150.0)])
    )
    triggers: list[Trigger] = [pl.gossip.Always(), pl.gossip.OnChange(0.5, every=4)]
    trigger = data.draw(st.sampled_from(triggers))
    policy = pl.gossip.Gossip(pl.gossip.ring(5), pl.gossip.Difference(0.5), trigger)
    simulator = pl.Simulator(5, pl.delays.ShiftedExponential(0.7, 0.3), link, schedule=schedule)
    engine = SimulatedGossip(simulator.lend())
    learner = least_squares()
    record = Record({}, pl.Prices(), lambda node: None)
    training = GossipTraining(learner, policy, None, codec, 0, record)
    for node, entry in engine.entries(training._job):
        training.journals[node].append(entry)
        if entry.now > 20.0:
            engine.stop("enough")
    for _, _, name, item in sorted(engine._queue, key=lambda each: each[:2]):
        if isinstance(item, Delivery):
            engine._deliver(name, engine._places[name], item)
    for name in nodes:
        for to, outbox in engine._places[name].outboxes.items():
            for message in outbox.take():
                engine._nodes[to].receive(name, message)
    here = [name for name in nodes if name not in away]
    graph = policy.graph.without(*away)
    for name in here:
        for other in graph.neighbors[name]:
            mine, theirs = engine._nodes[name]._copies, engine._nodes[other]._copies
            np.testing.assert_array_equal(mine[name], theirs[name])
    for journal in training.journals.values():
        assert pl.protocol.replay(training.policy, journal) == journal


def test_a_slow_link_carries_what_it_can_and_nobody_waits() -> None:
    policy = pl.gossip.Gossip(pl.gossip.ring(4), pl.gossip.Averaging())
    quick = fit(policy, steps=100)
    slow = fit(
        policy, steps=100, link=pl.delays.Link(latency=0.5, up=60.0)
    )  # a message takes 2 s and more
    assert slow.seconds == quick.seconds
    assert slow.meter.up_bytes <= 4 * 60.0 * slow.seconds + 8 * 200
    assert slow.meter.up_bytes < 0.4 * quick.meter.up_bytes


# --- what users see ------------------------------------------------------------------------------


def test_all_nodes_together_do_the_work_of_a_coordinator() -> None:
    run = fit(
        pl.gossip.Gossip(pl.gossip.ring(4)),
        delays=[pl.delays.Exponential(m) for m in (1.0, 1.0, 2.0, 4.0)],
    )
    assert run.steps == 40 and run.meter.samples_used == 40 * 32
    steps = [meter.version for meter in run.meters.values()]
    assert sum(steps) == 160 and steps[0] > 2 * steps[3]
    assert len(run.metrics["loss"]) == 160 and (np.diff(run.metrics["seconds"]) >= 0).all()
    np.testing.assert_allclose(run.model, np.mean([*run.models.values()], axis=0))
    text = run.summary()
    assert "4 nodes" in text and "updates" in text and "(w3)" in text
    with pytest.raises(ValueError, match=r"has a journal: run.journals\['w0'\]"):
        _ = run.journal


def test_the_same_seed_gives_the_same_run() -> None:
    policy = pl.gossip.Gossip(
        pl.gossip.exponential(6), pl.gossip.Difference(0.5), pl.gossip.OnChange(0.2)
    )
    runs = [fit(policy, make_learner(batch_size=48), pl.delays.Exponential(1.0),
                codec=pl.codecs.TopK(0.2))
            for _ in range(2)]  # fmt: skip
    assert torch.equal(flat(runs[0].model), flat(runs[1].model))
    assert runs[0].journals == runs[1].journals


def test_nodes_without_data_draw_noise_of_their_own() -> None:
    run = fit(pl.gossip.Gossip(pl.gossip.ring(4)), pl.learners.Quadratic(noise=1.0), steps=3)
    assert len({float(model[0]) for model in run.models.values()}) == 4


def test_buffers_are_mixed_as_the_rest() -> None:
    learner = make_learner(batch_size=48)
    model = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    learner = pl.TorchLearner(model, learner.loss, learner.optimizer, learner.dataset, 48)
    spreads = []
    for trigger in (pl.gossip.Always(), pl.gossip.OnChange(1e9)):  # always, and never
        run = fit(pl.gossip.Gossip(pl.gossip.ring(4), pl.gossip.Difference(1.0), trigger), learner)
        means = torch.stack([m[1].running_mean for m in run.models.values()])
        spreads.append(float((means - means.mean(dim=0)).norm()))
        assert all(int(m[1].num_batches_tracked) == 40 for m in run.models.values())
    assert spreads[0] < 0.5 * spreads[1]


def test_a_variance_stays_above_zero_though_messages_are_rare() -> None:
    learner = make_learner(batch_size=64)
    model = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        model.get_parameter("0.weight").mul_(
            0.05
        )  # variances far below the 1 that BatchNorm begins with
    learner = pl.TorchLearner(model, learner.loss, learner.optimizer, learner.dataset, 64)
    delays = [pl.delays.Fixed(10.0 if i == 3 else 1.0) for i in range(8)]
    policy = pl.gossip.Gossip(
        pl.gossip.ring(8), pl.gossip.Difference(0.5), pl.gossip.OnChange(30.0, every=50)
    )
    run = fit(policy, learner, delays, steps=80)
    assert meter_of(run).messages < 0.2 * 2 * run.meter.version
    for each in run.models.values():
        assert float(each[1].running_var.min()) > 0


def test_every_sample_is_seen_by_the_node_that_has_it() -> None:
    run = fit(pl.gossip.Gossip(pl.gossip.ring(4)), steps=30)
    tiles = {
        (node, tile)
        for node, journal in run.journals.items()
        for entry in journal
        for command in entry.commands
        if isinstance(command, Start)
        for tile in command.task.work.tiles or ()
    }
    assert tiles == {(f"w{i}", i) for i in range(4)}
    used = [s for s in run.samples() if s.fate == "used"]
    assert sum(stretch.samples for stretch in used) == 30 * 32


def test_ends_and_callbacks_count_over_all_nodes() -> None:
    seen: list[tuple[int, float]] = []

    class Look(pl.Callback):
        def stepped(self, progress: pl.Progress) -> None:
            assert progress.model().shape == (6,)
            seen.append((progress.step, progress.loss))

    learner, engine = least_squares(), pl.Simulator(4, pl.delays.Exponential(1.0))
    trainer = pl.Trainer(
        learner, pl.gossip.Gossip(pl.gossip.ring(4)), engine, callbacks=[Look()], progress=False
    )  # fmt: skip
    run = trainer.fit(until=lambda progress: progress.loss < 1.0)
    assert [step for step, _ in seen] == list(range(1, len(seen) + 1))
    assert seen[-1][1] < 1.0 <= seen[-2][1] and run.reason == "the condition of until holds"
    assert trainer.fit(epochs=2).meter.samples_used == pytest.approx(480, abs=8)
    assert trainer.fit(seconds=30).seconds == pytest.approx(30, abs=2)
    diverging = pl.learners.Quadratic((100.0,), batch_size=4)
    with np.errstate(all="ignore"):
        assert (
            "the loss is" in fit(pl.gossip.Gossip(pl.gossip.ring(4)), diverging, steps=5000).reason
        )


def test_journals_go_to_a_file_for_each_node(tmp_path: Path) -> None:
    run = fit(pl.gossip.Gossip(pl.gossip.ring(3)), journal=tmp_path / "run.jsonl", steps=5)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"run-w{i}.jsonl" for i in range(3)]
    journal = pl.Journal.load(tmp_path / "run-w1.jsonl")
    assert journal.header.peer is not None and journal.header.peer.neighbors == ("w0", "w2")
    assert (
        journal == run.journals["w1"] and pl.protocol.replay(run.driven_policy, journal) == journal
    )
    assert any(isinstance(c, Step) and c.mix for entry in journal for c in entry.commands)


def test_messages_are_paid_for() -> None:
    run = fit(pl.gossip.Gossip(pl.gossip.ring(4)), prices=pl.Prices(per_gigabyte=1.0))
    both = run.meter.up_bytes + run.meter.down_bytes
    assert run.meter.dollars == pytest.approx(both * 1e-9)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"placement": pl.BySpeed()}, "data stay with the nodes"),
        ({"placement": pl.policies.Placed(pl.partition.even(240, 4))}, "data stay with the nodes"),
        (
            {"placement": pl.policies.Placed(pl.partition.even(240, 8), move=False)},
            "use 4 shards",
        ),
        ({"model_codec": pl.codecs.TopK(0.1)}, "nodes send models to neighbors only"),
        ({"checkpoints": pl.Checkpoints("memory://x")}, "not to a store yet"),
        ({"min_workers": 2}, "start together: leave min_workers= out"),
        ({"robust": pl.robust.TrimmedMean(1)}, "needs a central coordinator"),
        ({"on_not_finite": "skip"}, "cannot do without the results of skipped samples"),
        (
            {"codec": pl.codecs.Feedback(pl.codecs.TopK(0.1))},
            "include what earlier messages left out",
        ),
        ({"codec": pl.codecs.TopK(0.1, (3, 3))}, "is for vectors of one size"),
    ],
)
def test_what_cannot_be_combined_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(pl.gossip.Gossip(pl.gossip.ring(4), trigger=pl.gossip.OnChange(0.1)), **more)


def test_wrong_recipes_are_refused() -> None:
    with pytest.raises(ValueError, match="the graph has 4 nodes and the engine 3 workers"):
        pl.Trainer(least_squares(), pl.gossip.Gossip(pl.gossip.ring(4)), pl.Simulator(3))
    with pytest.raises(ValueError, match="give the Gossip policy itself"):
        pl.Trainer(
            least_squares(),
            pl.policies.Until(pl.gossip.Gossip(pl.gossip.ring(4)), 3),
            pl.Simulator(4),
        )
    with pytest.raises(ValueError, match="240 samples for 300 nodes"):
        pl.Trainer(
            pl.learners.LeastSquares(np.ones((240, 1)), np.ones(240), batch_size=300),
            pl.gossip.Gossip(pl.gossip.ring(300)), pl.Simulator(300), progress=False,
        ).fit(steps=1)  # fmt: skip
    outer = make_learner(outer=partial(torch.optim.SGD, lr=1.0))
    with pytest.raises(ValueError, match="has no outer step"):
        fit(pl.gossip.Gossip(pl.gossip.ring(4)), outer)
    with pytest.raises(ValueError, match=r"mixing=0.5: give an object, such as Difference"):
        pl.gossip.Gossip(pl.gossip.ring(4), 0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"trigger=.*Always.*: give an object"):
        pl.gossip.Gossip(pl.gossip.ring(4), trigger=pl.gossip.Always)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Timing has no model"):
        fit(pl.gossip.Gossip(pl.gossip.ring(4)), pl.learners.TimingOnly(8))
