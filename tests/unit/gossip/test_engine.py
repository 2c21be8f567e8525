"""The engine of a decentralized run: on the workers that a training engine lends."""

from __future__ import annotations

import paceline as pl
from paceline.gossip.engine import gossip_engine
from paceline.gossip.ray.driver import RayGossip
from paceline.gossip.simulated import SimulatedGossip


def test_a_simulator_lends_its_delays_links_and_schedule() -> None:
    delays, links = (
        [pl.delays.Fixed(1.0), pl.delays.Fixed(2.0), pl.delays.Fixed(3.0)],
        [pl.delays.Link(0.1), pl.delays.Link(0.2)],
    )
    left = (4.0, pl.protocol.Left("w1"))
    engine = pl.Simulator(3, delays, links, unit=2, update=0.5, schedule=[left])
    workers = engine.lend()
    assert workers.delays == {f"w{i}": delay for i, delay in enumerate(delays)}
    assert workers.links == {"w0": links[0], "w1": links[1], "w2": links[0]}
    assert (workers.schedule, workers.unit, workers.update) == ((left,), 2, 0.5)


def test_each_engine_has_its_gossip_engine() -> None:
    assert isinstance(gossip_engine(pl.Simulator(3)), SimulatedGossip)
    ray = pl.Ray(3, timeout=7.0, start_timeout=11.0)
    workers = ray.lend()
    assert (workers.timeout, workers.start_timeout) == (7.0, 11.0)
    assert isinstance(gossip_engine(ray), RayGossip)
    assert ray.members() == []  # nothing is started
