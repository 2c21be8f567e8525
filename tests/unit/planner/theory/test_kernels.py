from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import pytest
from scipy import integrate, stats

from paceline.planner.theory.kernels import (
    Atoms,
    Blend,
    Gamma,
    Kernel,
    Laplace,
    Shifted,
    Uniform,
    erlang,
    exponential,
    fixed,
    shifted_exponential,
    uniform,
)

POINTS = np.asarray([0j, 0.2 + 0.1j, -0.3 + 1j, 1 + 7j, 0.9 + 0.05j])

LAWS: dict[str, tuple[Kernel, Any]] = {
    "erlang": (erlang(3, 1.5), stats.gamma(3, scale=0.5)),
    "exponential": (exponential(0.8), stats.expon(scale=0.8)),
    "uniform": (uniform(0.3, 2.1), stats.uniform(0.3, 1.8)),
    "shifted": (shifted_exponential(0.5, 0.25), stats.expon(0.5, 0.25)),
    "gamma": (Gamma(0.7, 0.7), stats.gamma(0.7)),
}


@pytest.mark.parametrize("name", LAWS)
def test_transforms_are_integrals_over_the_density(name: str) -> None:
    kernel, law = LAWS[name]
    assert kernel.mean == pytest.approx(law.mean())
    low, high = law.support()
    for order in range(3):
        for s, value in zip(POINTS, kernel.transform(POINTS, order), strict=True):

            def part(t: float, s: complex = s, order: int = order) -> complex:
                return complex(t**order * np.exp(-s * t) * law.pdf(t))

            top = min(high, 60.0)
            real = integrate.quad(lambda t: part(t).real, low, top, limit=400)[0]
            imaginary = integrate.quad(lambda t: part(t).imag, low, top, limit=400)[0]
            assert value == pytest.approx(real + 1j * imaginary, abs=2e-7)


def test_atoms_and_blends() -> None:
    atoms = Atoms((0.5, 5.5, 7.0), (9.0, 1.0, 0.0))
    assert (atoms.seconds, atoms.weights) == ((0.5, 5.5), (0.9, 0.1))
    assert atoms.mean == pytest.approx(1.0)
    blend = Blend([fixed(0.5), fixed(5.5), exponential(3.0)], [9, 1, 0])
    assert blend.abscissa == -inf
    assert blend.mean == pytest.approx(1.0)
    for order in range(3):
        by_hand = 0.9 * 0.5**order * np.exp(-0.5 * POINTS) + 0.1 * 5.5**order * np.exp(
            -5.5 * POINTS
        )
        assert atoms.transform(POINTS, order) == pytest.approx(by_hand)
        assert blend.transform(POINTS, order) == pytest.approx(by_hand)
        assert atoms.transform(POINTS.reshape(5, 1), order).shape == (5, 1)
    many = np.linspace(0, 1j, 300_001, dtype=np.complex128)  # more than one evaluation holds
    assert atoms.transform(many)[-1] == pytest.approx(atoms.transform(many[-1:])[0])


@pytest.mark.parametrize(
    "kernel", [erlang(4, 1.0), shifted_exponential(0.5, 0.5), uniform(0.0, 2.0)], ids=str
)
def test_a_transform_alone_gives_its_derivatives(kernel: Kernel) -> None:
    alone = Laplace(kernel.transform, kernel.mean, kernel.abscissa)
    for order in range(3):
        expected = kernel.transform(POINTS, order)
        assert alone.transform(POINTS, order) == pytest.approx(expected, rel=1e-8)


def test_a_shift_adds_to_any_kernel() -> None:
    by_shift, at_once = Shifted(Uniform(0.0, 1.0), 0.5), Uniform(0.5, 1.5)
    for order in range(3):
        assert by_shift.transform(POINTS, order) == pytest.approx(at_once.transform(POINTS, order))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="Atoms got no seconds; give at least one"):
        Atoms(())
    with pytest.raises(ValueError, match=r"seconds\[1\]=inf, which must be finite .* never fin"):
        Atoms((1.0, inf))
    with pytest.raises(ValueError, match=r"weights=\[1.0\] for 2 parts; give each one finite"):
        Atoms((1.0, 2.0), (1.0,))
    with pytest.raises(ValueError, match=r"weights=\[0.0\] for 1 parts"):
        Blend([fixed(1.0)], [0.0])
    with pytest.raises(ValueError, match=r"abscissa=0.0, which must be < 0.*measured\(seconds\)"):
        Laplace(lambda s: 1 / (1 + s), 1.0, 0.0)
    with pytest.raises(ValueError, match=r"Uniform got most=1.0, which must be finite and > 2.0"):
        uniform(2.0, 1.0)
    with pytest.raises(ValueError, match=r"Gamma got mean=0.0"):
        exponential(0.0)
    with pytest.raises(ValueError, match=r"Shifted got seconds=-1.0"):
        Shifted(fixed(1.0), -1.0)
