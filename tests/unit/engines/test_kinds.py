"""Kinds of machine: their names, limits and prices, and settings that are refused."""

from __future__ import annotations

from typing import Any

import pytest

import paceline as pl
from paceline.engines.kinds import Fleet

A100 = pl.Kind("a100", count=2, gpus=1, max_samples=64, price=1.2)
CPU = pl.Kind("cpu", count=(1, 3), cpus=4, max_samples=6)
NAMES = ("a100-0", "a100-1", "cpu-0", "cpu-1", "cpu-2")


def test_workers_are_named_by_their_kind() -> None:
    engine = pl.Ray(fleet=[A100, CPU])
    assert engine.workers == NAMES and engine.size == 5
    assert engine.fleet.least == 3 and engine.fleet.required() == ["a100-0", "a100-1", "cpu-0"]
    assert repr(engine) == "Ray(fleet of a100-0 to a100-1, cpu-0 to cpu-2)"
    assert pl.Ray(3).workers == ("w0", "w1", "w2") and pl.Ray(workers=3).fleet.least == 3


def test_the_least_number_counts_for_each_kind() -> None:
    fleet = Fleet.of([A100, CPU])
    assert fleet.missing([]) == {"a100": 2, "cpu": 1}
    assert fleet.missing(["cpu-0", "cpu-1", "cpu-2", "a100-1"]) == {"a100": 1}
    assert fleet.missing(["cpu-2", "a100-0", "a100-1"]) == {}
    assert Fleet.of([pl.Kind("spot", count=(0, 4))]).least == 1  # training needs one worker


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"name": ""}, "use letters, digits, - and _"),
        ({"name": "a/b"}, "use letters, digits, - and _"),
        ({"count": 0}, "count=0: use at least 1"),
        ({"count": 2.5}, "count=2.5: use a whole number"),
        ({"count": (3, 2)}, "0 <= least <= most"),
        ({"count": (0, 0)}, "most >= 1"),
        ({"count": (1, 2, 3)}, r"use a number, or \(least, most\)"),
        ({"cpus": -1}, "Kind k: cpus=-1: use a finite number >= 0"),
        ({"gpus": float("nan")}, "gpus=nan"),
        ({"resources": {"big": -1}}, "big=-1"),
        ({"resources": {"GPU": 1}}, "resources names GPU; use cpus= and gpus="),
        ({"max_samples": 0}, "max_samples=0: use at least 1"),
        ({"price": float("inf")}, "price=inf"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        pl.Kind(**{"name": "k", **given})


def test_a_fleet_or_a_number_but_not_both() -> None:
    with pytest.raises(ValueError, match="give a number of workers, or the kinds of machine"):
        pl.Ray()
    with pytest.raises(ValueError, match="give a number of workers, or the kinds of machine"):
        pl.Ray(4, fleet=[CPU])
    with pytest.raises(ValueError, match="each Kind has its own"):
        pl.Ray(fleet=[CPU], gpus=1)
    with pytest.raises(ValueError, match="several kinds named cpu"):
        pl.Ray(fleet=[CPU, pl.Kind("cpu")])
    with pytest.raises(ValueError, match="give kinds of machine"):
        pl.Ray(fleet=[])


# --- what the trainer takes from them ------------------------------------------------------------


def trainer(policy: Any = None, batch: int = 12, **more: Any) -> pl.Trainer:
    learner = pl.learners.Quadratic((1.0, 0.2), noise=0.5, batch_size=batch)
    engine = more.pop("engine", None) or pl.Ray(fleet=[A100, CPU])
    return pl.Trainer(learner, policy or pl.sync(), engine, progress=False, **more)


def test_prices_are_those_of_the_kinds() -> None:
    found = trainer().prices
    assert found.per_hour == {"a100-0": 1.2, "a100-1": 1.2} | dict.fromkeys(NAMES[2:], 0.0)
    assert trainer(prices=pl.Prices(3.0)).prices == pl.Prices(3.0)
    assert trainer(engine=pl.Ray(2)).prices == pl.Prices()
    with pytest.raises(ValueError, match=r"no price for a100-1, cpu-0 to cpu-2; this engine has"):
        trainer(prices=pl.Prices({"a100-0": 1.0}))


def limits(made: pl.Trainer) -> object:
    placement = made._settled().policy.placement
    assert isinstance(placement, pl.BySpeed)
    return placement.max_samples


def test_limits_are_those_of_the_kinds() -> None:
    own = {"a100-0": 64, "a100-1": 64, "cpu-0": 6, "cpu-1": 6, "cpu-2": 6}
    assert limits(trainer(placement=pl.BySpeed())) == own
    assert limits(trainer(placement=pl.BySpeed(32))) == own | {"a100-0": 32, "a100-1": 32}
    one = pl.BySpeed({"cpu-1": 4, "a100-0": 99})  # the smaller limit holds
    assert limits(trainer(placement=one)) == own | {"cpu-1": 4}
    policy = pl.policies.Gather(placement=pl.BySpeed())
    assert limits(trainer(policy)) == own
    with pytest.raises(ValueError, match="max_samples names w0; this engine has the workers a100"):
        trainer(placement=pl.BySpeed({"w0": 4}))


@pytest.mark.parametrize(
    "policy", [pl.sync(), pl.k_sync(2), pl.ata(4), pl.rennala(2), pl.coded(1), pl.local_sgd(2)]
)
def test_equal_shares_that_do_not_fit_are_refused(policy: pl.policies.Gather) -> None:
    with pytest.raises(ValueError, match=r"Kind cpu has max_samples=6.*use placement=BySpeed\(\)"):
        trainer(policy, batch=24)


def test_shares_that_fit_are_not_refused() -> None:
    trainer(pl.sync(), batch=18)  # 3 workers at the beginning, 6 samples each
    with pytest.raises(ValueError, match="up to 7 samples"):
        trainer(pl.sync(), batch=19)
    trainer(pl.policies.OnlyWorkers(["a100-0", "a100-1"], pl.sync()), batch=100)
    with pytest.raises(ValueError, match="Kind a100 has max_samples=64"):
        trainer(pl.policies.OnlyWorkers(["a100-0", "a100-1"], pl.sync()), batch=200)


def test_training_begins_with_the_least_numbers() -> None:
    assert trainer()._settled().min_workers == 3
    assert trainer(min_workers=1, batch=6)._settled().min_workers == 1
    assert trainer(engine=pl.Ray(4))._settled().min_workers == 4
    with pytest.raises(ValueError, match="needs all workers from the start, and Kind cpu has"):
        pl.profile(pl.learners.TimingOnly(8), pl.Ray(fleet=[A100, CPU]))
    with pytest.raises(ValueError, match=r'policy="auto" needs all workers.*use count=3'):
        trainer("auto", target=0.1)
    with pytest.raises(ValueError, match="start together"):
        trainer(pl.gossip.Gossip(pl.gossip.ring(5)))
