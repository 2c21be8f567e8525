"""A plan in use: workers that change are noticed, and the rest is planned anew."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import paceline as pl
from paceline.core.policy import Policy
from paceline.delays.fit import fit
from paceline.delays.models import Delay
from paceline.planner.changes import Seen, changed
from paceline.planner.measure.stale_training import smoothed
from paceline.planner.search import Entry

TARGET, RATE = 0.4, 0.06
LEARNER = pl.learners.Quadratic((1.0, 0.3) * 8 + (0.1,) * 48, noise=0.2, lr=RATE, batch_size=48)
STEADY = pl.delays.ShiftedExponential(0.1, 0.02)
SLOWER = pl.delays.Changed(STEADY, pl.delays.Fixed(3.0), at=25.0)
WORKERS = {f"w{i}": pl.planner.WorkerProfile(STEADY) for i in range(6)}
PROFILE = pl.planner.Profile(
    WORKERS, 48, LEARNER.message_bytes, surface=pl.planner.measure_loss_surface(LEARNER)
)


def planned(
    policy: Policy, profile: pl.planner.Profile = PROFILE, rate: float = RATE
) -> pl.planner.Auto:
    """Do as if this policy had been planned."""
    found = pl.forecast(policy, profile, learning_rate=rate, target=TARGET, seeds=1)
    plan = pl.planner.Plan((Entry("it", policy, None, rate, found),), "time", TARGET, "")
    return pl.planner.Auto(profile, plan)


def trainer(policy: Policy | Literal["auto"], *delays: Delay, **more: Any) -> pl.Trainer:
    engine = pl.Simulator(6, [*[STEADY] * (6 - len(delays)), *delays], unit=1)
    return pl.Trainer(LEARNER, policy, engine, progress=False, **more)


def to_target(progress: pl.Progress) -> bool:
    return progress.loss <= TARGET


@pytest.mark.long
def test_who_has_become_slow_is_no_longer_waited_for() -> None:
    run = trainer(planned(pl.sync()), SLOWER).fit(until=to_target, steps=1000)
    waits = trainer(pl.sync(), SLOWER).fit(until=to_target, steps=1000)
    assert run.seconds < 0.3 * waits.seconds
    (change,) = run.policy.changes  # type: ignore[attr-defined]
    assert change.startswith("at step 40: w5 takes ")
    assert f"  replanned {change}" in run.summary()
    assert pl.protocol.replay(run.driven_policy, run.journal) == run.journal  # planning included


def test_shares_by_speed_in_a_plan_are_known_to_the_engine_and_the_summary() -> None:
    policy = planned(pl.policies.Gather(placement=pl.BySpeed()))
    assert isinstance(policy.acting.placement, pl.BySpeed)
    assert "  speeds " in trainer(policy).fit(steps=4).summary()


def test_steady_workers_are_left_alone() -> None:
    policies = pl.sync(), pl.k_sync(4), pl.ringmaster(6)
    for policy in policies:
        run = trainer(planned(policy)).fit(steps=100)
        assert run.policy.changes == []  # type: ignore[attr-defined]
        plain = trainer(policy).fit(steps=100)
        assert [e.commands for e in run.journal] == [e.commands for e in plain.journal]


def tasks(law: Delay, count: int, rng: np.random.Generator, now: float, memory: Any) -> list[float]:
    """Return the seconds of tasks one after the other."""
    found = []
    for _ in range(count):
        found.append(law.sample(rng, now, memory))
        now += found[-1]
    return found


def alarms(law: Delay, fitted_to: int, draws: int, times: float = 1.0) -> float:
    """Return how often 20 tasks are taken for a change, of a law that was fitted to others."""
    found = 0
    for seed in range(draws):
        rng, memory = np.random.default_rng(seed), dict[str, float]()
        known = fit(tasks(law, fitted_to, rng, 0.0, memory))
        profile = pl.planner.WorkerProfile(
            known.bounded, pl.delays.Link(), known.observations, known.autocorrelation
        )
        newer = [times * each for each in tasks(law, 20, rng, 1000.0, memory)]
        found += changed(profile, Seen(newer, [True] * 20, []), 8.0, 0.0, 0)[0] is not None
    return found / draws


def bursts(seconds: float) -> Delay:
    """Return a law of three times the time, half of the time."""
    fast, slow = pl.delays.Erlang(16, 1.0), pl.delays.Erlang(16, 3.0)
    return pl.delays.Bursts(fast, slow, seconds, seconds)


@pytest.mark.parametrize(
    ("law", "fitted_to", "most"),
    [
        # Taken as known, as before, a law of 20 tasks gave 1 % of false alarms, bursts 6 and 25 %.
        (pl.delays.Exponential(1.0), 20, 0.005),
        (bursts(6.0), 60, 0.02),
        # A phase about as long as the 20 tasks cannot always be told from a change.
        (bursts(20.0), 60, 0.15),
    ],
)
def test_false_alarms_are_rare(law: Delay, fitted_to: int, most: float) -> None:
    assert alarms(law, fitted_to, draws=200 if fitted_to == 20 else 100) <= most


def test_true_alarms_are_not() -> None:
    assert alarms(pl.delays.Erlang(3, 1.0), 20, 50, times=4.0) > 0.9
    assert alarms(STEADY, 60, 50, times=2.0) == 1.0


def test_what_a_law_was_fitted_to_is_saved() -> None:
    engine = pl.Simulator(2, bursts(1000.0), unit=1)
    found = pl.planner.profile_of(
        pl.Trainer(LEARNER, pl.asynchronous(), engine, progress=False).fit(steps=200).journal
    )
    assert all(worker.observations > 50 for worker in found.workers.values())
    assert all(worker.autocorrelation > 0.2 for worker in found.workers.values())
    assert pl.planner.Profile.from_json(found.to_json()) == found
    data = json.loads(found.to_json())
    for each in data["workers"].values():  # as in files of before
        del each["observations"], each["autocorrelation"]
    older = pl.planner.Profile.from_json(json.dumps(data))
    assert [worker.observations for worker in older.workers.values()] == [0, 0]


def test_those_given_up_at_each_step_are_seen_to_be_quick_again() -> None:
    slow = {**WORKERS, "w5": pl.planner.WorkerProfile(pl.delays.Fixed(1.0))}
    profile = pl.planner.Profile(
        slow, 48, LEARNER.message_bytes, surface=pl.planner.measure_loss_surface(LEARNER)
    )
    quicker = pl.delays.Changed(pl.delays.Fixed(1.0), STEADY, at=30.0)
    run = trainer(planned(pl.k_sync(5), profile), quicker).fit(steps=100)
    assert "w5 takes 0.1" in run.policy.changes[0]  # type: ignore[attr-defined]


@pytest.mark.long
def test_slow_messages_are_noticed() -> None:
    links = [pl.delays.Link()] * 5 + [pl.delays.Link(4.0)]
    engine = pl.Simulator(6, [STEADY] * 6, links, unit=1)
    run = pl.Trainer(LEARNER, planned(pl.sync()), engine, progress=False).fit(steps=60)
    first = run.policy.changes[0]  # type: ignore[attr-defined]
    assert "w5 needs 8 s for its messages instead of 0 s" in first
    assert "sync()" not in first


def test_some_workers_can_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    few = pl.policies.OnlyWorkers(["w1", "w2"], pl.sync())
    monkeypatch.setattr(
        pl.planner.Auto, "_better", lambda self, left: (few, "the policy becomes few")
    )
    run = trainer(planned(pl.sync()), SLOWER).fit(steps=60)
    assert run.steps == 60
    assert run.policy.current.workers == few.workers  # type: ignore[attr-defined]


def test_it_is_resumed_in_the_middle(tmp_path: Path) -> None:
    whole = trainer(planned(pl.sync()), SLOWER).fit(steps=90)
    saves = pl.Checkpoints(tmp_path, every=25)
    trainer(planned(pl.sync()), SLOWER, checkpoints=saves).fit(steps=70)
    rest = trainer(planned(pl.sync()), SLOWER).resume(tmp_path).fit(steps=90)
    assert rest.policy.changes == whole.policy.changes  # type: ignore[attr-defined]
    assert rest.policy.changes  # type: ignore[attr-defined]
    np.testing.assert_array_equal(rest.model, whole.model)


def test_the_trainer_measures_and_plans_by_itself() -> None:
    run = trainer("auto", SLOWER, target=TARGET).fit(until=to_target, steps=1000)
    assert isinstance(run.policy, pl.planner.Auto)
    assert "  forecast  " in run.summary()
    assert run.meter.columns["loss"][-1] <= TARGET


@pytest.mark.parametrize(
    ("rate", "noise", "told"),
    [
        (0.2, 0.01, ""),
        (0.2, 1.0, ""),
        (0.4, 0.01, "stale gradients take"),
        (0.5, 0.01, "the loss rises with stale gradients"),
    ],
)
def test_stale_gradients_that_cost_more_than_forecast_are_given_up(
    rate: float, noise: float, told: str
) -> None:
    """The profile says that they cost nothing. With a high learning rate they diverge."""
    learner = replace(LEARNER, lr=rate, noise=noise)

    def train(policy: Policy) -> pl.Run:
        engine = pl.Simulator(6, STEADY, unit=1)
        return pl.Trainer(learner, policy, engine, progress=False).fit(steps=100)

    losses = train(pl.sync()).meter.columns["loss"]
    fresh = (0, losses[0]), *smoothed(losses)
    profile = replace(
        PROFILE,
        surface=pl.planner.measure_loss_surface(learner),
        stale_training=pl.planner.StaleTraining(rate, 5.0, fresh, fresh),
    )
    run = train(planned(pl.ringmaster(6), profile, rate))
    assert run.meter.columns["loss"][-1] <= TARGET or noise == 1.0
    changes = run.policy.changes  # type: ignore[attr-defined]
    assert len(changes) == bool(told)
    if told:
        assert told in changes[0] and "the policy becomes" in changes[0]
        stale = train(pl.ringmaster(6)).meter.columns["loss"]
        assert stale[-1] > 3 * run.meter.columns["loss"][-1]
    assert pl.protocol.replay(run.driven_policy, run.journal) == run.journal


def test_losses_of_older_checkpoints_are_read() -> None:
    policy = planned(pl.sync())
    policy.load_state_dict({**policy.state_dict(), "losses": [0.5]})
    assert policy.state_dict()["losses"] == [[0.5, 0.0]]


def test_another_engine_or_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="the profile is of 6 workers and batch_size=48"):
        pl.Trainer(LEARNER, planned(pl.sync()), pl.Simulator(4), progress=False)


def test_a_saved_policy_that_no_plan_has_is_refused() -> None:
    auto = planned(pl.sync())
    with pytest.raises(ValueError, match="a plan for this profile has no policy"):
        auto.load_state_dict(auto.state_dict() | {"policy": "exec('')"})
