"""Plans: what is chosen on fleets of which it is known what is best, and why."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import inf
from typing import Any

import pytest

import paceline as pl
from paceline.planner.grid import candidates

BATCH = 48
QUADRATIC = pl.learners.Quadratic((1.0, 0.3) * 8 + (0.1,) * 48, noise=0.2, lr=0.2, batch_size=BATCH)
TARGET = 0.5  # of a loss that is 7.6 at first
SHARE = 6 / BATCH  # of a second for a sample: a sixth of the batch takes 1 s


def profile(
    *delays: object, link: pl.delays.Link = pl.delays.Link(), prices: pl.Prices = pl.Prices()
) -> pl.planner.Profile:
    workers = {f"w{i}": pl.planner.WorkerProfile(each, link) for i, each in enumerate(delays)}  # type: ignore[arg-type]
    surface = pl.planner.measure_loss_surface(QUADRATIC)
    return pl.planner.Profile(workers, BATCH, QUADRATIC.message_bytes, prices, surface)


EQUAL = profile(*[pl.delays.Fixed(SHARE)] * 4)


@cache
def of_equal() -> pl.planner.Plan:
    return pl.plan(EQUAL, target=TARGET)


def test_equal_workers_and_a_quick_network_get_sync() -> None:
    found = of_equal()
    assert found.entries[0].text == "sync()"
    assert found.policy == pl.sync()
    assert found.codec is None
    assert "is not better" in found.reason
    assert 0.1 <= found.learning_rate <= 1.5  # the largest curvature is 1
    assert found.forecast.risk == 0


def test_a_dead_slow_worker_is_not_waited_for() -> None:
    slow = profile(
        *[pl.delays.ShiftedExponential(SHARE, SHARE / 10)] * 5, pl.delays.Fixed(100 * SHARE)
    )
    found = pl.plan(slow, target=TARGET)
    waits = pl.forecast(
        pl.sync(), slow, learning_rate=found.learning_rate, target=TARGET, seeds=4
    )  # fmt: skip
    leaves = pl.forecast(
        pl.k_sync(5), slow, learning_rate=found.learning_rate, target=TARGET, seeds=4
    )  # fmt: skip
    assert found.forecast.seconds < 0.1 * waits.seconds
    assert found.forecast.seconds < 1.05 * leaves.seconds
    assert "sync() several times as much" in found.reason or "times as much" in found.reason


def test_slow_links_get_a_codec_or_local_steps() -> None:
    far = profile(*[pl.delays.Fixed(SHARE)] * 4, link=pl.delays.Link(0.1, 200.0, 100.0))
    found = pl.plan(far, target=TARGET)
    assert found.codec is not None or any(work.steps > 1 for work in found.policy.works())
    plain = pl.forecast(pl.sync(), far, learning_rate=found.learning_rate, target=TARGET, seeds=2)
    assert found.forecast.seconds < 0.6 * plain.seconds


@pytest.mark.long
def test_the_dear_are_left_out_if_money_counts() -> None:
    prices = pl.Prices({"w0": 1.0, "w1": 9.0, "w2": 1.0, "w3": 9.0})
    fleet = profile(*[pl.delays.Fixed(SHARE)] * 4, prices=prices)
    found = pl.plan(fleet, target=TARGET, minimize="dollars")
    assert isinstance(found.policy, pl.policies.OnlyWorkers)
    assert set(found.policy.workers) <= {"w0", "w2"}
    assert found.policy.workers == ("w0", "w2")  # which is as cheap as one alone, and quicker
    quick = pl.plan(fleet, target=TARGET)
    assert quick.forecast.seconds < found.forecast.seconds
    assert quick.forecast.dollars > 2 * found.forecast.dollars


@pytest.mark.long
def test_bytes_are_saved_if_they_count() -> None:
    found = pl.plan(EQUAL, target=TARGET, minimize="bytes")
    quick = of_equal()
    assert found.forecast.bytes < 0.5 * quick.forecast.bytes


@pytest.mark.long
def test_the_seed_settles_all() -> None:
    fleet = profile(*[pl.delays.Exponential(SHARE)] * 2)
    one, two = (str(pl.plan(fleet, target=TARGET, seed=7)) for _ in range(2))
    assert one == two
    assert one != str(pl.plan(fleet, target=TARGET, seed=8))


def test_a_learning_rate_that_is_given_stays() -> None:
    found = pl.plan(EQUAL, target=TARGET, learning_rate=0.11)
    assert {entry.learning_rate for entry in found.entries} == {0.11}


def test_plans_for_fewer_workers() -> None:
    found = pl.plan(EQUAL, target=TARGET, workers=2)
    assert found.forecast.seconds > 1.5 * of_equal().forecast.seconds


def test_it_can_be_read() -> None:
    text = str(of_equal())
    lines = text.splitlines()
    assert lines[0] == "to a loss of 0.5, with the least time:"
    assert lines[1].split() == ["policy", "lr", "seconds", "dollars", "MB", "risk"]
    assert lines[2].split()[:2] == ["1", "sync()"]
    assert lines[-1].startswith("sync() takes ")


def test_every_candidate_works() -> None:
    prices = pl.Prices({f"w{i}": 1.0 + i for i in range(5)})
    fleet = profile(*[pl.delays.Exponential(SHARE)] * 5, prices=prices)
    grid = candidates(fleet, by_price=True)
    texts = [each.text for each in grid]
    assert len(texts) == len(set(texts)) > 30
    assert texts[0] == "sync()"
    for each in grid:
        run = pl.Trainer(
            pl.learners.TimingOnly(BATCH), each.policy, pl.Simulator(5), progress=False
        )
        assert run.fit(steps=2).steps == 2, each.text


def test_small_batches_and_single_workers_have_a_grid() -> None:
    assert candidates(replace(EQUAL, batch_size=1))
    alone = candidates(profile(pl.delays.Fixed(1.0)))
    assert [each.text for each in alone][:1] == ["sync()"]
    assert pl.plan(profile(pl.delays.Fixed(SHARE)), target=TARGET).forecast.seconds < inf


def test_refusals() -> None:
    with pytest.raises(
        ValueError, match=r"no policy reaches a loss of 2e-05 within 20000 steps\. "
    ):
        pl.plan(EQUAL, target=2e-5, learning_rate=0.5)  # at once, by theory
    with pytest.raises(ValueError, match=r"the lowest loss seen is .* noise holds the loss up by"):
        pl.plan(EQUAL, target=TARGET, learning_rate=0.05, max_steps=10)  # after all was tried
    with pytest.raises(ValueError, match="it must be below the first loss"):
        pl.plan(EQUAL, target=100.0)
    for rate in (0.0, -0.1, inf):
        with pytest.raises(ValueError, match="use a finite one > 0, or None"):
            pl.plan(EQUAL, target=TARGET, learning_rate=rate)
    with pytest.raises(ValueError, match="leaves nothing to choose from"):
        pl.plan(EQUAL, target=TARGET, codecs=[])
    with pytest.raises(ValueError, match='minimize="dollars" needs prices'):
        pl.plan(EQUAL, target=TARGET, minimize="dollars")
    with pytest.raises(ValueError, match="have no size"):
        pl.plan(replace(EQUAL, message_bytes=0), target=TARGET, minimize="bytes")
    with pytest.raises(ValueError, match='use "time", "dollars" or "bytes"'):
        pl.plan(EQUAL, target=TARGET, minimize="joy")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="this profile has 4; use 1 to 4"):
        pl.plan(EQUAL, target=TARGET, workers=7)


@pytest.mark.long
def test_noise_is_met_by_lower_learning_rates() -> None:
    noisy = pl.learners.Quadratic((1.0,) * 16, noise=3.0, lr=0.004, batch_size=8)
    workers = {f"w{i}": pl.planner.WorkerProfile(pl.delays.Fixed(0.1)) for i in range(2)}
    fleet = pl.planner.Profile(
        workers, 8, surface=pl.planner.measure_loss_surface(noisy), local_steps=False
    )
    found = pl.plan(fleet, target=0.04, seeds=4)
    assert found.learning_rate < 0.011
    assert found.forecast.risk == 0


@pytest.mark.long
def test_a_worker_that_costs_nothing_is_taken() -> None:
    prices = pl.Prices({"w0": 0.0, "w1": 1.0, "w2": 1.0})
    found = pl.plan(
        profile(*[pl.delays.Fixed(SHARE)] * 3, prices=prices), target=TARGET, minimize="dollars"
    )  # fmt: skip
    assert found.forecast.dollars == 0


@pytest.mark.long
def test_few_steps_can_be_planned() -> None:
    assert pl.plan(EQUAL, target=2.0, max_steps=25).forecast.steps <= 25


def test_codecs_can_be_given() -> None:
    found = pl.plan(EQUAL, target=TARGET, learning_rate=0.2, codecs=[pl.codecs.BFloat16()])
    assert {str(entry.codec) for entry in found.entries} == {str(pl.codecs.BFloat16())}


# --- a plan is run -------------------------------------------------------------------------------


def test_a_trainer_takes_a_plan_and_scores_its_forecast() -> None:
    fleet = profile(*[pl.delays.ShiftedExponential(SHARE, SHARE)] * 4)
    found = pl.plan(fleet, target=TARGET)
    learner = replace(QUADRATIC, lr=found.learning_rate)
    engine = pl.Simulator(4, pl.delays.ShiftedExponential(SHARE, SHARE), unit=1)
    trainer = pl.Trainer(learner, found, engine, progress=False)
    run = trainer.fit(steps=1000, until=lambda at: at.loss <= TARGET)
    about = run.journal.header.about
    assert about is not None
    assert about["forecast"]["policy"] == found.entries[0].text
    line = run.summary().splitlines()[-1]
    assert line.startswith(f"  forecast  {found.forecast.seconds:.4g} s [")
    assert line.endswith(f"to a loss of 0.5, took {run.seconds:.4g} s")
    assert run.seconds == pytest.approx(found.forecast.seconds, rel=0.5)
    short = pl.Trainer(learner, found, engine, progress=False).fit(steps=1)
    assert short.summary().endswith("which was not reached")


def test_another_learning_rate_is_told(caplog: pytest.LogCaptureFixture) -> None:
    engine = pl.Simulator(4, pl.delays.Fixed(SHARE), unit=1)
    found = of_equal()
    pl.Trainer(replace(QUADRATIC, lr=found.learning_rate), found, engine)
    assert not caplog.messages
    pl.Trainer(replace(QUADRATIC, lr=0.01), found, engine)
    assert "its forecast is of another run" in caplog.text


def test_a_plans_codec_is_used_unless_another_is_given() -> None:
    far = profile(*[pl.delays.Fixed(SHARE)] * 3, link=pl.delays.Link(0.0, 1e9, 50.0))
    found = pl.plan(far, target=TARGET)
    assert found.codec is not None
    engine = pl.Simulator(3, pl.delays.Fixed(SHARE), pl.delays.Link(0.0, 1e9, 50.0), unit=1)
    run = pl.Trainer(QUADRATIC, found, engine, progress=False).fit(steps=2)
    about = run.journal.header.about
    assert about is not None
    assert about["codec"] in found.entries[0].text
    other = pl.Trainer(QUADRATIC, found, engine, progress=False, codec=pl.codecs.Half()).fit(
        steps=2
    )
    assert other.journal.header.about["codec"] == "Half()"  # type: ignore[index]


class Opened(pl.Simulator):
    """Counts the jobs that it was opened for."""

    jobs = 0

    def open(self, *job: Any) -> None:
        self.jobs += 1
        super().open(*job)


def test_auto_measures_when_training_begins() -> None:
    engine = Opened(2, unit=1)
    trainer = pl.Trainer(QUADRATIC, "auto", engine, target=TARGET, progress=False)
    assert engine.jobs == 0
    trainer.fit(steps=1)
    first = engine.jobs
    assert first > 1
    trainer.fit(steps=2)  # under the same plan
    assert engine.jobs == first + 1


def test_auto_measures_plans_and_trains() -> None:
    delays = [pl.delays.Fixed(SHARE), pl.delays.Fixed(SHARE), pl.delays.Fixed(40 * SHARE)]
    engine = pl.Simulator(3, delays, unit=1)
    trainer = pl.Trainer(QUADRATIC, "auto", engine, target=TARGET, progress=False)
    run = trainer.fit(steps=1000, until=lambda at: at.loss <= TARGET)
    assert "took" in run.summary().splitlines()[-1]
    forecast = (run.journal.header.about or {})["forecast"]
    assert forecast["learning_rate"] == QUADRATIC.lr
    assert run.seconds < 5 * forecast["seconds"]
    with pytest.raises(ValueError, match='use policy="auto" with the loss to reach'):
        pl.Trainer(QUADRATIC, "auto", engine)
    with pytest.raises(ValueError, match='target= is for policy="auto"'):
        pl.Trainer(QUADRATIC, pl.sync(), engine, target=1.0)
