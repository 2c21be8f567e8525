"""What hosts say of themselves and refuse, on any machine."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest

from paceline.testing.hosts import Hosts, missing


def test_missing_says_what_is_missing_or_nothing() -> None:
    reason = missing()
    assert reason is None or (isinstance(reason, str) and reason)
    if sys.platform != "linux":
        assert reason is not None and "Linux" in reason


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"count": 0}, r"count=0 is not within 1 and 60; try 4"),
        ({"count": 61}, r"count=61 is not within 1 and 60; try 4"),
        ({"rate": -1.0}, r"rate=-1.0 is not at least 1000 .*; try 100e6, math.inf"),
        ({"rate": math.nan}, r"rate=nan is not at least 1000"),
        ({"rate": 0.0}, r"up=False"),
        ({"delay": -0.1}, r"delay=-0.1 is not within 0 and 60 seconds; try 0.005"),
        ({"delay": math.nan}, r"delay=nan is not within"),
        ({"loss": 1.5}, r"loss=1.5 is not a probability; try 0.01"),
        ({"mtu": 100}, r"mtu=100 is not within 576 and 65500; try 1500"),
        ({"queue": 1000}, r"queue=1000 holds no frame of mtu=1500; try the default"),
    ],
)
def test_impossible_arguments_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Hosts(**{"count": 2, **given})


def test_hosts_have_addresses_even_before_they_are_up() -> None:
    hosts = Hosts(3)
    assert [hosts.ip(host) for host in range(3)] == ["10.88.0.1", "10.88.0.2", "10.88.0.3"]
    with pytest.raises(ValueError, match=r"host=3 is none of these 3; use 0 to 2"):
        hosts.ip(3)


def test_nothing_runs_before_they_are_up() -> None:
    hosts = Hosts(2)
    with pytest.raises(RuntimeError, match=r"inside `with Hosts\(...\) as hosts:`"):
        hosts.popen(1, ["true"])
    with pytest.raises(RuntimeError, match=r"inside `with Hosts\(...\) as hosts:`"):
        hosts.carried()
    with pytest.raises(RuntimeError, match=r"inside `with Hosts\(...\) as hosts:`"):
        hosts.link(1, up=False)
