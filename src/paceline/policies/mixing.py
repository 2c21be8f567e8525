"""How a node mixes its model with copies of its neighbors' models.

A rule gives coefficients only, in the form of `Step.mix`: a factor for each copy, while the model
itself has what is left of 1. A copy is what its owner last made public; under its own name a node
has its own public copy, the one that its neighbors have of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from paceline.core.protocol import WorkerId

Mix: TypeAlias = dict[WorkerId, float]


class Mixing(Protocol):
    """A rule for the coefficients."""

    def mix(
        self, me: WorkerId, weights: Mapping[WorkerId, float], paces: Mapping[WorkerId, float]
    ) -> Mix:
        """Return the factor of each copy.

        weights: of the neighbors of whom a copy is at hand; others must be left out.
        paces: the steps that each takes to one of this node, as far as is known.
        """


@dataclass(frozen=True)
class Averaging:
    """Averages with the copies: x_i <- w_ii x_i + sum_j w_ij x̂_j.

    With fresh copies decentralized SGD, D-PSGD (Lian et al., 2017, arXiv 1705.09056); with those
    that came last EventGraD (Ghosh et al., 2021, arXiv 2103.07454). Stale copies drag the mean of
    all models back, and training freezes where they drag as hard as the gradient pulls: use
    `Difference` with any trigger but `Always`.
    """

    def mix(
        self, me: WorkerId, weights: Mapping[WorkerId, float], paces: Mapping[WorkerId, float]
    ) -> Mix:
        return dict(weights)


@dataclass(frozen=True)
class Difference:
    """Adds differences of public copies: x_i <- x_i + gamma sum_j w_ij min(1, p_ij) (x̂_j - x̂_i).

    p_ij are the steps that j takes to one of i, so that a link mixes at the pace of its slower end:
    at both ends as much in the same time. The mean of all models then stays what it was, however
    old the copies are, but for what changes while letters are on their way; and a slow node does
    not hold its neighbors back, as it would if they added its difference at every step of theirs.
    With x̂ advanced by
    compressed changes it is CHOCO (Koloskova, Stich and Jaggi, 2019, arXiv 1902.00340), with a
    trigger SPARQ-SGD (Singh et al., 2019, arXiv 1910.14280).

    gamma: below 1, the smaller the rarer or coarser the messages: a difference is added again in
        every pass until news comes.
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
