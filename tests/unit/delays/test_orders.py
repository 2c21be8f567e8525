"""Expected waiting times, against closed forms and the figures of the literature's settings."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracles.orders import kth, slowest

TEN = np.linspace(0.1, 1.0, 10).tolist()
FIFTY = np.linspace(0.1, 1.0, 50).tolist()
MEANS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=7)


def harmonic(n: int) -> float:
    return sum(1 / i for i in range(1, n + 1))


def fastest(means: tuple[float, ...]) -> float:
    return 1 / sum(1 / mean for mean in means)


def by_subsets(means: list[float], k: int) -> float:
    """Return E of the k-th fastest from minima of subsets alone (David and Nagaraja, 2003)."""
    n, total = len(means), 0.0
    for size in range(n - k + 1, n + 1):
        sign = (-1) ** (size - (n - k + 1))
        ways = np.prod([(size - 1 - i) / (i + 1) for i in range(n - k)])  # size - 1 over n - k
        total += sign * ways * sum(fastest(some) for some in combinations(means, size))
    return float(total)


def test_ten_workers_of_unequal_means() -> None:
    assert slowest(TEN[:3]) == pytest.approx(0.392879, abs=5e-7)
    assert slowest(TEN) == pytest.approx(1.920345, abs=5e-7)


@settings(max_examples=50, deadline=None)
@given(MEANS)
def test_they_agree_with_minima_of_subsets(means: list[float]) -> None:
    for k in range(1, len(means) + 1):
        expected = by_subsets(means, k)
        # The alternating sum loses digits, as many as its terms are larger than their sum.
        assert kth(means, k) == pytest.approx(expected, rel=1e-9, abs=1e-12 * max(means))
    assert slowest(means) == pytest.approx(kth(means, len(means)), rel=1e-11)


@pytest.mark.parametrize("n", [1, 2, 50, 200])
def test_equal_means_have_a_closed_form(n: int) -> None:
    for k in {1, min(5, n), (n + 1) // 2, n}:
        assert kth([2.0] * n, k) == pytest.approx(2 * (harmonic(n) - harmonic(n - k)), rel=1e-11)
        assert slowest([2.0] * k) == pytest.approx(2 * harmonic(k), rel=1e-11)


@pytest.mark.parametrize(
    ("k", "of_all", "of_k"),
    [
        (1, 0.0200, 1.0000),
        (5, 0.1043, 2.2833),
        (10, 0.2207, 2.9290),
        (20, 0.5042, 3.5977),
        (40, 1.5702, 4.2785),
        (50, 4.4992, 4.4992),
    ],
)
def test_fifty_workers_of_equal_means(k: int, of_all: float, of_k: float) -> None:
    assert kth([1.0] * 50, k) == pytest.approx(of_all, abs=6e-5)
    assert slowest([1.0] * k) == pytest.approx(of_k, abs=6e-5)


@pytest.mark.parametrize(
    ("k", "of_all", "of_k"),
    [
        (1, 0.0076, 0.1000),
        (5, 0.0408, 0.3187),
        (10, 0.0894, 0.5697),
        (20, 0.2214, 1.1265),
        (40, 0.8498, 2.4054),
        (50, 3.1005, 3.1012),
    ],
)
def test_fifty_workers_of_unequal_means(k: int, of_all: float, of_k: float) -> None:
    """Those of all fifty were sampled 200,000 times; those of the fastest k are exact."""
    assert kth(FIFTY, k) == pytest.approx(of_all, rel=2e-3, abs=5e-5)
    assert slowest(FIFTY[:k]) == pytest.approx(of_k, abs=6e-5)
    assert kth(FIFTY, 50) == pytest.approx(slowest(FIFTY), rel=1e-11)


def test_means_may_be_of_any_size() -> None:
    means = [1e-6, 1.0, 1e6]
    for k in (1, 2, 3):
        assert kth(means, k) == pytest.approx(by_subsets(means, k), rel=1e-9)
    assert slowest([1.0] * 5000) == pytest.approx(harmonic(5000), rel=1e-11)


@pytest.mark.parametrize("k", [0, 4, -1])
def test_as_many_as_there_are_can_be_awaited(k: int) -> None:
    with pytest.raises(ValueError, match=f"k={k} of 3 workers; use k from 1 to 3"):
        kth([1.0, 2.0, 3.0], k)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan")])
def test_means_are_positive(bad: float) -> None:
    for wait in (slowest, lambda means: kth(means, 1)):
        with pytest.raises(ValueError, match=r"means\[1\]=.* must be finite and > 0"):
            wait([1.0, bad])
        with pytest.raises(ValueError, match="no means were given"):
            wait([])
