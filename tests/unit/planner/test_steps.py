"""Where the steps to a loss are unknown, policies are ranked by what a step takes."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import partial
from math import isnan

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.planner.forecast.forecast import timed
from paceline.planner.measure import curvature
from paceline.planner.measure.budget import Budget
from paceline.planner.measure.curvature import NoCurvature, measure_curvature
from paceline.planner.measure.gradient_spectrum import gradient_spectrum
from paceline.planner.steps import averages_whole_batches
from paceline.report.callbacks import StageLine

BATCH = 12
WORKERS = {
    f"w{i}": pl.planner.WorkerProfile(pl.delays.Fixed(each))
    for i, each in enumerate((0.1, 0.1, 1.0))
}
ADAMW = {"name": "AdamW", "lr": 0.01, "betas": [0.9, 0.999]}
PROFILE = pl.planner.Profile(WORKERS, BATCH, 400, optimizer=ADAMW)


def squares(module: nn.Module, rows: Tensor) -> Tensor:
    found: Tensor = (module(rows) ** 2).mean()
    return found


def learner_of(optimizer: object, **more: object) -> pl.TorchLearner:
    torch.manual_seed(0)
    rows = torch.randn(32, 4)
    return pl.TorchLearner(nn.Linear(4, 2), squares, optimizer, rows, BATCH, **more)  # type: ignore[arg-type]


ENGINE = pl.Simulator(3, [pl.delays.Fixed(0.1), pl.delays.Fixed(0.1), pl.delays.Fixed(1.0)], unit=1)


def test_a_profile_names_the_optimizer_and_measures_no_curvature_for_others_than_sgd() -> None:
    adamw = learner_of(partial(torch.optim.AdamW, lr=0.02))
    found = pl.profile(adamw, ENGINE, seconds=20.0, tasks=2)
    assert found.surface is None
    assert found.optimizer is not None
    assert (found.optimizer["name"], found.optimizer["lr"]) == ("AdamW", 0.02)
    assert found.optimizer["betas"] == [0.9, 0.999]
    assert found.unknown.startswith("the learner's optimizer is AdamW, and the number of steps")
    assert found.stale_training is not None
    assert pl.planner.Profile.from_json(found.to_json()) == found
    momentum = learner_of(partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    found = pl.profile(momentum, ENGINE, seconds=20.0, tasks=2, warm=0)
    assert found.optimizer is not None
    assert found.optimizer["momentum"] == 0.9
    assert found.surface is not None and not found.unknown


def test_momentum_alone_makes_no_sgd() -> None:
    """RMSprop has a momentum too, and steps otherwise."""
    with pytest.raises(ValueError, match="forecasts are for SGD only"):
        pl.planner.sgd_equivalent_lr(learner_of(partial(torch.optim.RMSprop, lr=0.1)))


def test_an_outer_optimizer_is_named_too() -> None:
    sgd, outer = partial(torch.optim.SGD, lr=0.1), partial(torch.optim.Adam, lr=0.5)
    found = pl.profile(learner_of(sgd, outer=outer), ENGINE, seconds=20.0, tasks=2)
    assert found.optimizer is not None
    assert found.optimizer["outer"]["name"] == "Adam"
    assert "optimizer is Adam," in found.unknown


def test_policies_that_need_equally_many_steps_are_ranked_by_their_time() -> None:
    found = pl.plan(PROFILE, target=0.5)
    assert found.unknown == PROFILE.unknown != ""
    texts = [look.candidate.text for look in found.looks]
    assert {"sync()", "k_sync(2)", "sync(), placement=BySpeed()"} <= set(texts)
    left_out = ("ringmaster(3", "asynchronous", "k_async", "local_sgd")
    assert not any(text.startswith(left_out) for text in texts)
    figures = [entry.forecast.per_step["seconds"] for entry in found.entries]
    assert figures[0] <= 1.03 * min(figures)
    sync = next(look for look in found.looks if look.candidate.text == "sync()")
    assert sync.figure == pytest.approx(4.0)  # a third of the batch at 1 s a sample
    assert all(isnan(entry.forecast.seconds) for entry in found.entries)
    text = str(found)
    assert text.startswith("with the least time per step; the steps to a loss of 0.5 are unknown: ")
    assert "s/step" in text and "Stale gradients and local steps are left out" in text
    about = json.loads(json.dumps(found.about(), allow_nan=False))
    assert about["steps"] is None and about["unknown"] and about["per_step"]["seconds"] > 0


@pytest.mark.parametrize(
    ("policy", "whole"),
    [
        (pl.sync(), True),
        (pl.k_sync(2), True),
        (pl.rennala(3), True),
        (pl.coded(1), True),
        (pl.asynchronous(), False),  # it gives stale results less weight
        (pl.asynchronous(damping=False), True),  # of older models
        (pl.k_async(2), True),
        (pl.ringmaster(2), True),
        (pl.local_sgd(4), False),
        (pl.policies.Deadline(0.5), False),
    ],
)
def test_which_policies_average_whole_batches(policy: pl.protocol.Policy, whole: bool) -> None:
    timeline = timed(policy, PROFILE, None, 0)
    assert averages_whole_batches(timeline, BATCH) is whole


def test_without_curvature_a_plan_is_by_steps_too() -> None:
    found = pl.plan(replace(PROFILE, optimizer=None, codes=False), target=0.5, seeds=1)
    assert found.unknown == "the profile has no curvature of the loss"


def test_a_forecast_of_another_optimizer_is_of_a_step() -> None:
    found = pl.forecast(pl.asynchronous(), PROFILE, learning_rate=0.01, target=0.5)
    assert isnan(found.seconds) and found.per_step["seconds"] > 0
    assert "the steps to a loss are unknown: the learner's optimizer is AdamW" in str(found)
    assert "theory agrees" not in str(found)


def test_only_one_codec_can_be_given() -> None:
    with pytest.raises(ValueError, match=r"2 codecs are given, and the steps .* are unknown"):
        pl.plan(PROFILE, target=0.5, codecs=[None, pl.codecs.Half()])
    found = pl.plan(PROFILE, target=0.5, codecs=[pl.codecs.Half()], seeds=1)
    assert {str(entry.codec) for entry in found.entries} == {str(pl.codecs.Half())}


def test_a_profile_of_the_older_format_is_read_with_a_note() -> None:
    data = json.loads(replace(PROFILE, codes=False).to_json())
    del data["optimizer"]
    found = pl.planner.Profile.from_json(json.dumps({**data, "format": 1}))
    assert found.workers == PROFILE.workers and found.optimizer is None
    assert "does not name its optimizer" in found.notes[-1]
    assert "does not name its optimizer" in str(pl.plan(found, target=0.5, seeds=1))


# --- policy="auto" -------------------------------------------------------------------------------


def test_auto_plans_by_steps_for_adamw(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    adamw = learner_of(partial(torch.optim.AdamW, lr=0.02))
    run = pl.Trainer(adamw, "auto", ENGINE, target=0.5).fit(steps=60)
    assert run.steps == 60
    assert "planned by the time per step: the learner's optimizer is AdamW" in caplog.text
    told = capsys.readouterr().err
    assert "measuring: workers" in told and "planning" in told
    assert "curvature" not in told
    assert "forecast" not in (run.journal.header.about or {})


def test_auto_looks_at_the_optimizer_before_it_measures() -> None:
    adamw, outer = partial(torch.optim.AdamW, lr=0.1), partial(torch.optim.SGD, lr=0.7)
    with pytest.raises(ValueError, match=r"give a policy such as pl\.local_sgd\(16\)"):
        pl.Trainer(learner_of(adamw, outer=outer), "auto", pl.Simulator(2), target=0.5)
    idle = learner_of(partial(torch.optim.SGD, lr=0.0))
    with pytest.raises(ValueError, match="the learning rate is 0"):
        pl.Trainer(idle, "auto", pl.Simulator(2), target=0.5)


def test_auto_plans_again_by_steps() -> None:
    """A worker that becomes slow is then left out, or given less."""
    slowed = pl.delays.Changed(pl.delays.Fixed(0.1), pl.delays.Fixed(4.0), 60.0)
    even = {f"w{i}": pl.planner.WorkerProfile(pl.delays.Fixed(0.1)) for i in range(3)}
    profile = pl.planner.Profile(even, BATCH, optimizer=ADAMW, codes=False)
    found = pl.plan(profile, target=0.0, seeds=1)
    assert found.entries[0].text == "sync()"
    auto = pl.planner.Auto(profile, found)
    engine = pl.Simulator(3, [pl.delays.Fixed(0.1), pl.delays.Fixed(0.1), slowed], unit=1)
    quadratic = pl.learners.Quadratic((1.0,) * 4, noise=0.3, lr=0.01, batch_size=BATCH)
    run = pl.Trainer(quadratic, auto, engine, progress=False).fit(steps=260)
    assert "w2 takes" in run.summary()


# --- how long it takes ---------------------------------------------------------------------------


class Clock:
    """Advances by so many seconds each time it is read."""

    def __init__(self, each: float) -> None:
        self.now, self._each = 0.0, each

    def __call__(self) -> float:
        self.now += self._each
        return self.now


def test_a_budget_reduces_the_samples_and_then_refuses() -> None:
    learner, sizes = learner_of(partial(torch.optim.SGD, lr=0.1)), {"samples": 32, "steps": 6}
    full = measure_curvature(learner, **sizes)  # type: ignore[arg-type]
    assert full.samples == 32
    less = measure_curvature(learner, **sizes, budget=Budget(300.0, clock=Clock(2.0)))  # type: ignore[arg-type]
    assert less.samples < 32
    with pytest.raises(NoCurvature, match=r"cannot be measured in 20 s.* loss_seconds"):
        measure_curvature(learner, **sizes, budget=Budget(20.0, clock=Clock(2.0)))  # type: ignore[arg-type]


def test_a_profile_without_the_time_for_curvature_says_so() -> None:
    learner = learner_of(partial(torch.optim.SGD, lr=0.1))
    found = pl.profile(learner, ENGINE, seconds=20.0, tasks=2, loss_seconds=1e-9)
    assert found.surface is None
    assert any(note.startswith("without curvature: ") for note in found.notes)
    few = replace(found, codes=False)
    assert "without curvature: " in str(pl.plan(few, target=0.1, seeds=1))


def test_large_models_are_refused_before_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curvature, "_MEMORY", 100)
    with pytest.raises(NoCurvature, match="the curvature of 10 parameters takes more than"):
        measure_curvature(learner_of(partial(torch.optim.SGD, lr=0.1)))


def test_the_gradients_spectrum_ends_with_the_budget() -> None:
    learner = learner_of(partial(torch.optim.SGD, lr=0.1))
    with pytest.raises(NoCurvature, match="not enough time"):
        gradient_spectrum(learner, budget=Budget(1.0, clock=Clock(1.0)))
    shares: list[float] = []
    gradient_spectrum(learner, steps=4, budget=Budget(on_progress=shares.append))
    assert shares == sorted(shares) and shares[0] == 0.0


def test_stages_are_told() -> None:
    told: list[str] = []
    learner = learner_of(partial(torch.optim.SGD, lr=0.1))
    pl.profile(
        learner, ENGINE, seconds=20.0, tasks=2, warm=2,
        on_progress=lambda what, share: told.append(what),
    )  # fmt: skip
    assert list(dict.fromkeys(told)) == [
        "workers",
        "messages of other sizes",
        "curvature",
        "where the gradient points",
        "training",
        "training with stale gradients",
        "curvature after training",
    ]


def test_a_line_for_each_stage() -> None:
    stream, clock = io.StringIO(), Clock(4.0)
    line = StageLine(stream, clock)
    for share in (0.0, 0.2, 0.4, 0.6):
        line("measuring: workers", share)
    line("planning", 0.0)
    line.close()
    assert stream.getvalue().splitlines() == [
        "measuring: workers, 0% (8 s)",
        "measuring: workers, 60% (20 s)",
        "planning, 0% (24 s)",
    ]
