"""The rightmost root of s + a K(s) = 0, which decides whether and how fast delayed SGD converges.

Newton's method guesses a root. The guess is accepted only if the argument principle counts no
root further right. Two facts make the count a proof, up to rounding. First, |K(s)| <= K(σ) to the
right of Re s = σ, so that no root is further than a K(σ) from 0. Second, the second derivative on
that line is at most a K''(σ), which bounds the distance between two samples. Left of the poles of
exponential and Erlang delays other bounds replace these, and the poles enter the count.

Inside this file the mean delay is the unit of time, and z = s · mean, x = a · mean.
"""

from __future__ import annotations

from cmath import isnan
from math import comb, inf, isfinite, pi, sqrt

import numpy as np
from scipy.special import lambertw

from paceline.planner.theory.kernels import (
    Atoms,
    Blend,
    Complex,
    Gamma,
    Kernel,
    Real,
    Shifted,
    Uniform,
)

CLOSE = 1e-7  # limit of how much further right than the returned root another is, times 1 + |z|

_POINTS = 2**17  # limit of points on a line; more mean that a root lies on it
_NEAR = 0.01  # relative distance from the abscissa within which a kernel is not evaluated


class _OnLine(Exception):
    """A root lies on the line, or too close to it to tell on which side."""


def root(damping: float, kernel: Kernel) -> complex:
    """Return the rightmost root of s + a K(s) = 0, the one with Im s >= 0.

    If the kernel cannot be continued beyond its abscissa, and no root is right of it, return 0.99
    of the abscissa. The tail of the delays then decides, and the mean decays at least as fast.
    """
    if not (isfinite(damping) and damping > 0):
        raise ValueError(
            f"damping={damping!r}: give a finite number > 0, the learning rate times the curvature "
            "times the arrivals per second"
        )
    mean = kernel.mean
    if mean == 0:
        return complex(-damping)
    x = damping * mean
    match kernel:
        case Atoms(seconds=(_,)):
            z = lambert(x)
        case Gamma(stages=1):  # z² + z + x = 0
            z = (-1 + complex(1 - 4 * x) ** 0.5) / 2
        case _:
            z = _Equation(x, kernel).rightmost()
    return z / mean


def roots_right_of(line: float, damping: float, kernel: Kernel) -> int:
    """Return how many roots of s + a K(s) = 0 have Re s > line, counted with multiplicity."""
    equation = _Equation(damping * kernel.mean, kernel)
    if not line * kernel.mean > equation.limit:
        raise ValueError(
            f"line={line!r} is not right of {kernel.abscissa!r}, where the transform ends; "
            "use a greater number"
        )
    try:
        return equation.count(line * kernel.mean)
    except _OnLine:
        raise ValueError(f"a root or pole lies on Re s = {line!r}; move the line") from None


def lambert(x: float) -> complex:
    """Return W(-x) for x > 0: the rightmost solution of w exp(w) = -x with Im w >= 0.

    >>> lambert(1 / 2.718281828459045)
    (-1+0j)
    """
    w = complex(lambertw(-x))
    # Scipy returns NaN at the branch point, where both real solutions meet.
    return complex(-1) if isnan(w) else complex(w.real, abs(w.imag))


class _Equation:
    """h(z) = z + x K(z), and its derivative."""

    def __init__(self, x: float, kernel: Kernel) -> None:
        self.x = x
        self.kernel = kernel
        self.mean = kernel.mean
        poles = _poles(kernel)
        self.limit = kernel.abscissa * self.mean if poles is None else -inf
        self.poles = {at * self.mean: order for at, order in (poles or {}).items()}

    def value(self, z: Complex) -> Complex:
        return np.asarray(z + self.x * self.kernel.transform(z / self.mean))

    def slope(self, z: Complex) -> Complex:
        return np.asarray(1 - self.x * self.kernel.transform(z / self.mean, 1) / self.mean)

    def rightmost(self) -> complex:
        guess = self._newton(np.asarray([lambert(self.x), -self.x, -0.5 + 1j], np.complex128))
        if guess is not None and self._is_rightmost(guess):
            return guess
        return self._search()

    def count(self, line: float) -> int:
        """Return how many zeros are right of a line, by the winding number of h around 0."""
        return self._walk(line)[0]

    def _walk(self, line: float) -> tuple[int, Complex]:
        """Return the count, and the points of the line that it used."""
        passed = {at: order for at, order in self.poles.items() if at > line}
        with np.errstate(all="ignore"):
            reach = self.x * _reach(self.kernel, line / self.mean)
        if not isfinite(reach):
            raise _OnLine
        top = max([1.01 * reach + 1e-3, *(-at for at in passed)])
        y = np.linspace(0, top, 49)
        h, steep, bend = self._sample(line, y)
        while True:
            half = np.diff(y) / 2
            # Within half a step h stays in a disk around its value that does not contain 0.
            turn = bend[:-1] * half**2 / 2
            left = steep[:-1] * half + turn < np.abs(h[:-1])
            right = steep[1:] * half + turn < np.abs(h[1:])
            wide = np.flatnonzero(~(left & right))
            if not wide.size:
                break
            middle = (y[wide] + y[wide + 1]) / 2
            if y.size + wide.size > _POINTS or float(half[wide].min()) < 1e-14 * top:
                raise _OnLine
            new_h, new_steep, new_bend = self._sample(line, middle)
            y = np.insert(y, wide + 1, middle)
            h = np.insert(h, wide + 1, new_h)
            steep = np.insert(steep, wide + 1, new_steep)
            bend = np.insert(bend, wide + 1, new_bend)
        turned = float(np.sum(np.angle(h[1:] / h[:-1])))
        corner = complex(line, top)
        closing = float(np.angle(corner) + np.angle(h[-1] / corner))
        zeros = round((closing - turned) / pi) + sum(passed.values())
        return zeros, np.asarray(line + 1j * y, dtype=np.complex128)

    def _sample(self, line: float, y: Real) -> tuple[Complex, Real, Real]:
        """Return h and |h'| at these points of a line, and an upper bound of |h''| above each."""
        z = np.asarray(line + 1j * y, dtype=np.complex128)
        bend = self.x / self.mean**2 * _majorant(self.kernel, z / self.mean, 2)
        return self.value(z), np.abs(self.slope(z)), bend

    def _is_rightmost(self, z: complex) -> bool:
        line = z.real + CLOSE * (1 + abs(z))
        if line <= self.limit:
            return False
        try:
            return self.count(line) == 0
        except _OnLine:
            return False

    def _newton(self, z: Complex, left: float = -np.inf) -> complex | None:
        """Return the rightmost of the roots that Newton's method reaches from these points."""
        with np.errstate(all="ignore"):
            for _ in range(60):
                step = self.value(z) / self.slope(z)
                z = z - step
                if np.all(~np.isfinite(step) | (np.abs(step) <= 1e-15 * np.abs(z))):
                    break
            # At a double root Newton's steps stop near the square root of the rounding error.
            good = np.isfinite(z) & (np.abs(step) < 1e-6) & (z.real > max(self.limit, left))
            good &= np.abs(self.value(z)) < 1e-9 * (1 + np.abs(z))
        if not np.any(good):
            return None
        best = complex(z[good][np.argmax(z[good].real)])
        imaginary = abs(best.imag)
        return complex(best.real, 0.0 if imaginary < 1e-12 else imaginary)

    def _off(self, line: float) -> tuple[float, int, Complex]:
        """Walk a line, or a line next to it if a root lies on it."""
        for shift in (0.0, 1e-7, -1e-7, 3e-6, -3e-6, 1e-4, -1e-4, 3e-3, -3e-3, 0.02, -0.02):
            moved = line + shift * (1 + abs(line))
            try:
                return moved, *self._walk(moved)
            except _OnLine:
                continue
        raise ArithmeticError(
            f"the roots for gain {self.x!r} could not be counted near Re s = {line / self.mean!r}; "
            "use a smaller gain, or drop the longest delays"
        )

    def _search(self) -> complex:
        """Bisect the strip that holds the rightmost root, and try Newton's method from its edge."""
        low, high = self._bracket()
        if low is None:
            return complex(high)
        for _ in range(60):
            if high - low < 0.1 * (1 + abs(low)):
                low, _, points = self._off(low)
                found = self._newton(self._starts(points), low - 1e-6)
                if found is not None and self._is_rightmost(found):
                    return found
            middle, zeros, _ = self._off((low + high) / 2)
            if high - low < CLOSE or not low < middle < high:
                break
            low, high = (middle, high) if zeros else (low, middle)
        low, _, points = self._off(low)
        return complex(points[np.argmin(np.abs(self.value(points)))])

    def _bracket(self) -> tuple[float | None, float]:
        line, zeros, _ = self._off(0.0)
        if zeros:
            return line, 1.01 * self.x  # right of 0 every root has |z| <= x
        high, last = line, self.limit * (1 - _NEAR)
        low = max(-1 / 16, last)
        while True:
            line, zeros, _ = self._off(low)
            if zeros:
                return line, high
            if low == last:
                return None, last
            high, low = line, max(1.5 * low, last)

    def _starts(self, points: Complex) -> Complex:
        """Return starts for Newton's method: the points of a line that seem closest to a root."""
        distance = np.abs(self.value(points) / self.slope(points))
        inner = (distance[1:-1] <= distance[:-2]) & (distance[1:-1] <= distance[2:])
        least = np.flatnonzero(inner) + 1
        chosen = np.concatenate([[0], least[np.argsort(distance[least])][:24]])
        return np.asarray(points[chosen] + distance[chosen] / sqrt(2))


def _poles(kernel: Kernel) -> dict[float, int] | None:
    """Return the poles of the continued transform by order; None if it cannot be continued."""
    match kernel:
        case Atoms() | Uniform():
            return {}
        case Gamma(stages=k) if k == int(k):
            return {kernel.abscissa: int(k)}
        case Shifted(kernel=part):
            return _poles(part)
        case Blend(kernels=parts):
            found: dict[float, int] = {}
            for part in parts:
                poles = _poles(part)
                if poles is None:
                    return None
                found |= {at: max(order, found.get(at, 0)) for at, order in poles.items()}
            return found
    return None


def _majorant(kernel: Kernel, s: Complex, order: int) -> Real:
    """Return an upper bound of |E X^order exp(-s X)| above each of these points of a line."""
    match kernel:
        case Gamma():  # falls with Im s
            return np.abs(kernel.transform(s, order))
        case Shifted(kernel=part, seconds=shift):
            terms = (
                comb(order, i) * shift ** (order - i) * _majorant(part, s, i)
                for i in range(order + 1)
            )
            return np.asarray(np.exp(-shift * s.real) * sum(terms))
        case Blend(kernels=parts, weights=weights):
            pairs = zip(parts, weights, strict=True)
            return np.asarray(sum(weight * _majorant(part, s, order) for part, weight in pairs))
    first = np.asarray(s.real[:1], dtype=np.complex128)
    return np.full(s.shape, float(kernel.transform(first, order)[0].real))


def _reach(kernel: Kernel, line: float) -> float:
    """Return an upper bound of |K(s)| right of a line, where Im s exceeds |poles|."""
    match kernel:
        case Gamma(stages=k, mean=mean) if line <= kernel.abscissa:
            least = min(-1 - mean / k * line, 1.0)
            return least**-k if least > 1e-30 else inf
        case Shifted(kernel=part, seconds=shift):
            return float(np.exp(-shift * line)) * _reach(part, line)
        case Blend(kernels=parts, weights=weights):
            return sum(w * _reach(part, line) for part, w in zip(parts, weights, strict=True))
    return float(kernel.transform(np.asarray([line], np.complex128))[0].real)
