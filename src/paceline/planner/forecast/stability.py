"""Whether the steps of a policy are stable at a measured curvature, also with momentum."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import cycle, islice

from paceline.planner.forecast.quadratic import Reads

_STEPS = 400  # minimum of steps to take, in four parts
_OLD = 16  # steps to take, in multiples of the largest staleness
_FAR = 1e9  # distance at which a run that began at 1 has diverged


def instability(reads: Sequence[Reads], curvature: float, rate: float, momentum: float) -> str:
    """Return in words how the steps of a policy diverge at this curvature; "" if they do not.

    rate: of SGD, or of an optimizer with momentum, divided by 1 - momentum.
    """
    reads = reads[len(reads) // 2 :]  # the first ones are less stale
    if not any(grows(reads, curvature, rate, each) for each in {0.0, momentum}):
        return ""
    pairs = [(read.age, read.weight) for each in reads for read in each]
    gain = rate * curvature * sum((1 + age) * weight for age, weight in pairs) / len(reads)
    return (
        f"diverges at a curvature of {curvature:.3g}, which was measured: lr * curvature * "
        f"(staleness + 1) is {gain:.2g}; its time holds only if training leaves that region; use "
        "a lower learning rate"
    )


def grows(reads: Sequence[Reads], curvature: float, rate: float, momentum: float = 0.0) -> bool:
    """Return whether a distance from the minimum grows if these steps are repeated, without noise.

    The maximum of the last quarter of the steps is compared with that of the second quarter.
    """
    oldest = max(read.age for each in reads for read in each)
    quarter = max(_STEPS, _OLD * (oldest + 1)) // 4
    history = deque([1.0], oldest + 1)
    velocity, largest = 0.0, [0.0] * 4
    for step, each in enumerate(islice(cycle(reads), 4 * quarter)):
        change = 0.0
        for read in each:
            x = history[max(len(history) - 1 - read.age, 0)]
            change += read.weight * x * (1 - (1 - rate * curvature) ** read.steps)
        velocity = momentum * velocity + (1 - momentum) * change
        history.append(history[-1] - velocity)
        distance = abs(history[-1])
        largest[step // quarter] = max(largest[step // quarter], distance)
        if not distance < _FAR:
            return True
    return largest[3] > largest[1]
