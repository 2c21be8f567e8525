"""The greedy cuts against a greedy written out, against all cuts there are, and on real images."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import combinations
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fashion_mnist import FASHION_MNIST, fashion_mnist
from paceline.data.partition.base import Floats, Indices, Partition, normalized, quotas
from paceline.data.partition.greedy import (
    facility_location_blocks,
    feature_based_blocks,
    graph_cut_blocks,
    proportional_turns,
)
from paceline.data.partition.submodular import (
    Blocks,
    _tile_size,
    facility_location,
    feature_based,
    graph_cut,
)

Cut: TypeAlias = Callable[..., Partition]
Value: TypeAlias = Callable[[Floats, list[int]], float]

CUTS: list[Cut] = [facility_location, graph_cut, feature_based]
COVERING: list[Cut] = [facility_location, graph_cut]


# The functions and the rule as the paper has them, every value from scratch.


def coverage(similarity: Floats, chosen: list[int]) -> float:
    return float(similarity[chosen].max(axis=0).sum()) if chosen else 0.0


def cut_weight(similarity: Floats, chosen: list[int]) -> float:
    others = np.ones(len(similarity), bool)
    others[chosen] = False
    return float(similarity[chosen][:, others].sum())


def by_the_paper(f: Value, similarity: Floats, sizes: list[int]) -> list[int]:
    blocks: list[list[int]] = [[] for _ in sizes]
    rest = list(range(len(similarity)))
    while rest:
        j = min(
            (j for j, size in enumerate(sizes) if len(blocks[j]) < size),
            key=lambda j: (f(similarity, blocks[j]), j),
        )
        v = max(rest, key=lambda v: (f(similarity, [*blocks[j], v]), -v))
        blocks[j].append(v)
        rest.remove(v)
    return [next(j for j, block in enumerate(blocks) if v in block) for v in range(len(similarity))]


def kernel(points: Floats, bandwidth: float = 1.0) -> Floats:
    squared = ((points[:, None] - points) ** 2).sum(axis=2)
    exact: Floats = np.rint(np.exp(-squared / (2 * bandwidth**2)) * 2**30) / 2**30
    return exact


def some_points(number: int) -> tuple[Floats, NDArray[np.int64]]:
    """Return points and sizes, in every third case with pairs apart, in another with doubles."""
    random = np.random.default_rng(number)
    count = int(random.integers(2, 60))
    points = random.standard_normal((count, 2))
    if number % 3 == 1:  # two that are each other's nearest, far from all: equal gains
        half = (count + 1) // 2
        pairs = [(10.0 * k, side) for k in range(half) for side in (0.0, 0.5)]
        points = np.array(pairs)[random.permutation(2 * half)[:count]]
    if number % 3 == 2:
        points = points[random.integers(0, count // 2 + 1, count)]
    shares = normalized(random.random(int(random.integers(1, 6))) + 0.1)
    return points, quotas([count], shares)[0]


@pytest.mark.parametrize(
    ("blocks", "f"),
    [(facility_location_blocks, coverage), (graph_cut_blocks, cut_weight)],
    ids=["facility location", "graph cut"],
)
def test_the_quick_greedy_is_the_greedy_of_the_paper(blocks: Blocks, f: Value) -> None:
    for number in range(200):
        points, sizes = some_points(number)
        similarity = kernel(points)
        if number % 4 == 3:  # any similarity will do, also one that differs of each with itself
            any_values = np.random.default_rng(number).integers(0, 9, similarity.shape)
            similarity = (any_values + any_values.T) / 2
        quick = blocks(similarity, sizes).tolist()
        assert quick == by_the_paper(f, similarity, sizes.tolist()), f"instance {number}"


def test_ties_go_to_the_lower_index() -> None:
    alike = np.ones((6, 6))
    for blocks in (facility_location_blocks, graph_cut_blocks):
        assert blocks(alike, np.array([1, 2, 3])).tolist() == [0, 1, 2, 1, 2, 2]


def test_the_greedy_comes_near_the_best_there_is() -> None:
    for number in range(60):
        points = np.random.default_rng(number).standard_normal((8, 2))
        distances = np.linalg.norm(points[:, None] - points, axis=2)[np.triu_indices(8, 1)]
        similarity = kernel(points, float(np.median(distances)))
        of = facility_location_blocks(similarity, np.array([4, 4]))
        greedy = min(coverage(similarity, np.flatnonzero(of == j).tolist()) for j in (0, 1))
        best = max(
            min(coverage(similarity, list(half)), coverage(similarity, [*{*range(8)} - {*half}]))
            for half in combinations(range(8), 4)
        )
        assert greedy >= 0.95 * best, f"instance {number}"


def test_with_all_candidates_the_best_sample_is_taken() -> None:
    values = np.random.default_rng(0).random((20, 3))
    sizes = np.array([5, 15])
    sums, rest, expected = np.zeros((2, 3)), list(range(20)), np.empty(20, np.int64)
    for j in proportional_turns(sizes):
        v = rest[int(np.sqrt(sums[j] + values[rest]).sum(axis=1).argmax())]
        rest.remove(v)
        sums[j] += values[v]
        expected[v] = j
    blocks = feature_based_blocks(values, sizes, 20, np.random.default_rng(0))
    assert blocks.tolist() == expected.tolist()


def test_turns_are_proportional_at_all_times() -> None:
    sizes = np.array([7, 0, 21, 42])
    turns = proportional_turns(sizes)
    taken = np.array([np.bincount(turns[:k], minlength=4) for k in range(71)])
    assert taken[-1].tolist() == sizes.tolist()
    assert np.abs(taken - np.arange(71)[:, None] * sizes / 70).max() <= 1


@settings(max_examples=60, deadline=None)
@given(data=st.data(), cut=st.sampled_from(CUTS), seed=st.integers(0, 9))
def test_every_sample_once_and_as_many_as_asked(data: st.DataObject, cut: Cut, seed: int) -> None:
    count = data.draw(st.integers(1, 120))
    shares = data.draw(
        st.one_of(
            st.integers(1, 7),
            st.lists(st.sampled_from([0, 1, 2.5, 4, 0.3]), min_size=1, max_size=6).filter(any),
        )
    )
    random = np.random.default_rng(seed)
    features = random.standard_normal((count, 2))
    labels = data.draw(st.sampled_from([None, random.integers(0, 4, count)]))
    options: dict[str, Any] = {}
    if cut is not feature_based:
        options["chunk"] = data.draw(st.sampled_from([1, 7, 50, None]))
        options["faithful"] = data.draw(st.booleans())
        if not options["faithful"]:
            options["tiles"] = data.draw(st.sampled_from([None, 1, 5, 200]))
    partition = cut(features, shares, labels, seed=seed, **options)
    assert len(partition) == count
    wanted = normalized(shares)
    assert partition.parts == len(wanted)
    classes = (
        np.zeros(count, np.int64) if labels is None else np.unique(labels, return_inverse=True)[1]
    )
    found = np.zeros((classes.max() + 1, len(wanted)), np.int64)
    np.add.at(found, (classes, partition.of), 1)
    assert found.tolist() == quotas(np.bincount(classes), wanted).tolist()
    assert np.abs(partition.sizes - count * wanted).max() <= 1
    assert cut(features, shares, labels, seed=seed, **options) == partition


@pytest.mark.parametrize("cut", CUTS)
def test_the_seed_decides(cut: Cut) -> None:
    features = np.random.default_rng(0).standard_normal((300, 2))
    options: dict[str, Any] = {} if cut is feature_based else {"chunk": 100}
    assert cut(features, 3, seed=1, **options) != cut(features, 3, seed=2, **options)


@pytest.mark.parametrize("cut", COVERING)
def test_whole_classes_are_cut_by_the_paper_when_faithful(cut: Cut) -> None:
    blocks = facility_location_blocks if cut is facility_location else graph_cut_blocks
    features = np.random.default_rng(0).standard_normal((90, 3))
    labels = np.arange(90) % 2
    partition = cut(features, [1, 2], labels, faithful=True, bandwidth=1.5, chunk=None)
    for number, row in enumerate(quotas([45, 45], normalized([1, 2]))):
        mine = features[labels == number]
        assert partition.of[labels == number].tolist() == blocks(kernel(mine, 1.5), row).tolist()


def test_tiles_fit_the_shares_where_they_can() -> None:
    assert _tile_size(np.array([125] * 8)) == 125
    assert _tile_size(np.array([125, 125, 250, 500])) == 125
    assert _tile_size(np.array([124, 126, 125, 0])) == 62 * 2
    # Where no size fits, no part is left to chance by more than a fifth.
    odd = np.array([129, 121, 263, 487])
    assert (odd % _tile_size(odd) / odd).max() < 0.2


@pytest.mark.parametrize("cut", COVERING)
def test_chunks_are_random_and_keep_the_order_of_the_data(cut: Cut) -> None:
    features = np.random.default_rng(0).standard_normal((300, 2))
    one, other = (
        cut(features, 3, seed=seed, faithful=True, bandwidth=1.0, chunk=100) for seed in (1, 2)
    )
    assert one != other
    alike = cut(np.ones((6, 2)), [1, 2, 3], faithful=True)
    assert alike.of.tolist() == [0, 1, 2, 1, 2, 2]


@pytest.mark.parametrize("cut", CUTS)
def test_samples_that_are_all_alike_are_cut_all_the_same(cut: Cut) -> None:
    assert cut(np.ones((10, 2)), [1, 4]).sizes.tolist() == [2, 8]


@pytest.mark.parametrize("offset", [0.0, 1e9])
def test_a_shift_of_all_features_changes_nothing(offset: float) -> None:
    features = np.random.default_rng(0).integers(0, 50, (80, 3)) / 8
    assert graph_cut(features + offset, 4) == graph_cut(features, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": np.ones(3)}, r"not float64 of shape \(3,\); .* as a column"),
        ({"features": np.full((3, 1), np.nan)}, r"not finite"),
        ({"labels": [0, 1]}, r"labels of shape \(2,\) for 3 samples"),
        ({"chunk": 0}, r"chunk=0: use at least 1"),
        ({"tiles": 0}, r"tiles=0: use at least 1"),
        ({"tiles": 2, "faithful": True}, r"leave out tiles=2"),
        ({"bandwidth": 0.0}, r"bandwidth=0.0: use a finite distance"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    options = {"features": np.eye(3), "shares": 2, **options}
    with pytest.raises(ValueError, match=message):
        facility_location(**options)


def test_no_candidates_are_refused() -> None:
    with pytest.raises(ValueError, match="candidates=0"):
        feature_based(np.eye(3), 2, candidates=0)


# On real images: are the parts more like the whole than those of a random cut by class?


@cache
def images() -> tuple[Floats, NDArray[np.uint8], Floats]:
    """Return features (PCA-32), labels, and random Fourier features of their own to judge by."""
    given = fashion_mnist()
    labels = given.train_labels[:5000]
    pixels = given.train_images[:5000].reshape(5000, -1) / 255
    pixels -= pixels.mean(axis=0)
    features = pixels @ np.linalg.eigh(pixels.T @ pixels)[1][:, -32:]
    random = np.random.default_rng(99)
    pairs = features[random.permutation(5000)] - features
    width = np.median(np.linalg.norm(pairs, axis=1))
    angles = features @ (random.standard_normal((32, 512)) / width)
    return features, labels, np.hstack([np.cos(angles), np.sin(angles)]) / np.sqrt(512)


def unlikeness(partition: Partition) -> float:
    """Return the root mean square distance (MMD) of the parts from the whole."""
    judge = images()[2]
    means = np.array([judge[partition.indices(j)].mean(axis=0) for j in range(partition.parts)])
    return float(np.sqrt(((means - judge.mean(axis=0)) ** 2).sum(axis=1).mean()))


@cache
def at_random(shares: tuple[float, ...]) -> float:
    """Return the median of twenty random cuts by class."""
    labels, found = images()[1], []
    for seed in range(20):
        random, of = np.random.default_rng(seed), np.empty(len(labels), np.int64)
        for number, row in enumerate(quotas(np.bincount(labels), normalized(shares))):
            mine: Indices = random.permutation(np.flatnonzero(labels == number))
            of[mine] = np.repeat(np.arange(len(row)), row)
        found.append(unlikeness(Partition(of, len(shares))))
    return float(np.median(found))


real = pytest.mark.skipif(not FASHION_MNIST.is_dir(), reason="apt install dataset-fashion-mnist")
EQUAL, UNEQUAL, ODD = (1.0,) * 4, (1.0, 1.0, 2.0, 4.0), (1.03, 0.97, 2.1, 3.9)


@real
@pytest.mark.parametrize("shares", [EQUAL, UNEQUAL, ODD], ids=["equal", "unequal", "odd"])
@pytest.mark.parametrize("cut", CUTS)
def test_parts_are_more_alike_than_at_random(cut: Cut, shares: tuple[float, ...]) -> None:
    features, labels, _ = images()
    assert unlikeness(cut(features, shares, labels)) < 0.85 * at_random(shares)


@real
@pytest.mark.parametrize("cut", COVERING)
def test_the_rule_of_the_paper_is_worse_than_random_with_unequal_shares(cut: Cut) -> None:
    features, labels, _ = images()
    by_paper = unlikeness(cut(features, UNEQUAL, labels, faithful=True))
    assert by_paper > 1.5 * at_random(UNEQUAL)
    assert unlikeness(cut(features, EQUAL, labels, faithful=True)) < at_random(EQUAL)


@real
@pytest.mark.parametrize("cut", COVERING)
def test_chunks_cost_some_likeness_but_not_all(cut: Cut) -> None:
    features, labels, _ = images()
    assert unlikeness(cut(features, EQUAL, labels, chunk=100)) < 0.9 * at_random(EQUAL)
