"""The tuning of benchmarks: every arm gets the same number of trials, and its best one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from _tuning import Trial, tune

GRID = (0.1, 0.3, 1.0, 3.0)


def recorded(score: Callable[[Trial], float]) -> tuple[list[Trial], Callable[..., list[float]]]:
    seen: list[Trial] = []

    def scores(trials: Sequence[Trial]) -> list[float]:
        seen.extend(trials)
        return [score(trial) for trial in trials]

    return seen, scores


def near(rate: float) -> Callable[[Trial], float]:
    return lambda trial: -abs(math.log(trial.rate / rate))


def test_an_arm_gets_its_best_rate() -> None:
    _, scores = recorded(lambda trial: near({"a": 1.0, "b": 0.3}[trial.arm])(trial))
    found = tune(["a", "b"], scores, factors=GRID)
    assert {arm: each.best.rate for arm, each in found.items()} == {"a": 1.0, "b": 0.3}


def test_all_arms_are_extended_if_one_is_best_at_an_end() -> None:
    seen, scores = recorded(lambda trial: near({"a": 1.0, "b": 0.01}[trial.arm])(trial))
    found = tune(["a", "b"], scores, factors=GRID)
    assert Counter(trial.arm for trial in seen) == {"a": len(GRID) + 1, "b": len(GRID) + 1}
    assert found["b"].best.rate == pytest.approx(0.1 / 3)
    assert found["a"].best.rate == 1.0
    assert found["a"].trials == found["b"].trials == len(GRID) + 1
    assert found["b"].at_edge and found["b"].report()["at_edge"]
    assert not found["a"].at_edge and "at_edge" not in found["a"].report()


def test_both_ends_are_extended_at_most_once() -> None:
    seen, scores = recorded(lambda trial: near({"a": 1e9, "b": 1e-9}[trial.arm])(trial))
    found = tune(["a", "b"], scores, factors=GRID)
    assert found["a"].best.rate == pytest.approx(9.0)
    assert found["a"].trials == found["b"].trials == len(GRID) + 2
    assert len(seen) == 2 * (len(GRID) + 2)


def test_a_knob_costs_the_other_arms_as_many_rates() -> None:
    def score(trial: Trial) -> float:
        if trial.arm == "plain":
            return near(0.58)(trial)
        return near(1.0)(trial) + (5.0 if trial.knob == 0.2 else 0.0)

    seen, scores = recorded(score)
    found = tune(["plain", "trigger"], scores, {"trigger": (0.2, 0.5)}, GRID)
    assert found["trigger"].best == Trial("trigger", 1.0, 0.2)
    assert found["plain"].best.rate == pytest.approx(3**-0.5)
    assert Counter(trial.arm for trial in seen) == {"plain": 6, "trigger": 6}
    assert len(set(seen)) == len(seen)  # no trial is spent twice
    assert found["plain"].trials == found["trigger"].trials == 6


def test_knobs_alone() -> None:
    seen, scores = recorded(lambda trial: -(trial.knob or 1.0))
    found = tune(["a", "b"], scores, {"a": (0.5, 2.0), "b": (3.0, 4.0)}, factors=(1.0,))
    assert (found["a"].best.knob, found["b"].best.knob) == (0.5, None)
    assert len(seen) == 6
    with pytest.raises(ValueError, match="same number"):
        tune(["a", "b"], scores, {"a": (0.5,)}, factors=(1.0,))


def test_a_diverged_run_is_never_the_best() -> None:
    _, scores = recorded(lambda trial: math.nan if trial.rate >= 1 else trial.rate)
    found = tune(["a"], scores, factors=GRID)["a"]
    assert (found.best.rate, found.score) == (0.3, 0.3)
    assert found.report() == {"rate": 0.3, "trials": len(GRID)}


def test_the_report_has_the_untuned_score() -> None:
    _, scores = recorded(lambda trial: 50.0 + trial.rate if trial.rate < 1 else 40.0)
    assert tune(["a"], scores, factors=GRID)["a"].report() == {
        "rate": 0.3, "trials": len(GRID), "untuned": 40.0,
    }  # fmt: skip
