"""The driver of a run on Ray, killed for real and started again until the run has ended."""

from __future__ import annotations

import pytest
from benchmarks.chaos_resume import EVERY, kills

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize(("policy", "count", "seed"), [("sync", 4, 1), ("k_sync", 3, 3)])
def test_a_killed_driver_leaves_no_trace(policy: str, count: int, seed: int) -> None:
    """Bits, samples, processes: `kills` raises if any of them is not as it should be."""
    told = kills(count, policy, seed)
    assert told["kills"] == count
    assert told["torn"] >= 1  # in the middle of a checkpoint too
    assert 0 < told["most_redone"] <= EVERY
    assert told["workers_gone_seconds"] < 30
