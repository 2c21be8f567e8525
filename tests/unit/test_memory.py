"""A run whose journal is on disk needs no more memory for many steps than for few."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

import paceline as pl
from paceline.core.policy import Policy
from paceline.report.columns import BLOCK

FIRST = 2 * BLOCK + 8
LAST = FIRST + BLOCK  # when as many of the figures are in memory
ALLOWED = 24 * BLOCK
"""Bytes: a number that is kept at each step is 32."""

POLICIES: dict[str, Callable[[], Policy]] = {
    "k_sync": lambda: pl.k_sync(2),
    "asynchronous": pl.asynchronous,
    "ringmaster": lambda: pl.ringmaster(2),
    "ringleader": pl.policies.ringleader,
    "deadline": lambda: pl.deadline(1.0),
    "bandit": lambda: pl.bandit(2, index=pl.selection.Thompson(), discount=0.9),
    "by_speed": lambda: pl.policies.Gather(placement=pl.BySpeed()),
    "growing": lambda: pl.k_sync(pl.policies.GrowOnNoise(1, 3, memory=5)),
    "gossip": lambda: pl.gossip.Gossip(pl.gossip.ring(3)),
}
SOON = "by_speed", "growing", "gossip"
"""Those of CI, which keep the most."""


class Weighed(pl.Callback):
    """Weighs all that Python holds, at two steps."""

    def __init__(self) -> None:
        self.bytes: dict[int, int] = {}

    def stepped(self, progress: pl.Progress) -> None:
        if progress.step in (FIRST, LAST):
            gc.collect()
            if sys.version_info < (3, 12):
                # Where each `match` leaves a name behind, until there are some thousands.
                sys._clear_type_cache()
            self.bytes[progress.step] = tracemalloc.get_traced_memory()[0]


def grown(policy: Policy, journal: Path | None, *more: pl.Callback) -> int:
    """Return how many bytes more there are after the last step than after the first."""
    weighed = Weighed()
    learner = pl.learners.Quadratic((1.0, 0.3), noise=0.3, lr=0.01, batch_size=8)
    engine = pl.Simulator(3, pl.delays.Exponential(1.0), pl.delays.Link(latency=0.01))
    trainer = pl.Trainer(
        learner, policy, engine, journal=journal, callbacks=[weighed, *more], progress=False
    )
    tracemalloc.start(1)
    try:
        trainer.fit(steps=LAST)
    finally:
        tracemalloc.stop()
    return weighed.bytes[LAST] - weighed.bytes[FIRST]


@pytest.mark.parametrize(
    "name",
    [name if name in SOON else pytest.param(name, marks=pytest.mark.long) for name in POLICIES],
)
def test_memory_does_not_grow_with_steps(name: str, tmp_path: Path) -> None:
    # Nodes take turns, so that a block of each and of all together may be in memory or not.
    more = 4 * 12 * 8 * BLOCK if name == "gossip" else 0
    # What is made once in a process, and kept for all runs, does not come a second time.
    again = (grown(POLICIES[name](), tmp_path / f"{turn}.jsonl") for turn in range(2))
    assert any(bytes < ALLOWED + more for bytes in again)


def test_what_grows_is_found(tmp_path: Path) -> None:
    class Hoard(pl.Callback):
        def __init__(self) -> None:
            self.kept: list[float] = []

        def stepped(self, progress: pl.Progress) -> None:
            self.kept.append(progress.loss * 2)

    for turn in range(2):
        assert grown(pl.sync(), tmp_path / f"{turn}.jsonl", Hoard()) > ALLOWED


def test_a_journal_in_memory_takes_what_the_docs_say() -> None:
    """docs/faults.md tells the bytes of a task; a journal is most of what a run keeps."""
    each = grown(pl.sync(), None) / (LAST - FIRST) / 3
    assert 500 < each < 2500, each
