"""Training with stale gradients tells how many more steps they need."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from math import inf, nan

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.planner.forecast.forecast import timed
from paceline.planner.measure.stale_training import (
    StaleTraining,
    compared,
    smoothed,
    steps_to,
)

FRESH = ((0, 4.0), (10, 2.0), (20, 1.0))
STALE = ((0, 4.0), (10, 3.5), (20, 3.0), (40, 2.0))
MEASURED = StaleTraining(0.1, 4.0, FRESH, STALE)


def test_the_ratio_is_that_of_the_steps_to_the_same_loss() -> None:
    assert MEASURED.ratio(0.0) == 1.0
    assert MEASURED.ratio(4.0) == 4.0  # 40 and 10 steps to 2.0, the lowest loss of both
    assert MEASURED.ratio(4.0, target=3.0) == 4.0  # 20 and 5
    assert MEASURED.ratio(4.0, target=3.5) == 4.0
    assert MEASURED.ratio(4.0, target=0.5) == 4.0  # below both: as at 2.0
    assert MEASURED.ratio(4.0, target=4.5) == 4.0  # not below the first loss: as at 2.0
    assert MEASURED.ratio(2.0) == 2.5  # half of the extra steps
    assert MEASURED.ratio(4.0, lr=0.05) == 2.5


def test_stale_gradients_never_need_fewer_steps() -> None:
    assert replace(MEASURED, fresh=STALE, stale=FRESH).ratio(4.0) == 1.0


def test_a_loss_that_hardly_falls_with_stale_gradients_has_no_ratio() -> None:
    stuck = replace(MEASURED, stale=((0, 4.0), (40, 3.9)))
    assert stuck.ratio(1.0) == inf
    assert stuck.ratio(0.0) == 1.0


def test_steps_are_found_between_points() -> None:
    assert steps_to(FRESH, 4.0) == 0.0
    assert steps_to(FRESH, 3.0) == 5.0
    assert steps_to(FRESH, 0.9) == inf


def test_losses_are_smoothed_over_more_and_more_steps() -> None:
    curve = smoothed([float(100 - i) for i in range(101)])
    steps = [step for step, _ in curve]
    assert steps[:4] == [2, 3, 4, 5] and steps[-1] > 75
    assert all(loss == pytest.approx(100 - step, abs=1) for step, loss in curve)


FALLING = [3.0 - i / 20 for i in range(40)]
AGES = [3.0] * 40


def test_what_cannot_be_compared_is_not_measured() -> None:
    assert compared(0.1, FALLING, FALLING, AGES) is not None
    assert compared(0.1, [3.0 + i for i in range(40)], FALLING, AGES) is None
    assert compared(0.1, FALLING, FALLING, [0.0] * 40) is None  # nothing was stale
    assert compared(0.1, FALLING, [], []) is None
    assert compared(0.0, FALLING, FALLING, AGES) is None


@pytest.mark.parametrize(
    "end", [[nan] * 30, [2.9 + i for i in range(30)], [2.0] * 29 + [10.0], [3.1] * 30]
)
def test_training_that_falls_and_then_diverges_has_no_ratio(end: list[float]) -> None:
    found = compared(0.1, FALLING, [3.0 - i / 5 for i in range(10)] + end, AGES)
    assert found is not None and found.ratio(3.0) == inf


def test_a_loss_is_that_of_the_model_that_its_result_began_from() -> None:
    """Stale results of the same models report the same losses later, and that costs no steps."""
    late = FALLING[:1] * 3 + FALLING[:37]
    found = compared(0.1, FALLING, late, [0.0, 1.0, 2.0] + [3.0] * 37)
    assert found is not None and found.staleness == 3.0
    assert found.ratio(3.0) == pytest.approx(1.0, abs=0.05)


# --- in profiles, forecasts and plans ------------------------------------------------------------

WORKERS = {f"w{i}": pl.planner.WorkerProfile(pl.delays.Fixed(0.1)) for i in range(4)}
SURFACE = pl.planner.Surface(4.0, 1.0, 1.0, ((1.0, 0.5), (0.1, 0.5)), 100)
SGD = pl.planner.Profile(WORKERS, 16, surface=SURFACE, stale_training=MEASURED)
ADAMW = replace(SGD, surface=None, optimizer={"name": "AdamW", "lr": 0.1}, codes=False)


def test_a_profile_keeps_both_trainings_in_a_file() -> None:
    assert pl.planner.Profile.from_json(SGD.to_json()) == SGD
    before = json.loads(SGD.to_json())
    del before["stale_training"]
    assert pl.planner.Profile.from_json(json.dumps(before)).stale_training is None


ASYNCHRONOUS = pl.asynchronous(damping=False)


def test_a_forecast_uses_the_measured_ratio() -> None:
    given = {"learning_rate": 0.1, "target": 2.0, "seeds": 1}
    fresh = pl.forecast(pl.rennala(4), SGD, **given)  # type: ignore[arg-type]
    stale = pl.forecast(ASYNCHRONOUS, SGD, **given)  # type: ignore[arg-type]
    by_theory = pl.forecast(ASYNCHRONOUS, replace(SGD, stale_training=None), **given)  # type: ignore[arg-type]
    assert fresh.relative_steps == by_theory.relative_steps == 1.0
    assert stale.relative_steps == pytest.approx(MEASURED.ratio(3.0), rel=0.05)  # of four workers
    assert stale.steps == pytest.approx(stale.relative_steps * fresh.steps + 3, rel=0.1)
    assert by_theory.steps < 1.5 * fresh.steps
    assert "times the steps of fresh gradients, as measured" in str(stale)
    assert "theory" not in str(stale)


def test_a_lower_weight_of_stale_results_acts_as_a_lower_learning_rate() -> None:
    given = {"learning_rate": 0.1, "target": 2.0, "seeds": 1}
    damped = pl.forecast(pl.asynchronous(), SGD, **given)  # type: ignore[arg-type]
    extra = MEASURED.ratio(3.0, lr=0.1 / 4) - 1  # of weight 1 / (1 + 3)
    assert damped.relative_steps - 1 == pytest.approx(extra, rel=0.05)


def test_a_plan_ranks_by_the_measured_ratio() -> None:
    given = {"target": 2.0, "learning_rate": 0.1, "seeds": 1, "codecs": [None]}
    profile = replace(SGD, codes=False)
    found = pl.plan(profile, **given)  # type: ignore[arg-type]
    figures = {look.candidate.text: look.figure for look in found.looks}
    without = pl.plan(replace(profile, stale_training=None), **given)  # type: ignore[arg-type]
    by_theory = {look.candidate.text: look.figure for look in without.looks}
    assert figures["k_async(1)"] > 1.3 * by_theory["k_async(1)"]
    assert figures["sync()"] == by_theory["sync()"]


def test_a_plan_by_the_cost_of_a_step_compares_stale_gradients_too() -> None:
    found = pl.plan(ADAMW, target=2.0, seeds=1)
    figures = {look.candidate.text: look.figure for look in found.looks}
    assert figures["k_async(1)"] == pytest.approx(
        MEASURED.ratio(3.0) * figures["sync()"], rel=0.1
    )  # equal workers: a step of either takes as long
    assert "asynchronous()" not in figures  # its weights do not add up to 1
    assert "Stale gradients need more steps, as training showed" in str(found)
    left_out = pl.plan(replace(ADAMW, stale_training=None), target=2.0, seeds=1)
    assert "k_async(1)" not in {look.candidate.text for look in left_out.looks}
    stuck = replace(MEASURED, stale=((0, 4.0), (40, 3.9)))
    none = pl.plan(replace(ADAMW, stale_training=stuck), target=2.0, seeds=1)
    assert "k_async(1)" not in {look.candidate.text for look in none.looks}


# --- measured ------------------------------------------------------------------------------------


def classes(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    rows, labels = batch
    return nn.functional.cross_entropy(module(rows), labels)


def net(optimizer: object) -> pl.TorchLearner:
    torch.manual_seed(0)
    rows = torch.randn(2048, 16)
    labels = (rows @ torch.randn(16, 8)).argmax(dim=1)
    module = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
    data = torch.utils.data.TensorDataset(rows, labels)
    return pl.TorchLearner(module, classes, optimizer, data, 64)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_the_ratio_of_real_runs_is_the_forecast_one(name: str) -> None:
    """Steps are within 30 %, with other samples, and also at other stalenesses."""
    lr = {"AdamW": 0.01, "SGD": 0.3}[name]
    engine = pl.Simulator(8, pl.delays.ShiftedExponential(0.01, 0.01))
    learner = net(partial(getattr(torch.optim, name), lr=lr))
    profile = pl.profile(learner, engine, seconds=60.0, tasks=10)
    assert bool(profile.unknown) is (name == "AdamW")
    assert profile.stale_training is not None
    assert 3 < profile.stale_training.staleness < 7  # ringmaster(8) discards results of 8 or more
    target, most = 0.8, 600

    def steps(policy: pl.protocol.Policy) -> float:
        runs = [
            pl.Trainer(learner, policy, engine, seed=seed, progress=False)
            .fit(steps=most, until=lambda at: at.loss <= target)
            .steps
            for seed in range(10, 15)
        ]
        assert max(runs) < most
        return sorted(runs)[2]

    fresh = steps(pl.sync())
    for policy in (ASYNCHRONOUS, pl.ringmaster(4)):
        told = pl.forecast(policy, profile, learning_rate=lr, target=target, seeds=1)
        staleness = timed(policy, profile, None, 0).staleness
        forecast = told.relative_steps * fresh + staleness  # a step reports an older loss
        assert forecast == pytest.approx(steps(policy), rel=0.3)
        assert told.relative_steps > 1.02


def test_what_is_not_measured() -> None:
    learner, sgd = net(partial(torch.optim.AdamW, lr=0.01)), net(partial(torch.optim.SGD, lr=0.0))
    one = pl.profile(learner, pl.Simulator(1), seconds=20.0, tasks=2)
    assert one.stale_training is None
    two = pl.Simulator(2)
    assert pl.profile(learner, two, seconds=20.0, tasks=2, warm=0).stale_training is None
    assert pl.profile(sgd, two, seconds=20.0, tasks=2).stale_training is None
