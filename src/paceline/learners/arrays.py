"""Small problems in NumPy, for tests and theory, and a learner without any arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.codes.blocks import Encoder, sketch
from paceline.core.averages import scaled
from paceline.core.protocol import SHARED, Coefficients, Stat, Task, Want, Work
from paceline.data.partition.base import Partition
from paceline.data.sampling import Samples, Stream
from paceline.data.seeding import generator
from paceline.learners.base import (
    Array,
    Direction,
    Layout,
    Outcome,
    Places,
    Proceed,
    Recipe,
    Saved,
    Span,
    Steps,
    Sums,
)

Vector = NDArray[np.float64]
_BLOCK = 2**15  # values added at a time: a block in a core's cache takes 3/4 of the time


class ArrayServer(Steps):
    """Plain SGD: x <- x - lr * sum of weight * result."""

    needs_totals = False

    def __init__(self, start: Vector, lr: float) -> None:
        self.vector = np.array(start, dtype=np.float64)
        self._lr = lr
        self._direction = Direction()
        self._sum = np.zeros_like(self.vector)

    @property
    def layout(self) -> Layout:
        return Layout(self.vector.size)

    def recipe(self, span: Span) -> Recipe:
        return partial(_zeros, span[1] - span[0], self._lr)

    def reduce(
        self, weights: Sequence[float], vectors: Sequence[Array], wants: frozenset[Want]
    ) -> Sums:
        self._sum = np.zeros_like(self.vector)
        for start in range(0, self._sum.size, _BLOCK):
            block = slice(start, start + _BLOCK)
            for weight, vector in zip(weights, vectors, strict=True):
                self._sum[block] += weight * vector[block]
        return self._direction.sums(self._sum, wants)

    def apply(self, totals: Sums, lr_scale: float = 1.0) -> None:
        self.vector -= self._lr * lr_scale * self._sum

    def model(self) -> Vector:
        return self.vector.copy()

    def export(self) -> dict[str, Array]:
        return {"x": self.vector.copy()}

    def places(self) -> Places:
        return Places({"x": (0, self.vector.shape)}, lambda tail: {})

    def save(self) -> Saved:
        return Saved({"values": self.vector, **self._direction.save()}, {})

    def load(self, saved: Saved) -> None:
        self.vector[:] = saved.arrays["values"]
        self._direction.load(saved.arrays)


def _zeros(size: int, lr: float) -> ArrayServer:
    return ArrayServer(np.zeros(size), lr)


class ArrayReplica:
    """Computes gradients of a problem; with several local steps, their sum (change / `lr`)."""

    def __init__(
        self, problem: Quadratic | Linear, seed: int, tiles: Partition | None = None
    ) -> None:
        self._problem, self._seed = problem, seed
        size = problem.examples
        self._samples = None if size is None else Samples(Stream(size, seed), seed, tiles)

    def compute(self, model: Iterable[Array], task: Task, proceed: Proceed) -> Outcome:
        self._problem.check(task.work)
        x = np.concatenate(list(model))
        if task.work.parts is not None:
            return self._coded(x, task, task.work.parts, proceed)
        total, done, loss = np.zeros_like(x), 0, 0.0
        for step in range(task.work.steps):
            samples = sum(1 for sample in range(task.samples) if proceed(done + sample))
            if not samples:
                break
            value, gradient = self._of_step(x, task, step, samples)
            loss += value * samples
            total += gradient
            done += samples
            if task.work.steps > 1:
                x -= self._problem.lr * gradient
        return Outcome(total, done, {"loss": loss / max(done, 1)})

    def _coded(
        self, x: Vector, task: Task, parts: Mapping[int, Coefficients], proceed: Proceed
    ) -> Outcome:
        encoder = Encoder(x.size, task.work.messages)
        loss = 0.0
        done = 0
        for part, factors in parts.items():
            place, size = task.part(part)
            if not proceed(done):
                return Outcome(None, 0)
            done += size
            value, gradient = self._of_place(x, place, size)
            encoder.add(gradient, scaled(factors, size * task.work.n_parts / task.samples))
            loss += value * size / task.computed
        message = encoder.message(np.float64)
        seen = sketch(message, generator(self._seed, SHARED, task.version))
        return Outcome(message, task.computed, {"loss": loss, "sketch": seen})

    def _of_step(self, x: Vector, task: Task, step: int, samples: int) -> tuple[float, Vector]:
        problem = self._problem
        if isinstance(problem, Quadratic):
            return self._of_place(x, task.offset + step * task.samples, samples)
        assert self._samples is not None
        return problem.gradient(x, self._samples.of(task, step)[:samples])

    def _of_place(self, x: Vector, place: int, samples: int) -> tuple[float, Vector]:
        problem = self._problem
        if isinstance(problem, Quadratic):
            return problem.gradient(x, samples, generator(self._seed, SHARED, place))
        assert self._samples is not None
        return problem.gradient(x, self._samples.stretch(place, samples))


@dataclass(frozen=True)
class Quadratic:
    """f(x) = 1/2 sum of h_i (x_i - b_i)^2 with Gaussian noise of deviation `noise` per sample."""

    curvature: tuple[float, ...] = (1.0,)
    optimum: float = 0.0
    start: float = 1.0
    noise: float = 0.0
    lr: float = 0.1
    batch_size: int = 8
    examples: None = None

    @property
    def message_bytes(self) -> int:
        return 8 * len(self.curvature)

    def gradient(self, x: Vector, samples: int, rng: np.random.Generator) -> tuple[float, Vector]:
        """Return the loss at x and a gradient averaged over `samples` samples."""
        gradient = np.asarray(self.curvature) * (x - self.optimum)
        if self.noise:
            gradient = gradient + self.noise / np.sqrt(samples) * rng.standard_normal(x.size)
        return self.loss(x), gradient

    def loss(self, x: Vector) -> float:
        return float(0.5 * np.sum(np.asarray(self.curvature) * (x - self.optimum) ** 2))

    def replica(self, seed: int, tiles: Partition | None = None) -> ArrayReplica:
        return ArrayReplica(self, seed, tiles)

    def server(self) -> ArrayServer:
        return ArrayServer(np.full(len(self.curvature), self.start), self.lr)

    def rate(self, version: int) -> float:
        return self.lr

    def check(self, work: Work) -> None:
        _check_work(work)

    def about(self) -> dict[str, Any]:
        return {"learner": "Quadratic", "batch_size": self.batch_size}


class Linear:
    """The common part of problems on rows of data; the model is a vector x that starts at 0."""

    features: Vector
    lr: float
    batch_size: int

    @property
    def examples(self) -> int:
        return len(self.features)

    @property
    def message_bytes(self) -> int:
        return 8 * int(self.features.shape[1])

    def gradient(self, x: Vector, chosen: NDArray[np.int64]) -> tuple[float, Vector]:
        """Return the loss at x and its gradient over the chosen samples."""
        raise NotImplementedError

    def replica(self, seed: int, tiles: Partition | None = None) -> ArrayReplica:
        return ArrayReplica(self, seed, tiles)

    def server(self) -> ArrayServer:
        return ArrayServer(np.zeros(self.features.shape[1]), self.lr)

    def rate(self, version: int) -> float:
        return self.lr

    def check(self, work: Work) -> None:
        _check_work(work)

    def about(self) -> dict[str, Any]:
        name = type(self).__name__
        return {"learner": name, "batch_size": self.batch_size, "examples": self.examples}


@dataclass(frozen=True, eq=False)
class Logistic(Linear):
    """Logistic regression with labels -1 and 1: mean of log(1 + exp(-y a.x)) + l2/2 |x|^2."""

    features: Vector
    labels: Vector
    l2: float = 0.0
    lr: float = 0.1
    batch_size: int = 32

    def __post_init__(self) -> None:
        if set(np.unique(self.labels)) - {-1.0, 1.0}:
            raise ValueError("labels must be -1 or 1; for 0 and 1 use 2 * labels - 1")

    def gradient(self, x: Vector, chosen: NDArray[np.int64]) -> tuple[float, Vector]:
        a, y = self.features[chosen], self.labels[chosen]
        margin = y * (a @ x)
        pull = -y / (1 + np.exp(margin))
        loss = float(np.mean(np.logaddexp(0, -margin)) + 0.5 * self.l2 * (x @ x))
        return loss, a.T @ pull / len(y) + self.l2 * x


@dataclass(frozen=True, eq=False)
class LeastSquares(Linear):
    """Linear regression: mean of 1/2 (a.x - y)^2."""

    features: Vector
    targets: Vector
    lr: float = 0.1
    batch_size: int = 32

    def __post_init__(self) -> None:
        if len(self.features) != len(self.targets):
            raise ValueError(
                f"{len(self.features)} rows of features and {len(self.targets)} targets; "
                "give one target for each row"
            )

    def gradient(self, x: Vector, chosen: NDArray[np.int64]) -> tuple[float, Vector]:
        a = self.features[chosen]
        residual = a @ x - self.targets[chosen]
        return float(0.5 * np.mean(residual**2)), a.T @ residual / len(chosen)


def _check_work(work: Work) -> None:
    if work.parts is not None and (work.steps > 1 or work.budget < inf):
        raise ValueError("a task on parts of a batch computes gradients: use steps=1 and no budget")
    if work.overlap:
        raise ValueError(
            "overlap=True: a learner of arrays computes on the model of its task alone; use "
            "TorchLearner, or leave overlap out"
        )


class NoArithmetic:
    """Both sides of `TimingOnly`: time passes, but no result is computed."""

    vector: Vector = np.empty(0)
    needs_totals = False
    layout = Layout(0)

    def compute(self, model: Iterable[Array], task: Task, proceed: Proceed) -> Outcome:
        return Outcome(None, task.samples * task.work.steps)

    def recipe(self, span: Span) -> Recipe:
        return NoArithmetic

    def reduce(
        self, weights: Sequence[float], vectors: Sequence[Array], wants: frozenset[Want]
    ) -> Sums:
        return {}

    def apply(self, totals: Sums, lr_scale: float = 1.0) -> None:
        pass

    def step(
        self,
        weights: Sequence[float],
        vectors: Sequence[Array],
        wants: frozenset[Want],
        lr_scale: float = 1.0,
    ) -> dict[Stat, float]:
        return {}

    def model(self) -> None:
        return None

    def export(self) -> dict[str, Array]:
        return {}

    def places(self) -> None:
        return None

    def save(self) -> Saved:
        return Saved({}, {})

    def load(self, saved: Saved) -> None:
        pass


@dataclass(frozen=True)
class TimingOnly:
    """A learner without arithmetic, for simulations of time only."""

    batch_size: int = 1
    message_bytes: int = 0
    examples: int | None = None

    def replica(self, seed: int, tiles: Partition | None = None) -> NoArithmetic:
        return NoArithmetic()

    def server(self) -> NoArithmetic:
        return NoArithmetic()

    def rate(self, version: int) -> float:
        return 1.0

    def check(self, work: Work) -> None:
        pass

    def about(self) -> dict[str, Any]:
        return {"learner": "TimingOnly", "batch_size": self.batch_size}
