"""Steps that take longer than forecast, though each worker is as fast as before: a new plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import paceline as pl
from paceline.core.policy import Policy
from paceline.delays.fit import fit
from paceline.delays.models import Delay
from paceline.planner.changes import NEWEST, WARM, Paced, Seen
from paceline.planner.forecast.timeline import Timeline
from paceline.planner.search import Entry

TARGET, RATE = 0.4, 0.06
LEARNER = pl.learners.Quadratic((1.0, 0.3) * 8 + (0.1,) * 48, noise=0.2, lr=RATE, batch_size=48)
STEADY = pl.delays.ShiftedExponential(0.1, 0.02)
SURFACE = pl.planner.measure_loss_surface(LEARNER)


def profile(laws: Sequence[Delay], observations: int = 0) -> pl.planner.Profile:
    workers = {
        f"w{i}": pl.planner.WorkerProfile(law, observations=observations)
        for i, law in enumerate(laws)
    }
    return pl.planner.Profile(workers, 48, LEARNER.message_bytes, surface=SURFACE)


PROFILE = profile([STEADY] * 6, observations=30)


def by_turns(slow: int) -> list[Delay]:
    """Return times of which those of `slow` workers are slow in each round, of others each time.

    Each worker takes 0.1 s a sample, and 0.22 s in `slow` rounds of six.
    """
    times = [0.22] * slow + [0.1] * (6 - slow)
    return [pl.delays.Trace([*times[i:], *times[:i]]) for i in range(6)]


def planned(policy: Policy, found: pl.planner.Profile = PROFILE) -> pl.planner.Auto:
    """Do as if this policy had been planned."""
    told = pl.forecast(policy, found, learning_rate=RATE, target=TARGET, seeds=1)
    plan = pl.planner.Plan((Entry("it", policy, None, RATE, told),), "time", TARGET, "")
    return pl.planner.Auto(found, plan)


def reached(progress: pl.Progress) -> bool:
    return progress.loss <= TARGET


@pytest.mark.parametrize(
    ("policy", "slow"), [(pl.sync(), 1), (pl.k_sync(5), 2)], ids=["sync", "k_sync"]
)
def test_a_bad_forecast_of_fresh_gradients_is_found_out_early(policy: Policy, slow: int) -> None:
    engine = pl.Simulator(6, by_turns(slow), unit=1)
    run = pl.Trainer(LEARNER, planned(policy), engine, progress=False).fit(until=reached)
    stays = pl.Trainer(LEARNER, policy, engine, progress=False).fit(until=reached)
    auto = run.policy
    assert isinstance(auto, pl.planner.Auto)
    assert auto.changes[0].startswith("at step 20: a step takes ")
    assert "the policy becomes" in auto.changes[0]
    assert not any(" times as long" in change for change in auto.changes)
    assert stays.steps > 100
    assert run.seconds < 0.85 * stays.seconds
    assert f"  replanned {auto.changes[0]}" in run.summary()
    assert pl.protocol.replay(run.driven_policy, run.journal) == run.journal


@pytest.mark.long
def test_it_is_resumed_in_the_middle(tmp_path: Path) -> None:
    """Before the comparison of the steps, and after it, under the policy that it chose."""
    engine = pl.Simulator(6, by_turns(1), unit=1)
    whole = pl.Trainer(LEARNER, planned(pl.sync()), engine, progress=False).fit(steps=60)
    for steps in (13, 33):
        saves = pl.Checkpoints(tmp_path / str(steps), every=steps)
        given = {"progress": False, "checkpoints": saves}
        pl.Trainer(LEARNER, planned(pl.sync()), engine, **given).fit(steps=steps)  # type: ignore[arg-type]
        again = pl.Trainer(LEARNER, planned(pl.sync()), engine, progress=False)
        rest = again.resume(tmp_path / str(steps)).fit(steps=60)
        assert rest.policy.changes == whole.policy.changes != []  # type: ignore[attr-defined]
        np.testing.assert_array_equal(rest.model, whole.model)


# --- the comparison itself -----------------------------------------------------------------------


def seconds_of(policy: Policy, found: pl.planner.Profile, age: int, seed: int) -> list[float]:
    timeline = Timeline(policy, found, seed)
    timeline.reach(age)
    return timeline.each[max(WARM, age - NEWEST) : age]


def alarms(policy: Policy, law: Delay, times: float, age: int, draws: int) -> float:
    """Return how often steps are found to differ, of laws that were fitted to 30 tasks."""
    found = 0
    for seed in range(draws):
        rng, memory = np.random.default_rng(seed), dict[str, float]()
        workers, real = {}, {}
        for name in (f"w{i}" for i in range(6)):
            known = fit([law.sample(rng, 0.0, memory) for _ in range(30)])
            workers[name] = pl.planner.WorkerProfile(known.bounded, observations=30)
            real[name] = pl.planner.WorkerProfile(pl.delays.Scaled(law, times))
        seconds = seconds_of(policy, replace(PROFILE, workers=real), age, 1000 + seed)
        given = replace(PROFILE, workers=workers)
        found += bool(Paced(policy, given, None, 0).missed(seconds, age))
    return found / draws


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "age"),
    [(pl.sync(), 60), (pl.k_sync(4), 20), (pl.bandit(3), 60)],
    ids=["sync", "k_sync", "bandit"],
)
def test_false_alarms_are_rare(policy: Policy, age: int) -> None:
    assert alarms(policy, pl.delays.Exponential(0.1), 1.0, age, draws=25) == 0


def test_true_alarms_are_not() -> None:
    assert alarms(pl.k_sync(4), STEADY, 1.5, 20, draws=20) == 1.0
    assert alarms(pl.sync(), pl.delays.Exponential(0.1), 3.0, 60, draws=20) > 0.9


def test_workers_that_never_end_a_task_keep_the_law_of_their_profile() -> None:
    """Under k_sync(5) the tasks of a slow worker are cancelled: its times are lower bounds."""
    ended, cancelled = (Seen([0.5] * NEWEST, [whole] * NEWEST, []) for whole in (True, False))
    paced = Paced(pl.k_sync(5), PROFILE, None, 0)
    found = paced.corrected({name: ended for name in PROFILE.workers} | {"w5": cancelled})
    assert found.workers["w0"].compute.mean == pytest.approx(0.5)
    assert found.workers["w5"] == PROFILE.workers["w5"]


def test_what_cannot_be_compared_is_not() -> None:
    many = [100.0] * NEWEST
    assert Paced(pl.sync(), PROFILE, None, 0).missed(many, 20)
    assert not Paced(pl.sync(), PROFILE, None, 0).missed(many[:7], 20)  # too few
    grows = pl.k_sync(pl.policies.GrowOnNoise(1, 4))  # by the loss
    for policy in (pl.ringmaster(6), pl.asynchronous(), grows):
        assert not Paced(policy, PROFILE, None, 0).missed(many, 20)
    waits = pl.deadline(1e-6)  # no step is ever taken
    assert not Paced(waits, PROFILE, None, 0).missed(many, 20)
