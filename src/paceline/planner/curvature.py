"""What the theory of SGD needs to know of a model: its curvature, gradient and noise, measured.

Products with the Hessian are gradients of the slope in a direction, so the learner's own replica
computes them: on the same samples, with the same random layers and buffers as in training, and
without leaving a trace in the module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf, isfinite, sqrt
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh_tridiagonal
from scipy.special import expit

from paceline.core.protocol import Task, Work
from paceline.learners.arrays import LeastSquares, Logistic, Quadratic
from paceline.learners.base import Array, Learner

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paceline.learners.torch import TorchLearner

Vector: TypeAlias = NDArray[np.float64]
Spectrum: TypeAlias = tuple[tuple[float, float], ...]
"""Eigenvalues in their order, each with the share of all eigenvalues that it stands for."""
Product: TypeAlias = Callable[[Vector], Vector]
"""A symmetric matrix, known by what it makes of vectors."""

PRODUCT = 3.0
"""The time of a product with the Hessian over that of a gradient: 2.1 for a net of three layers,
4.4 for a convolutional one with BatchNorm (one core of a Xeon, 128 samples)."""

_DENSE = 1024  # parameters up to which a numpy problem's Hessian is decomposed
_NOTHING = 1e-6  # of the largest eigenvalue: what is smaller is rounding
_NORMAL = 1.96  # intervals are of 95 %


@dataclass(frozen=True)
class Curvature:
    """Figures of a loss at one model.

    top, bottom: the largest and the smallest eigenvalue of the Hessian; below 0 it curves down.
    typical: the median of its positive eigenvalues.
    noise: the trace of the covariance of one sample's gradient.
    gradient_norm: that of the gradient on all data, from an estimate of its square without bias;
        0.0 if it is lost in the noise.
    samples: on which it was measured.
    cost: in gradients of one sample.
    intervals: of 95 % for "noise" and "gradient_norm". Those of "top" and "bottom" hold an
        eigenvalue; no top is below its interval, and no bottom above. That of "typical" is
        between the neighbors of what was found (Chebyshev, Markov and Stieltjes); where most
        eigenvalues are close to 0, as in large nets, it is wide.
    """

    top: float
    bottom: float
    typical: float
    noise: float
    gradient_norm: float
    loss: float
    samples: int
    parameters: int
    cost: float
    intervals: Mapping[str, tuple[float, float]]
    spectrum: Spectrum = field(repr=False)

    @property
    def noise_scale(self) -> float:
        """tr(Sigma) / |G|^2: the batch at which noise is as large as the gradient.

        The simple noise scale of McCandlish et al. (2018, arXiv 1812.06162).
        """
        square = self.gradient_norm**2
        if square == 0:
            return inf if self.noise else 0.0
        return self.noise / square

    def quantile(self, share: float) -> float:
        """Return below which curvature this share of the positive spectrum lies; 0.0 if none is."""
        if not 0 <= share <= 1:
            raise ValueError(f"share={share}: a share of the spectrum is from 0 to 1")
        place = _place(self.spectrum, share)
        return 0.0 if place is None else self.spectrum[place][0]


def measure_curvature(
    learner: Learner,
    *,
    at: Array | None = None,
    samples: int = 512,
    pieces: int = 16,
    steps: int = 24,
    seed: int = 0,
) -> Curvature:
    """Measure the loss of a learner at its first model, or at another.

    It takes as long as samples * (1 + 3 * steps) gradients of one sample. For `Quadratic`,
    `Logistic` and `LeastSquares` all figures are exact, on all data.

    at: the model as a flat vector, such as a server's or the one a checkpoint holds.
    samples: drawn from the data as training does; all of them if there are fewer.
    pieces: that they are computed in, two or more; the noise is told from how these differ.
    steps: of Lanczos's method; the ends of the spectrum converge first.

    >>> measure_curvature(Quadratic((4.0, 1.0, 0.5), noise=2.0)).top
    4.0
    """
    if pieces < 2 or samples < pieces or steps < 2:
        raise ValueError(
            f"samples={samples}, pieces={pieces}, steps={steps}: use pieces >= 2, samples >= "
            "pieces and steps >= 2"
        )
    server = learner.server()
    model = server.vector if at is None else np.asarray(at)
    if model.shape != server.vector.shape:
        raise ValueError(
            f"at has shape {model.shape}; give the flat vector of this learner, of shape "
            f"{server.vector.shape}"
        )
    match learner:
        case Quadratic():
            return _of_quadratic(learner, model)
        case Logistic() | LeastSquares():
            return _of_linear(learner, model, steps, seed)
    return _of_torch(_as_torch(learner), model, server.layout.trained, samples, pieces, steps, seed)


def lanczos(
    product: Product, size: int, steps: int, rng: np.random.Generator
) -> tuple[Vector, Vector, Vector]:
    """Return eigenvalues of a symmetric matrix, their shares of its spectrum, and error bounds.

    Within its error of each there is an eigenvalue of the matrix; the largest and the smallest
    found are never beyond the true ones. The shares are the squared first components, whose
    expectation over random starts is a quadrature of the spectral density (Ubaru, Chen and Saad,
    2017; for deep nets Ghorbani et al., 2019, arXiv 1901.10159). Each vector is made orthogonal
    to all before it, twice, since rounding would bring back what has converged.
    """
    steps = min(steps, size)
    basis = np.empty((steps, size), dtype=np.float64 if size <= 10**6 else np.float32)
    diagonal, beside = np.zeros(steps), np.zeros(steps)
    vector = rng.standard_normal(size)
    vector /= np.linalg.norm(vector)
    for i in range(steps):
        basis[i] = vector
        found = product(vector)
        diagonal[i] = float(vector @ found)
        known = basis[: i + 1]
        for _ in range(2):
            found = found - known.T @ (known @ found)
        beside[i] = float(np.linalg.norm(found))
        if not isfinite(diagonal[i]) or not isfinite(beside[i]):
            raise ValueError(
                "the Hessian has no finite values here; measure at a model whose loss is finite"
            )
        largest = max(float(abs(diagonal[: i + 1]).max()), float(beside[: i + 1].max()))
        if i + 1 == steps or beside[i] <= 1e-10 * largest:
            steps = i + 1
            break
        vector = found / beside[i]
    values, vectors = eigh_tridiagonal(diagonal[:steps], beside[: steps - 1])
    return values, vectors[0] ** 2, abs(beside[steps - 1] * vectors[-1])


# --- numpy's problems, exactly -------------------------------------------------------------------


def _of_quadratic(learner: Quadratic, x: Vector) -> Curvature:
    eigenvalues = np.sort(np.asarray(learner.curvature, dtype=np.float64))
    gradient = np.asarray(learner.curvature) * (x - learner.optimum)
    noise = learner.noise**2 * x.size
    return _exact(eigenvalues, float(np.linalg.norm(gradient)), noise, learner.loss(x), 0)


def _of_linear(learner: Logistic | LeastSquares, x: Vector, steps: int, seed: int) -> Curvature:
    features, rows = learner.features, len(learner.features)
    loss, gradient = learner.gradient(x, np.arange(rows))
    if isinstance(learner, Logistic):
        slope = expit(-learner.labels * (features @ x))
        pull, bend, l2 = -learner.labels * slope, slope * (1 - slope), learner.l2
    else:
        pull, bend, l2 = features @ x - learner.targets, np.ones(rows), 0.0
    # |g_i - G|^2 with g_i = a_i pull_i + l2 x, of which the last part is the same for all.
    mean = gradient - l2 * x
    squares = np.einsum("ij,ij->i", features, features) * pull**2
    noise = max(float(squares.mean() - mean @ mean), 0.0)
    norm = float(np.linalg.norm(gradient))
    if x.size <= _DENSE:
        hessian = features.T @ (features * bend[:, None]) / rows + l2 * np.eye(x.size)
        return _exact(_eigenvalues(hessian), norm, noise, loss, rows)

    def product(v: Vector) -> Vector:
        return np.asarray(features.T @ (bend * (features @ v)) / rows + l2 * v, dtype=np.float64)

    found = _of_spectrum(*lanczos(product, x.size, steps, _generator(seed)))
    # A product of this kind is as quick as a gradient.
    return _curvature(found, norm, noise, loss, rows, x.size, rows * (1.0 + len(found["spectrum"])))


def _exact(values: Vector, norm: float, noise: float, loss: float, samples: int) -> Curvature:
    found = _of_spectrum(values, np.full(values.size, 1 / values.size))
    return _curvature(found, norm, noise, loss, samples, values.size, float(samples))


def _curvature(
    found: dict[str, Any],
    norm: float,
    noise: float,
    loss: float,
    samples: int,
    parameters: int,
    cost: float,
) -> Curvature:
    """Put figures together of which the noise and the gradient are sure."""
    found["intervals"] |= {"noise": (noise, noise), "gradient_norm": (norm, norm)}
    return Curvature(
        noise=noise,
        gradient_norm=norm,
        loss=loss,
        samples=samples,
        parameters=parameters,
        cost=cost,
        **found,
    )


# --- torch ---------------------------------------------------------------------------------------


class _Slope:
    """The loss, or with a direction its slope there, whose gradient is the Hessian's product."""

    def __init__(self, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        self._loss = loss
        self.direction: Vector | None = None

    def __call__(self, module: nn.Module, batch: Any) -> Tensor:
        loss = self._loss(module, batch)
        if self.direction is None:
            return loss
        import torch

        parameters = [p for p in module.parameters() if p.requires_grad]
        # Plain autograd, not torch.func, which refuses custom functions of the older kind.
        gradients = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
        slope, start = loss * 0.0, 0  # so that there is a graph even if the loss is linear
        for parameter, gradient in zip(parameters, gradients, strict=True):
            stop = start + parameter.numel()
            along = torch.from_numpy(self.direction[start:stop]).to(gradient)
            slope = slope + (gradient.reshape(-1) * along).sum()
            start = stop
        return slope


def _as_torch(learner: Learner) -> TorchLearner:
    from paceline.learners.torch import TorchLearner

    if not isinstance(learner, TorchLearner):
        raise TypeError(
            f"{type(learner).__name__} has no curvature to measure; give a TorchLearner, or a "
            "Quadratic, Logistic or LeastSquares"
        )
    return learner


def _of_torch(
    learner: TorchLearner,
    model: Array,
    size: int,
    samples: int,
    pieces: int,
    steps: int,
    seed: int,
) -> Curvature:
    """Measure on pieces of the data; the first `size` values of the model are trained."""
    samples = min(samples, learner.examples)
    pieces = min(pieces, samples)
    if pieces < 2:
        raise ValueError(
            f"the dataset has {learner.examples} samples: the noise of a gradient needs at least 2"
        )
    each = samples // pieces
    slope = _Slope(learner.loss)
    replica = replace(learner, loss=slope, outer=None).replica(seed)
    model = model.astype(np.float32)

    def compute(piece: int) -> tuple[Vector, float]:
        task = Task(piece, "", Work(), 0, 0.0, each, piece * each)
        outcome = replica.compute([model], task, lambda done: True)
        assert outcome.vector is not None
        # A copy, since the next task is computed in the same memory.
        return np.array(outcome.vector[:size], dtype=np.float64), outcome.stats["loss"]

    def product(vector: Vector) -> Vector:
        slope.direction = vector
        total = np.zeros(size)
        for piece in range(pieces):
            total += compute(piece)[0]
        return total / pieces

    gradients = np.empty((pieces, size), dtype=np.float32)
    losses = np.empty(pieces)
    for piece in range(pieces):
        gradients[piece], losses[piece] = compute(piece)
    noise, square, intervals = _noise(gradients, each, learner.examples)
    if size <= steps:
        hessian = np.stack([product(unit) for unit in np.eye(size)])
        values = _eigenvalues((hessian + hessian.T) / 2)
        found = _of_spectrum(values, np.full(size, 1 / size))
    else:
        found = _of_spectrum(*lanczos(product, size, steps, _generator(seed)))
    found["intervals"] |= intervals
    return Curvature(
        noise=noise,
        gradient_norm=sqrt(max(square, 0.0)),
        loss=float(losses.mean()),
        samples=each * pieces,
        parameters=size,
        cost=each * pieces * (1 + PRODUCT * len(found["spectrum"])),
        **found,
    )


def _noise(
    gradients: NDArray[np.float32], each: int, examples: int
) -> tuple[float, float, dict[str, tuple[float, float]]]:
    """Return tr(Sigma), |G|^2 without bias, and intervals by the jackknife.

    With g_i the mean gradient of piece i of b samples, b times the variance of the g_i estimates
    tr(Sigma), and the mean of g_i.g_j over i != j estimates |G|^2: what McCandlish et al. (2018,
    appendix A.1) do with two batch sizes. As samples are drawn without repetition from N, pieces
    are correlated by -Sigma / N, which is added back.
    """
    wide = gradients.astype(np.float64) if gradients.size <= 10**7 else gradients
    gram = np.asarray(wide @ wide.T, dtype=np.float64)

    def figures(kept: NDArray[np.int64]) -> tuple[float, float]:
        part, count = gram[np.ix_(kept, kept)], len(kept)
        own = float(np.trace(part)) / count
        crossed = (float(part.sum()) - own * count) / (count * (count - 1))
        noise = max(each * (own - crossed), 0.0)
        return noise, crossed + noise / examples

    count = len(gram)
    noise, square = figures(np.arange(count))
    if count < 3:
        return noise, square, {"noise": (0.0, inf), "gradient_norm": (0.0, inf)}
    without = np.array([figures(np.delete(np.arange(count), i)) for i in range(count)])
    errors = np.sqrt((count - 1) * without.var(axis=0)) * _NORMAL
    found = np.array([noise, square])
    (least, short), (most, long) = (np.maximum(found + e, 0.0).tolist() for e in (-errors, errors))
    return noise, square, {"noise": (least, most), "gradient_norm": (sqrt(short), sqrt(long))}


# --- the spectrum --------------------------------------------------------------------------------


def _of_spectrum(values: Vector, shares: Vector, errors: Vector | None = None) -> dict[str, Any]:
    """Return what the spectrum tells; errors: None if it is all of the spectrum."""
    spectrum = tuple((float(v), float(s)) for v, s in zip(values, shares, strict=True))
    top, bottom = float(values[-1]), float(values[0])
    place = _place(spectrum, 0.5)
    typical = 0.0 if place is None else float(values[place])
    above, below, around = 0.0, 0.0, (typical, typical)
    if errors is not None:
        above, below = float(errors[-1]), float(errors[0])
        if place is not None:
            low, high = max(place - 1, 0), min(place + 1, values.size - 1)
            around = max(float(values[low]), 0.0), float(values[high])
    return {
        "top": top,
        "bottom": bottom,
        "typical": typical,
        "spectrum": spectrum,
        "intervals": {
            "top": (top, top + above),
            "bottom": (bottom - below, bottom),
            "typical": around,
        },
    }


def _place(spectrum: Spectrum, share: float) -> int | None:
    """Return at which eigenvalue this share of the positive ones is passed."""
    least = _NOTHING * max(abs(value) for value, _ in spectrum)
    positive = [(place, weight) for place, (value, weight) in enumerate(spectrum) if value > least]
    wanted, passed = share * sum(weight for _, weight in positive), 0.0
    for place, weight in positive:
        passed += weight
        if passed >= wanted * (1 - 1e-12):
            return place
    return None


def _eigenvalues(matrix: Vector) -> Vector:
    return np.asarray(np.linalg.eigvalsh(matrix), dtype=np.float64)


def _generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))
