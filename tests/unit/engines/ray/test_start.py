"""A start of Ray that takes too long is told in a sentence."""

from __future__ import annotations

import pytest

pytest.importorskip("ray")

from paceline.engines.ray.cluster.join import StartTimeout, is_start_timeout

# What ray.init raised at a load of 38 on 2 cores (Ray 2.60).
RAISED = (
    "The current node timed out during startup. This could happen because some of the raylet "
    "failed to startup or the GCS has become overloaded."
)


def test_only_a_start_that_timed_out_is_taken_for_one() -> None:
    assert is_start_timeout(Exception(RAISED))
    assert not is_start_timeout(ValueError("Can't find a `node_ip_address.json` file"))


def test_it_says_what_to_do() -> None:
    told = str(StartTimeout(37.95, 2))
    assert "load 38.0 on 2 cores" in told and "ray start --head" in told
