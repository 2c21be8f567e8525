"""Turns raw inputs into short vectors whose means distinguish distributions, chunk by chunk.

Principal components first shorten the inputs. Random Fourier features follow; their means are equal
only if the distributions are equal. The user's own embedding can replace the first step.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.data.seeding import generator

Vectors: TypeAlias = NDArray[np.float32]
Whole = TypeVar("Whole", bound=np.integer[Any])

_CHUNK_NUMBERS = 1 << 23  # most float32 values in memory at a time: 32 MB
_EXACT_WIDTH = 2048  # up to this width the covariance is small (32 MB) and fast to diagonalize
_EXTRA = 16  # more directions than asked for, as Halko et al. advise (they say 5 to 10)
_ROUNDS = 4  # of the power iteration; images need 1 to 4 (Halko et al., 2011, section 4.5)
_PAIRED = 2000  # samples whose distances give the bandwidth
# The streams of the seed, by purpose.
_CHOICE, _START, _FREQUENCIES, _DISTANCES = range(4)


class Rows(Protocol):
    """Any object with rows to slice: an array, a memory map, a dataset in a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, rows: slice, /) -> Any: ...


def as_rows(given: Any) -> Rows:
    """Return an object with a shape unchanged, and convert others, such as lists, to an array."""
    rows: Rows = given if hasattr(given, "shape") else np.asarray(given)
    return rows


def pca(inputs: Rows, dimensions: int = 64, *, seed: int = 0, fit_on: int = 20_000) -> Vectors:
    """Return the principal components of inputs of any shape (n, ...), in the inputs' units.

    The directions come from a random `fit_on` of the samples. They come from the covariance, or for
    wide inputs by randomized power iteration (Halko, Martinsson and Tropp, 2011, arXiv:0909.4061).

    >>> pca(np.array([[0.0, 0.0], [3.0, 4.0]]), 1).tolist()
    [[-2.5], [2.5]]
    """
    inputs = as_rows(inputs)
    count, width = _measured(inputs)
    if not dimensions >= 1:
        raise ValueError(f"dimensions={dimensions}: use at least 1, such as 64")
    if fit_on < 2:
        raise ValueError(f"fit_on={fit_on}: use at least 2 samples, such as 20,000")
    chosen = np.arange(count)
    if count > fit_on:
        chosen = np.sort(generator(seed, _CHOICE).choice(count, fit_on, replace=False))
    center = sum(block.sum(0, dtype=np.float64) for block in _blocks(inputs, chosen)) / len(chosen)
    center = np.asarray(center, np.float32)
    directions = _directions(inputs, chosen, center, min(dimensions, width), seed)
    out = np.empty((count, directions.shape[1]), np.float32)
    start = 0
    for block in _blocks(inputs):
        out[start : start + len(block)] = (block - center) @ directions
        start += len(block)
    return out


class Fourier:
    """Random Fourier features of a Gaussian kernel: cosines and sines, each vector of norm 1.

    phi(z) = sqrt(2/D) [cos(Wz), sin(Wz)], W ~ N(0, 1/bandwidth^2), so that phi(x) . phi(y) is
    about exp(-|x - y|^2 / (2 bandwidth^2)) (Rahimi and Recht, 2007). The numbers are the same on
    every machine, up to rounding.

    >>> fourier = Fourier.fit(np.eye(3), size=8)
    >>> fourier(np.eye(3)).shape
    (3, 8)
    """

    def __init__(self, width: int, bandwidth: float, size: int = 256, seed: int = 0) -> None:
        if size < 2 or size % 2:
            raise ValueError(f"size={size}: use an even number, half cosines and half sines")
        if not (isfinite(bandwidth) and bandwidth > 0):
            raise ValueError(f"bandwidth={bandwidth}: use a distance > 0, or None for the median")
        self.width, self.size, self.bandwidth = width, size, float(bandwidth)
        normal = generator(seed, _FREQUENCIES).standard_normal((width, size // 2))
        self._frequencies = (normal / bandwidth).astype(np.float32)

    @classmethod
    def fit(
        cls, z: Rows, size: int = 256, seed: int = 0, bandwidth: float | None = None
    ) -> Fourier:
        """Return features; default bandwidth: the median nonzero distance of 2,000 samples."""
        z = as_rows(z)
        count, width = _measured(z)
        if bandwidth is None:
            bandwidth = _median_distance(_some(z, count, seed))
        return cls(width, bandwidth, size, seed)

    def __call__(self, z: Any) -> Vectors:
        """Return the features of a chunk of samples."""
        chunk = np.asarray(z, np.float32)
        chunk = chunk.reshape(len(chunk), -1)
        if chunk.shape[1] != self.width:
            raise ValueError(
                f"samples have {chunk.shape[1]} numbers each, but these features were fitted to "
                f"{self.width}; fit them again"
            )
        with np.errstate(invalid="ignore", over="ignore"):  # the next line raises an error
            angles = chunk @ self._frequencies
        if not np.isfinite(angles).all():
            raise ValueError("features hold numbers that are not finite; replace or drop them")
        half = self.size // 2
        out = np.empty((len(chunk), self.size), np.float32)
        np.cos(angles, out=out[:, :half])
        np.sin(angles, out=out[:, half:])
        out *= np.float32(np.sqrt(1 / half))
        return out


def add_by_key(sums: NDArray[np.float64], keys: NDArray[Whole], rows: Vectors) -> None:
    """Add each row of a chunk to the sum that its key names."""
    order = np.argsort(keys, kind="stable")
    # Not np.add.reduceat, which takes six times as long along this axis.
    for same in np.split(order, np.flatnonzero(np.diff(keys[order])) + 1):
        sums[keys[same[0]]] += rows[same].sum(0)


def _measured(rows: Rows) -> tuple[int, int]:
    """Return how many samples there are and how many numbers each has."""
    if len(rows.shape) < 2 or not all(rows.shape):
        raise ValueError(
            f"samples of shape {tuple(rows.shape)}; give (n, ...) with at least one sample and "
            "one number in each, such as values.reshape(n, -1)"
        )
    return len(rows), int(np.prod(rows.shape[1:], dtype=np.int64))


def _blocks(rows: Rows, chosen: NDArray[np.int64] | None = None) -> Iterator[Vectors]:
    """Yield all samples, or the chosen ones (ascending), as matrices of limited size."""
    count, width = _measured(rows)
    step = max(1, _CHUNK_NUMBERS // width)
    for start in range(0, count, step):
        stop = min(start + step, count)
        piece = rows[start:stop]
        if chosen is not None:
            first, last = np.searchsorted(chosen, (start, stop))
            if first == last:
                continue
            piece = np.asarray(piece)[chosen[first:last] - start]
        block = np.asarray(piece, np.float32)
        yield block.reshape(len(block), width)


def _directions(
    rows: Rows, chosen: NDArray[np.int64], center: Vectors, dimensions: int, seed: int
) -> Vectors:
    """Return the directions of largest variance, as columns, the largest first."""
    width = len(center)

    def spread(basis: Vectors | None) -> NDArray[np.float64]:
        """Multiply the scatter matrix, sum of (x - center)(x - center)', by a basis."""
        total = np.zeros((width, width if basis is None else basis.shape[1]))
        for block in _blocks(rows, chosen):
            block = block - center
            total += block.T @ (block if basis is None else block @ basis)
        return total

    if width <= _EXACT_WIDTH:
        values, vectors = np.linalg.eigh(spread(None))
    else:
        basis = generator(seed, _START).standard_normal((width, dimensions + _EXTRA))
        for _ in range(_ROUNDS):
            basis = np.linalg.qr(basis)[0]
            basis = spread(basis.astype(np.float32))
        basis = np.linalg.qr(basis)[0]
        values, inner = np.linalg.eigh(basis.T @ spread(basis.astype(np.float32)))
        vectors = basis @ inner
    if not np.isfinite(values).all():
        raise ValueError("inputs hold numbers that are not finite; replace or drop them")
    vectors = vectors[:, ::-1][:, :dimensions]
    # The sign of an eigenvector is arbitrary: make its largest entry positive, on every machine.
    largest = np.abs(vectors).argmax(0)
    signs = np.where(vectors[largest, np.arange(dimensions)] < 0, -1, 1)
    directions: Vectors = (vectors * signs).astype(np.float32)
    return directions


def _some(rows: Rows, count: int, seed: int) -> Vectors:
    """Return at most 2,000 of the samples, drawn at random."""
    chosen = np.arange(count)
    if count > _PAIRED:
        chosen = np.sort(generator(seed, _DISTANCES).choice(count, _PAIRED, replace=False))
    return np.concatenate(list(_blocks(rows, chosen)))


def _median_distance(some: Vectors) -> float:
    """Return the median of the distances that are not 0; 1 if there are none."""
    centered = some.astype(np.float64) - some.mean(0, dtype=np.float64)
    norms = (centered**2).sum(1)
    squares = norms[:, None] + norms - 2 * centered @ centered.T
    apart = squares[np.triu_indices(len(some), 1)]
    # Rounding may leave a small distance between equal samples: drop it.
    apart = apart[apart > 1e-12 * norms.max()]
    return float(np.sqrt(np.median(apart))) if apart.size else 1.0
