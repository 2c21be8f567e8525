"""Gradient transforms before the optimizer's step that need norms of whole tensors or models.

A transform sees the model as pieces: tensors, or the parts of them that one server holds. It
returns sums over its pieces; these are added up over all servers and passed back to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Protocol

import torch
from torch import Tensor

from paceline.learners.base import Sums


@dataclass(frozen=True, slots=True)
class Piece:
    """A trained tensor, or the part of it that a server holds, flat."""

    index: int  # of the tensor in the model
    dimensions: int  # of the whole tensor
    value: Tensor
    gradient: Tensor


class Transform(Protocol):
    """Changes gradients in place, in two phases."""

    def sums(self, pieces: Sequence[Piece]) -> Sums:
        """Return the sums over these pieces that `apply` needs of the whole model."""

    def apply(self, pieces: Sequence[Piece], totals: Sums) -> None:
        """Change these pieces' gradients, given the sums over all pieces."""


@dataclass(frozen=True)
class ClipNorm:
    """Scales the gradient down to a norm of at most `limit`, as `clip_grad_norm_` of torch does."""

    limit: float

    def __post_init__(self) -> None:
        if not self.limit > 0:
            raise ValueError(f"limit={self.limit}: a norm to clip to must be above 0")

    def sums(self, pieces: Sequence[Piece]) -> Sums:
        return {"clip": sum(_square(piece.gradient) for piece in pieces)}

    def apply(self, pieces: Sequence[Piece], totals: Sums) -> None:
        factor = self.limit / (sqrt(totals["clip"]) + 1e-6)
        if factor < 1:
            for piece in pieces:
                piece.gradient.mul_(factor)


@dataclass(frozen=True)
class TrustRatio:
    """Scales each tensor's gradient by its norms; with SGD and momentum this is LARS.

    g <- eta |w| / (|g| + weight_decay |w|) * (g + weight_decay w), tensor by tensor (You, Gitman
    and Ginsburg 2017, arXiv 1708.03888). Tensors with fewer than two dimensions, such as biases,
    are unchanged, and so is a tensor whose norm or gradient is zero.
    """

    eta: float = 0.001
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not (self.eta > 0 and self.weight_decay >= 0):
            raise ValueError(
                f"eta={self.eta}, weight_decay={self.weight_decay}: use eta > 0, weight_decay >= 0"
            )

    def sums(self, pieces: Sequence[Piece]) -> Sums:
        found: Sums = {}
        for piece in pieces:
            if piece.dimensions > 1:
                found[f"trust.{piece.index}.value"] = _square(piece.value)
                found[f"trust.{piece.index}.gradient"] = _square(piece.gradient)
        return found

    def apply(self, pieces: Sequence[Piece], totals: Sums) -> None:
        for piece in pieces:
            if piece.dimensions < 2:
                continue
            value = sqrt(totals[f"trust.{piece.index}.value"])
            gradient = sqrt(totals[f"trust.{piece.index}.gradient"])
            if value and gradient:
                ratio = self.eta * value / (gradient + self.weight_decay * value)
                piece.gradient.add_(piece.value, alpha=self.weight_decay).mul_(ratio)


def _square(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)) ** 2
