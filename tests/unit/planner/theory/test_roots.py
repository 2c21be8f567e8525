from __future__ import annotations

from math import exp, pi

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import lambertw

import paceline as pl
from paceline.planner.theory.kernels import (
    Atoms,
    Blend,
    Gamma,
    Kernel,
    Laplace,
    erlang,
    exponential,
    fixed,
    shifted_exponential,
    uniform,
)
from paceline.planner.theory.responses import kernel_of
from paceline.planner.theory.roots import lambert, root, roots_right_of

# x, -Re(s τ), Im(s τ): the table of fixed delays in the digest, part B2.
FIXED = [
    (0.05, 0.052706, 0.0),
    (0.1, 0.111833, 0.0),
    (0.2, 0.259171, 0.0),
    (0.3, 0.489402, 0.0),
    (exp(-1), 1.0, 0.0),
    (0.4, 0.944090, 0.407268),
    (0.5, 0.794024, 0.770112),
    (0.75, 0.517456, 1.146994),
    (0.8, 0.472964, 1.193497),
    (1.0, 0.318132, 1.337236),
    (1.2, 0.190463, 1.439224),
    (1.5, 0.032784, 1.549644),
    (pi / 2, 0.0, pi / 2),
]


@pytest.mark.parametrize(("x", "decay", "frequency"), FIXED)
def test_fixed_delays(x: float, decay: float, frequency: float) -> None:
    for tau in (1.0, 0.02, 300.0):
        found = root(x / tau, fixed(tau)) * tau
        assert found.real == pytest.approx(-decay, abs=1e-6)
        assert found.imag == pytest.approx(frequency, abs=1e-6)


@pytest.mark.parametrize(("x", "decay", "frequency"), FIXED)
def test_the_search_finds_what_is_known(x: float, decay: float, frequency: float) -> None:
    """Two equal atoms are a fixed delay that is not recognized."""
    found = root(x, Atoms((1.0, 1.0), (0.5, 0.5)))
    assert found.real == pytest.approx(-decay, abs=2e-6)
    assert found.imag == pytest.approx(frequency, abs=2e-6 if abs(x - exp(-1)) > 1e-3 else 2e-3)


def test_lambert() -> None:
    assert lambert(exp(-1)) == -1
    for x in (np.nextafter(exp(-1), 0), np.nextafter(exp(-1), 1)):  # known to half the digits
        assert lambert(float(x)) == pytest.approx(-1, abs=1e-7)
    for x in [*np.geomspace(1e-12, 1e9, 300), *np.linspace(0.3, 2.0, 300)]:
        w = lambert(float(x))
        assert w.imag >= 0
        assert w * np.exp(w) == pytest.approx(-x, rel=1e-12)


def test_no_other_branch_is_further_right() -> None:
    for x in np.linspace(0.01, 5, 60):
        others = [lambertw(-x, k).real for k in range(-20, 21)]
        assert lambert(float(x)).real >= max(others) - 1e-9


@pytest.mark.parametrize("x", [0.05, 0.25, 0.3, 0.5, 1.0, 2.0, 2.5, 6.0])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 8])
def test_erlang_roots_are_those_of_a_polynomial(k: int, x: float) -> None:
    """s (1 + s/k)^k + x = 0 for mean 1."""
    polynomial = np.polynomial.Polynomial([0, 1]) * np.polynomial.Polynomial([1, 1 / k]) ** k + x
    roots = polynomial.roots()
    found = root(x / 3.0, erlang(k, 3.0)) * 3.0
    assert found.real == pytest.approx(roots.real.max(), abs=1e-6)
    assert found.imag == pytest.approx(
        np.abs(roots[np.argmax(roots.real)].imag), abs=1e-6 if k > 1 or x != 0.25 else 1e-3
    )
    for line in (-2.7, -0.7, -0.2, 0.3):  # the pole is at -k
        assert roots_right_of(line / 3, x / 3, erlang(k, 3.0)) == np.sum(roots.real > line)


def generator(damping: float, kernel: Atoms, nodes: int = 120) -> NDArray[np.float64]:
    """Return the generator of the semigroup, on Chebyshev's points of the past.

    Its eigenvalues are the characteristic roots (Breda, Maset and Vermiglio, 2005), found in
    another way than by the equation. With 70 nodes some were spurious.
    """
    longest = max(kernel.seconds)
    angle = pi * np.arange(nodes + 1) / nodes
    at = (np.cos(angle) - 1) * longest / 2
    c = np.ones(nodes + 1)
    c[[0, -1]] = 2
    c *= (-1.0) ** np.arange(nodes + 1)
    apart = at[:, None] - at[None, :] + np.eye(nodes + 1)
    matrix = np.outer(c, 1 / c) / apart
    matrix -= np.diag(matrix.sum(axis=1))
    matrix[0] = 0.0
    for seconds, weight in zip(kernel.seconds, kernel.weights, strict=True):
        near = np.abs(at + seconds) < 1e-13
        terms = near.astype(float) if near.any() else (1 / c) / (-seconds - at)
        matrix[0] -= damping * weight * terms / terms.sum()
    return np.asarray(matrix)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.floats(0.05, 3.0), st.floats(0.05, 1.0)), min_size=1, max_size=5, unique=True
    ),
    st.floats(0.05, 5.0),
)
def test_no_root_is_missed(parts: list[tuple[float, float]], gain: float) -> None:
    kernel = Atoms([at for at, _ in parts], [weight for _, weight in parts])
    damping = gain / kernel.mean
    found = root(damping, kernel)
    eigenvalues = np.linalg.eigvals(generator(damping, kernel))
    # Close to a double root, both are known to half the digits.
    assert found.real == pytest.approx(eigenvalues.real.max(), abs=2e-5 * (1 + abs(found)))
    line = found.real - 0.3
    if not np.any(np.abs(eigenvalues.real - line) < 1e-4):
        assert roots_right_of(line, damping, kernel) == np.sum(eigenvalues.real > line)


@pytest.mark.parametrize(
    ("kernel", "damping", "line", "expected"),
    [
        (Atoms((0.17, 0.57, 0.08), (0.72, 0.03, 0.25)), 248.27586206896552, -5.06, 26),
        (Atoms((1.27, 6.83, 2.0, 1.79), (0.28, 0.04, 0.12, 0.57)), 28.603568442190852, -0.27, 18),
    ],
)
def test_counts_between_samples(kernel: Atoms, damping: float, line: float, expected: int) -> None:
    """Here h winds between the first samples: values and slopes alone do not tell."""
    eigenvalues = np.linalg.eigvals(generator(damping, kernel, 300))
    assert np.sum(eigenvalues.real > line) == expected
    assert roots_right_of(line, damping, kernel) == expected


@pytest.mark.parametrize(
    "kernel",
    [
        uniform(0.0, 2.0),
        shifted_exponential(0.5, 0.5),
        Atoms((0.5, 5.5), (0.9, 0.1)),
        Blend([fixed(1.0), exponential(2.0)], [0.7, 0.3]),
        Laplace(lambda s: (1 + s / 4) ** -4, 1.0, -4.0),
    ],
    ids=lambda kernel: type(kernel).__name__,
)
@pytest.mark.parametrize("gain", [0.02, 0.25, 0.32380512, 0.6, 1.5, 2.4674011, 8.0])
def test_what_is_found_is_a_root_and_the_rightmost(kernel: Kernel, gain: float) -> None:
    damping = gain / kernel.mean
    found = root(damping, kernel)
    at = np.asarray([found])
    assert abs(found + damping * kernel.transform(at)[0]) < 1e-9
    assert roots_right_of(found.real + 1e-6, damping, kernel) == 0
    assert roots_right_of(found.real - 1e-3, damping, kernel) >= 1


def test_heavy_tails_and_no_delay() -> None:
    for model in (pl.delays.LogNormal(exp(-0.5), 1.0), pl.delays.Pareto(1.0, 1.5)):
        kernel = kernel_of(model)
        found = root(0.8 / kernel.mean, kernel)
        assert roots_right_of(found.real + 1e-5, 0.8 / kernel.mean, kernel) == 0
    assert root(0.3, fixed(0.0)) == -0.3


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.floats(0.05, 6.0), st.floats(0.05, 1.0)), min_size=2, max_size=4, unique=True
    ),
    st.floats(0.05, 5.0),
)
def test_roots_left_of_poles(parts: list[tuple[float, float]], gain: float) -> None:
    """Memoryless workers of several speeds are a linear system, one state for each speed."""
    means, weights = (np.asarray(column) for column in zip(*parts, strict=True))
    weights = weights / weights.sum()
    kernel = Blend([exponential(mean) for mean in means.tolist()], weights.tolist())
    damping = gain / kernel.mean
    system = np.diag(np.concatenate([[0.0], -1 / means]))
    system[0, 1:] = -damping * weights
    system[1:, 0] = 1 / means
    found = root(damping, kernel) * kernel.mean
    assert found.real == pytest.approx(
        np.linalg.eigvals(system).real.max() * kernel.mean, abs=2e-6 * (1 + abs(found))
    )


def test_where_the_tail_decides() -> None:
    """One worker in a hundred is memoryless and slow: its pole at -0.1 comes before the roots."""
    kernel = Blend([fixed(1.0), exponential(10.0)], [0.99, 0.01])
    found = root(0.5, kernel)
    assert found.real == pytest.approx(-0.10112, abs=1e-5)
    assert abs(found + 0.5 * kernel.transform(np.asarray([found]))[0]) < 1e-9
    # If nothing is known left of the pole, the rate is that of the tail, a little below.
    alone = Laplace(kernel.transform, kernel.mean, kernel.abscissa)
    assert root(0.5, alone) == pytest.approx(-0.099)
    assert roots_right_of(-0.099, 0.5, alone) == 0


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"damping=0.0: give a finite number > 0"):
        root(0.0, fixed(1.0))
    with pytest.raises(ValueError, match=r"line=-2.0 is not right of -0.5"):
        roots_right_of(-2.0, 1.0, Gamma(0.5, 1.0))
    with pytest.raises(ValueError, match=r"a root or pole lies on Re s = -0.5; move"):
        roots_right_of(-0.5, 1.0, exponential(1.0))
