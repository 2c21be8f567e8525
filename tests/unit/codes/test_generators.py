"""Generator matrices: their tolerance and condition by exhaustion, and what is refused."""

from __future__ import annotations

from itertools import combinations
from math import pi, sqrt, tan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.codes import generators as make
from paceline.codes.generators import Matrix, tolerance

HAMMING = [
    [1, 0, 0, 0, 1, 1, 0],
    [0, 1, 0, 0, 1, 0, 1],
    [0, 0, 1, 0, 0, 1, 1],
    [0, 0, 0, 1, 1, 1, 1],
]


@pytest.mark.parametrize(
    ("generator", "stragglers"),
    [
        (make.repetition(5), 4),
        (make.parity(5), 1),
        (make.identity(4), 0),
        (make.harmonic(6), 4),
        (make.harmonic(9, 4), 5),
        (make.icosahedral(), 3),
        (make.gaussian(5, 3, range(20)), 2),
        (make.systematic(6, 4, range(20)), 2),
        (make.matrix(HAMMING), 2),  # an MDS code would bear 3
    ],
)
def test_tolerance(generator: Matrix, stragglers: int) -> None:
    assert tolerance(generator)[0] == stragglers


@pytest.mark.parametrize("d", [3, 4, 5, 6, 9])
def test_lines_at_equal_angles(d: int) -> None:
    assert tolerance(make.harmonic(d))[1] == pytest.approx(1 / tan(pi / (2 * d)), abs=1e-9)


def test_worst_condition_numbers() -> None:
    assert tolerance(make.harmonic(4))[1] == pytest.approx(2.414213562, abs=1e-8)
    assert tolerance(make.icosahedral())[1] == pytest.approx(3.702459, abs=1e-6)
    assert tolerance(make.gaussian(4, 2, [2457]))[1] == pytest.approx(2.56, abs=0.005)
    assert tolerance(make.gaussian(8, 4, [2720]))[1] == pytest.approx(24.5, abs=0.05)
    assert tolerance(make.systematic(5, 3, [997]))[1] == pytest.approx(4.62, abs=0.005)
    assert tolerance(make.systematic(10, 5, [2465]))[1] == pytest.approx(144, abs=0.5)


@pytest.mark.parametrize(
    ("d", "m", "drawn"),
    [(5, 3, 4.62), (6, 3, 7.90), (6, 4, 7.71), (8, 4, 24.5), (10, 5, 144.0), (12, 8, 353.0)],
)
def test_the_best_is_better_than_thousands_of_draws(d: int, m: int, drawn: float) -> None:
    stragglers, condition = tolerance(make.best(d, m))
    assert stragglers == d - m
    assert condition < drawn


def test_the_best_is_mds_for_every_size() -> None:
    for d in range(1, 11):
        for m in range(1, d + 1):
            stragglers, condition = tolerance(make.best(d, m))
            assert stragglers == d - m
            assert condition < 2000


def test_more_seeds_are_no_worse() -> None:
    few, many = (tolerance(make.gaussian(5, 3, range(count)))[1] for count in (5, 200))
    assert many < few
    assert make.gaussian(5, 3, range(9)) == make.gaussian(5, 3, range(9))


@given(st.integers(1, 6), st.integers(0, 4), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_tolerance_agrees_with_ranks(m: int, more: int, seed: int) -> None:
    """Random 0/±1 matrices, which have dependent columns often."""
    d = m + more
    g = np.random.default_rng(seed).integers(-1, 2, (m, d)).astype(float)
    if np.linalg.matrix_rank(g) < m or not g.any(axis=0).all():
        with pytest.raises(ValueError):
            tolerance(make.matrix(g))
        return
    lost = max(
        t for t in range(d) if all(np.linalg.matrix_rank(g[:, keep]) == m for keep in _left(d, t))
    )
    assert tolerance(make.matrix(g))[0] == lost


def _left(d: int, lost: int) -> list[list[int]]:
    return [list(keep) for keep in combinations(range(d), d - lost)]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ([[1.0, 2.0], [2.0, 4.0]], "rank below its 2 rows"),
        ([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0 + 1e-12]], "rank below its 2 rows, or nearly so"),
        ([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]], "column 1 of the generator matrix is zero"),
        ([[1.0, float("nan")]], "NaN or infinite"),
        ([[1.0], [2.0]], r"shape \(2, 1\); use m rows and d columns"),
        ([1.0, 2.0], r"shape \(2,\)"),
        ([[1.0, 2.0], [1.0]], "rows of equal length"),
        ([], r"shape \(0,\)"),
        ([["a"]], "real numbers"),
    ],
)
def test_bad_matrices_are_refused(values: list[list[float]], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        tolerance(make.matrix(values))


def test_what_cannot_be_checked_is_refused() -> None:
    with pytest.raises(ValueError, match=r"more than 200,000; use smaller groups"):
        tolerance(make.matrix(np.random.default_rng(0).standard_normal((15, 30))))
    with pytest.raises(ValueError, match="at most 200,000 ways"):
        make.gaussian(30, 15)
    with pytest.raises(ValueError, match="d=3, m=4"):
        make.best(3, 4)


def test_columns_of_frames_have_unit_norm_on_the_icosahedron() -> None:
    assert np.linalg.norm(np.array(make.icosahedral()), axis=0) == pytest.approx([1.0] * 6)
    assert np.linalg.norm(make.frame(7, 3), axis=0) == pytest.approx([sqrt(1.5)] * 7)
