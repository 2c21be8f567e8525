"""How a node mixes its model with copies of its neighbors' models.

A rule gives coefficients only, in the form of `Step.mix`: a factor for each copy, while the model
itself has what is left of 1. A copy is what its owner last made public; under its own name a node
has its own public copy, the one that its neighbors have of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.core.protocol import WorkerId

Mix: TypeAlias = dict[WorkerId, float]
Floats: TypeAlias = NDArray[np.float64]


def averaging(weights: Mapping[WorkerId, float]) -> Mix:
    """Average with the copies: x_i <- w_ii x_i + sum_j w_ij x̂_j.

    With fresh copies decentralized SGD, D-PSGD (Lian et al., 2017, arXiv 1705.09056); with those
    that came last EventGraD (Ghosh et al., 2021, arXiv 2103.07454). Stale copies drag the mean of
    all models back, and training freezes where they drag as hard as the gradient pulls: use
    `difference` with any trigger but `Always`.

    weights: of the neighbors of whom a copy is at hand; others must be left out.
    """
    return dict(weights)


def difference(me: WorkerId, weights: Mapping[WorkerId, float], gamma: float) -> Mix:
    """Add differences of public copies: x_i <- x_i + gamma sum_j w_ij (x̂_j - x̂_i).

    The mean of all models stays what it was, however old the copies are, as long as both ends of
    a link mix equally often with the same two copies and the same weight. With x̂ advanced by
    compressed changes it is CHOCO (Koloskova, Stich and Jaggi, 2019, arXiv 1902.00340), with a
    trigger SPARQ-SGD (Singh et al., 2019, arXiv 1910.14280).

    gamma: below 1, the smaller the rarer or coarser the messages: a difference is added again in
        every pass until news comes.
    """
    if not 0 < gamma <= 1:
        raise ValueError(f"gamma={gamma}: use 0 < gamma <= 1, and gamma < 1 if messages are rare")
    if me in weights:
        raise ValueError(f"{me!r} is among its own neighbors; leave it out of the weights")
    mix = {peer: gamma * weight for peer, weight in weights.items()}
    return mix | {me: -sum(mix.values())}  # last, so that all together are 0.0 without rounding


def mixed(
    model: Floats, copies: Mapping[WorkerId, Floats], mix: Mapping[WorkerId, float]
) -> Floats:
    """Return what a mix makes of a model, added up in the order given."""
    total = (1.0 - sum(mix.values())) * model
    for peer, weight in mix.items():
        total = total + weight * copies[peer]
    return total
