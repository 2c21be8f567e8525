"""The bound of what a process has on its way."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from pytest import approx

from paceline.engines.ray.transport.window import GAIN, KEPT, LATELY, LEAST, SHORT, Window


@dataclass(eq=False)
class Connection:
    on_its_way: int = 0
    acknowledged: int = 0
    round_trip: float = 0.05


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run(window: Window, clock: Clock, connections: list[Connection], rate: float) -> None:
    """Have all connections together get bytes acknowledged at a rate for one measurement."""
    clock.now += 0.125  # a little longer than SAMPLE
    for each in connections:
        each.acknowledged += round(rate * 0.125 / len(connections))
    window.measure(connections)


def measured(rate: float, count: int) -> tuple[Window, Clock, list[Connection]]:
    clock = Clock()
    window, connections = Window(clock), [Connection() for _ in range(count)]
    window.measure(connections)
    run(window, clock, connections, rate)
    return window, clock, connections


def test_twice_what_the_way_holds_is_shared_by_the_active_connections() -> None:
    window, _, (one, other) = measured(100e6, 2)
    assert window.room(one, 2) == GAIN * 100e6 * 0.05 / 2
    one.on_its_way = 1_000_000
    assert window.room(one, 2) == GAIN * 100e6 * 0.05 / 2 - 1_000_000
    assert window.room(other, 1) == GAIN * 100e6 * 0.05


def test_a_slow_way_and_an_unknown_rate_leave_the_least() -> None:
    assert Window(Clock()).room(Connection(), 3) == LEAST
    window, _, connections = measured(1e5, 1)
    assert window.room(connections[0], 1) == LEAST


def test_there_is_no_bound_on_a_short_way() -> None:
    window, _, _ = measured(100e6, 1)
    assert window.room(Connection(10**9, round_trip=SHORT / 2), 1) == inf


def test_the_largest_rate_counts_until_it_is_long_ago() -> None:
    window, clock, connections = measured(100e6, 1)
    for _ in range(KEPT - 1):
        run(window, clock, connections, 50e6)
    assert window.room(connections[0], 1) == approx(GAIN * 100e6 * 0.05)
    run(window, clock, connections, 50e6)
    assert window.room(connections[0], 1) == approx(GAIN * 50e6 * 0.05)


def test_a_pause_is_not_measured() -> None:
    window, clock, connections = measured(100e6, 1)
    for _ in range(KEPT):
        window.measure([])  # nothing is sent
        clock.now += 60.0
        window.measure(connections)
    assert window.room(connections[0], 1) == approx(GAIN * 100e6 * 0.05)


def test_a_connection_that_ends_within_a_measurement_counts_as_idle() -> None:
    window, clock, (one, other) = measured(100e6, 2)
    one.acknowledged += 10**9
    clock.now += 0.125  # a little longer than SAMPLE
    window.measure([other])
    assert window.room(other, 1) == GAIN * 100e6 * 0.05


def test_a_connection_that_gets_far_less_than_another_is_slow() -> None:
    window, clock, (one, other) = measured(100e6, 2)
    assert not window.slow
    clock.now += 0.125
    one.acknowledged += 10**6
    other.acknowledged += 10**5
    window.measure([one, other])
    assert window.slow == {other}
    assert window.room(other, 1) == LEAST
    clock.now += 0.125
    other.acknowledged += 10**6
    window.measure([other])  # the other one has nothing to send now
    assert not window.slow


def test_if_all_connections_are_slow_the_limit_is_their_own_host() -> None:
    window, clock, connections = measured(100e6, 2)
    run(window, clock, connections, 1e6)
    assert not window.slow


def test_a_rate_of_long_ago_does_not_make_others_slow() -> None:
    window, clock, (one, _) = measured(100e6, 2)
    window.measure([])
    clock.now += LATELY
    window.measure([one])
    run(window, clock, [one], 1e6)
    assert not window.slow


def test_a_connection_that_had_to_wait_is_not_slow() -> None:
    window, clock, (one, other) = measured(100e6, 2)
    clock.now += 0.125
    one.acknowledged += 10**7
    window.measure([one, other])  # the other one got nothing
    assert not window.slow


def test_a_way_that_is_slow_at_first_is_not_held_back() -> None:
    """A connection over a long way begins slowly. Its bound must let it become faster."""
    clock = Clock()
    window, near, far = Window(clock), Connection(round_trip=0.01), Connection(round_trip=0.08)
    window.measure([near, far])
    for _ in range(40):
        room = window.room(far, 2)
        clock.now += 0.125
        near.acknowledged += round(50e6 * 0.125)
        far.acknowledged += round(min(50e6, max(room / 0.08, 1e6)) * 0.125)
        window.measure([near, far])
    assert far not in window.slow and window.room(far, 2) >= 50e6 * 0.08
