"""Fitted laws against the ones that were drawn from, with and without tasks that were given up."""

from __future__ import annotations

from math import inf, isfinite, nan

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.core.journal import Journal
from paceline.delays.fit import ENOUGH, NEWEST, Fit, drifted, fit, fit_workers
from paceline.delays.models import (
    Delay,
    Erlang,
    Exponential,
    Fixed,
    LogNormal,
    Pareto,
    ShiftedExponential,
    Trace,
)

LAWS: list[Delay] = [
    Exponential(0.5),
    ShiftedExponential(1.0, 0.3),
    Erlang(4, 0.8),
    LogNormal(0.3, 0.8),
    Pareto(0.2, 2.5),
]


def draw(model: Delay, count: int, seed: int) -> NDArray[np.float64]:
    rng = np.random.default_rng(seed)
    memory: dict[str, float] = {}
    return np.array([model.sample(rng, 0.0, memory) for _ in range(count)])


def awaited(
    model: Delay, count: int, seed: int, k: int = 5, n: int = 8
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return one worker's seconds when only the fastest k of n equal ones are awaited."""
    seconds = draw(model, count * n, seed).reshape(count, n)
    given_up = np.sort(seconds[:, 1:], axis=1)[:, k - 1]
    return np.minimum(seconds[:, 0], given_up), seconds[:, 0] > given_up


def parameters(model: Delay) -> dict[str, float]:
    return {name: getattr(model, name) for name in type(model).__dataclass_fields__}  # type: ignore[attr-defined]


# --- laws ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_recovers_the_parameters(law: Delay) -> None:
    """2000 values: within 8 % (the standard error of a shape is 3 %), and the mean within 5 %."""
    found = fit(draw(law, 2000, seed=3))
    assert found.kind == type(law).__name__
    assert found.fits and found.p_value > 0.01 and not found.note
    assert found.parameters == pytest.approx(parameters(law), rel=0.08)
    assert found.model.mean == pytest.approx(law.mean, rel=0.05)
    assert (found.observations, found.censored) == (2000, 0)
    for name, (low, high) in found.intervals.items():
        assert 0 <= low <= getattr(found.model, name) <= high < inf


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_recovers_the_parameters_behind_censoring(law: Delay) -> None:
    seconds, censored = awaited(law, 2000, seed=4)
    found = fit(seconds, censored)
    assert 0.3 < censored.mean() < 0.45
    assert found.kind == type(law).__name__
    assert found.fits
    assert found.parameters == pytest.approx(parameters(law), rel=0.15)
    assert found.model.mean == pytest.approx(law.mean, rel=0.07)
    assert seconds[~censored].mean() < 0.9 * law.mean  # what one would think without them


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_chooses_the_right_law_in_nine_of_ten_cases(law: Delay) -> None:
    found = [fit(draw(law, 400, seed)).kind for seed in range(10)]
    assert found.count(type(law).__name__) >= 9


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_intervals_hold_the_truth_about_as_often_as_they_say(law: Delay) -> None:
    """Of 30 intervals of 95 %, at least 24: fewer has a probability of 1e-3."""
    fits = [fit(*awaited(law, 300, seed, k=7)) for seed in range(30)]
    right = [found for found in fits if found.kind == type(law).__name__]
    assert len(right) >= 20
    for name, value in parameters(law).items():
        held = [found.intervals[name][0] <= value <= found.intervals[name][1] for found in right]
        assert np.mean(held) >= 0.8, name


@pytest.mark.parametrize("k", [3, 8])
def test_a_right_law_is_seldom_flagged(k: int) -> None:
    """At p < 0.01 at most 3 of 50, with and without censoring."""
    fits = [fit(*awaited(law, 300, seed, k, n=9)) for law in LAWS for seed in range(10)]
    assert sum(not found.fits for found in fits) <= 3


def test_a_law_that_is_none_of_these_is_flagged_and_replayed() -> None:
    rng = np.random.default_rng(0)
    seconds = np.where(rng.random(400) < 0.7, 1.0, 3.0) * rng.uniform(0.95, 1.05, 400)
    found = fit(seconds)
    assert not found.fits
    assert found.p_value < 1e-6 and found.ks > 0.1
    assert found.model == Trace(seconds.tolist())
    assert found.note.startswith("no law describes these 400 seconds; the best, ")
    low, high = found.intervals["mean"]
    assert low < seconds.mean() < high


def test_the_replay_goes_on_where_tasks_were_given_up() -> None:
    """Two speeds, and whatever takes over 2 s is given up at once in half of the cases."""
    rng = np.random.default_rng(1)
    truth = np.where(rng.random(600) < 0.6, 1.0, 3.0) * rng.uniform(0.9, 1.1, 600)
    limit = np.where(rng.random(600) < 0.5, 2.0, 9.0)
    found = fit(np.minimum(truth, limit), truth > limit)
    assert isinstance(found.model, Trace) and not found.fits
    assert len(found.model.seconds) == 600
    assert found.model.mean == pytest.approx(truth.mean(), rel=0.03)
    assert truth[truth <= limit].mean() < 0.92 * truth.mean()
    # In the order in which they came, so that slow times stay together.
    seen = truth <= limit
    assert np.array(found.model.seconds)[seen].tolist() == truth[seen].tolist()
    assert (np.array(found.model.seconds)[~seen] > limit[~seen]).all()


def test_constant_seconds() -> None:
    found = fit(0.25 + 1e-9 * np.arange(20))
    assert found.model == Fixed(float(np.median(0.25 + 1e-9 * np.arange(20))))
    assert found.fits and found.drift == 1.0
    assert fit(np.zeros(20)).model == Fixed(0.0)
    # A constant that is sometimes given up before is still one; after it is not.
    assert fit([0.25] * 10 + [0.1], [False] * 10 + [True]).kind == "Fixed"
    assert fit([0.25] * 10 + [0.9], [False] * 10 + [True]).kind != "Fixed"


def test_zeros_leave_laws_that_can_be_zero() -> None:
    assert fit([0.0] + [0.1 * i for i in range(1, 30)]).kind in (
        "ShiftedExponential",
        "Exponential",
        "Trace",
    )


def test_few_observations_tell_no_law() -> None:
    few = fit([1.0, 1.1, 0.9])
    assert few.model == Trace([1.0, 1.1, 0.9])
    assert not few.fits
    assert few.note == "3 finished tasks are too few to fit a law; 8 or more are needed"
    low, high = few.intervals["mean"]
    assert low < 0.5 and high > 3.0  # of three nobody knows more
    hidden = fit([1.0, 2.0, 3.0, 3.0], [False, False, True, True])
    assert hidden.model == Exponential(4.5)  # 9 s in which two finished
    assert not hidden.fits and hidden.censored == 2
    assert fit(draw(Exponential(1.0), ENOUGH, 0)).note == ""


def test_an_infinite_mean_needs_strong_evidence() -> None:
    """Ten values of any law can look like a tail without a mean; five hundred cannot."""
    few = [fit(*awaited(Exponential(1.0), 10, seed, k=7)).model.mean for seed in range(60)]
    assert max(few) < 5.0
    found = fit(draw(Pareto(0.2, 0.8), 500, 0))
    assert found.kind == "Pareto" and found.model.mean == inf
    assert found.bounded.mean < inf  # as planning needs it
    assert found.intervals["mean"][1] == inf


def test_half_given_up_is_said() -> None:
    found = fit(*awaited(Exponential(1.0), 500, 2, k=2))
    assert found.fits
    assert found.note.endswith(
        "of 500 tasks did not finish (censored): the mean depends on the law's tail"
    )


def test_only_the_newest_count() -> None:
    old, new = draw(Exponential(9.0), 500, 0), draw(Exponential(1.0), NEWEST, 1)
    assert fit(np.concatenate([old, new])) == fit(new)


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"seconds\[1\]=nan: give finite seconds >= 0"):
        fit([1.0, nan])
    with pytest.raises(ValueError, match=r"seconds\[0\]=-1.0"):
        fit([-1.0, 2.0])
    with pytest.raises(ValueError, match=r"none of 2 tasks finished.* wait for the worker's first"):
        fit([1.0, 2.0], [True, True])
    with pytest.raises(ValueError, match=r"shape \(2,\) and censored of shape \(1,\)"):
        fit([1.0, 2.0], [True])
    with pytest.raises(ValueError, match="fit_workers got no journal"):
        fit_workers()
    with pytest.raises(ValueError, match="skip=-1"):
        fit_workers(Journal(), skip=-1)


# --- drift ---------------------------------------------------------------------------------------


def test_drift_is_seen_and_steadiness_is_not_drift() -> None:
    same = [fit(draw(Exponential(1.0), 200, seed)).drift for seed in range(40)]
    assert 0.25 < np.median(same) < 0.75
    assert sum(p < 0.05 for p in same) <= 6
    slower = [*draw(Exponential(1.0), 100, 1), *draw(Exponential(2.0), 100, 2)]
    assert fit(slower).drift < 1e-3


def test_slow_times_that_come_and_go_are_not_drift() -> None:
    """Bursts make neighbors alike, which a test for independent values takes for a change."""
    rng = np.random.default_rng(5)
    false, least = 0, 1.0
    for _ in range(20):
        slow = np.repeat(rng.random(60) < 0.5, 8)
        found = fit(np.where(slow, 3.0, 1.0) * rng.exponential(size=slow.size))
        false += found.drift < 0.05
        least = min(least, found.autocorrelation)
    assert least > 0.03
    assert false <= 4


def test_drifted_compares_newer_seconds_with_a_fit() -> None:
    found = fit(*awaited(Exponential(1.0), 300, 0))
    assert drifted(found, *awaited(Exponential(1.0), 100, 1)) > 0.01
    assert drifted(found, *awaited(Exponential(2.0), 100, 2)) < 1e-3
    constant = fit([0.5] * 20)
    assert drifted(constant, [0.5001, 0.4999]) == 1.0
    assert drifted(constant, [0.6] * 10) < 1e-3


def test_fits_compare_and_print() -> None:
    seconds = draw(Exponential(1.0), 50, 0)
    assert fit(seconds) == fit(seconds)
    assert "Exponential" in repr(fit(seconds)) and "array" not in repr(fit(seconds))
    assert isinstance(fit(seconds), Fit) and isfinite(fit(seconds).log_likelihood)
