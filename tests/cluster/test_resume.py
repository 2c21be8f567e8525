"""The driver of a run on Ray, killed for real and started again until the run has ended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from benchmarks.chaos_resume import EVERY, cluster, kills

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with cluster() as started:
        yield started


@pytest.mark.parametrize(("policy", "count", "seed"), [("sync", 3, 1), ("k_sync", 2, 7)])
def test_a_killed_driver_leaves_no_trace(policy: str, count: int, seed: int, address: str) -> None:
    """Bits, samples, processes: `kills` raises if any of them is not as it should be."""
    told = kills(count, policy, seed, address)
    assert told["kills"] == count
    assert told["torn"] >= 1  # in the middle of a checkpoint too
    assert 0 < told["most_redone"] <= EVERY
    assert told["workers_gone_seconds"] < 30
