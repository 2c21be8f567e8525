"""Likelihoods against scipy's distributions, and their maxima against its general optimizer."""

from __future__ import annotations

from dataclasses import replace
from math import exp, isfinite, log, log1p

import numpy as np
import pytest
from scipy import stats

from paceline.delays.laws import ENOUGH, Law, fitted, log_survival
from paceline.delays.models import (
    Delay,
    Erlang,
    Exponential,
    Fixed,
    LogNormal,
    Pareto,
    ShiftedExponential,
)

LAWS: list[tuple[Delay, stats.rv_continuous]] = [
    (Exponential(0.5), stats.expon(0, 0.5)),
    (ShiftedExponential(1.0, 0.3), stats.expon(1.0, 0.3)),
    (Erlang(4, 0.8), stats.gamma(4, scale=0.2)),
    (LogNormal(0.3, 0.8), stats.lognorm(0.8, scale=0.3)),
    (Pareto(0.2, 2.5), stats.pareto(2.5, scale=0.2)),
]


def scipys(model: Delay) -> stats.rv_continuous:
    match model:
        case Exponential(mean):
            return stats.expon(0, mean)
        case Erlang(stages, mean):
            return stats.gamma(stages, scale=mean / stages)
        case LogNormal(median, sigma):
            return stats.lognorm(sigma, scale=median)
    raise TypeError(model)


def censored(seed: int, count: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """Return Erlang times of mean 1, some given up after exponential ones of mean 2."""
    rng = np.random.default_rng(seed)
    times, until = rng.gamma(3, 1 / 3, count), rng.exponential(2.0, count)
    return np.minimum(times, until), times <= until


def by_name(times: np.ndarray, done: np.ndarray) -> dict[str, Law]:
    return {type(law.model).__name__: law for law in fitted(times, done)}


@pytest.mark.parametrize(("model", "law"), LAWS, ids=lambda value: repr(value)[:12])
def test_probability_of_longer(model: Delay, law: stats.rv_continuous) -> None:
    t = np.array([0.0, 1e-6, 0.1, 0.19, 0.5, 1.0, 1.1, 3.0, 9.0])
    assert log_survival(model, t) == pytest.approx(law.logsf(t), rel=1e-9, abs=1e-15)


def test_probability_of_much_longer() -> None:
    """Where the probability itself is below the least float."""
    x = 3000.0
    assert exp(-x) == 0.0
    expected = log(x**3 / 6 + x**2 / 2 + x + 1) - x
    assert log_survival(Erlang(4, 4.0), np.array([x])) == pytest.approx([expected], rel=1e-14)
    # Mills' ratio: P(Z > u) = φ(u) / u · (1 - 1/u² + 3/u⁴ - …)
    u = 100.0
    tail = -(u**2) / 2 - log(u) - log(2 * np.pi) / 2 + log1p(-1 / u**2 + 3 / u**4)
    assert log_survival(LogNormal(1.0, 1.0), np.exp([u])) == pytest.approx([tail], rel=1e-12)


def test_other_models_have_no_law() -> None:
    with pytest.raises(TypeError, match="has no law to compare with"):
        log_survival(Fixed(1.0), np.ones(1))


@pytest.mark.parametrize("name", ["Exponential", "Erlang", "LogNormal"])
@pytest.mark.parametrize("hidden", [False, True])
def test_the_likelihood_is_that_of_the_model_and_highest_there(name: str, hidden: bool) -> None:
    times, done = censored(0)
    if not hidden:
        times, done = times[done], done[done]
    found = by_name(times, done)[name]

    def likelihood(model: Delay) -> float:
        law = scipys(model)
        return float(law.logpdf(times[done]).sum() + law.logsf(times[~done]).sum())

    assert found.log_likelihood == pytest.approx(likelihood(found.model), rel=1e-10)
    for key, value in found.parameters().items():
        near = (int(value) - 1, int(value) + 1) if key == "stages" else (value / 1.01, value * 1.01)
        for other in near:
            beside = replace(found.model, **{key: other})  # type: ignore[type-var]
            assert likelihood(beside) < found.log_likelihood


def test_log_normal_as_by_a_general_optimizer() -> None:
    times, done = censored(1)
    found = by_name(times, done)["LogNormal"].model
    assert isinstance(found, LogNormal)
    data = stats.CensoredData.right_censored(times, ~done)
    sigma, _, median = stats.lognorm.fit(data, floc=0)
    assert (found.sigma, found.median) == pytest.approx((sigma, median), rel=1e-3)


@pytest.mark.parametrize("spread", [0.0, 1e-9, 1e-4])
@pytest.mark.parametrize("until", [9.0, 3000.0])
def test_equal_times_of_which_some_take_much_longer(spread: float, until: float) -> None:
    rng = np.random.default_rng(0)
    times = np.concatenate([0.3 + spread * rng.normal(size=ENOUGH), np.full(20, until)])
    found = by_name(times, times < 1.0)
    assert len(found) == 5
    for law in found.values():
        assert isfinite(law.log_likelihood)
        assert all(low <= high for low, high in law.intervals.values())
