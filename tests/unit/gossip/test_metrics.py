"""The metrics of nodes, counted while a run goes on and again from its journals."""

from __future__ import annotations

import pytest

import paceline as pl
from paceline.core.journal import Entry, Header, Journal
from paceline.core.protocol import Finished, Joined, Left, Peer, Send, Start, Task, Work
from paceline.gossip.metrics import GossipMeters, NodeMeter, meter_of, meters_of
from paceline.report.metrics import Meter

PEER = Header("", 4, peer=Peer("w0", ("w1", "w2"), (3, 5)), message_bytes=100)
TASK = Task(0, "w0", Work(), 0, 0.0, 4, 0)


def journal() -> Journal:
    made = Journal(PEER)
    for at, event, commands in (
        (0.0, Joined("w0"), (Start(TASK),)),
        (1.0, Left("w1"), ()),
        (2.0, Joined("w1"), ()),
        (3.0, Finished(0, 4, 3.0, sent=70, got=30), (Send(("w1", "w2"), (1,)), Send(("w1",)))),
    ):
        made.append(Entry(at, event, commands))
    return made


def test_a_node_counts_messages_and_its_own_time_alone() -> None:
    meter = meter_of(PEER)
    assert isinstance(meter, NodeMeter)
    for entry in journal():
        meter.observe(entry)
    assert (meter.messages, meter.tensors_sent) == (3, 4)
    assert (meter.up_bytes, meter.down_bytes) == (70, 30)  # and no model with the task
    assert list(meter.workers) == ["w0"] and meter.worker_seconds == 3.0


def test_a_central_coordinator_has_a_plain_meter() -> None:
    assert type(meter_of(Header("", 4))) is Meter


def test_journals_give_the_metrics_of_the_run() -> None:
    policy = pl.gossip.Gossip(pl.gossip.ring(3), trigger=pl.gossip.OnChange(0.5, every=4))
    run = pl.Trainer(
        pl.learners.Quadratic((1.0, 0.3), noise=0.1, batch_size=6),
        policy,
        pl.Simulator(3, [pl.delays.Fixed(m) for m in (1.0, 1.3, 2.1)], pl.delays.Link(0.1)),
        progress=False,
    ).fit(steps=20)
    again = meters_of({node: each.header for node, each in run.journals.items()})
    assert isinstance(again, GossipMeters)
    for node, each in run.journals.items():
        observe = again.observer(node)
        for entry in each:
            observe(entry)
    assert {node: meter.version for node, meter in again.nodes.items()} == {
        node: meter.version for node, meter in run.meters.items()
    }
    assert isinstance(run.meter, type(again.total)) and run.meter.messages == again.messages > 0
    assert run.meter.up_bytes == again.total.up_bytes
    assert run.meter.busy_seconds == pytest.approx(again.total.busy_seconds)
    assert again.lines().splitlines()[1].split()[:3] == [
        "updates",
        str(again.messages),
        "messages,",
    ]
