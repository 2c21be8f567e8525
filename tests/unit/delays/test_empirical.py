"""Survival curves and tests against published figures and scipy's."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from paceline.delays.empirical import (
    continued,
    distance,
    drift,
    is_constant,
    kaplan_meier,
    log_rank,
)
from paceline.delays.laws import Law
from paceline.delays.models import Exponential

# Weeks of remission under 6-MP and under a placebo (Freireich et al., 1963); + is longer.
TREATED = "6 6 6 6+ 7 9+ 10 10+ 11+ 13 16 17+ 19+ 20+ 22 23 25+ 32+ 32+ 34+ 35+"
PLACEBO = "1 1 2 2 3 4 4 5 5 8 8 8 8 11 11 12 12 15 17 22 23"


def weeks(text: str) -> tuple[np.ndarray, np.ndarray]:
    parts = text.split()
    return (
        np.array([float(part.rstrip("+")) for part in parts]),
        np.array([not part.endswith("+") for part in parts]),
    )


def test_kaplan_meier() -> None:
    at, after = kaplan_meier(*weeks(TREATED))
    assert at.tolist() == [6, 7, 10, 13, 16, 22, 23]
    assert after == pytest.approx([0.857, 0.807, 0.753, 0.690, 0.627, 0.538, 0.448], abs=5e-4)


def test_log_rank() -> None:
    """Its chi-square is 16.79 in the literature."""
    both = weeks(TREATED), weeks(PLACEBO)
    assert log_rank(*both, 0.0) == pytest.approx(stats.chi2.sf(16.793, 1), rel=1e-3)
    assert log_rank(*both, 0.3) == log_rank(*both, 0.0)  # of 30 values it may be chance
    assert log_rank(*both, 0.5) == pytest.approx(stats.chi2.sf(16.793 / 3, 1), rel=1e-3)


def test_nothing_to_compare() -> None:
    same = np.full(10, 0.3), np.ones(10, bool)
    assert log_rank(same, same, 0.0) == 1.0
    assert is_constant(*same)
    assert drift(*same) == (1.0, 0.0)


def test_distance_is_kolmogorovs() -> None:
    times = np.random.default_rng(0).exponential(1.2, 200)
    law = Law(Exponential(1.0), 0.0, 0, {}, shrinks=1.0)
    ks, p_value = distance(law, times, np.ones(200, bool))
    expected = stats.kstest(times, "expon")
    assert ks == pytest.approx(expected.statistic, rel=1e-12)
    assert p_value == pytest.approx(expected.pvalue, rel=0.05)  # exact for infinitely many


@pytest.mark.parametrize("limit", [0.5, 2.0])
def test_the_p_value_of_a_true_law_is_at_least_uniform(limit: float) -> None:
    """With the law known and not fitted; Hall and Wellner's weights err to the safe side."""
    rng = np.random.default_rng(1)
    law = Law(Exponential(1.0), 0.0, 0, {}, shrinks=1.0)
    small = 0
    for _ in range(200):
        times, until = rng.exponential(size=100), rng.exponential(limit, 100)
        small += distance(law, np.minimum(times, until), times <= until)[1] < 0.1
    assert small <= 32  # of 200 at 10 %, more has a probability of 0.3 %


def test_continued_times_are_longer_and_the_seen_ones_stay() -> None:
    times, done = weeks(TREATED)
    found = np.array(continued(times, done).seconds)
    assert found[done].tolist() == times[done].tolist()
    assert (found[~done] > times[~done]).all()
