"""Splits that do not look at the contents: sizes, classes, and unlikeness where it is wanted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.data.partition.base import Partition, normalized
from paceline.data.partition.simple import by_label, dirichlet, even, stratified

SHARES = st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(any)
LABELS = st.lists(st.integers(-2, 3), min_size=1, max_size=80)


def counts(partition: Partition, labels: list[int]) -> NDArray[np.int64]:
    """Return how many samples of each class (row) each part (column) has."""
    _, codes = np.unique(labels, return_inverse=True)
    cells = np.zeros((codes.max() + 1, partition.parts), np.int64)
    np.add.at(cells, (codes, partition.of), 1)
    return cells


@given(st.integers(1, 200), SHARES, st.integers(0, 5))
def test_even_has_exact_sizes(samples: int, shares: list[int], seed: int) -> None:
    partition = even(samples, shares, seed=seed)
    assert len(partition) == samples
    assert partition.parts == len(shares)
    assert (np.abs(partition.sizes - samples * normalized(shares)) < 1).all()
    assert partition == even(samples, shares, seed=seed)


@given(LABELS, SHARES, st.integers(0, 5))
@example([0], [1, 1, 1], 0)
def test_stratified_keeps_classes_and_sizes(
    labels: list[int], shares: list[int], seed: int
) -> None:
    portions = normalized(shares)
    partition = stratified(labels, shares, seed=seed)
    cells = counts(partition, labels)
    assert (np.abs(partition.sizes - len(labels) * portions) < 1 + 1e-9).all()
    assert (np.abs(cells - np.outer(cells.sum(1), portions)) < 2).all()
    assert not partition.sizes[portions == 0].any()
    assert partition == stratified(labels, shares, seed=seed)


@pytest.mark.parametrize(
    "cut",
    [
        lambda seed: even(1000, 4, seed=seed),
        lambda seed: stratified([0, 1] * 500, 4, seed=seed),
        lambda seed: by_label([0, 1] * 500, 4, shards=3, seed=seed),
        lambda seed: dirichlet([0, 1] * 500, 4, 1.0, seed=seed),
    ],
)
def test_seeds_matter(cut: Callable[[int], Partition]) -> None:
    assert cut(0) != cut(1)


def test_a_random_split_is_random() -> None:
    # Each of 4 parts has a quarter of the first 1000 samples, to within five deviations.
    for partition in (even(4000, 4), stratified([0] * 4000, 4)):
        first = np.bincount(partition.of[:1000], minlength=4)
        assert (np.abs(first - 250) < 5 * np.sqrt(1000 * 0.25 * 0.75)).all()


@given(LABELS, SHARES, st.integers(1, 3))
def test_by_label_keeps_sizes_and_cuts_the_sorted(
    labels: list[int], shares: list[int], shards: int
) -> None:
    partition = by_label(labels, shares, shards=shards)
    off = np.abs(partition.sizes - len(labels) * normalized(shares))
    assert (off < shards).all()
    changes = np.diff(partition.of[np.argsort(labels, kind="stable")])
    assert np.count_nonzero(changes) < shards * len(shares)


def test_two_shards_give_a_part_few_classes() -> None:
    labels = list(range(10)) * 60
    assert (np.count_nonzero(counts(by_label(labels, 10), labels), axis=0) == 1).all()
    two = np.count_nonzero(counts(by_label(labels, 10, shards=2), labels), axis=0)
    assert two.max() == 2
    # They are drawn at random: hardly any part has both halves of a class.
    assert two.sum() >= 15


@given(LABELS, st.integers(1, 9), st.sampled_from([1e-9, 0.1, 1.0, 100.0]))
def test_dirichlet_leaves_no_part_empty(labels: list[int], parts: int, alpha: float) -> None:
    if parts > len(labels):
        with pytest.raises(ValueError, match=f"parts={parts} of {len(labels)} samples"):
            dirichlet(labels, parts, alpha)
        return
    partition = dirichlet(labels, parts, alpha)
    assert len(partition) == len(labels)
    assert partition.sizes.min() >= 1
    assert partition == dirichlet(labels, parts, alpha)


def test_alpha_tells_how_unlike_the_parts_are() -> None:
    labels = list(range(10)) * 100
    spread = [counts(dirichlet(labels, 5, alpha), labels).std() for alpha in (0.05, 1.0, 1e4)]
    assert spread[0] > 1.5 * spread[1] > 1.5 * 1.5 * spread[2]
    # Shares of Dirichlet(a, ..., a) have variance (1/5)(4/5) / (5a + 1), in a class of 100.
    many = [counts(dirichlet(labels, 5, 1.0, seed=seed), labels).var() for seed in range(40)]
    assert np.mean(many) == pytest.approx(100**2 * 0.2 * 0.8 / 6, rel=0.15)


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="0 samples: use at least 1"):
        even(0, 2)
    with pytest.raises(ValueError, match=r"labels of shape \(2, 1\).*argmax"):
        stratified([[0], [1]], 2)
    with pytest.raises(ValueError, match="shards=0"):
        by_label([0, 1], 2, shards=0)
    for alpha in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"alpha={alpha}: use a number > 0"):
            dirichlet([0, 1], 2, alpha)
