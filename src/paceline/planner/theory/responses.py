"""Kernels of response times: of models, of measured seconds, and of unequal workers together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.special import ndtr, ndtri

from paceline.delays import compound, models
from paceline.planner.theory.kernels import (
    Atoms,
    Blend,
    Gamma,
    Kernel,
    Real,
    Shifted,
    erlang,
    exponential,
    fixed,
    shifted_exponential,
)

MOST = 256  # limit of atoms for a sample or a heavy tail: a root then takes 10 to 50 ms


def measured(
    seconds: Sequence[float], most: int = MOST, weights: Sequence[float] | None = None
) -> Atoms:
    """Return the kernel of measured response times.

    More than `most` of them are sorted into `most` groups of equal size. Each group is replaced by
    its mean, which preserves the mean of all.

    weights: of the gradients with these times, if a policy applies them with different factors.
    """
    times = np.asarray(seconds, dtype=np.float64)
    if most < 1:
        raise ValueError(f"most={most}: keep at least 1 atom; {MOST} are plenty")
    shares = np.ones(times.size) if weights is None else np.asarray(weights, dtype=np.float64)
    order = np.argsort(times, kind="stable")
    times, shares = times[order], shares[order]
    if times.size <= most:
        return Atoms(times.tolist(), shares.tolist())
    pairs = zip(np.array_split(times, most), np.array_split(shares, most), strict=True)
    groups = [(float(np.average(at, weights=share)), float(share.sum())) for at, share in pairs]
    return Atoms([at for at, _ in groups], [share for _, share in groups])


def rate_weighted(kernels: Sequence[Kernel], most: int | None = None) -> Kernel:
    """Return the kernel of unequal workers, dK = Σ (1/m_i) dF_i / Λ, where Λ = Σ 1/m_i.

    A worker of mean m_i delivers 1/m_i gradients a second, so that fast workers count more. The
    mean is n/Λ, the harmonic mean of the m_i.

    most: a limit of atoms, as in `measured`.
    """
    for position, kernel in enumerate(kernels):
        if not kernel.mean > 0:
            raise ValueError(
                f"kernels[{position}] has mean {kernel.mean!r}, and delivers infinitely often; "
                "give every worker a mean > 0 seconds"
            )
    rates = [1 / kernel.mean for kernel in kernels]
    if all(isinstance(kernel, Atoms) for kernel in kernels):
        atoms = [kernel for kernel in kernels if isinstance(kernel, Atoms)]
        seconds = [at for kernel in atoms for at in kernel.seconds]
        pairs = zip(atoms, rates, strict=True)
        shares = [rate * share for kernel, rate in pairs for share in kernel.weights]
        each, place = np.unique(seconds, return_inverse=True)
        merged = np.bincount(place, shares).tolist()
        return measured(each.tolist(), each.size if most is None else most, merged)
    return kernels[0] if len(set(kernels)) == 1 else Blend(kernels, rates)


def kernel_of(model: models.Delay) -> Kernel:
    """Return the kernel of a model of response time.

    Log-normal and Pareto times become 256 atoms of equal weight, at the means of equally likely
    parts of the law. This keeps the boundary of stability. The decay rate is that of the atoms:
    the true tails are too heavy for any exponential rate in the long run.
    """
    match model:
        case models.Fixed():
            return fixed(model.seconds)
        case models.Exponential():
            return exponential(model.mean)
        case models.ShiftedExponential():
            return shifted_exponential(model.shift, model.scale)
        case models.Erlang():
            return erlang(model.stages, model.mean)
        case models.Trace():
            return measured(model.seconds)
        case models.LogNormal():
            return Atoms((_parts_of_lognormal(model.sigma) * model.median).tolist())
        case models.Pareto() if model.alpha > 1:
            return Atoms((_parts_of_pareto(model.alpha) * model.minimum).tolist())
        case models.Pareto():
            raise ValueError(
                f"Pareto with alpha={model.alpha!r} has no finite mean, and so no rate of arrivals;"
                " use alpha > 1, or measured(seconds)"
            )
        case compound.Mixture():
            return Blend([kernel_of(part) for part in model.models], model.weights)
        case compound.Scaled():
            return _scaled(model.model, model.factor)
    raise TypeError(
        f"{model!r} has no kernel of its own, since its times depend on the moment or are unknown; "
        "sample it, and use measured(seconds)"
    )


def _scaled(model: models.Delay, factor: float) -> Kernel:
    """Return the kernel of a model whose seconds are multiplied."""
    match kernel := kernel_of(model):
        case Atoms():
            return Atoms([factor * at for at in kernel.seconds], kernel.weights)
        case Gamma():
            return Gamma(kernel.stages, factor * kernel.mean)
        case Shifted(Gamma() as part, seconds):
            return Shifted(Gamma(part.stages, factor * part.mean), factor * seconds)
    assert isinstance(model, compound.Mixture | compound.Scaled)
    if isinstance(model, compound.Scaled):
        return _scaled(model.model, factor * model.factor)
    return Blend([_scaled(part, factor) for part in model.models], model.weights)


def _parts_of_lognormal(sigma: float) -> Real:
    """Return the means of equally likely parts: E[X; X < q] = E X · Φ(Φ⁻¹(p) - sigma)."""
    below = ndtr(ndtri(np.arange(MOST + 1) / MOST) - sigma)
    return np.asarray(MOST * np.exp(sigma**2 / 2) * np.diff(below))


def _parts_of_pareto(alpha: float) -> Real:
    """Return the means of equally likely parts: E[X; X > q] = E X · (1 - p)^(1 - 1/alpha)."""
    above = (1 - np.arange(MOST + 1) / MOST) ** (1 - 1 / alpha)
    return np.asarray(-MOST * alpha / (alpha - 1) * np.diff(above))
