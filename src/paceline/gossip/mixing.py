"""How a node mixes its model with copies of its neighbors' models.

A rule returns coefficients only, in the form of `Step.mix`: a factor for each copy. The model
itself has the rest of 1. A copy is the model that its owner last published. Under its own name a
node finds its own public copy, which its neighbors hold as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from paceline.core.protocol import WorkerId
from paceline.learners.base import Array

Mix: TypeAlias = dict[WorkerId, float]


class Mixing(Protocol):
    """A rule for the coefficients."""

    def mix(
        self, me: WorkerId, weights: Mapping[WorkerId, float], paces: Mapping[WorkerId, float]
    ) -> Mix:
        """Return the factor of each copy.

        weights: of the neighbors whose copy is at hand; the rule must leave out all others.
        paces: the steps that each neighbor takes per step of this node, where known.
        """


@dataclass(frozen=True)
class Averaging:
    """Averages with the copies: x_i <- w_ii x_i + sum_j w_ij x̂_j.

    With fresh copies this is decentralized SGD, D-PSGD (Lian et al., 2017, arXiv 1705.09056). With
    the copies that arrived last it is EventGraD (Ghosh et al., 2021, arXiv 2103.07454). Stale
    copies pull the mean of all models back. Training freezes where their pull equals that of the
    gradient: use `Difference` with any trigger but `Always`.
    """

    def mix(
        self, me: WorkerId, weights: Mapping[WorkerId, float], paces: Mapping[WorkerId, float]
    ) -> Mix:
        return dict(weights)


@dataclass(frozen=True)
class Difference:
    """Adds differences of public copies: x_i <- x_i + gamma sum_j w_ij min(1, p_ij) (x̂_j - x̂_i).

    p_ij are the steps that j takes per step of i. So a link mixes at the pace of its slower end,
    by the same amount at both ends. The mean of all models then stays the same, however stale the
    copies are, except for changes while messages are in flight. A slow node does not hold its
    neighbors back, as it would if they added its difference at each of their steps. With x̂
    advanced by compressed changes this is CHOCO (Koloskova, Stich and Jaggi, 2019, arXiv
    1902.00340). With a trigger it is SPARQ-SGD (Singh et al., 2019, arXiv 1910.14280).

    gamma: below 1, and smaller where messages are rarer or coarser: every pass adds a difference
        again until the next update arrives.
    """

    gamma: float

    def __post_init__(self) -> None:
        if not 0 < self.gamma <= 1:
            raise ValueError(
                f"gamma={self.gamma}: use 0 < gamma <= 1, and gamma < 1 if messages are rare"
            )

    def mix(
        self, me: WorkerId, weights: Mapping[WorkerId, float], paces: Mapping[WorkerId, float]
    ) -> Mix:
        if me in weights:
            raise ValueError(f"{me!r} is among its own neighbors; leave it out of the weights")
        mix = {
            peer: self.gamma * weight * min(1.0, paces.get(peer, 1.0))
            for peer, weight in weights.items()
        }
        return mix | {me: -sum(mix.values())}  # last: all together are 0.0 without rounding


def mixed(model: Array, copies: Mapping[WorkerId, Array], mix: Mapping[WorkerId, float]) -> Array:
    """Return the weighted sum of a model with copies; the model has the rest of 1."""
    # Copies first: where their weights add up to 0, their sum is small, and so is its rounding.
    total = sum(np.multiply(copies[peer], weight) for peer, weight in mix.items())
    own = 1.0 - sum(mix.values())
    return np.asarray(model * model.dtype.type(own) + total, dtype=model.dtype)
