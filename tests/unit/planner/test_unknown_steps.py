"""Plans by the time per step: local steps with kept state, overlap, and codecs such as Lazy."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import isnan

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.planner.forecast.overlap import overlapped
from paceline.planner.measure.probe import is_sgd, optimizer_of

BATCH, SIZE = 24, 4000
ADAMW = {"name": "AdamW", "lr": 0.001, "kept": True, "outer": {"name": "SGD", "momentum": 0.9}}
SLOW = pl.delays.Link(0.5, down=4000.0, up=2000.0)
TIMES = (0.1, 0.1, 0.2, 0.4)


def profile(*times: float, link: pl.delays.Link = SLOW, **more: object) -> pl.planner.Profile:
    workers = {
        f"w{i}": pl.planner.WorkerProfile(pl.delays.Fixed(each), link)
        for i, each in enumerate(times)
    }
    return pl.planner.Profile(workers, BATCH, SIZE, **more)  # type: ignore[arg-type]


DILOCO = profile(*TIMES, optimizer=ADAMW)


# --- local steps ---------------------------------------------------------------------------------


def test_a_plan_for_given_local_steps() -> None:
    found = pl.plan(DILOCO, target=1.0, local_steps=8)
    assert found.unknown.startswith("the learner's optimizer is AdamW")
    texts = [look.candidate.text for look in found.looks]
    assert {"local_sgd(8)", "local_sgd(8), placement=BySpeed()", "local_sgd(8, k=3)"} <= {*texts}
    assert all("local_sgd(8" in text for text in texts)
    assert {work.steps for entry in found.entries for work in entry.policy.works()} == {8}
    assert found.entries[0].text == "local_sgd(8), placement=BySpeed()"
    assert "local_sgd(8) " in found.reason and "times as much" in found.reason
    assert "averages changes of 8 local steps" in str(found)
    seconds = found.entries[0].forecast.per_step["seconds"]
    assert f"{8 * BATCH / seconds:.4g}" in str(found).splitlines()[2]  # samples a second
    engine = pl.Simulator(4, [pl.delays.Fixed(each) for each in TIMES], SLOW, unit=1)
    for text in ("local_sgd(8)", "local_sgd(8, k=3)"):
        (look,) = [look for look in found.looks if look.candidate.text == text]
        learner = pl.learners.TimingOnly(BATCH, SIZE)
        run = pl.Trainer(learner, look.candidate.policy, engine, progress=False).fit(steps=40)
        assert look.figure == pytest.approx(run.seconds / 40, rel=0.02)  # the very time


def test_theory_proposes_how_many_changes_to_wait_for() -> None:
    """The grid has 10, 8 and 5 of these workers."""
    times = [0.1] * 7 + [0.3] * 4
    found = pl.plan(profile(*times, optimizer=ADAMW), target=1.0, local_steps=4)
    (own,) = [look for look in found.looks if look.candidate.origin]
    assert own.candidate.text == "local_sgd(4, k=7)"
    others = [look for look in found.looks if ", k=" in look.candidate.text and look is not own]
    assert others and own.figure < min(look.figure for look in others)


def test_sgd_with_given_local_steps_is_planned_to_the_loss() -> None:
    learner = pl.learners.Quadratic((1.0, 0.1) * 8, noise=0.1, lr=0.1, batch_size=BATCH)
    surface = pl.planner.measure_loss_surface(learner)
    found = pl.plan(profile(*TIMES, surface=surface), target=1.0, learning_rate=0.1, local_steps=4)
    assert not found.unknown and found.forecast.seconds > 0
    assert {work.steps for entry in found.entries for work in entry.policy.works()} == {4}
    assert "sync()" not in found.reason


def test_a_new_plan_keeps_the_number_of_local_steps() -> None:
    learner = pl.learners.Quadratic((1.0, 0.1) * 8, noise=0.1, lr=0.01, batch_size=BATCH)
    plan = pl.plan(DILOCO, target=0.5, local_steps=4)
    slower = [pl.delays.Fixed(each) for each in (*TIMES[:3], 8.0)]
    engine = pl.Simulator(4, slower, SLOW, unit=1)
    auto = pl.planner.Auto(DILOCO, plan)
    run = pl.Trainer(learner, auto, engine, progress=False).fit(steps=60)
    assert "w3 takes" in run.policy.changes[0]  # type: ignore[attr-defined]
    assert "the policy becomes" in run.policy.changes[0]  # type: ignore[attr-defined]
    begun = [c for each in run.journal for c in each.commands if isinstance(c, pl.protocol.Start)]
    assert {start.task.work.steps for start in begun} == {4}


def test_local_steps_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="local_steps=1: use 2 or more, or None"):
        pl.plan(DILOCO, target=1.0, local_steps=1)
    with pytest.raises(ValueError, match="give it an outer optimizer"):
        pl.plan(replace(DILOCO, local_steps=False), target=1.0, local_steps=4)


def learner_of(inner: str, momentum: float) -> pl.TorchLearner:
    def loss(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (module(rows) ** 2).mean()
        return found

    optimizer, outer = (partial(torch.optim.SGD, lr=0.1, momentum=each) for each in (momentum, 0.9))
    rows = torch.ones(32, 4)
    given = {"outer": outer, "inner": inner}
    return pl.TorchLearner(nn.Linear(4, 2), loss, optimizer, rows, BATCH, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("inner", "momentum", "known"),
    [("fresh", 0.9, True), ("kept", 0.0, True), ("kept", 0.9, False)],
)
def test_a_kept_momentum_makes_the_steps_unknown(inner: str, momentum: float, known: bool) -> None:
    learner = learner_of(inner, momentum)
    assert is_sgd(learner) is known
    found = replace(DILOCO, optimizer=optimizer_of(learner))
    assert ("keep the momentum" in found.unknown) is not known
    assert pl.planner.Profile.from_json(found.to_json()) == found


# --- overlap -------------------------------------------------------------------------------------


def test_a_round_with_overlap_takes_the_longer_of_computing_and_messages() -> None:
    """Equal workers: messages take 0.5 + 1 s down and 0.5 + 2 s up, and computing 0.6 s a step."""
    for steps, seconds in ((20, 12.0), (2, 4.0)):
        equal = profile(0.1, 0.1, 0.1, 0.1)
        rounds = 400
        assert overlapped(equal, steps, rounds=rounds) == pytest.approx(seconds, rel=0.02)
        told = pl.forecast(
            pl.local_sgd(steps), replace(equal, optimizer=ADAMW), learning_rate=0.1, target=1.0
        )
        assert told.per_step["seconds"] == pytest.approx(steps * 0.6 + 4.0)
    unequal = overlapped(profile(*TIMES), 20, rounds=400)
    assert unequal == pytest.approx(20 * 6 * 0.4, rel=0.02)


def test_the_plan_tells_of_overlap() -> None:
    text = str(pl.plan(profile(0.1, 0.1, optimizer=ADAMW), target=1.0, local_steps=4))
    assert "with pl.local_steps(every=4, overlap=True) a step of all workers takes 4.8" in text
    assert "The outer step is then one round late" in text
    sent = replace(profile(0.1, 0.1, optimizer=ADAMW), message_bytes=4000)
    slow = {name: replace(w, link=pl.delays.Link(up=100)) for name, w in sent.workers.items()}
    sent = replace(sent, workers=slow)
    plain, few = (overlapped(sent, 4, codec) for codec in (None, pl.codecs.TopK(0.01)))
    assert plain > 39 and few < 10  # seconds; messages of 40 s are sent in part


# --- codecs of unknown effect --------------------------------------------------------------------


def test_lazy_messages_are_ranked_by_the_time_per_step() -> None:
    learner = pl.learners.Quadratic((1.0, 0.1) * 250, noise=0.0, lr=0.1, batch_size=BATCH)
    surface = pl.planner.measure_loss_surface(learner)
    sgd = replace(profile(*TIMES, surface=surface), message_bytes=learner.message_bytes)
    codec = pl.codecs.Lazy(codec=pl.codecs.TopK(0.1))
    found = pl.plan(sgd, target=1.0, codecs=[codec])
    assert found.unknown == "the effect of Lazy(codec=TopK(fraction=0.1)) on accuracy is unknown"
    assert found.codec == codec and isnan(found.forecast.seconds)
    assert "s a step, and sync(), codec=Lazy(codec=TopK(fraction=0.1)) 4.67 s" in found.reason
    told = pl.forecast(pl.sync(), sgd, learning_rate=0.1, target=1.0, codec=codec)
    engine = pl.Simulator(4, [pl.delays.Fixed(each) for each in TIMES], SLOW, unit=1)
    run = pl.Trainer(learner, pl.sync(), engine, progress=False, codec=codec).fit(steps=20)
    assert told.per_step["seconds"] == pytest.approx(run.seconds / 20, rel=0.01)
    sent = run.metrics["down_bytes"][-1] + run.metrics["up_bytes"][-1]
    assert told.per_step["bytes"] == pytest.approx(sent / 20, rel=0.01)


def test_triggers_give_upper_bounds() -> None:
    lag = pl.codecs.Lazy(pl.codecs.Lag(workers=1))
    told = pl.forecast(pl.sync(), DILOCO, learning_rate=0.1, target=1.0, codec=lag)
    assert told.unknown == DILOCO.unknown
    sgd = replace(DILOCO, surface=pl.planner.measure_loss_surface(pl.learners.Quadratic()))
    sgd = replace(sgd, optimizer=None)
    told = pl.forecast(pl.sync(), sgd, learning_rate=0.1, target=0.5, codec=lag)
    assert "each message counts as sent, so its time and bytes are upper bounds" in told.unknown


def test_codecs_of_unknown_effect_are_not_compared() -> None:
    surface = pl.planner.measure_loss_surface(pl.learners.Quadratic())
    sgd = profile(*TIMES, surface=surface)
    with pytest.raises(ValueError, match="2 codecs are given"):
        pl.plan(sgd, target=0.5, codecs=[None, pl.codecs.Lazy()])


# --- decentralized runs --------------------------------------------------------------------------


def test_what_to_do_instead_of_a_forecast_of_gossip() -> None:
    """The engine of the profile simulates such a run, with the learner."""
    policy = pl.gossip.Gossip(pl.gossip.ring(4))
    with pytest.raises(ValueError, match=r"pl\.Trainer\(learner, policy, profile\.engine\(\)\)"):
        pl.forecast(policy, DILOCO, learning_rate=0.1, target=1.0)
    learner = pl.learners.Quadratic(batch_size=BATCH)
    run = pl.Trainer(learner, policy, DILOCO.engine(), progress=False).fit(seconds=60.0)
    assert run.seconds > 0
