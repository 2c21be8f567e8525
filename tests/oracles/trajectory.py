"""The mean of asynchronous SGD over time, integrated step by step, to check its roots against."""

from __future__ import annotations

from math import ceil, isfinite

import numpy as np
from scipy.linalg import eigh_tridiagonal

from paceline.planner.theory.kernels import Atoms, Blend, Gamma, Kernel, Real, Shifted, Uniform

_NODES = 40  # of the rule by which a continuous law becomes atoms


def mean_path(damping: float, kernel: Kernel, seconds: float, step: float) -> tuple[Real, Real]:
    """Return times, and x with x' = -a E x(t - X) at these; before 0 it is 1.

    The trapezoidal rule, with linear interpolation between steps: its error falls with their
    square.
    """
    if not (isfinite(seconds) and 0 < step <= seconds and damping > 0):
        raise ValueError(
            f"damping={damping!r}, seconds={seconds!r}, step={step!r}: use damping > 0, finite "
            "seconds > 0, and 0 < step <= seconds"
        )
    weights = _weights(atoms(kernel), step)
    reach = weights.size
    steps = ceil(seconds / step)
    x = np.ones(reach + steps)  # the first `reach` of them are the past, up to time 0
    backwards = weights[::-1]
    pull = 1.0  # E x(t - X) now
    for now in range(reach, reach + steps):
        past = float(backwards[:-1] @ x[now - reach + 1 : now])
        # Delays below a step depend on what is being found, which is linear in it.
        x[now] = (x[now - 1] - damping * step / 2 * (pull + past)) / (
            1 + damping * step / 2 * weights[0]
        )
        pull = past + float(weights[0]) * float(x[now])
    return np.arange(steps + 1, dtype=np.float64) * step, x[reach - 1 :]


def atoms(kernel: Kernel, nodes: int = _NODES) -> Atoms:
    """Return atoms that share the kernel's first moments: the nodes of its Gaussian quadrature."""
    match kernel:
        case Atoms():
            return kernel
        case Gamma():
            # Golub and Welsch: eigenvalues of the matrix of the Laguerre polynomials' recurrence.
            # scipy.special.roots_genlaguerre does the same, but overflows beyond 171 stages.
            order = np.arange(nodes)
            beside = np.sqrt(order[1:] * (order[1:] + kernel.stages - 1))
            at, vectors = eigh_tridiagonal(2 * order + kernel.stages, beside)
            scale = kernel.mean / kernel.stages
            return Atoms((at * scale).tolist(), (vectors[0] ** 2).tolist())
        case Uniform():
            at, weights = np.polynomial.legendre.leggauss(nodes)
            half = (kernel.most - kernel.least) / 2
            return Atoms((kernel.mean + half * at).tolist(), weights.tolist())
        case Shifted():
            part = atoms(kernel.kernel, nodes)
            return Atoms([at + kernel.seconds for at in part.seconds], part.weights)
        case Blend():
            parts = [atoms(part, nodes) for part in kernel.kernels]
            pairs = zip(parts, kernel.weights, strict=True)
            shares = [weight * share for part, weight in pairs for share in part.weights]
            return Atoms([at for part in parts for at in part.seconds], shares)
    raise TypeError(
        f"{type(kernel).__name__} is known by its transform alone, and has no quadrature; sample "
        "its delays, and use measured(seconds)"
    )


def _weights(kernel: Atoms, step: float) -> Real:
    """Return the weights of x now, one step ago, two …, by linear interpolation."""
    at = np.asarray(kernel.seconds) / step
    share = np.asarray(kernel.weights)
    below = np.floor(at + 1e-9).astype(np.int64)
    part = np.clip(at - below, 0.0, 1.0)
    found = np.zeros(int(below.max()) + 2)
    np.add.at(found, below, share * (1 - part))
    np.add.at(found, below + 1, share * part)
    return found
