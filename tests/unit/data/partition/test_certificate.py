"""Certificates against closed forms, against the kernel itself, and against bad splits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fashion_mnist import FASHION_MNIST, fashion_mnist
from paceline.data.partition import certificate
from paceline.data.partition.balance import balanced
from paceline.data.partition.base import Partition, normalized
from paceline.data.partition.certificate import certify
from paceline.data.partition.features import Fourier, pca
from paceline.data.partition.simple import by_label, dirichlet, even, stratified


def blobs(count: int, seed: int = 0) -> tuple[NDArray[Any], NDArray[np.int64]]:
    random = np.random.default_rng(seed)
    labels = random.choice(4, count, p=[0.4, 0.3, 0.2, 0.1])
    return random.standard_normal((count, 3)) + 1.5 * labels[:, None], labels


@pytest.mark.parametrize("shares", [[1] * 5, [1, 1, 2, 6]], ids=str)
def test_chance_is_as_predicted(shares: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate, "_FEATURES", 256)  # it holds in any
    monkeypatch.setattr(certificate, "_PROBED", 20)
    z, labels = blobs(500)
    cuts: list[tuple[Callable[[int], Partition], str]] = [
        (lambda seed: stratified(labels, shares, seed=seed), "predicted"),
        (lambda seed: even(500, shares, seed=seed), "predicted_plain"),
    ]
    for cut, name in cuts:
        found = [certify(cut(seed), z, labels) for seed in range(40)]
        measured = np.sqrt(np.mean([each.rms**2 for each in found if each.rms]))
        assert measured == pytest.approx(getattr(found[0], name), rel=0.06)
    ratio = found[0].ratio
    assert ratio is not None
    assert found[0].rms == pytest.approx(ratio * (found[0].predicted or 0))


def test_without_labels_the_prediction_is_the_plain_one() -> None:
    z, labels = blobs(300)
    blind, seeing = certify(even(300, 3), z), certify(even(300, 3), z, labels)
    assert blind.predicted == pytest.approx(seeing.predicted_plain)
    assert blind.predicted_plain == pytest.approx(seeing.predicted_plain)
    assert blind.class_distances is None
    # The classes are far apart here: inside of them is much less variance than in all.
    assert (seeing.predicted or 0) < 0.8 * (seeing.predicted_plain or 0)
    # Of classes that are smaller than the number of parts none can get its share.
    single = certify(even(300, 3), z, np.arange(300))
    assert single.predicted == pytest.approx(single.predicted_plain)


def test_distances_are_those_of_the_kernel() -> None:
    z, labels = blobs(400)
    partition = dirichlet(labels, 4, 1.0)
    bandwidth = Fourier.fit(z).bandwidth
    kernel = np.exp(-((z[:, None] - z) ** 2).sum(2) / (2 * bandwidth**2))
    found = certify(partition, z, labels)
    assert found.distances is not None
    for part in range(4):
        weights = (partition.of == part) / partition.sizes[part] - 1 / 400
        assert found.distances[part] == pytest.approx(np.sqrt(weights @ kernel @ weights), rel=0.1)
    assert found.rms == pytest.approx(np.sqrt(np.mean(np.square(found.distances))))


def test_all_samples_count_and_chunks_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    z, labels = blobs(1000)
    partition = stratified(labels, 3)
    whole = certify(partition, z, labels)
    fourier = Fourier.fit(z, 2048, certificate._OTHER_SEED)
    phi = fourier(z).astype(np.float64)
    means = [phi[partition.indices(part)].mean(0) - phi.mean(0) for part in range(3)]
    assert whole.distances is not None
    np.testing.assert_allclose(whole.distances, np.linalg.norm(means, axis=1), rtol=1e-4)
    monkeypatch.setattr(certificate, "_CHUNK", 64)
    chunked = certify(partition, z, labels)
    assert chunked.distances is not None
    np.testing.assert_allclose(chunked.distances, whole.distances, rtol=1e-4)


def test_nobody_grades_his_own_work() -> None:
    z, labels = blobs(2000)
    mine = certify(balanced(z, 4, labels, seed=0), z, labels, seed=0)
    other = certify(balanced(z, 4, labels, seed=0), z, labels, seed=1)
    assert mine.ratio != other.ratio
    assert mine.ratio == pytest.approx(other.ratio, rel=0.3)
    own = Fourier.fit(z, 256, 0)._frequencies
    judge = Fourier.fit(z, 2048, certificate._OTHER_SEED)._frequencies
    assert not np.isin(own, judge).any()


@pytest.mark.parametrize("width", [1, 10])
def test_chance_sets_off_no_alarm(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in 1,000 certificates may; of 100 with fixed seeds none does."""
    monkeypatch.setattr(certificate, "_FEATURES", 256)
    for seed in range(40):
        random = np.random.default_rng(seed)
        z, labels = random.standard_normal((120, width)), random.integers(0, 5, 120)
        for partition in (even(120, [1, 2, 9], seed=seed), stratified(labels, 7, seed=seed)):
            assert certify(partition, z, labels).warnings == ()
        assert certify(even(120, 60, seed=seed), labels=labels).ok


def test_skewed_splits_are_flagged() -> None:
    z, labels = blobs(1000)
    for partition in (
        by_label(labels, 4),
        by_label(labels, 4, shards=2),
        dirichlet(labels, 4, 0.3),
    ):
        found = certify(partition, z, labels)
        assert not found.ok
        assert "classes" in found.warnings[0]
        assert "contents" in found.warnings[-1]
        assert not certify(partition, labels=labels).ok
        # Without labels the contents give it away.
        assert not certify(partition, z).ok
    # As they do where each class is as it should be, but sorted.
    order = np.lexsort((z[:, 0], labels))
    inside = np.empty(1000, np.int64)
    for label in range(4):
        mine = order[labels[order] == label]
        inside[mine] = np.arange(len(mine)) * 4 // len(mine)
    found = certify(Partition(inside), z, labels)
    assert len(found.warnings) == 1
    assert "parts have contents" in found.warnings[0]


def test_a_rare_class_in_one_place_is_flagged() -> None:
    z, labels = np.random.default_rng(0).standard_normal((1000, 4)), np.arange(1000) % 5
    labels[:10] = 9
    found = certify(Partition(np.arange(1000) * 10 // 1000), z, labels)
    assert "part 0 has 10 of the 10 samples of class 9" in found.warnings[-1]
    assert certify(stratified(labels, 10), z, labels).ok


def test_a_few_far_out_samples_are_no_alarm() -> None:
    for spikes, parts in ((1, 100), (10, 50)):
        z = np.zeros((1000, 1))
        z[:spikes] = 1
        assert all(certify(even(1000, parts, seed=seed), z).ok for seed in range(20))


def test_unplanned_empty_parts_are_told() -> None:
    found = certify(Partition([0, 2, 0, 2], 4))
    assert found.warnings == ("2 of 4 parts are empty, the first is 1",)


@pytest.mark.skipif(not FASHION_MNIST.is_dir(), reason="apt install dataset-fashion-mnist")
def test_sorted_images_are_twenty_times_as_far_off() -> None:
    images = fashion_mnist()
    z, labels = pca(images.test_images), images.test_labels
    found = certify(by_label(labels, [1, 1, 2, 4]), z, labels, [1, 1, 2, 4])
    assert found.ratio is not None and found.ratio > 20
    assert found.class_distances is not None and max(found.class_distances) >= 0.8
    assert str(found).startswith("NOT OK")


def test_sizes_are_compared_with_the_shares() -> None:
    labels = [0, 1] * 500
    assert certify(stratified(labels, [1, 3]), labels=labels, shares=[1, 3]).ok
    found = certify(stratified(labels, [1, 3]), labels=labels, shares=2)
    assert found.targets == (500.0, 500.0)
    assert found.warnings == (
        "2 of 2 parts are not of the planned size; part 0 has 250 samples instead of 500.0",
    )
    # As they come, if nothing was planned.
    assert certify(stratified(labels, [1, 3])).targets == (250.0, 750.0)


def test_total_variation() -> None:
    found = certify(Partition([0, 0, 0, 0, 1, 1, 1, 1]), labels=[0, 0, 0, 1, 0, 1, 1, 1])
    assert found.class_distances == (0.25, 0.25)


def test_empty_parts_do_not_spoil_the_rest() -> None:
    z, labels = blobs(100)
    found = certify(even(100, [1, 0, 1]), z, labels, [1, 0, 1])
    assert found.ok
    assert found.distances is not None and np.isnan(found.distances[1])
    assert found.rms is not None and np.isfinite(found.rms)
    missing = certify(Partition([0, 2] * 50, 3), z, labels, 3)
    assert "1 of 3 parts are empty, the first is 1" in missing.warnings


def test_what_cannot_differ_is_alike() -> None:
    assert certify(even(50, 1), *blobs(50)).ok
    same = certify(even(50, 5), np.ones((50, 3)))
    assert same.ok
    assert same.ratio is None
    assert normalized(5).tolist() == [size / 50 for size in same.sizes]


def test_the_table_begins_with_the_verdict() -> None:
    z, labels = blobs(1000)
    good, bad = certify(stratified(labels, 2), z, labels), certify(by_label(labels, 2), z, labels)
    assert str(good).startswith("OK: the parts are alike, at ")
    assert str(bad).startswith("NOT OK: the parts are not alike, at ")
    assert bad.warnings[0] in str(bad).splitlines()[1]
    assert len(str(good).splitlines()) == 1 + 1 + 2 + 1
    assert str(certify(even(1000, 2))).startswith("OK: as far as sizes and labels tell")


def test_what_does_not_fit_is_refused() -> None:
    z, labels = blobs(10)
    with pytest.raises(ValueError, match=r"labels of shape \(10,\) for a partition of 9"):
        certify(even(9, 2), labels=labels)
    with pytest.raises(ValueError, match=r"features of shape \(10,\) for a partition of 9"):
        certify(even(9, 2), z)
    with pytest.raises(ValueError, match="3 shares for 2 parts"):
        certify(even(9, 2), shares=3)
