"""The averages of a step: of gradients by what their losses count, and of the losses themselves.

A loss may count something else than samples, such as tokens. A result then holds the sum of its
gradients per sample: its own mean, times its count, which is tokens per sample. Such results can be
added up with the weights of any policy or code. The step divides their sum by the mean count.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.protocol import Coefficients, magnitude


def scaled(coefficients: Coefficients, factor: float) -> Coefficients:
    """Return the coefficients multiplied by a factor."""
    if isinstance(coefficients, tuple):
        return tuple(factor * each for each in coefficients)
    return factor * coefficients


def by_count(
    weights: Sequence[Coefficients], counts: Sequence[float | None]
) -> Sequence[Coefficients]:
    """Return the weights divided by the mean count, so the step is the mean over what is counted.

    Plain weights w keep their sum: each is divided by sum(w * count) / sum(w). So a damped step
    stays damped. The counts of coded results are encoded as their vectors are, and the decoder's
    weights of one block decode them. A result without a count has the count 1.

    >>> by_count([0.5, 0.5], [10.0, 30.0])
    [0.025, 0.025]
    """
    if all(count is None for count in counts):
        return weights
    known = [1.0 if count is None else count for count in counts]
    firsts = [weight[0] if isinstance(weight, tuple) else weight for weight in weights]
    total = 1.0 if any(isinstance(weight, tuple) for weight in weights) else sum(firsts)
    mean = sum(weight * count for weight, count in zip(firsts, known, strict=True))
    if not mean:  # nothing was counted: all vectors are zero
        return weights
    return [scaled(weight, total / mean) for weight in weights]


def mean_loss(
    weights: Sequence[Coefficients],
    losses: Sequence[float | None],
    counts: Sequence[float | None],
) -> float | None:
    """Return the mean of the results' losses by the weights and counts of the step; None: unknown.

    The count of a coded result belongs to its message, so its loss has the weight alone.

    >>> mean_loss([0.5, 0.5], [1.0, 2.0], [10.0, 30.0])
    1.75
    """
    known = [
        (magnitude(weight) * (1.0 if count is None or isinstance(weight, tuple) else count), loss)
        for weight, loss, count in zip(weights, losses, counts, strict=True)
        if loss is not None
    ]
    total = sum([share for share, _ in known])
    return sum([share * loss for share, loss in known]) / total if total else None
