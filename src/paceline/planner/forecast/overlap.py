"""The time of rounds of local steps whose messages overlap with the next local steps.

With `pl.local_steps(overlap=True)` a worker goes on while its change travels. In round r worker i
computes for C_i(r), sends its change at s_i(r), and gets the outer step at a_i(r):

    s_i(r) = max(s_i(r-1) + C_i(r), a_i(r-1))    it waits for the outer step before
    o(r)   = max_i (s_i(r) + up_i)               the outer step has all changes
    a_i(r) = o(r) + down_i

The seconds of a round are exact. The outer step is applied one round late, and how many more
rounds that takes is unknown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.planner.forecast.encoded import shrinkage
from paceline.planner.measure.profile import Profile

if TYPE_CHECKING:  # which needs torch
    from paceline.codecs.base import Codec

ROUNDS = 60
"""Rounds to simulate."""


def overlapped(
    profile: Profile,
    local_steps: int,
    codec: Codec | None = None,
    seed: int = 0,
    rounds: int = ROUNDS,
) -> float:
    """Return the mean seconds of a round of all workers, each with an equal share of the batch.

    codec: of the changes.
    """
    rng = np.random.Generator(np.random.PCG64([seed, 6]))
    workers = [*profile.workers.values()]
    size, work = profile.message_bytes, profile.batch_size / profile.size * local_steps
    sent_up = size * shrinkage(codec, profile)[0]
    up = np.array([worker.link.latency + sent_up / worker.link.up for worker in workers])
    down = np.array([worker.link.latency + size / worker.link.down for worker in workers])
    memory: list[dict[str, float]] = [{} for _ in workers]
    sent, arrived = down.copy(), down.copy()  # all get the first model at the same time
    step = 0.0
    for _ in range(rounds):
        pairs = zip(workers, sent.tolist(), memory, strict=True)
        computed = [worker.compute.sample(rng, at, kept) * work for worker, at, kept in pairs]
        sent = np.maximum(sent + computed, arrived)
        step = float((sent + up).max())
        arrived = step + down
    return step / rounds


def overlap_note(
    profile: Profile, local_steps: int, codec: Codec | None = None, seed: int = 0
) -> str:
    """Return a sentence on what overlap makes of a round."""
    return (
        f"with pl.local_steps(every={local_steps}, overlap=True) a step of all workers takes "
        f"{overlapped(profile, local_steps, codec, seed):.3g} s. The outer step is then one round "
        "late, and how many more steps that takes is unknown"
    )
