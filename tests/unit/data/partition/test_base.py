"""Partitions and quotas: the laws that everything that cuts data keeps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.data.partition.base import Partition, normalized, quotas, whole_shares

SHARES = st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(any)
PARTS = st.lists(st.integers(0, 5), min_size=1, max_size=40)


@given(PARTS)
def test_every_sample_is_in_one_part(of: list[int]) -> None:
    partition = Partition(of, parts=7)
    lists = [partition.indices(part) for part in range(7)]
    assert sorted(np.concatenate(lists).tolist()) == list(range(len(of)))
    assert [len(each) for each in lists] == partition.sizes.tolist()
    assert all(of[i] == part for part, each in enumerate(lists) for i in each.tolist())
    assert all((np.diff(each) > 0).all() for each in lists)
    assert Partition.from_lists(lists) == partition


@given(PARTS, st.lists(st.integers(0, 2), min_size=6, max_size=6))
def test_merging_keeps_every_sample(of: list[int], into: list[int]) -> None:
    merged = Partition(of, 6).merged(into, 3)
    assert merged.of.tolist() == [into[part] for part in of]
    assert merged.parts == 3


def test_equal_partitions_have_equal_digests() -> None:
    assert Partition([0, 1]) == Partition(np.array([0, 1], np.uint8))
    assert hash(Partition([0, 1])) == hash(Partition([0, 1]))
    assert Partition([0, 1]) != Partition([1, 0])
    assert Partition([0, 1]) != Partition([0, 1], parts=3)
    assert "2 samples, 2 parts" in repr(Partition([0, 1]))


def test_a_partition_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        Partition([0, 1]).of[0] = 1


@pytest.mark.parametrize(
    ("of", "parts", "message"),
    [
        ([], None, "at least one"),
        ([0.5], None, "whole numbers"),
        ([[0]], None, "one dimension"),
        ([0, 3], 2, "parts 0 to 3 were named; use 0 to 1"),
        ([-1, 0], None, "parts -1 to 0 were named"),
    ],
)
def test_what_is_no_partition_is_refused(of: list[int], parts: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Partition(of, parts)


def test_lists_must_name_each_sample_once() -> None:
    with pytest.raises(ValueError, match="1 samples are in no part, the first is 1"):
        Partition.from_lists([[0, 2], [2]])
    with pytest.raises(ValueError, match="part 1 names samples 5 to 5"):
        Partition.from_lists([[0], [5]])
    with pytest.raises(ValueError, match="part=2: this partition has 2 parts"):
        Partition([0, 1]).indices(2)
    with pytest.raises(ValueError, match="give one entry for each of the 2 parts"):
        Partition([0, 1]).merged([0])


@given(SHARES)
def test_shares_add_up_to_one(shares: list[int]) -> None:
    portions = normalized(shares)
    assert portions.sum() == pytest.approx(1)
    np.testing.assert_allclose(portions * sum(shares), shares)
    assert normalized(4).tolist() == [0.25] * 4


@pytest.mark.parametrize("shares", [0, -1, [], [0, 0], [1, -1], [float("inf")], [float("nan")]])
def test_shares_that_mean_nothing_are_refused(shares: int | list[float]) -> None:
    with pytest.raises(ValueError, match="use"):
        normalized(shares)


@given(st.integers(0, 1000), SHARES)
def test_whole_shares_are_rounded_ones(total: int, shares: list[int]) -> None:
    amounts = whole_shares(total, normalized(shares))
    assert amounts.sum() == total
    assert (np.abs(amounts - total * normalized(shares)) < 1).all()
    assert not amounts[np.array(shares) == 0].any()


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), SHARES)
@example([1] * 30, [1] * 9)  # fewer samples in each class than there are parts
@example([0, 7, 0], [0, 1, 1])  # a class without samples, a part without a share
@example([5, 5], [3])
def test_quotas_keep_classes_and_totals(counts: list[int], shares: list[int]) -> None:
    portions = normalized(shares)
    amounts = quotas(counts, portions)
    assert amounts.shape == (len(counts), len(shares))
    assert (amounts >= 0).all()
    assert amounts.sum(1).tolist() == counts
    assert (np.abs(amounts.sum(0) - sum(counts) * portions) < 1 + 1e-9).all()
    assert (np.abs(amounts - np.outer(counts, portions)) < 2).all()
    assert not amounts[:, portions == 0].any()
