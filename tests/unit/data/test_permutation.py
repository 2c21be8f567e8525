"""The permutation that needs no memory."""

from __future__ import annotations

import resource
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from paceline.data.permutation import Permutation
from paceline.data.sampling import LARGE, Stream


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 1000, 4097])
def test_every_number_once(size: int) -> None:
    order = Permutation(size, seed=3).at(np.arange(size))
    assert sorted(order.tolist()) == list(range(size))


def test_it_depends_on_seed_and_key() -> None:
    places = np.arange(1000)
    orders = [
        Permutation(1000, seed, key).at(places) for seed, key in ((0, (1,)), (0, (2,)), (1, (1,)))
    ]
    for one, other in pairwise([*orders, orders[0]]):
        assert np.mean(one == other) < 0.02
    assert np.array_equal(Permutation(1000, 0, (1,)).at(places), orders[0])


def test_it_is_like_a_random_one() -> None:
    """Numbers at a place are uniform over seeds; fixed points and ascents are as expected."""
    size, seeds = 37, 4000
    orders = np.array([Permutation(size, seed).at(np.arange(size)) for seed in range(seeds)])
    for place in (0, 1, size - 1):
        counts = np.bincount(orders[:, place], minlength=size)
        assert stats.chisquare(counts).pvalue > 1e-4
    fixed = (orders == np.arange(size)).sum(axis=1)
    assert abs(fixed.mean() - 1) < 5 / seeds**0.5  # mean 1 and variance 1
    ascents = (np.diff(orders, axis=1) > 0).sum(axis=1)
    assert abs(ascents.mean() - (size - 1) / 2) < 5 * ((size + 1) / 12 / seeds) ** 0.5
    pairs = np.bincount((orders[:, 1] - orders[:, 0]) % size, minlength=size)[1:]
    assert stats.chisquare(pairs).pvalue > 1e-4


def test_a_billion_samples_need_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stream = Stream(10**9, seed=0)
    drawn = [stream.indices(start, 4096) for start in (0, 4096, 10**9 - 2048, 7 * 10**9)]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # of 1 KiB
    assert all(each.min() >= 0 and each.max() < 10**9 and len(each) == 4096 for each in drawn)
    assert len(np.unique(np.concatenate(drawn[:2]))) == 8192
    assert stats.kstest(drawn[0] / 1e9, "uniform").pvalue > 1e-4


def test_a_large_stream_has_every_sample_once_an_epoch() -> None:
    size = LARGE + 5
    stream = Stream(size, seed=1)
    seen = np.concatenate([stream.indices(start, 2**20) for start in range(0, size, 2**20)])
    assert np.array_equal(np.sort(seen[:size]), np.arange(size))
    assert not np.array_equal(stream.indices(0, 100), stream.indices(size, 100))
