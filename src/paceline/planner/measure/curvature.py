"""Measures the curvature, gradient and noise of a model, which the theory of SGD needs.

Products with the Hessian are gradients of the slope in a direction, so the learner's own replica
computes them. It uses the same samples, random layers and buffers as in training, and leaves the
module unchanged. Torch's math kernel computes attention there, since the fused kernels have no
second derivative. If a model has no second derivative, products are differences of gradients on
the same samples.
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
from paceline.planner.measure.budget import Budget, halved

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paceline.learners.loss import Count, Loss
    from paceline.learners.torch import TorchLearner

Vector: TypeAlias = NDArray[np.float64]
Spectrum: TypeAlias = tuple[tuple[float, float], ...]
"""Eigenvalues in ascending order, each with the share of all eigenvalues it represents."""
Product: TypeAlias = Callable[[Vector], Vector]
"""A symmetric matrix, given as its product with a vector."""

PRODUCT = 3.0
"""The time of a product with the Hessian over that of a gradient: 2.1 for a net of three layers,
4.4 for a convolutional one with BatchNorm (one core of a Xeon, 128 samples)."""

DOUBLE, DIFFERENCES = "double backward", "differences of gradients"
STEP = 1e-3
"""Distance between the gradients of a difference, relative to the model's length: large enough for
single precision, small enough for the curvature."""

_SMALL = 2  # minimum of samples of a piece, and samples of the gradient that is timed first
_FEW_PIECES = 4
_FEW_STEPS = 6  # minimum of Lanczos steps: fewer do not find the ends of the spectrum
_MEMORY = 2**32  # limit of bytes for vectors as long as the model
_DENSE = 1024  # limit of parameters for decomposing a numpy problem's whole Hessian
_NOTHING = 1e-6  # relative to the largest eigenvalue: smaller ones are rounding
_NORMAL = 1.96  # intervals are of 95 %


class NoCurvature(ValueError):
    """The curvature of a loss cannot be measured at this model or within the given time."""


@dataclass(frozen=True)
class Curvature:
    """The measured curvature, gradient and noise of a loss at one model.

    top, bottom: the largest and the smallest eigenvalue of the Hessian.
    typical: the median of its positive eigenvalues.
    noise: the trace of the covariance of one sample's gradient.
    gradient_norm: of the gradient on all data, from an unbiased estimate of its square; 0.0 if
        noise hides it.
    samples: the number of samples measured.
    cost: of the measurement, in gradients of one sample.
    intervals: of 95 % for "noise" and "gradient_norm". Those of "top" and "bottom" contain an
        eigenvalue; the true top is never below its interval, the true bottom never above. That of
        "typical" is between the neighbors of the value found (Chebyshev, Markov and Stieltjes).
        It is wide if most eigenvalues are close to 0, as in large nets.
    by: how products with the Hessian were computed: "exact", "double backward" or "differences of
        gradients".
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
    by: str = "exact"

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
        """Return this quantile of the positive spectrum; 0.0 if no curvature is positive."""
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
    budget: Budget | None = None,
) -> Curvature:
    """Measure the curvature of a learner's loss at its first model, or at another.

    It takes as long as samples * (1 + 3 * steps) gradients of one sample. A budget reduces
    samples, pieces and steps. It raises `NoCurvature` if the budget is too small, or if the loss
    has no curvature to measure. For `Quadratic`, `Logistic` and `LeastSquares` all values are
    exact, on all data, except the spectrum of the last two beyond 1024 parameters.

    at: the model as a flat vector, such as a server's or that of a checkpoint.
    samples: drawn from the data as in training; all data if there are fewer.
    pieces: two or more parts of the samples; the noise is estimated from their differences.
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
    sizes = server.layout.trained, samples, pieces, steps
    return _of_torch(_as_torch(learner), model, *sizes, seed, budget or Budget())


def lanczos(
    product: Product,
    size: int,
    steps: int,
    rng: np.random.Generator,
    budget: Budget | None = None,
) -> tuple[Vector, Vector, Vector]:
    """Return eigenvalues of a symmetric matrix, their shares of its spectrum, and error bounds.

    Each value is within its error bound of a true eigenvalue; the largest and the smallest found
    are never beyond the true ones. The shares are the squared first components. Their expectation
    over random starts is a quadrature of the spectral density (Ubaru, Chen and Saad, 2017). For
    deep nets see Ghorbani et al., 2019, arXiv 1901.10159. Each vector is made orthogonal to all
    before it, twice, since rounding would bring converged directions back. It stops early when the
    budget is over, and raises `NoCurvature` if that is before six steps.
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
            raise NoCurvature(
                "the Hessian has no finite values here; measure at a model whose loss is finite"
            )
        largest = max(float(abs(diagonal[: i + 1]).max()), float(beside[: i + 1].max()))
        if i + 1 == steps or beside[i] <= 1e-10 * largest:
            steps = i + 1
            break
        if budget is not None:
            if budget.is_over:
                if i + 1 < _FEW_STEPS:
                    raise _too_slow(budget)
                steps = i + 1
                break
            budget.report((i + 1) / steps)
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
    """Return the curvature of a problem whose noise and gradient are exact."""
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


class _NoGraph(RuntimeError):
    """The gradient has no graph: a function in the loss is differentiable once."""


class _Slope:
    """The loss, or its slope along a direction, whose gradient is the Hessian's product with it."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self.direction: Vector | None = None

    def __call__(self, module: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Count]:
        if self.direction is None:
            return self._loss(module, batch)
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(SDPBackend.MATH):  # other kernels have no double backward
            found = self._loss(module, batch)
        loss = found[0] if isinstance(found, tuple) else found
        parameters = [p for p in module.parameters() if p.requires_grad]
        # Plain autograd, not torch.func, which refuses custom functions of the older kind.
        gradients = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
        if not any(gradient.requires_grad for gradient in gradients):
            raise _NoGraph("no gradient depends on the parameters")
        slope, start = loss * 0.0, 0
        for parameter, gradient in zip(parameters, gradients, strict=True):
            stop = start + parameter.numel()
            along = torch.from_numpy(self.direction[start:stop]).to(gradient)
            slope = slope + (gradient.reshape(-1) * along).sum()
            start = stop
        return (slope, found[1]) if isinstance(found, tuple) else slope


def _as_torch(learner: Learner) -> TorchLearner:
    from paceline.learners.torch import TorchLearner

    if not isinstance(learner, TorchLearner):
        raise NoCurvature(
            f"{type(learner).__name__} has no curvature to measure; give a TorchLearner, or a "
            "Quadratic, Logistic or LeastSquares"
        )
    return learner


class _Pieces:
    """Computes gradients of a torch model, and products with its Hessian, on pieces of the data.

    The first `size` values of the model are trained.
    """

    def __init__(self, learner: TorchLearner, model: Array, size: int, seed: int) -> None:
        self._slope = _Slope(learner.loss)
        self._replica = replace(learner.without_local_steps(), loss=self._slope).replica(seed)
        self._model, self._size = model.astype(np.float32), size
        self._length = STEP * max(float(np.linalg.norm(self._model[:size])), 1.0)
        self.by = DOUBLE

    def gradient(
        self, piece: int, each: int, shift: Vector | None = None, along: Vector | None = None
    ) -> tuple[Vector, float]:
        """Return the gradient of a piece, or that of the slope along a direction, and the loss."""
        model = self._model
        if shift is not None:
            model = model.copy()
            model[: self._size] += shift.astype(np.float32)
        self._slope.direction = along
        task = Task(piece, "", Work(), 0, 0.0, each, piece * each)
        outcome = self._replica.compute([model], task, lambda done: True)
        assert outcome.vector is not None
        # A copy, since the next task is computed in the same memory.
        gradient = np.array(outcome.vector[: self._size], dtype=np.float64)
        return gradient / (outcome.stats.get("count") or 1.0), outcome.stats.get("loss", 0.0)

    def product(self, vector: Vector, pieces: int, each: int) -> Vector:
        """Return the mean over pieces of the Hessian's product with a vector."""
        total = np.zeros(self._size)
        for piece in range(pieces):
            total += self._product(vector, piece, each)
        return total / pieces

    def _product(self, vector: Vector, piece: int, each: int) -> Vector:
        if self.by == DOUBLE:
            try:
                return self.gradient(piece, each, along=vector)[0]
            except RuntimeError:  # plain gradients worked before, so double backward failed
                self.by = DIFFERENCES
        ahead, behind = (
            self.gradient(piece, each, sign * self._length * vector)[0] for sign in (1, -1)
        )
        return (ahead - behind) / (2 * self._length)


def _of_torch(
    learner: TorchLearner,
    model: Array,
    size: int,
    samples: int,
    pieces: int,
    steps: int,
    seed: int,
    budget: Budget,
) -> Curvature:
    """Measure the curvature of a torch model on pieces of the data."""
    samples = min(samples, learner.examples)
    pieces = min(pieces, samples)
    if pieces < 2:
        raise NoCurvature(
            f"the dataset has {learner.examples} samples: the noise of a gradient needs at least 2"
        )
    measured = _Pieces(learner, model, size, seed)
    each, pieces, steps = _affordable(measured, size, samples // pieces, pieces, steps, budget)
    gradients = np.empty((pieces, size), dtype=np.float32)
    losses = np.empty(pieces)
    for piece in range(pieces):
        gradients[piece], losses[piece] = measured.gradient(piece, each)
    noise, square, intervals = _noise(gradients, each, learner.examples)

    def product(vector: Vector) -> Vector:
        return measured.product(vector, pieces, each)

    if size <= steps:
        hessian = np.stack([product(unit) for unit in np.eye(size)])
        values = _eigenvalues((hessian + hessian.T) / 2)
        found = _of_spectrum(values, np.full(size, 1 / size))
    else:
        found = _of_spectrum(*lanczos(product, size, steps, _generator(seed), budget))
    found["intervals"] |= intervals
    return Curvature(
        noise=noise,
        gradient_norm=sqrt(max(square, 0.0)),
        loss=float(losses.mean()),
        samples=each * pieces,
        parameters=size,
        cost=each * pieces * (1 + PRODUCT * len(found["spectrum"])),
        by=measured.by,
        **found,
    )


def _affordable(
    measured: _Pieces, size: int, each: int, pieces: int, steps: int, budget: Budget
) -> tuple[int, int, int]:
    """Return the samples per piece, pieces and steps that fit the memory and the budget."""
    if 4 * size * (min(pieces, _FEW_PIECES) + min(steps, _FEW_STEPS)) > _MEMORY:
        raise NoCurvature(
            f"the curvature of {size} parameters takes more than {_MEMORY / 2**30:.0f} GiB to "
            "measure; plan by the time per step, or profile a smaller model of the same kind"
        )
    pieces = halved(pieces, _FEW_PIECES, lambda n: 4 * size * (n + _FEW_STEPS) <= _MEMORY)
    steps = halved(steps, _FEW_STEPS, lambda n: 4 * size * (n + pieces) <= _MEMORY)
    if budget.seconds == inf:
        return each, pieces, steps
    times = pieces * (1 + PRODUCT * steps)
    each, seconds = budget.affordable(each, _SMALL, lambda n: measured.gradient(0, n), times)

    def fits(pieces: int, steps: int) -> bool:
        return pieces * (1 + PRODUCT * steps) * seconds <= budget.left

    pieces = halved(pieces, _FEW_PIECES, lambda n: fits(n, steps))
    steps = halved(steps, _FEW_STEPS, lambda n: fits(pieces, n))
    if not fits(pieces, steps):
        raise _too_slow(budget)
    return each, pieces, steps


def _too_slow(budget: Budget) -> NoCurvature:
    return NoCurvature(
        f"the curvature cannot be measured in {budget.seconds:.3g} s, even on few samples; give "
        "more time: profile(…, loss_seconds=…)"
    )


def _noise(
    gradients: NDArray[np.float32], each: int, examples: int
) -> tuple[float, float, dict[str, tuple[float, float]]]:
    """Return tr(Sigma), an unbiased estimate of |G|^2, and intervals by the jackknife.

    Let g_i be the mean gradient of piece i of b samples. b times the variance of the g_i estimates
    tr(Sigma). The mean of g_i.g_j over i != j estimates |G|^2; McCandlish et al. (2018,
    appendix A.1) do the same with two batch sizes. As samples are drawn from N without repetition,
    pieces have the covariance -Sigma / N, which is corrected for.
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
    """Return the fields of `Curvature` that follow from a spectrum; errors: None if it is exact."""
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
    """Return the index of this quantile of the positive eigenvalues; None if there are none."""
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
