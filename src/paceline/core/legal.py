"""Why a command of a policy is refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import isfinite

from paceline.core.protocol import Result, Step, TaskId, Work, WorkerId


def fault_of_work(work: Work, samples: int) -> str | None:
    """Return why no task can do a work with so many samples; None if one can."""
    if work.tiles is not None:
        if work.parts is not None or min(work.tiles.values(), default=0) < 1:
            return "each data shard in tiles= needs at least one sample, and parts= must be None"
        if work.samples not in (None, samples):
            return f"the data shards in tiles= have {samples} samples together"
    if min(samples, work.steps, work.shares) < 1:
        return "a task needs at least one sample, step and share"
    if work.parts is not None and not all(0 <= j < work.n_parts for j in work.parts):
        return f"the samples have {work.n_parts} parts; use 0 to {work.n_parts - 1}"
    return None


def fault_of_step(
    step: Step, held: Mapping[TaskId, Result], copies: Collection[WorkerId]
) -> str | None:
    """Return why a step cannot be taken with the held results and copies; None if it can."""
    if not step.weights and not step.mix:
        return "the step uses no result"
    if unknown := [id for id in step.weights if id not in held]:
        return f"results not held: {unknown}"
    if empty := [id for id in step.weights if not held[id].samples]:
        return f"results without samples: {empty}; discard them"
    if unknown_peers := [peer for peer in step.mix if peer not in copies]:
        return f"no copy of the models of {unknown_peers}"
    if not all(map(isfinite, step.mix.values())):
        return "a weight of a copy is not finite"
    for weight in step.weights.values():
        if not all(map(isfinite, weight if isinstance(weight, tuple) else (weight,))):
            return "a weight is not finite"
    return None
