"""A report names what would have been faster, from the delays that the run measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import paceline as pl
from paceline.core.policy import Policy
from paceline.delays.models import Delay
from paceline.learners.arrays import TimingOnly
from paceline.planner.advice import Advice, advice
from paceline.training.run import Run

QUICK = pl.delays.ShiftedExponential(0.003, 0.0002)
UNEQUAL: Sequence[Delay] = (
    [QUICK] * 4 + [pl.delays.Scaled(QUICK, 2)] * 3 + [pl.delays.Scaled(QUICK, 10)]
)
SHARES, WITHOUT = "sync(), placement=BySpeed()", "sync() without w7"


def run(
    policy: Policy,
    placement: pl.BySpeed | None = None,
    delays: Sequence[Delay] = UNEQUAL,
) -> Run:
    engine = pl.Simulator(workers=8, delays=delays, unit=1)
    trainer = pl.Trainer(TimingOnly(256), policy, engine, placement=placement, progress=False)
    return trainer.fit(steps=60)


def found(of: Run) -> Advice:
    known = advice(of.journal, of.seconds, of.steps)
    assert known is not None
    return known


def test_it_forecasts_what_the_other_policies_then_take() -> None:
    others = dict(found(run(pl.sync())).others)
    assert set(others) == {SHARES, "k_sync(7)", WITHOUT}
    measured = {
        SHARES: run(pl.sync(), pl.BySpeed()).seconds,
        "k_sync(7)": run(pl.k_sync(7)).seconds,
        WITHOUT: run(pl.policies.OnlyWorkers([f"w{i}" for i in range(7)], pl.sync())).seconds,
    }
    assert others == pytest.approx(measured, rel=0.1)


def test_the_fastest_comes_first_in_words() -> None:
    of = run(pl.sync())
    text = str(found(of))
    assert text.startswith(f"“{SHARES}” would have taken about ")
    assert "; “" in text and text.endswith(".")


def test_equal_machines_need_no_change() -> None:
    of = run(pl.sync(), delays=[QUICK] * 8)
    assert str(found(of)).startswith("None of “") and "clearly faster" in str(found(of))


@pytest.mark.parametrize(
    "policy", [pl.ringmaster(8), pl.asynchronous(), pl.local_sgd(4)], ids=["ring", "any", "local"]
)
def test_runs_that_need_another_number_of_steps_are_not_compared(policy: Policy) -> None:
    of = run(policy)
    assert advice(of.journal, of.seconds, of.steps) is None


def test_short_runs_are_not_judged() -> None:
    of = run(pl.sync())
    assert advice(of.journal, of.seconds, 4) is None


def test_the_page_of_a_run_shows_it(tmp_path: Path) -> None:
    page = run(pl.sync()).report(tmp_path / "run.html").read_text(encoding="utf-8")
    assert f"<strong>What to change.</strong> “{SHARES}”" in page
