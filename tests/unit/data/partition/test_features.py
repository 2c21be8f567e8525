"""Principal components against a full decomposition, Fourier features against their kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.spatial.distance import pdist

from paceline.data.partition import features
from paceline.data.partition.features import Fourier, pca


class OnlySlices:
    """Rows that can be had in slices only, as from a file, and that remember the longest."""

    def __init__(self, values: NDArray[Any]) -> None:
        self._values, self.shape, self.longest = values, values.shape, 0

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        assert isinstance(rows, slice)
        piece = self._values[rows]
        self.longest = max(self.longest, len(piece))
        return piece


def correlated(count: int, width: int, seed: int = 0) -> NDArray[np.float64]:
    """Return samples whose variances fall off: 1, 1/4, 1/9, ... in turned directions."""
    random = np.random.default_rng(seed)
    turned = np.linalg.qr(random.standard_normal((width, width)))[0]
    values: NDArray[np.float64] = random.standard_normal((count, width)) / np.arange(1, width + 1)
    found: NDArray[np.float64] = 5 + values @ turned
    return found


def reference(inputs: NDArray[Any], dimensions: int) -> NDArray[np.float64]:
    centered = inputs.reshape(len(inputs), -1) - inputs.reshape(len(inputs), -1).mean(0)
    left, values, _ = np.linalg.svd(centered.astype(np.float64), full_matrices=False)
    found: NDArray[np.float64] = (left * values)[:, :dimensions]
    return found


def same_but_for_signs(a: NDArray[Any], b: NDArray[Any], tolerance: float) -> None:
    assert a.shape == b.shape
    np.testing.assert_allclose(a * np.sign((a * b).sum(0)), b, atol=tolerance)


def test_pca_is_the_decomposition() -> None:
    inputs = correlated(500, 20)
    components = pca(inputs, 6)
    assert components.dtype == np.float32
    same_but_for_signs(components, reference(inputs, 6), 1e-4)
    assert pca(inputs, 64).shape == (500, 20)


def test_wide_inputs_take_the_randomized_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "_EXACT_WIDTH", 10)
    inputs = correlated(400, 60)
    same_but_for_signs(pca(inputs, 4), reference(inputs, 4), 2e-3)


@pytest.mark.parametrize("exact", [10, 2048])
def test_chunks_make_no_difference(monkeypatch: pytest.MonkeyPatch, exact: int) -> None:
    monkeypatch.setattr(features, "_EXACT_WIDTH", exact)
    inputs = correlated(300, 12).reshape(300, 3, 4)
    whole = pca(inputs, 3, fit_on=100)
    monkeypatch.setattr(features, "_CHUNK_NUMBERS", 12 * 7)
    rows = OnlySlices(inputs)
    np.testing.assert_allclose(pca(rows, 3, fit_on=100), whole, atol=1e-4)
    assert rows.longest == 7


def test_bytes_on_disk_do(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (200, 5, 4), dtype=np.uint8)
    mapped = np.memmap(tmp_path / "images", np.uint8, "w+", shape=images.shape)
    mapped[:] = images
    np.testing.assert_array_equal(pca(mapped, 8), pca(images, 8))
    same_but_for_signs(pca(images, 8), reference(images, 8), 0.02)


def test_a_sample_of_the_data_tells_the_directions() -> None:
    inputs = correlated(5000, 10)
    near = pca(inputs, 1, fit_on=500)
    assert not np.array_equal(near, pca(inputs, 1, fit_on=500, seed=1))
    correlation = np.corrcoef(near[:, 0], reference(inputs, 1)[:, 0])[0, 1]
    assert abs(correlation) > 0.99


def test_fourier_features_are_the_gaussian_kernel() -> None:
    z = np.random.default_rng(0).standard_normal((40, 3))
    phi = Fourier.fit(z, size=20_000, bandwidth=1.5)(z)
    squares = ((z[:, None] - z) ** 2).sum(2)
    # Hoeffding: 10,000 cosines in [-1, 1] are off by 0.05 with probability 2 exp(-12.5).
    np.testing.assert_allclose(phi @ phi.T, np.exp(-squares / (2 * 1.5**2)), atol=0.05)


def test_fourier_features_have_norm_one_and_belong_to_the_seed() -> None:
    z = np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    phi = Fourier.fit(z)(z)
    assert phi.shape == (50, 256)
    assert phi.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(phi, axis=1), 1, rtol=1e-5)
    np.testing.assert_array_equal(phi, Fourier.fit(z)(z))
    np.testing.assert_allclose(Fourier.fit(z)(z[10:20]), phi[10:20], atol=1e-6)
    assert np.abs(Fourier.fit(z, seed=1)(z) - phi).max() > 0.01


def test_the_bandwidth_is_the_median_distance() -> None:
    z = correlated(300, 5)
    assert Fourier.fit(z).bandwidth == pytest.approx(np.median(pdist(z)), rel=1e-4)
    many = correlated(5000, 5)
    assert Fourier.fit(OnlySlices(many)).bandwidth == pytest.approx(
        np.median(pdist(many)), rel=0.05
    )


def test_equal_samples_do_not_count_as_distances() -> None:
    twice = np.repeat([[0.0, 0.1], [3.0, 4.1]], [90, 10], axis=0)
    assert Fourier.fit(twice).bandwidth == pytest.approx(5)
    assert Fourier.fit(np.ones((4, 2))).bandwidth == 1
    assert Fourier.fit(np.ones((1, 2))).bandwidth == 1


def test_what_has_no_features_is_refused() -> None:
    z = np.ones((4, 2))
    with pytest.raises(ValueError, match=r"samples of shape \(4,\); give \(n, ...\)"):
        pca(np.ones(4))
    with pytest.raises(ValueError, match=r"samples of shape \(0, 3\)"):
        Fourier.fit(np.ones((0, 3)))
    with pytest.raises(ValueError, match="dimensions=0"):
        pca(z, 0)
    with pytest.raises(ValueError, match="fit_on=1"):
        pca(z, fit_on=1)
    with pytest.raises(ValueError, match="size=7: use an even number"):
        Fourier.fit(z, size=7)
    with pytest.raises(ValueError, match="bandwidth=0"):
        Fourier.fit(z, bandwidth=0)
    with pytest.raises(
        ValueError, match="samples have 3 numbers each, but these features were fitted to 2"
    ):
        Fourier.fit(z)(np.ones((1, 3)))
    broken = np.array([[0.0, 1.0], [np.nan, 1.0], [1.0, 0.0]])
    with pytest.raises(ValueError, match="not finite"):
        pca(broken)
    with pytest.raises(ValueError, match="not finite"):
        Fourier(2, 1.0)(broken)
